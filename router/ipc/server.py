"""The scheduler's side of the socket: many API processes, one connection each."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from typing import cast

import structlog

from router.ipc.address import IpcAddress
from router.ipc.framing import Codec, FrameBuffer, FrameError
from router.ipc.messages import IPC_VERSION, Hello, ToApi, Welcome
from router.ipc.port import SchedulerPort
from settings.errors import ConfigError

CHECK_SOCKET_S = 1.0
"""How often the socket's file is looked for."""
MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""An API process that reads so slowly is cut off: its clients are gone in any case."""

log = structlog.get_logger("router.ipc")


class IpcServer:
    """Listens until closed. Connections that break or speak another protocol are dropped alone. A socket
    whose file was removed (by a cleaner of temporary files, say) is made anew, for API processes to come."""

    def __init__(
        self, address: IpcAddress, port: SchedulerPort, *, check_socket_s: float = CHECK_SOCKET_S
    ) -> None:
        self.address = address
        """With the port that was bound, after `start`."""
        self._port = port
        self._check_socket_s = check_socket_s
        self._server: asyncio.Server | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._connections: set[_Connection] = set()

    async def start(self) -> None:
        """Raises ConfigError when the address can't be listened on."""
        loop = asyncio.get_running_loop()
        try:
            if self.address.path:
                await self._listen_at(self.address.path)
                self._keeper = loop.create_task(self._keep(self.address.path), name="ipc socket")
            else:
                self._server = await loop.create_server(self._make, self.address.host, self.address.port)
                port = self._server.sockets[0].getsockname()[1]
                self.address = IpcAddress(host=self.address.host, port=port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"--scheduler-address is {self.address}, but can't be used: {reason}") from None

    async def _listen_at(self, path: str) -> None:
        """Raises OSError."""
        _remove_dead_socket(path)
        server = await asyncio.get_running_loop().create_unix_server(self._make, path=path)
        os.chmod(path, 0o600)
        self._server = server

    async def _keep(self, path: str) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._check_socket_s)
            if _is_there(path):
                continue
            gone = self._server
            try:
                _make_folder(path)
                await self._listen_at(path)
            except OSError as error:
                if str(error) != said:
                    said = str(error)
                    log.error("the scheduler's socket is gone and can't be made anew", path=path, cause=said)
                continue
            said = ""
            if gone is not None:
                gone.close()
            log.warning("the scheduler's socket was removed: made anew", path=path)

    def _make(self) -> _Connection:
        return _Connection(self._port, self._connections)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        if connections:
            # Lets the transports flush what was written.
            await asyncio.wait(
                [asyncio.create_task(connection.gone.wait()) for connection in connections], timeout=1.0
            )
        if self.address.path:
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)


class _Connection(asyncio.Protocol):
    def __init__(self, port: SchedulerPort, connections: set[_Connection]) -> None:
        self._port = port
        self._connections = connections
        self._codec = Codec()
        self._buffer = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._conn: int | None = None
        self.gone = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio.Transport without its class.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._buffer.feed(data):
                message = self._codec.to_scheduler(frame)
                if isinstance(message, Hello):
                    self._greet(message)
                elif self._conn is None:
                    raise FrameError("the first message must be a greeting")
                else:
                    self._port.receive(self._conn, message)
        except FrameError as error:
            log.warning("api connection dropped", cause=str(error))
            self._abort()

    def _greet(self, hello: Hello) -> None:
        self._write(Welcome(version=IPC_VERSION))
        if hello.version != IPC_VERSION:
            log.error(
                "api process refused: run the same release on both",
                api=hello.api_id,
                version=hello.version,
                expected=IPC_VERSION,
            )
            self.close()
            return
        if self._conn is None:
            self._conn = self._port.attach(self._write)

    def _write(self, message: ToApi) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(self._codec.frame(message))
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            log.error("api process does not read: dropped", unread_bytes=transport.get_write_buffer_size())
            self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.gone.set()
        conn, self._conn = self._conn, None
        if conn is not None:
            self._port.detach(conn)


def _is_there(path: str) -> bool:
    return os.path.exists(path)


def _make_folder(path: str) -> None:
    """For a cleaner that took the folder too. Raises OSError."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)


def _remove_dead_socket(path: str) -> None:
    """A socket file that a killed process left behind. One that somebody listens on raises OSError."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "a file that is no socket is in the way")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(errno.EADDRINUSE, "in use")
