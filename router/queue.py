"""The one global queue: priority class, then arrival."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from router.request import Request


class RequestQueue:
    """Requests that wait for a replica, best first. A request met a second time (preempted, migrated) goes
    back to the place that its arrival gives it."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._items: list[Request] = []
        self.version = 0
        """Changes with every push and removal."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        """Best first, over a snapshot: the queue may change meanwhile."""
        return iter(self._items[:])

    @property
    def head(self) -> Request | None:
        return self._items[0] if self._items else None

    def push(self, request: Request) -> None:
        at = bisect.bisect_left(self._keys, request.key)
        if at < len(self._keys) and self._keys[at] == request.key:
            raise AssertionError(f"request {request.conn}/{request.id} is already queued")
        self.version += 1
        self._keys.insert(at, request.key)
        self._items.insert(at, request)

    def remove(self, request: Request) -> None:
        at = bisect.bisect_left(self._keys, request.key)
        if at >= len(self._items) or self._items[at] is not request:
            raise AssertionError(f"request {request.conn}/{request.id} is not queued")
        self.version += 1
        del self._keys[at]
        del self._items[at]

    def check(self) -> None:
        assert self._keys == sorted(self._keys)
        assert self._keys == [request.key for request in self._items]
