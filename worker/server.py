"""One worker process's gRPC server: the service, its engine and the socket, started and stopped together."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import grpc

from proto import worker_pb2_grpc
from worker.engine import Engine
from worker.errors import StartError
from worker.runner import Runner
from worker.service import WorkerService
from worker.tracing import RowTraces

MAX_MESSAGE_BYTES = 1 << 30
"""A step may admit many prompts of a million tokens, 4 bytes each."""

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A second worker on the same port must fail, not share it.
    ("grpc.so_reuseport", 0),
    # A router that vanished without a word (host lost, cable cut) is noticed within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class WorkerServer:
    """Call `start`, then `stop`, on one event loop."""

    def __init__(
        self,
        runner: Runner,
        *,
        host: str,
        port: int,
        max_window: int,
        on_fatal: Callable[[Exception], None] | None = None,
        traces: RowTraces | None = None,
    ) -> None:
        self.engine = Engine(runner, max_window=max_window, on_fatal=on_fatal, traces=traces)
        self.worker_id = uuid.uuid4().hex
        self._host = host
        self._port = port
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Start the compute thread and listen. Returns the bound port. Raises StartError when it is taken."""
        server = grpc.aio.server(options=_OPTIONS)
        service = WorkerService(self.engine, worker_id=self.worker_id, quire_version=quire_version())
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        check_can_listen(self._host, self._port)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port = server.add_insecure_port(f"{host}:{self._port}")
        except RuntimeError:
            port = 0
        if port == 0:
            raise StartError(f"cannot listen on {self._host}:{self._port} (--host, --port)")
        self.engine.start()
        await server.start()
        self._server = server
        return port

    async def stop(self, *, grace_s: float) -> None:
        """Stop listening, and give open calls that long to end."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None


def check_can_listen(host: str, port: int) -> None:
    """Raises StartError with the system's own reason, which gRPC does not tell."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # Binding beside a listener can succeed; listening beside it can't.
            probe.listen(1)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port} (--host, --port): {error.strerror}") from error


def quire_version() -> str:
    try:
        return version("quire")
    except PackageNotFoundError:
        return "unknown"
