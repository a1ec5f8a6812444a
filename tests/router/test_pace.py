"""How prompts and answers share the steps: small mixed ones, larger ones for more work, pauses for bursts."""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import Any

from router.pace import LONG_ROW_TOKENS, MAX_CHUNKS, MAX_HELD, ROW_TOKENS
from tests.router.sim import Sim, text


def streams_and(sim: Sim, *, n: int, n_new: int = 200) -> list[int]:
    """`n` answers that decode in every step; what was computed so far is forgotten."""
    ids = [sim.submit(text(8, seed=i), n_new=n_new)[0] for i in range(n)]
    for _ in range(n + 4):
        sim.turn()
    sizes(sim).clear()
    return ids


def sizes(sim: Sim) -> deque[tuple[int, int]]:
    """(decode rows, prompt tokens) of each step."""
    return sim.replicas[0].runner.step_sizes


def mixed(sim: Sim) -> list[int]:
    """Prompt tokens of the steps that carried answers too."""
    return [n_prompt for n_decode, n_prompt in sizes(sim) if n_decode and n_prompt]


def paced(**config: Any) -> Sim:
    settings: dict[str, Any] = {
        "mixed_step_tokens": 64,
        "max_waiting_tokens": 4,
        "decode_pause_ratio": 0.5,
        **config,
    }
    return Sim(
        check=False, max_batch_size=96, max_batch_prefill_tokens=128, fake_n_blocks=4000, config=settings
    )


def longest_pause(sim: Sim) -> int:
    runs = [len(list(steps)) for paused, steps in groupby(sizes(sim), key=lambda s: s[0] == 0) if paused]
    return max(runs, default=0)


def test_a_prompt_alone_takes_the_largest_steps() -> None:
    sim = paced()
    sim.submit(text(300, seed=1), n_new=2)
    sim.run()
    assert [n for _, n in sizes(sim)][:3] == [128, 128, 44]


def test_beside_answers_a_step_has_a_fixed_room_of_which_each_takes_its_part() -> None:
    sim = paced()
    streams_and(sim, n=4)
    ids = sim.submit(text(200, seed=50), n_new=2)
    sim.run()
    assert 64 - 4 * ROW_TOKENS == 40
    assert mixed(sim) == [32, 32, 32, 32, 72], "whole blocks of 16, and a rest of up to 96 at once"
    assert longest_pause(sim) == 0
    sim.assert_right(*ids)


def test_answers_that_are_nearly_done_end_before_a_long_prompt_begins() -> None:
    sim = paced()
    answers = streams_and(sim, n=2, n_new=20)
    ids = sim.submit(text(200, seed=50), n_new=2)
    sim.run()
    assert mixed(sim) == []
    assert [n for _, n in sizes(sim) if n] == [128, 72]
    assert sizes(sim)[0] == (2, 0)
    sim.assert_right(*answers, *ids)


def test_a_short_prompt_does_not_wait_for_them() -> None:
    sim = paced()
    streams_and(sim, n=2, n_new=20)
    sim.submit(text(60, seed=50), n_new=2)
    sim.run()
    assert mixed(sim) == [60]


def test_a_quarter_of_the_room_stays_with_the_prompts() -> None:
    sim = paced()
    streams_and(sim, n=40)
    sim.submit(text(200, seed=50), n_new=2)
    sim.run()
    assert mixed(sim) == [16] * 7 + [88]


def test_a_prompt_that_is_little_larger_than_the_room_goes_whole_and_alone() -> None:
    sim = paced()
    streams_and(sim, n=2)
    ids = sim.submit(text(96, seed=50), text(90, seed=51), n_new=2)
    sim.run()
    assert mixed(sim) == [96, 90]
    sim.assert_right(*ids)


def test_a_long_prompt_is_divided_into_few_chunks_beside_few_answers() -> None:
    sim = paced(mixed_step_tokens=16)
    streams_and(sim, n=1)
    n_tokens = 900
    sim.submit(text(n_tokens, seed=50), n_new=2)
    sim.run()
    assert n_tokens // MAX_CHUNKS - LONG_ROW_TOKENS == 64
    assert mixed(sim) == [64] * 14 + [4]


