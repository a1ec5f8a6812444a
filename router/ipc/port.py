"""What the scheduler offers to API connections, however they reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from router.ipc.messages import ToApi, ToScheduler

Send = Callable[[ToApi], None]
"""Hands a message to one API connection. Never blocks and never raises."""


class SchedulerPort(Protocol):
    def attach(self, send: Send) -> int:
        """A new API connection; returns its number. The present state is sent at once."""
        ...

    def receive(self, conn: int, message: ToScheduler) -> None: ...

    def detach(self, conn: int) -> None:
        """The connection is gone: its requests are cancelled."""
        ...
