"""Follows the load for as long as it runs."""

from __future__ import annotations

from deploy.scaler.model import RouterState, ScaleError
from deploy.scaler.policy import Memory, Observation, ScalePolicy, decide
from deploy.scaler.steps import Scaler

INTERVAL_S = 2.0
FAILURE_PAUSE_S = 60.0
"""After a worker that could not be started: trying at once again would fail again."""


def observe(state: RouterState, *, n_workers: int) -> Observation:
    live = [load for load in state.loads if load.live and not load.draining]
    n_rows = sum(load.n_rows for load in live)
    n_blocks = sum(load.n_blocks for load in live)
    return Observation(
        n_workers=n_workers,
        n_live=len(live),
        n_waiting=state.n_waiting,
        oldest_wait_s=state.oldest_wait_s,
        rows_used=sum(load.n_running for load in live) / max(1, n_rows),
        kv_used=sum(load.n_blocks_used for load in live) / max(1, n_blocks),
    )


def follow(scaler: Scaler, policy: ScalePolicy, *, n_rounds: int | None = None) -> None:
    """Until interrupted. What goes wrong is said, and tried again later."""
    memory = Memory()
    rounds = 0
    while n_rounds is None or rounds < n_rounds:
        rounds += 1
        pause_s = INTERVAL_S
        try:
            n = len(scaler.engine.workers())
            seen = observe(scaler.router.state(), n_workers=n)
            target, memory, why = decide(policy, seen, memory, now_s=scaler.time.now_s())
            if target != n:
                scaler.say(f"{n} to {target} workers: {why}")
                scaler.scale(target)
        except ScaleError as error:
            scaler.say(f"not done: {error}")
            pause_s = FAILURE_PAUSE_S
        scaler.time.wait(pause_s)
