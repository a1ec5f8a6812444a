"""The connections of API processes to the scheduler: whom to tell what."""

from __future__ import annotations

from router.ipc.messages import ServerState, ToApi
from router.ipc.port import Send


class Connections:
    """Numbers them, and drops what is meant for one that has gone."""

    def __init__(self) -> None:
        self._sends: dict[int, Send] = {}
        self._n_seen = 0

    def add(self, send: Send) -> int:
        """Its number, never used again."""
        self._n_seen += 1
        self._sends[self._n_seen] = send
        return self._n_seen

    def remove(self, conn: int) -> None:
        self._sends.pop(conn, None)

    def __contains__(self, conn: int) -> bool:
        return conn in self._sends

    def send(self, conn: int, message: ToApi) -> None:
        send = self._sends.get(conn)
        if send is not None:
            send(message)

    def tell_all(self, state: ServerState) -> None:
        for send in list(self._sends.values()):
            send(state)
