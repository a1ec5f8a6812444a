"""What operators ask of the scheduler: state, metrics, the cache, draining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from router.errors import InvalidRequestError
from router.live import LiveView

if TYPE_CHECKING:
    from router.metrics import SchedulerCollector
    from router.scheduler import Scheduler

MAX_PREFIXES = 1000


class AdminOps:
    """One method per `AdminCall.op`."""

    def __init__(self, scheduler: Scheduler, collector: SchedulerCollector) -> None:
        self._scheduler = scheduler
        self._collector = collector
        self._ops: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "ping": lambda _: None,
            "state": self._state,
            "live": LiveView(scheduler).value,
            "metrics": self._metrics,
            "cache": self._cache,
            "flush_cache": self._flush_cache,
            "check": self._check,
            "drain": self._drain,
            "drain_replica": self._drain_replica,
        }

    def call(self, op: str, args: Mapping[str, Any]) -> Any:
        """Raises InvalidRequestError for what is unknown, AssertionError when `check` finds something."""
        handler = self._ops.get(op)
        if handler is None:
            raise InvalidRequestError(f"unknown operation {op!r}: one of {', '.join(sorted(self._ops))}")
        return handler(args)

    def _state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        scheduler = self._scheduler
        core = scheduler.core
        replicas = []
        for replica_id, link in scheduler.fleet.links.items():
            entry: dict[str, Any] = {
                "id": replica_id,
                "address": link.address,
                "state": link.state.value,
                "reason": link.reason,
            }
            capacity = link.capacity
            if capacity is not None:
                entry |= {
                    "worker_id": capacity.worker_id,
                    "quire_version": capacity.quire_version,
                    "model_id": capacity.model_id,
                    "device": capacity.device,
                    "dtype": capacity.dtype,
                    "kv_cache_dtype": capacity.kv_cache_dtype,
                    "attention": capacity.attention,
                    "max_rows": capacity.max_rows,
                    "memory_arithmetic": capacity.memory_arithmetic,
                }
            rs = core.replicas.get(replica_id) if core is not None else None
            if rs is not None:
                entry |= {
                    "generation": rs.generation,
                    "n_running": rs.n_running,
                    "n_in_flight": len(rs.in_flight),
                    "half_open": rs.probing,
                    "suspect": rs.suspect,
                    "draining": rs.closing,
                    "last_step_us": rs.last_step_us,
                    "blocks": asdict(rs.allocator.stats()),
                }
            replicas.append(entry)
        return {
            "ready": scheduler.state.ready,
            "reason": scheduler.state.reason,
            "draining": scheduler.state.draining,
            "router_id": scheduler.router_id,
            "n_waiting": len(core.queue) if core is not None else 0,
            "n_requests": core.n_requests if core is not None else 0,
            "oldest_wait_s": scheduler.oldest_wait_s,
            "replicas": replicas,
        }

    def _metrics(self, args: Mapping[str, Any]) -> str:
        return self._collector.exposition()

    def _cache(self, args: Mapping[str, Any]) -> dict[str, Any]:
        limit = args.get("limit", 20)
        if not isinstance(limit, int) or not 0 <= limit <= MAX_PREFIXES:
            raise InvalidRequestError(
                f"limit is {limit!r}, but must be from 0 to {MAX_PREFIXES}", param="limit"
            )
        scheduler = self._scheduler
        core = scheduler.core
        replicas = []
        for replica_id, rs in core.replicas.items() if core is not None else ():
            replicas.append(
                {
                    "id": replica_id,
                    "address": scheduler.fleet.links[replica_id].address,
                    "stats": asdict(rs.allocator.stats()),
                    **rs.allocator.inspect(limit=limit),
                }
            )
        return {
            "prefix_caching": scheduler.config.prefix_caching,
            "block_size": scheduler.limits.block_size if scheduler.limits is not None else None,
            "replicas": replicas,
        }

    def _flush_cache(self, args: Mapping[str, Any]) -> dict[str, Any]:
        core = self._scheduler.core
        return {"blocks_freed": core.flush_cache() if core is not None else 0}

    def _check(self, args: Mapping[str, Any]) -> dict[str, Any]:
        core = self._scheduler.core
        if core is not None:
            core.check()
        return {"ok": True}

    def _drain(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._scheduler.begin_drain()
        return {"draining": True}

    def _drain_replica(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """`address` as in the state; `on` false takes it back."""
        address, on = args.get("address"), args.get("on", True)
        if not isinstance(address, str) or not isinstance(on, bool):
            raise InvalidRequestError("drain_replica needs `address`, a text, and takes `on`, true or false")
        n_running = self._scheduler.drain_replica(address, on=on)
        return {"address": address, "draining": on, "n_running": n_running}
