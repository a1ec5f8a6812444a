"""Writes streams once per batch of events instead of once per token."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Flushable(Protocol):
    def flush(self) -> None:
        """Never raises."""
        ...


class Flusher:
    """Collects the streams that have something to write. `flush` is called when a batch of events is through;
    should events come outside a batch, the loop's next turn does it."""

    __slots__ = ("_scheduled", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Flushable] = []
        self._scheduled = False

    def add(self, stream: Flushable) -> None:
        self._waiting.append(stream)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def flush(self, *_: object) -> None:
        waiting, self._waiting = self._waiting, []
        for stream in waiting:
            stream.flush()

    def _next_turn(self) -> None:
        self._scheduled = False
        self.flush()
