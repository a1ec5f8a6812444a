"""Supervision of callbacks: what an event loop would only log ends the process loudly instead."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Guard:
    """A context in which no exception is lost: it goes to `fail`, and the loop's own turn goes on."""

    __slots__ = ("_fail",)

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self._fail(error)
            return True
        return False
