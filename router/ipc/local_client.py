"""The API and the scheduler in one process: the same messages, unencoded."""

from __future__ import annotations

from router.ipc.dispatch import DISCONNECTED, Dispatcher
from router.ipc.messages import ToScheduler
from router.ipc.port import SchedulerPort


class LocalClient(Dispatcher):
    """Implements `SchedulerClient`."""

    def __init__(self, port: SchedulerPort) -> None:
        super().__init__()
        self._port = port
        self._conn: int | None = port.attach(self._receive)

    def _send(self, message: ToScheduler) -> bool:
        if self._conn is None:
            return False
        self._port.receive(self._conn, message)
        return True

    async def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            self._port.detach(conn)
            self._set_state(DISCONNECTED)
