"""The gRPC face of a worker: checks who may open a Run, and moves messages between the wire and the engine.

It never computes and never waits for a step, except where a new Run has to wait for the old one's end.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import structlog

from proto import worker_pb2_grpc
from proto.status import RUN_END_KEY, RunEnd
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import (
    Capacity,
    DescribeRequest,
    HealthRequest,
    HealthResponse,
    Open,
    PrepareRequest,
    PrepareResponse,
    Step,
    StepResult,
)
from worker.engine import Engine
from worker.errors import ProtocolError, RunRefused
from worker.run import Run as EngineRun
from worker.runner import RunnerCapacity

_STATUS_OF: dict[RunEnd, grpc.StatusCode] = {
    RunEnd.SHUTDOWN: grpc.StatusCode.UNAVAILABLE,
    RunEnd.REPLACED: grpc.StatusCode.ABORTED,
    RunEnd.HELD: grpc.StatusCode.FAILED_PRECONDITION,
    RunEnd.STALE: grpc.StatusCode.FAILED_PRECONDITION,
    RunEnd.VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    RunEnd.PROTOCOL: grpc.StatusCode.INVALID_ARGUMENT,
    RunEnd.DEVICE: grpc.StatusCode.INTERNAL,
    RunEnd.INTERNAL: grpc.StatusCode.INTERNAL,
}

Context = grpc.aio.ServicerContext[Step, StepResult]


@dataclass(slots=True)
class _Ended:
    end: RunEnd
    message: str


@dataclass(slots=True, eq=False)
class _Stream:
    """What the event loop knows of one accepted Run."""

    outbox: asyncio.Queue[StepResult | _Ended] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """One instance per process, on one event loop."""

    def __init__(self, engine: Engine, *, worker_id: str, quire_version: str) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._capacity = describe(
            engine.runner.capacity,
            worker_id=worker_id,
            quire_version=quire_version,
            max_window=engine.max_window,
        )
        self._opening = asyncio.Lock()
        self._streams: dict[EngineRun, _Stream] = {}
        self._log = structlog.get_logger("worker.service")

    # grpc names its methods so.
    async def Describe(self, request: DescribeRequest, context: Any) -> Capacity:  # noqa: N802
        return self._capacity

    async def Prepare(self, request: PrepareRequest, context: Any) -> PrepareResponse:  # noqa: N802
        if not request.HasField("grammar"):
            return PrepareResponse(ok=False, error="nothing to prepare: the request names no grammar")
        try:
            await asyncio.to_thread(self._engine.runner.prepare, request.grammar)
        except ValueError as error:
            return PrepareResponse(ok=False, error=str(error))
        return PrepareResponse(ok=True)

    async def Health(self, request: HealthRequest, context: Any) -> HealthResponse:  # noqa: N802
        health = self._engine.health()
        return HealthResponse(
            ready=health.ready,
            running=health.running,
            last_seq=health.last_seq,
            stalled_us=health.stalled_us,
            holder=health.holder,
            error=health.error,
        )

    # grpc.aio also takes a coroutine that reads and writes through its context; the stubs don't know it.
    async def Run(  # type: ignore[override]  # noqa: N802
        self, request_iterator: Any, context: Context
    ) -> None:
        first = await _read_step(context)
        if first is None:
            return
        if first.seq != 0 or not first.HasField("open"):
            await _abort(
                context,
                RunEnd.PROTOCOL,
                f"the first message of a Run must carry `open` with seq 0; this one has seq {first.seq}",
            )
        await self._check_open(first.open, context)
        async with self._opening:
            await self._make_room(first.open, context)
            run, stream = self._open(first.open)
            try:
                self._engine.open(run)
            except RunRefused as error:
                del self._streams[run]
                end = RunEnd.INTERNAL if self._engine.health().error else RunEnd.SHUTDOWN
                await _abort(context, end, str(error))
        reader = asyncio.create_task(self._read(run, context))
        try:
            ended = await self._write(stream, context)
        finally:
            # Also when the router hung up: this coroutine is cancelled then.
            self._engine.close(run, RunEnd.CLIENT, "the router closed the stream")
            reader.cancel()
        if ended.end is not RunEnd.CLIENT:
            await context.write(
                StepResult(generation=run.generation, run_end=ended.end.value, run_end_message=ended.message)
            )
            await _abort(context, ended.end, ended.message)

    async def _check_open(self, request: Open, context: Context) -> None:
        if request.protocol_version != PROTOCOL_VERSION:
            await _abort(
                context,
                RunEnd.VERSION,
                f"router {request.router_id!r} speaks protocol version {request.protocol_version}, this "
                f"worker speaks {PROTOCOL_VERSION}",
            )
        if not request.router_id:
            await _abort(context, RunEnd.PROTOCOL, "`open` names no router_id")
        if not 1 <= request.window <= self._engine.max_window:
            await _abort(
                context,
                RunEnd.PROTOCOL,
                f"window {request.window} was asked for, but 1 to {self._engine.max_window} are allowed "
                "(the worker's --window)",
            )

    async def _make_room(self, request: Open, context: Context) -> None:
        """Wait until no Run holds the rows, ending an older one of the same router. Refuses otherwise."""
        while (held := self._engine.current_run) is not None:
            if held.is_open and held.router_id != request.router_id:
                await _abort(
                    context,
                    RunEnd.HELD,
                    f"this worker is held by router {held.router_id!r} (generation {held.generation}); "
                    f"router {request.router_id!r} is refused while that stream lives",
                )
            if held.is_open and request.generation <= held.generation:
                await _abort(
                    context,
                    RunEnd.STALE,
                    f"generation {request.generation} of router {request.router_id!r} is not above "
                    f"{held.generation}, which is live",
                )
            stream = self._streams.get(held)
            if stream is None:
                return
            self._engine.close(
                held, RunEnd.REPLACED, f"generation {request.generation} of the same router took over"
            )
            await stream.ended.wait()

    def _open(self, request: Open) -> tuple[EngineRun, _Stream]:
        loop = asyncio.get_running_loop()
        stream = _Stream()

        def deliver(item: StepResult | _Ended) -> None:
            stream.outbox.put_nowait(item)
            if isinstance(item, _Ended):
                stream.ended.set()
                self._streams.pop(run, None)

        def from_engine(item: StepResult | _Ended) -> None:
            # The loop is closed when the process ends under a running step: nobody listens then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(deliver, item)

        run = EngineRun(
            router_id=request.router_id,
            generation=request.generation,
            window=request.window,
            emit=from_engine,
            on_end=lambda end, message: from_engine(_Ended(end, message)),
        )
        self._streams[run] = stream
        return run, stream

    async def _read(self, run: EngineRun, context: Context) -> None:
        while True:
            step = await _read_step(context)
            if step is None:
                self._engine.close(run, RunEnd.CLIENT, "the router closed the stream")
                return
            try:
                self._engine.submit(run, step)
            except ProtocolError as error:
                self._engine.close(run, RunEnd.PROTOCOL, str(error))
                return

    async def _write(self, stream: _Stream, context: Context) -> _Ended:
        while True:
            item = await stream.outbox.get()
            if isinstance(item, _Ended):
                return item
            await context.write(item)


async def _read_step(context: Context) -> Step | None:
    """None when the router has closed its side."""
    message: object = await context.read()
    return message if isinstance(message, Step) else None


async def _abort(context: Context, end: RunEnd, message: str) -> NoReturn:
    await context.abort(_STATUS_OF[end], message, ((RUN_END_KEY, end.value),))
    raise AssertionError("abort returned")


def describe(capacity: RunnerCapacity, *, worker_id: str, quire_version: str, max_window: int) -> Capacity:
    """What `Describe` answers."""
    return Capacity(
        protocol_version=PROTOCOL_VERSION,
        quire_version=quire_version,
        worker_id=worker_id,
        model_id=capacity.model_id,
        model_hash=capacity.model_hash,
        block_size=capacity.block_size,
        n_blocks=capacity.n_blocks,
        max_rows=capacity.max_rows,
        max_step_tokens=capacity.max_step_tokens,
        max_context=capacity.max_context,
        vocab_size=capacity.vocab_size,
        graph_sizes=capacity.graph_sizes,
        max_batch_total_tokens=capacity.max_batch_total_tokens,
        memory_arithmetic=capacity.memory_arithmetic,
        attention=capacity.attention,
        device=capacity.device,
        dtype=capacity.dtype,
        kv_cache_dtype=capacity.kv_cache_dtype,
        eos_token_ids=capacity.eos_token_ids,
        max_logprobs=capacity.max_logprobs,
        max_window=max_window,
        model_path=capacity.model_path,
        features=capacity.features,
    )
