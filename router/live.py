"""What somebody who watches the engine sees at one moment: all replicas in short, some of them in full."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from router.errors import InvalidRequestError

if TYPE_CHECKING:
    from router.replica_state import ReplicaState
    from router.scheduler import Scheduler

MAX_PREFIXES = 100
MAX_DETAILS = 16


class LiveView:
    """Asked about once a second while a page is open. A replica in short costs a few microseconds; in full it
    costs a look at its leases and at the prefixes that were found again."""

    def __init__(self, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock

    def value(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """`replicas` are the ids to tell in full, `limit` the most prefixes of each. In the place of one that
        is not live stands the first that is. Raises InvalidRequestError."""
        limit, wanted = args.get("limit", 8), args.get("replicas", [])
        if not isinstance(limit, int) or not 0 <= limit <= MAX_PREFIXES:
            raise InvalidRequestError(
                f"limit is {limit!r}, but must be from 0 to {MAX_PREFIXES}", param="limit"
            )
        if (
            not isinstance(wanted, list)
            or len(wanted) > MAX_DETAILS
            or not all(isinstance(replica_id, int) for replica_id in wanted)
        ):
            raise InvalidRequestError(
                f"replicas must be a list of at most {MAX_DETAILS} ids", param="replicas"
            )
        scheduler = self._scheduler
        core = scheduler.core
        live = core.replicas if core is not None else {}
        state = scheduler.state
        return {
            "time_s": self._clock(),
            "ready": state.ready,
            "reason": state.reason,
            "draining": state.draining,
            "n_waiting": len(core.queue) if core is not None else 0,
            "oldest_wait_s": round(scheduler.oldest_wait_s, 3),
            "n_requests": core.n_requests if core is not None else 0,
            "totals": self._totals(),
            "prefix_caching": scheduler.config.prefix_caching,
            "block_size": scheduler.limits.block_size if scheduler.limits is not None else None,
            "replicas": [
                self._brief(replica_id, live.get(replica_id)) for replica_id in scheduler.fleet.links
            ],
            "details": self._details(wanted, limit=limit),
        }

    def _details(self, wanted: list[int], *, limit: int) -> dict[str, Any]:
        """By the id asked for."""
        core = self._scheduler.core
        live = core.replicas if core is not None else {}
        if not live:
            return {}
        shown = {replica_id: replica_id if replica_id in live else min(live) for replica_id in wanted}
        made = {replica_id: _detail(live[replica_id], limit=limit) for replica_id in set(shown.values())}
        return {str(asked): made[replica_id] for asked, replica_id in shown.items()}

    def _totals(self) -> dict[str, int]:
        """Counters since the start: who watches makes rates of them."""
        stats = self._scheduler.stats
        return {
            "output_tokens": stats.n_output_tokens,
            "prompt_tokens": stats.n_prompt_tokens,
            "steps": stats.n_steps,
            "requests": stats.n_submitted,
            "preempted": stats.n_preempted,
            "migrated": stats.n_migrated,
            "hit_tokens": stats.hit_tokens,
            "asked_tokens": stats.asked_tokens,
        }

    def _brief(self, replica_id: int, rs: ReplicaState | None) -> dict[str, Any]:
        link = self._scheduler.fleet.links[replica_id]
        entry: dict[str, Any] = {
            "id": replica_id,
            "address": link.address,
            "state": link.state.value,
            "reason": link.reason,
        }
        if link.capacity is not None:
            entry["device"] = link.capacity.device
            entry["dtype"] = link.capacity.dtype
        if rs is not None:
            entry |= {
                "n_running": rs.n_running,
                "max_rows": rs.shape.max_batch_size,
                "n_in_flight": len(rs.in_flight),
                "half_open": rs.probing,
                "suspect": rs.suspect,
                "draining": rs.closing,
                "last_step_us": rs.last_step_us,
                "blocks": asdict(rs.allocator.stats()),
            }
        return entry


def _detail(rs: ReplicaState, *, limit: int) -> dict[str, Any]:
    return {"replica": rs.replica_id, "rows": _rows(rs), **rs.allocator.inspect(limit=limit)}


def _rows(rs: ReplicaState) -> dict[str, list[int]]:
    """Column by column, in tokens: nothing of the texts. A row is in prefill while `done` is below
    `target`."""
    rows = np.flatnonzero(rs.leased)
    return {
        "row": rows.tolist(),
        "prompt": rs.n_prompt[rows].tolist(),
        "cached": rs.n_cached[rows].tolist(),
        "target": rs.target[rows].tolist(),
        "done": rs.n_scheduled[rows].tolist(),
        "known": rs.n_committed[rows].tolist(),
    }
