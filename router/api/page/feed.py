"""One look at the engine a second, shared by everybody who watches, and none while nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from router.api.context import ApiContext
from router.api.errors import unavailable
from router.ipc.client import RefusedError

INTERVAL_S = 1.0
MAX_WATCHERS = 64
MAX_DETAILS = 4
"""Replicas told in full in one look: with more, they take turns."""
N_PREFIXES = 8

_log = structlog.get_logger("quire.api")


class Watcher:
    """One open stream. It holds the newest event alone: a slow reader misses some and never falls behind."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        """Which one to show in full."""
        self._event: bytes | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, event: bytes) -> None:
        self._event = event
        self._changed.set()

    def close(self) -> None:
        """What was put before is still read."""
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """Waits for the next event; None when the stream is to end."""
        while self._event is None and not self._closed:
            await self._changed.wait()
            self._changed.clear()
        event, self._event = self._event, None
        return event


class LiveFeed:
    """Owns the task that asks the scheduler while there are watchers. `pause` waits between two looks."""

    def __init__(
        self,
        context: ApiContext,
        *,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        max_watchers: int = MAX_WATCHERS,
    ) -> None:
        self._context = context
        self._pause = pause
        self._max_watchers = max_watchers
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._n_told = 0

    @property
    def n_watchers(self) -> int:
        return len(self._watchers)

    def join(self, replica: int) -> Watcher:
        """Its first event comes at once. Raises ApiError (503) when too many watch."""
        if len(self._watchers) >= self._max_watchers:
            raise unavailable(
                f"{self._max_watchers} live views are open on this process, which is the most it serves.",
                retry_after_s=10.0,
            )
        watcher = Watcher(replica)
        self._watchers.add(watcher)
        if self._task is not None:
            self._task.cancel()  # the newcomer does not wait for the others' next turn
        self._task = asyncio.create_task(self._run(), name="live feed")
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            await self._look()
            if self._context.draining:
                for watcher in self._watchers:
                    watcher.close()
                return
            await self._pause(INTERVAL_S)

    async def _look(self) -> None:
        replicas = self._take_turns(sorted({watcher.replica for watcher in self._watchers}))
        try:
            value = await self._context.client.admin("live", replicas=replicas, limit=N_PREFIXES)
            details = value.get("details", {})
            head = {name: part for name, part in value.items() if name != "details"} | self._own()
            events = {
                replica: _event(head | {"detail": self._detail(details, replica)}) for replica in replicas
            }
        except RefusedError as error:
            events = dict.fromkeys(replicas, _event({"error": str(error)}))
        except Exception:  # a fault of ours ends no stream: the next look may be well
            _log.exception("live view failed")
            events = dict.fromkeys(replicas, _event({"error": "The server failed on the live view."}))
        for watcher in self._watchers:
            if watcher.replica in events:
                watcher.put(events[watcher.replica])

    def _take_turns(self, replicas: list[int]) -> list[int]:
        """However many are looked at, the scheduler is not held up for long."""
        if len(replicas) <= MAX_DETAILS:
            return replicas
        first = self._n_told % len(replicas)
        self._n_told += MAX_DETAILS
        return (replicas * 2)[first : first + MAX_DETAILS]

    def _own(self) -> dict[str, Any]:
        """What this process knows better than the scheduler."""
        reason = self._context.not_ready_reason
        return {"ready": reason is None, "reason": reason or ""}

    def _detail(self, details: dict[str, Any], replica: int) -> dict[str, Any] | None:
        """With the prefixes' ends as text, once the tokenizer is read."""
        detail: dict[str, Any] | None = details.get(str(replica))
        text = self._context.loaded
        if detail is None or text is None:
            return detail
        decode = text.tokenizer.decode
        prefixes = [
            prefix
            | {
                "first_text": decode(prefix["first_tokens"], skip_special=False),
                "last_text": decode(prefix["last_tokens"], skip_special=False),
            }
            for prefix in detail.get("prefixes", ())
        ]
        return detail | {"prefixes": prefixes}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
