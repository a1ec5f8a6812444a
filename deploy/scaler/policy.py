"""How many workers should there be? Pure: what was seen and when, in; a number, out.

Up soon, down late: a queue hurts at once, a worker too many only costs. A condition must hold without a break
for a while before it counts, and while a worker is starting nothing more is decided upwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from settings.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePolicy:
    """Raises ConfigError when the bounds contradict each other."""

    n_min: int
    n_max: int
    up_wait_s: float = 2.0
    """More workers when a request has waited for so long …"""
    up_kv: float = 0.9
    """… or the share of the KV blocks in use is above this …"""
    up_after_s: float = 5.0
    """… all this time."""
    down_load: float = 0.6
    """Fewer when one less would still have at most this share of its rows and blocks in use …"""
    down_after_s: float = 300.0
    """… all this time, and nothing waits."""

    def __post_init__(self) -> None:
        if self.n_min < 1:
            raise ConfigError(f"--min is {self.n_min}, but at least one worker must stay")
        if self.n_max < self.n_min:
            raise ConfigError(f"--max is {self.n_max}, but must be at least --min ({self.n_min})")
        if not 0 < self.down_load < self.up_kv <= 1:
            raise ConfigError(
                f"--down-load is {self.down_load:g} and --up-kv {self.up_kv:g}, but 0 < down < up <= 1 must "
                "hold: else workers would come and go"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    n_workers: int
    """Containers, whatever their state."""
    n_live: int
    """Of them, those that serve."""
    n_waiting: int
    oldest_wait_s: float
    rows_used: float
    """Running requests over the rows of all live workers, 0 to 1."""
    kv_used: float
    """The same of KV blocks."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Since when a condition has held; None: it does not."""

    high_since_s: float | None = None
    low_since_s: float | None = None


def decide(
    policy: ScalePolicy, seen: Observation, memory: Memory, *, now_s: float
) -> tuple[int, Memory, str]:
    """(how many workers there should be, what to remember, why)."""
    n = seen.n_workers
    if n < policy.n_min:
        return policy.n_min, Memory(), f"below --min {policy.n_min}"
    if n > policy.n_max:
        return policy.n_max, Memory(), f"above --max {policy.n_max}"
    high, low = _is_high(policy, seen), _is_low(policy, seen)
    memory = replace(
        memory,
        high_since_s=_since(high, memory.high_since_s, now_s),
        low_since_s=_since(low, memory.low_since_s, now_s),
    )
    if _held(memory.high_since_s, policy.up_after_s, now_s) and n < policy.n_max and seen.n_live == n:
        why = f"the queue waits {seen.oldest_wait_s:.1f} s, {seen.kv_used:.0%} of the KV cache is in use"
        return n + 1, Memory(), why
    if _held(memory.low_since_s, policy.down_after_s, now_s) and n > policy.n_min:
        return n - 1, Memory(), f"low load for {policy.down_after_s:g} s"
    return n, memory, ""


def _is_high(policy: ScalePolicy, seen: Observation) -> bool:
    return seen.oldest_wait_s > policy.up_wait_s or seen.kv_used > policy.up_kv


def _is_low(policy: ScalePolicy, seen: Observation) -> bool:
    """Whether one worker less could carry the load."""
    if seen.n_waiting or seen.n_live < 2:
        return False
    fewer = seen.n_live / (seen.n_live - 1)
    return max(seen.rows_used, seen.kv_used) * fewer <= policy.down_load


def _since(holds: bool, since_s: float | None, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _held(since_s: float | None, for_s: float, now_s: float) -> bool:
    return since_s is not None and now_s - since_s >= for_s
