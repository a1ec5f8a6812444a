"""The API's side of the socket. It connects again by itself until closed, and notices a scheduler that is
stopped or stuck."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from typing import cast

import msgspec
import structlog

from router.ipc.address import IpcAddress
from router.ipc.dispatch import DISCONNECTED, Dispatcher
from router.ipc.framing import Codec, FrameBuffer, FrameError
from router.ipc.messages import (
    IPC_VERSION,
    AdminCall,
    Cancel,
    Hello,
    ServerState,
    ToApi,
    ToScheduler,
    Welcome,
)
from router.ipc.pulse import INTERVAL_S, Pulse, PulseCheck

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
_NO_REPLY = 0
"""The call id of a ping, whose answer nobody awaits."""
_SILENT = msgspec.structs.replace(DISCONNECTED, reason="the scheduler does not answer")

log = structlog.get_logger("router.ipc")


class SocketClient(Dispatcher):
    """Implements `SchedulerClient`. Made by `connect`."""

    def __init__(self, address: IpcAddress, *, api_id: str, ping_s: float) -> None:
        super().__init__()
        self._address = address
        self._api_id = api_id
        self._ping_s = ping_s
        self._silent = False
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def connect(cls, address: str, *, api_id: str = "", ping_s: float = INTERVAL_S) -> SocketClient:
        """Returns at once; `wait_ready` waits for a scheduler that is ready. Raises ConfigError when
        `address` is none."""
        client = cls(IpcAddress.parse(address), api_id=api_id or f"api-{os.getpid()}", ping_s=ping_s)
        client._task = asyncio.get_running_loop().create_task(client._stay_connected())
        return client

    @property
    def state(self) -> ServerState:
        return _SILENT if self._silent else self._state

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            await connection.gone.wait()
        self._lost()

    def _send(self, message: ToScheduler) -> bool:
        if self._silent and not isinstance(message, Cancel):
            return False
        return self._connection is not None and self._connection.write(message)

    async def _stay_connected(self) -> None:
        pause_s = FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            try:
                make = functools.partial(_Connection, self)
                if self._address.path:
                    _, connection = await loop.create_unix_connection(make, path=self._address.path)
                else:
                    _, connection = await loop.create_connection(make, self._address.host, self._address.port)
            except OSError as error:
                log.debug("scheduler not reached", address=str(self._address), cause=str(error))
            else:
                self._connection = connection
                connection.write(Hello(version=IPC_VERSION, api_id=self._api_id))
                pulse = loop.create_task(self._watch(connection))
                try:
                    await connection.gone.wait()
                finally:
                    pulse.cancel()
                self._connection = None
                self._silent = False
                if connection.was_welcome:
                    log.warning("connection to the scheduler lost", address=str(self._address))
                    pause_s = FIRST_PAUSE_S
                self._lost()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _watch(self, connection: _Connection) -> None:
        while True:
            pulse = connection.pulse.ask()
            if pulse is Pulse.LOST:
                log.error("the scheduler has been silent for too long: its requests have failed")
                connection.abort()
                return
            if self._silent != (pulse is Pulse.SILENT):
                self._silent = pulse is Pulse.SILENT
                log.warning(
                    "the scheduler does not answer" if self._silent else "the scheduler answers again"
                )
            connection.write(AdminCall(call_id=_NO_REPLY, op="ping"))
            await asyncio.sleep(self._ping_s)


class _Connection(asyncio.Protocol):
    def __init__(self, owner: SocketClient) -> None:
        self._owner = owner
        self._codec = Codec()
        self._buffer = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self.gone = asyncio.Event()
        self.was_welcome = False
        self.pulse = PulseCheck()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio.Transport without its class.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self.pulse.heard()
        try:
            for frame in self._buffer.feed(data):
                self._take(self._codec.to_api(frame))
        except FrameError as error:
            log.error("the scheduler speaks another protocol", cause=str(error))
            self.abort()

    def _take(self, message: ToApi) -> None:
        if isinstance(message, Welcome):
            if message.version != IPC_VERSION:
                log.error(
                    "scheduler refused: run the same release on both",
                    version=message.version,
                    expected=IPC_VERSION,
                )
                self.abort()
                return
            self.was_welcome = True
        else:
            self._owner._receive(message)

    def write(self, message: ToScheduler) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(self._codec.frame(message))
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
