from __future__ import annotations

import itertools

import pytest

from deploy.scaler.policy import Memory, Observation, ScalePolicy, decide
from settings.errors import ConfigError

POLICY = ScalePolicy(n_min=1, n_max=4, up_wait_s=2, up_after_s=5, down_after_s=60)


def seen(
    n: int, *, n_live: int | None = None, wait_s: float = 0, rows: float = 0, kv: float = 0
) -> Observation:
    return Observation(
        n_workers=n,
        n_live=n if n_live is None else n_live,
        n_waiting=int(wait_s > 0),
        oldest_wait_s=wait_s,
        rows_used=rows,
        kv_used=kv,
    )


def run(policy: ScalePolicy, *script: tuple[float, Observation]) -> list[int]:
    """The target at each of (time, observation)."""
    memory, targets = Memory(), []
    for now_s, observation in script:
        target, memory, _ = decide(policy, observation, memory, now_s=now_s)
        targets.append(target)
    return targets


def test_a_queue_that_lasts_brings_one_more_worker() -> None:
    waiting = seen(1, wait_s=3)
    assert run(POLICY, (0, waiting), (4.9, waiting), (5, waiting)) == [1, 1, 2]


def test_a_full_kv_cache_counts_as_a_queue_does() -> None:
    full = seen(2, kv=0.95, rows=0.2)
    assert run(POLICY, (0, full), (5, full)) == [2, 3]


def test_a_queue_that_comes_and_goes_changes_nothing() -> None:
    waiting, calm = seen(1, wait_s=3), seen(1)
    script = [(float(i), waiting if i % 4 else calm) for i in range(40)]
    assert set(run(POLICY, *script)) == {1}


def test_while_a_worker_starts_nothing_more_is_decided_upwards() -> None:
    starting = seen(2, n_live=1, wait_s=30)
    assert set(run(POLICY, *[(float(i), starting) for i in range(60)])) == {2}


def test_after_a_step_the_condition_must_hold_anew() -> None:
    memory = Memory()
    _, memory, _ = decide(POLICY, seen(1, wait_s=9), memory, now_s=0)
    target, memory, why = decide(POLICY, seen(1, wait_s=14), memory, now_s=5)
    assert target == 2
    assert why == "the queue waits 14.0 s, 0% of the KV cache is in use"
    target, memory, _ = decide(POLICY, seen(2, wait_s=15), memory, now_s=6)
    assert target == 2


def test_low_load_takes_one_away_late() -> None:
    low = seen(3, rows=0.3, kv=0.3)  # 0.45 on two
    assert run(POLICY, (0, low), (59, low), (60, low)) == [3, 3, 2]


def test_what_one_less_could_not_carry_stays() -> None:
    busy = seen(2, rows=0.2, kv=0.35)  # 0.7 on one
    assert set(run(POLICY, *[(float(i * 10), busy) for i in range(50)])) == {2}


def test_it_never_swings() -> None:
    """The load that asked for the second worker does not send it away again."""
    n, memory, targets = 1, Memory(), []
    for i in range(2000):
        total = 0.95
        n_live = n
        observation = seen(n, kv=total / n_live, rows=total / n_live)
        n, memory, _ = decide(POLICY, observation, memory, now_s=float(i))
        targets.append(n)
    assert targets[-1] == 2
    assert sum(a != b for a, b in itertools.pairwise(targets)) == 1


@pytest.mark.parametrize(("n", "target"), [(0, 1), (5, 4), (9, 4)])
def test_bounds_hold_at_once(n: int, target: int) -> None:
    assert run(POLICY, (0, seen(n, wait_s=50))) == [target]


def test_the_largest_stays_the_largest() -> None:
    waiting = seen(4, wait_s=99)
    assert set(run(POLICY, *[(float(i), waiting) for i in range(30)])) == {4}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n_min": 0}, "--min is 0"),
        ({"n_min": 3, "n_max": 2}, "--max is 2, but must be at least --min"),
        ({"down_load": 0.95}, "workers would come and go"),
    ],
)
def test_bounds_that_contradict_each_other(given: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScalePolicy(**{"n_min": 1, "n_max": 4, **given})  # type: ignore[arg-type]  # mixed numbers
