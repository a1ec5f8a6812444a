"""A fake worker inside the caller's event loop, for tests of whatever talks to a worker.

    async with fake_worker() as worker:
        channel = grpc.aio.insecure_channel(worker.address)

It is reached through a small TCP relay, so that a test can kill it as `kill -9` would, cut its network, and
bring it back at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from checkpoint.checkpoint import Checkpoint
from settings.ports import free_ports
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.fake import FakeRunner, FakeTiming, make_fake_runner
from worker.fake_faults import FakeFaults
from worker.server import WorkerServer

_STOP_TIMEOUT_S = 5.0


class FakeWorker:
    """Made by `fake_worker`. `address` stays the same over `kill` and `restart`."""

    def __init__(
        self, config: WorkerConfig, *, checkpoint: Checkpoint | None, timing: FakeTiming | None
    ) -> None:
        self.config = config
        self._checkpoint = checkpoint
        self._timing = timing
        self._relay = Relay()
        self._server: WorkerServer | None = None
        self.runner: FakeRunner
        """Of the present process; `restart` makes a new one."""
        self.fatal: list[Exception] = []
        """What would have ended the process."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._relay.port}"

    @property
    def engine(self) -> Engine:
        assert self._server is not None, "the worker is not running"
        return self._server.engine

    @property
    def worker_id(self) -> str:
        assert self._server is not None, "the worker is not running"
        return self._server.worker_id

    @property
    def faults(self) -> FakeFaults:
        return self.runner.faults

    async def start(self) -> None:
        self.runner = make_fake_runner(self.config, self._checkpoint, timing=self._timing)
        server = WorkerServer(
            self.runner, host="127.0.0.1", port=0, max_window=self.config.window, on_fatal=self.fatal.append
        )
        self._relay.target_port = await server.start()
        self._server = server
        await self._relay.open()

    async def kill(self) -> None:
        """As kill -9: connections break at once, nothing more is computed or said, nothing listens."""
        await self._relay.close()
        await self._stop_server()

    async def restart(self, **changes: Any) -> None:
        """A new process at the same address: `kill` if it runs, then start with an empty cache. `changes`
        are fields of WorkerConfig."""
        await self.kill()
        self.config = replace(self.config, **changes)
        await self.start()

    async def terminate(self) -> None:
        """As SIGTERM: the running step ends and is reported, the stream ends as a shutdown."""
        server = self._server
        if server is not None:
            await asyncio.to_thread(server.engine.stop)
            await server.stop(grace_s=_STOP_TIMEOUT_S)
            self._server = None
        await self._relay.close()

    def partition(self) -> None:
        """The network swallows everything in both directions; connections stay open."""
        self._relay.set_flowing(False)

    def heal(self) -> None:
        """What was held back during the partition arrives now."""
        self._relay.set_flowing(True)

    def cut(self) -> None:
        """All connections break; the process lives on and can be connected again."""
        self._relay.cut()

    def pause(self) -> None:
        """As SIGSTOP, seen from outside: no step ends and the network is silent."""
        self.faults.hang()
        self.partition()

    def resume(self) -> None:
        self.heal()
        self.faults.unhang()

    async def close(self) -> None:
        await self.kill()

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        self.runner.faults.unhang()
        await server.stop(grace_s=0)
        await asyncio.to_thread(server.engine.stop, timeout_s=_STOP_TIMEOUT_S)


@contextlib.asynccontextmanager
async def fake_worker(
    config: WorkerConfig | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    timing: FakeTiming | None = None,
    **changes: Any,
) -> AsyncIterator[FakeWorker]:
    """Starts one and ends it. Steps take no time unless `timing` or `fake_step_ms` says so; `changes` are
    fields of WorkerConfig, e.g. `block_size=4, fake_n_blocks=64, fake_strict=True`."""
    base = config if config is not None else WorkerConfig(model="", attention="fake", fake_step_ms=0.0)
    worker = FakeWorker(replace(base, **changes), checkpoint=checkpoint, timing=timing)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.close()


class Relay:
    """Forwards bytes between a port of its own (0: a free one, kept when it is opened again) and
    `target_port`."""

    def __init__(self) -> None:
        self.port = 0
        self.target_port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def open(self) -> None:
        self._flowing.set()
        self.port = self.port or free_ports(1)[0]
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._writers.add(their_writer)
            try:
                await self._join(reader, writer, their_reader, their_writer)
            finally:
                their_writer.transport.abort()
                self._writers.discard(their_writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        their_reader: asyncio.StreamReader,
        their_writer: asyncio.StreamWriter,
    ) -> None:
        pumps = [
            asyncio.create_task(self._pump(reader, their_writer)),
            asyncio.create_task(self._pump(their_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
