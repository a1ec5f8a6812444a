"""Runs the app under uvicorn and ends it in order: nothing new, running answers to their end, then exit."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import structlog
import uvicorn
from starlette.applications import Starlette

from router.api.connection import Connection
from router.api.context import ApiContext
from router.ipc.messages import ErrorInfo
from settings.errors import ConfigError

T = TypeVar("T")

_BACKLOG = 2048
_LAST_WORDS_S = 2.0
"""After the grace time: for the last events to reach clients that read."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = structlog.get_logger("quire.api")


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again after the shutdown, and the exit code not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """One listening socket and the app behind it."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        context: ApiContext = app.state.context
        self._context = context
        self._listener = listener
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(_LAST_WORDS_S)),
            backlog=_BACKLOG,
        )
        self._server = _Server(config)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        """Begins the shutdown; again: ends at once."""
        if self._stopping.is_set():
            self._server.force_exit = self._server.should_exit = True
        self._stopping.set()
        self._context.draining = True

    async def run(self, *, on_listening: Callable[[int], None] | None = None) -> None:
        """Returns when the shutdown is complete."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.stop)
        stopper = asyncio.create_task(self._stop_in_order())
        try:
            serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
            if on_listening is not None:
                on_listening(self.port)
            await serving
        finally:
            stopper.cancel()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _stop_in_order(self) -> None:
        await self._stopping.wait()
        context = self._context
        grace_s = context.config.shutdown_grace_s
        _log.info("shutting down", running=len(context.running), grace_s=grace_s)
        context.on_idle = self._idle.set
        if context.running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace_s)
        info = ErrorInfo(
            status=503,
            type="server_error",
            message=f"The server shut down; its {grace_s:g} s of grace (shutdown_grace_s) are over.",
            code="shutting_down",
        )
        for answer in list(context.running):
            answer.interrupt(info)
        self._server.should_exit = True


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket, IPv4 or IPv6; `shared` with other processes that say the same. Raises ConfigError when
    the address can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error} (--host)") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror or error}; --port takes another one"
        ) from error
    return listener


def run_loop(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run` on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
