from __future__ import annotations

import random

import numpy as np

from router.budget import AnswerLengths, peak_blocks


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def simulated_peak(own: list[int], slack: list[int], remaining: list[int], block_size: int) -> int:
    """Decode all rows in lockstep, one token each; a row's blocks are free when it ends."""
    peak = sum(own)
    for t in range(1, max(remaining) + 1):
        held = 0
        for o, s, r in zip(own, slack, remaining, strict=True):
            if r >= t:
                held += o + max(0, -(-(t - s) // block_size))
        peak = max(peak, held)
    return peak


def test_the_peak_bounds_a_simulated_run_and_is_close_to_it() -> None:
    rng = random.Random(1)
    for _ in range(300):
        block_size = rng.choice((1, 2, 16))
        n = rng.randrange(1, 12)
        own = [rng.randrange(1, 20) for _ in range(n)]
        slack = [rng.randrange(block_size) for _ in range(n)]
        remaining = [rng.randrange(1, 100) for _ in range(n)]
        got = peak_blocks(
            own=ints(*own), slack=ints(*slack), remaining=ints(*remaining), block_size=block_size
        )
        true = simulated_peak(own, slack, remaining, block_size)
        assert abs(got - true) <= n / 2 + 1
        if block_size == 1:
            assert got == true


def test_rows_that_end_soon_are_not_charged_for_what_comes_later() -> None:
    together = peak_blocks(own=ints(10, 10), slack=ints(0, 0), remaining=ints(10, 100), block_size=1)
    assert together == 110  # the long one alone at its end, not 10 + 10 + 10 + 100


def test_nothing_runs_nothing_is_held() -> None:
    assert peak_blocks(own=ints(), slack=ints(), remaining=ints(), block_size=16) == 0


def test_without_experience_a_modest_answer_is_expected() -> None:
    lengths = AnswerLengths(prior=256)
    assert lengths.expected(ints(0, 100, 1000)).tolist() == [256, 256, 1000]


def test_experience_is_the_mean_of_longer_answers() -> None:
    lengths = AnswerLengths(min_samples=4)
    for n in (10, 10, 30, 50):
        lengths.add(n)
    # From 0: mean of all; from 10: mean of 30 and 50; beyond all: as much again.
    assert lengths.expected(ints(0, 10, 30, 60)).tolist() == [25, 30, 20, 60]


def test_old_experience_fades() -> None:
    lengths = AnswerLengths(n_samples=8, min_samples=4)
    for n in [1000] * 8 + [20] * 8:
        lengths.add(n)
    assert lengths.expected(ints(0)).tolist() == [20]