def test_beside_many_answers_a_long_prompt_has_the_usual_room() -> None:
    sim = paced(mixed_step_tokens=32)
    streams_and(sim, n=4)
    sim.submit(text(900, seed=50), n_new=2)
    sim.run()
    assert max(mixed(sim)[:-1]) == 32 - 4 * ROW_TOKENS


def test_a_burst_of_short_prompts_pauses_the_answers_for_a_bounded_number_of_steps() -> None:
    """SGLang #32549: no stream stands still for longer than that, however long the queue."""
    sim = paced()
    ids = streams_and(sim, n=8)
    ids += sim.submit(*(text(32, seed=100 + i) for i in range(70)), n_new=4)
    sim.run()
    assert longest_pause(sim) == MAX_HELD
    first_pause = next(i for i, (n_decode, _) in enumerate(sizes(sim)) if not n_decode)
    step_after = sizes(sim)[first_pause + MAX_HELD]
    assert step_after[0] >= 8, "the answers have the next step"
    assert step_after[1] == 0, "for themselves"
    sim.assert_right(*ids)


def test_long_prompts_never_pause_the_answers() -> None:
    """SGLang #32549: 8 streams decode while long prompts keep arriving."""
    sim = paced()
    ids = streams_and(sim, n=8)
    ids += sim.submit(*(text(300, seed=100 + i) for i in range(30)), n_new=4)
    sim.run()
    assert longest_pause(sim) == 0
    # All 30 wait for a chunk of up to 64: twice their part of four steps, capped by the prompt budget.
    assert max(n for n_decode, n in sizes(sim) if n_decode) == 128
    sim.assert_right(*ids)


def test_no_pause_when_it_is_switched_off() -> None:
    sim = paced(decode_pause_ratio=0.0)
    streams_and(sim, n=8)
    sim.submit(*(text(32, seed=100 + i) for i in range(70)), n_new=4)
    sim.run()
    assert longest_pause(sim) == 0


def test_no_pause_for_few_beside_many() -> None:
    sim = paced(max_waiting_tokens=1)
    streams_and(sim, n=40)
    sim.submit(*(text(32, seed=100 + i) for i in range(19)), n_new=4)
    sim.run()
    assert longest_pause(sim) == 0


def test_cached_beginnings_are_no_work() -> None:
    """Prompts that share a long beginning ask for little: the answers go on."""
    shared = text(256, seed=9)
    sim = paced()
    sim.submit(shared, n_new=1)
    sim.run()
    ids = streams_and(sim, n=8)
    ids += sim.submit(*(shared + text(2, seed=100 + i) for i in range(25)), n_new=4)
    sim.run()
    assert longest_pause(sim) == 0
    sim.assert_right(*ids)


def test_answers_do_not_pause_for_a_later_priority_class() -> None:
    sim = paced()
    streams = streams_and(sim, n=8)
    sim.submit(*(text(32, seed=100 + i) for i in range(70)), n_new=4, priority=5)
    while any(not sim.answers[i].done for i in streams):
        sim.turn()
    assert longest_pause(sim) == 0
    sim.run()


def test_a_pause_without_room_for_a_prompt_is_none() -> None:
    """Nothing that waits fits into the pool: the answers go on instead of waiting for it."""
    sim = Sim(
        check=False,
        max_batch_size=32,
        max_batch_prefill_tokens=64,
        fake_n_blocks=20,
        config={"mixed_step_tokens": 32, "max_waiting_tokens": 1, "decode_pause_ratio": 0.1},
    )
    ids = [sim.submit(text(16, seed=i), n_new=50)[0] for i in range(3)]
    for _ in range(6):
        sim.turn()
    ids += sim.submit(*(text(30, seed=100 + i) for i in range(12)), n_new=40)
    sim.run()
    sim.assert_right(*ids)
    sim.assert_empty()


def test_without_chunking_prompts_go_whole() -> None:
    sim = paced(prefill_chunking=False)
    streams_and(sim, n=8)
    sim.submit(text(120, seed=50), n_new=2)
    sim.run()
    assert max(n for _, n in sizes(sim)) == 120
