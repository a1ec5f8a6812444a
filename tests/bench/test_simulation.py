"""The simulator: its clock is made up, its decisions are the scheduler's own."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.measures import summarize
from bench.scenarios import Case
from bench.simulate import app
from bench.simulation.device import H200_LLAMA_8B, SERVED
from bench.simulation.replay import Replay, WorkerShape
from router.config import RouterConfig

NONE = np.zeros(0, dtype=np.int64)


def replay(case: Case, **config: object) -> Replay:
    return Replay(
        case=case,
        config=RouterConfig(**config),  # type: ignore[arg-type]
        worker=WorkerShape(n_blocks=4000),
        device=H200_LLAMA_8B,
        paths=SERVED,
    )


def test_one_answer_takes_what_the_formula_says() -> None:
    run = replay(Case("one", n_own=128, n_output=3, n_requests=1, concurrency=1))
    (record,) = run.run()
    steps_ms = [
        H200_LLAMA_8B.step_ms(decode_kv=NONE, n_shared=0, chunk_q=np.array([128]), chunk_kv=np.array([128])),
        H200_LLAMA_8B.step_ms(decode_kv=np.array([129]), n_shared=0, chunk_q=NONE, chunk_kv=NONE),
        H200_LLAMA_8B.step_ms(decode_kv=np.array([130]), n_shared=0, chunk_q=NONE, chunk_kv=NONE),
    ]
    assert [step.time_s * 1e3 for step in run.steps] == pytest.approx(steps_ms)
    ways_ms = SERVED.in_ms + SERVED.request_ms + 128 * SERVED.token_ms
    ways_ms += SERVED.send_ms + SERVED.result_ms + SERVED.out_ms
    assert record.ttft_s * 1e3 == pytest.approx(ways_ms + steps_ms[0])
    assert np.diff(record.event_s) * 1e3 == pytest.approx(steps_ms[1:])


def test_a_shared_prefix_is_computed_once() -> None:
    run = replay(Case("shared", n_prefix=512, n_own=16, n_output=4, n_requests=12, concurrency=6))
    assert len(run.run()) == 12
    assert sum(step.n_prompt_tokens for step in run.steps) == 512 + 12 * 16


def test_a_replay_repeats_exactly() -> None:
    case = Case("rate", n_own=300, n_output=8, n_requests=20, rate_per_s=40.0)
    first, second = replay(case).run(), replay(case).run()
    assert [r.event_s for r in first] == [r.event_s for r in second]


def test_pauses_bring_first_tokens_of_a_burst_forward() -> None:
    case = Case("burst", n_own=512, n_output=20, n_requests=96, concurrency=96)
    with_pauses = replay(case)
    without = replay(case, decode_pause_ratio=0.0)
    worst = [summarize(run.run()).ttft_ms.p99 or 0 for run in (with_pauses, without)]
    assert worst[0] < worst[1]
    assert sum(step.n_decode == 0 for step in with_pauses.steps) > sum(
        step.n_decode == 0 for step in without.steps
    )


def test_the_command_compares_settings() -> None:
    result = CliRunner().invoke(
        app, ["--cases", "c1", "--mixed-step-tokens", "64", "--mixed-step-tokens", "800"]
    )
    assert result.exit_code == 0
    assert "--mixed-step-tokens=64\n" in result.stdout
    assert result.stdout.count("| c1 ") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--cases", "c7"], "--cases 'c7'"), (["--mixed-step-tokens", "0"], "--mixed-step-tokens is 0")],
)
def test_a_setting_that_can_not_be_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
