"""What is wanted of the figures, and which of it was met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.scaling.loss import LossRun
from bench.scaling.measure import PrefixedRun

LEAST_GAIN = 0.95
"""Of one replica's output tokens a second, by each."""
LEAST_HITS = 0.95
MOST_IMBALANCE = 0.2
TTFT_NOISE = 1.05


@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    wanted: str
    found: str
    met: bool


def gain_goals(one: dict[str, Any], all_: dict[str, Any], *, n: int) -> list[Goal]:
    """From two `Summary.as_dict` of the same case, the second with n times the load."""
    ratio = all_["output_tok_s"] / one["output_tok_s"] if one["output_tok_s"] else 0.0
    ttft_one, ttft_all = one["ttft_ms"]["p50"] or 0.0, all_["ttft_ms"]["p50"] or 0.0
    n_failed = sum(s["n_errors"] + s["n_short"] for s in (one, all_))
    return [
        Goal(
            f"output tok/s of {n} replicas, times one's", f"at least {LEAST_GAIN * n:.2f}", f"{ratio:.2f}",
            ratio >= LEAST_GAIN * n,
        ),
        Goal(
            "TTFT p50, beside one replica's", f"at most {ttft_one:,.0f} ms (and 5 % of noise)",
            f"{ttft_all:,.0f} ms", ttft_all <= TTFT_NOISE * ttft_one,
        ),
        Goal("requests failed or short", "0", f"{n_failed}", n_failed == 0),
    ]  # fmt: skip


def placement_goals(one: PrefixedRun, exact: PrefixedRun) -> list[Goal]:
    return [
        Goal(
            "hit rate of exact placement, beside one replica's",
            f"at least {LEAST_HITS:.0%} of {one.hit_rate:.1%}", f"{exact.hit_rate:.1%}",
            exact.hit_rate >= LEAST_HITS * one.hit_rate,
        ),
        Goal(
            "tokens per replica, (most - least) / mean", f"under {MOST_IMBALANCE:.0%}",
            f"{exact.run.imbalance:.1%}", exact.run.imbalance < MOST_IMBALANCE,
        ),
        Goal(
            "requests failed or short", "0", f"{exact.run.n_failed + one.run.n_failed}",
            exact.run.n_failed + one.run.n_failed == 0,
        ),
    ]  # fmt: skip


def loss_goals(loss: LossRun) -> list[Goal]:
    back = loss.share_back_s
    return [
        Goal("requests failed or short, one worker killed", "0", f"{loss.n_failed}", loss.n_failed == 0),
        Goal(
            "80 % of its share again after its return", "seen",
            "not seen" if back is None else f"after {back:.1f} s", back is not None,
        ),
    ]  # fmt: skip


def rows(goals: Sequence[Goal]) -> list[list[str]]:
    return [[goal.what, goal.wanted, goal.found, "met" if goal.met else "**missed**"] for goal in goals]
