from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

import bench.scaling.__main__ as command
from bench.measures import RequestRecord, summarize
from bench.prompts import PromptShape
from bench.run_cases import PromptSource
from bench.scaling.goals import gain_goals
from bench.scaling.loss import LossRun, per_second, shares
from bench.scaling.measure import spread, times_computed
from bench.scaling.observe import Counts, grown, parse_counts
from bench.scaling.sizes import case_named, prefixed, sized
from checkpoint.smollm2 import SMOLLM2
from tests.bench.test_measures import record

METRICS = """
# TYPE quire_replica_output_tokens_total counter
quire_replica_output_tokens_total{replica="127.0.0.1:1"} 30.0
quire_replica_output_tokens_total{replica="127.0.0.1:2"} 5.0
quire_replica_prefill_tokens_total{replica="127.0.0.1:1"} 100.0
quire_replica_prefill_tokens_total{replica="127.0.0.1:2"} 7.0
quire_replicas_live 2.0
"""


def invoke(*arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_load_grows_with_the_devices_and_shrinks_for_a_dry_run() -> None:
    case = case_named("c256")
    assert sized(case, n_devices=1, shrink=1) == case
    twice = sized(case, n_devices=2, shrink=1)
    assert (twice.concurrency, twice.n_requests, twice.n_own) == (512, 2048, 512)
    small = sized(case_named("shared"), n_devices=3, shrink=16)
    assert (small.concurrency, small.n_requests) == (12, 96)
    assert (small.n_prefix, small.n_own, small.n_output) == (128, 8, 8)


def test_prompts_begin_with_one_of_the_prefixes() -> None:
    source = PromptSource(words=None, vocab_size=1000)
    shape = PromptShape(n_prefix=6, n_own=4)
    drawn = prefixed(source, shape, n=40, n_prefixes=3, seed=5)
    by_prefix: dict[int, set[tuple[object, ...]]] = {}
    for prompt, prefix in zip(drawn.prompts, drawn.prefix_of, strict=True):
        by_prefix.setdefault(prefix, set()).add(tuple(prompt[:6]))
    assert {len(stems) for stems in by_prefix.values()} == {1}
    assert len(set.union(*by_prefix.values())) == 3
    assert len({tuple(prompt) for prompt in drawn.prompts}) == 40
    assert drawn == prefixed(source, shape, n=40, n_prefixes=3, seed=5)


def test_a_prefix_counts_as_computed_when_it_was_not_found() -> None:
    found = [record(0.0, 0.1) for _ in range(4)]
    for r, n_cached in zip(found, (0, 64, 16, 96), strict=True):
        r.n_cached = n_cached
    assert times_computed(found, [0, 0, 1, 1], n_prefix=96) == (1, 1)


def test_counters_of_replicas_are_read_and_may_begin_anew() -> None:
    now = parse_counts(METRICS, at_s=2.0)
    assert now.n_live == 2
    before = Counts(at_s=1.0, n_live=2, output={"127.0.0.1:1": 10.0, "127.0.0.1:2": 9.0}, prefill={})
    assert now.since(before) == {"127.0.0.1:1": (100.0, 20.0), "127.0.0.1:2": (7.0, 5.0)}
    assert grown(3.0, 8.0) == 5.0
    assert grown(8.0, 3.0) == 3.0


def test_imbalance_is_the_spread_over_the_mean() -> None:
    assert spread([90.0, 110.0]) == pytest.approx(0.2)
    assert spread([]) == spread([0.0, 0.0]) == 0.0


def test_tokens_fall_into_the_second_in_which_they_arrived() -> None:
    joined = record(10.0, 10.5, 12.1, n_output=8)  # two events, eight tokens
    failed = RequestRecord(start_s=10.0, n_input=1, n_expected=1, error="lost")
    assert per_second([joined, failed], begin_s=10.0) == (4.0, 0.0, 4.0)
    assert per_second([failed], begin_s=10.0) == ()


def test_the_share_of_a_replica_that_is_away_is_nothing() -> None:
    samples = [
        Counts(at_s=float(t), n_live=2, output=output, prefill={})
        for t, output in enumerate(
            [{"a": 0.0, "b": 0.0}, {"a": 5.0, "b": 5.0}, {"a": 15.0}, {"a": 20.0, "b": 5.0}]
        )
    ]
    assert shares(samples, "b", begin_s=0.0) == ((1.0, 0.5), (2.0, 0.0), (3.0, 0.5))


def test_when_a_share_is_back() -> None:
    def loss(share: float) -> LossRun:
        return LossRun(
            load="", replica="b", killed_s=1.0, back_s=3.0, summary=summarize([]),
            output_per_s=(5.0, 5.0, 0.0, 0.0, 6.0), share_per_s=((2.0, 0.0), (4.5, share)), fair_share=0.5,
        )  # fmt: skip

    assert loss(0.45).share_back_s == 1.5
    assert loss(0.2).share_back_s is None
    assert loss(0.2).silent_s == 2.0


def test_goals_follow_the_number_of_replicas() -> None:
    def summary(rate: float, ttft_ms: float) -> dict[str, object]:
        return {"output_tok_s": rate, "ttft_ms": {"p50": ttft_ms}, "n_errors": 0, "n_short": 0}

    assert all(goal.met for goal in gain_goals(summary(100, 50), summary(381, 51), n=4))
    met = [goal.met for goal in gain_goals(summary(100, 50), summary(379, 60), n=4)]
    assert met == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--parts", "speed", "--device", "fake"], "choose among gain, loss, placement"),
        (["--placements", "best", "--device", "fake"], "choose among exact, random, round-robin"),
        (["--devices", "2"], "give the server's command after --"),
        (["--device", "fake", "--", "quire"], "has a command of its own"),
        (["--devices", "1", "--", "quire"], "needs --tokenizer"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], why: str) -> None:
    code, text = invoke(*arguments)
    assert code == 2
    assert why in text
    assert "Traceback" not in text


def test_a_server_that_does_not_start_is_in_the_report(tmp_path: Path) -> None:
    code, text = invoke(
        "--devices", "1", "--prompts", "tokens", "--shrink", "64", "--out", str(tmp_path), "--", "false",
    )  # fmt: skip
    assert code == 1
    assert "The run stopped early" in text
    assert "exited with 1" in json.loads(next(tmp_path.glob("*.json")).read_text())["stopped"]


@pytest.mark.slow
def test_the_whole_measurement_with_fake_workers(tmp_path: Path) -> None:
    code, text = invoke(
        "--device", "fake", "--devices", "2", "--shrink", "32", "--before-s", "1", "--after-s", "2",
        "--placements", "exact,round-robin", "--out", str(tmp_path), "--logs", str(tmp_path / "logs"),
    )  # fmt: skip
    assert code == 0, text
    document = json.loads(next(tmp_path.glob("*.json")).read_text())
    (one,), (both,) = document["gain"]["one"], document["gain"]["all"]
    assert one["summary"]["n_requests"] * 2 == both["summary"]["n_requests"]
    assert len(both["replica_tokens"]) == 2
    assert all(part["output"] > 0 for part in both["replica_tokens"].values())
    loss = document["loss"]
    assert loss["summary"]["n_errors"] == loss["summary"]["n_short"] == 0
    assert loss["back_s"] > loss["killed_s"] > 0
    dealt, exact = document["few_prefixes"]["round-robin"], document["few_prefixes"]["exact"]
    assert np.mean(exact["computed"]) <= np.mean(dealt["computed"])
    assert SMOLLM2 in document["server"]
    assert "| round-robin" in next(tmp_path.glob("*.md")).read_text()
