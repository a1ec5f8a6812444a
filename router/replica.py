"""The connection to one worker: describe, open a Run, carry steps and results, watch its health, reconnect.

It decides nothing about requests; its owner is told when the replica comes, answers and goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import structlog

from proto import worker_pb2_grpc
from proto.status import RUN_END_KEY, RunEnd
from proto.version import PROTOCOL_VERSION
from proto.worker_pb2 import (
    Capacity,
    DescribeRequest,
    Grammar,
    HealthRequest,
    Open,
    PrepareRequest,
    PrepareResponse,
    Step,
    StepResult,
)
from router.errors import ReplicaMismatchError, StepProtocolError

FIRST_PAUSE_S = 0.1
LONGEST_UNREACHED_PAUSE_S = 1.0
LAST_WORD_WITHIN_S = 1.0
OWN_PAUSE_S = 1.0
"""So late is no event loop that is merely busy."""
MET_THE_END = "Internal error from Core"
"""What gRPC says of a stream at once when a write meets its end. How the worker ended it, which decides
whether requests are blamed, replaces this as soon as it has arrived."""
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A worker that is gone must not be remembered by a shared, backing-off connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

log = structlog.get_logger("router.replica")


class LinkState(enum.Enum):
    CONNECTING = "connecting"
    LIVE = "live"
    WAITING = "waiting"
    """Between two attempts."""
    REFUSED = "refused"
    """It can't serve this router; tried again, for it may be replaced."""
    CLOSED = "closed"


LEGAL_MOVES: dict[LinkState, frozenset[LinkState]] = {
    LinkState.CONNECTING: frozenset({LinkState.LIVE, LinkState.WAITING, LinkState.REFUSED, LinkState.CLOSED}),
    LinkState.LIVE: frozenset({LinkState.WAITING, LinkState.CLOSED}),
    LinkState.WAITING: frozenset({LinkState.CONNECTING, LinkState.CLOSED}),
    LinkState.REFUSED: frozenset({LinkState.CONNECTING, LinkState.CLOSED}),
    LinkState.CLOSED: frozenset(),
}


class LinkOwner(Protocol):
    """Called on the event loop."""

    def check_capacity(self, link: ReplicaLink, capacity: Capacity) -> None:
        """Raises ReplicaMismatchError when the worker can't serve here."""

    def next_generation(self) -> int: ...

    def link_up(self, link: ReplicaLink, capacity: Capacity, *, generation: int, probing: bool) -> None: ...

    def link_result(self, link: ReplicaLink, result: StepResult) -> None:
        """Raises StepProtocolError when the stream can't go on."""

    def link_suspect(self, link: ReplicaLink, suspect: bool) -> None: ...

    def link_down(self, link: ReplicaLink, reason: str, loss: Loss) -> None: ...

    def link_changed(self, link: ReplicaLink) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    connect_timeout_s: float
    health_interval_s: float
    health_timeout_s: float
    stall_timeout_s: float
    max_backoff_s: float


class Loss(enum.Enum):
    """How a session ended, as far as it says something about the requests that ran there."""

    PLANNED = enum.auto()
    """The worker or this router ended it on purpose."""
    SILENT = enum.auto()
    """The connection broke or went dead: the process may be gone, or only the network."""
    FAULT = enum.auto()
    """The worker reported a fault or made no progress."""


class LostError(Exception):
    """The session is over; the message says why."""

    def __init__(self, message: str, loss: Loss = Loss.FAULT) -> None:
        super().__init__(message)
        self.loss = loss


class ReplicaLink:
    """One address, served until `close`."""

    def __init__(
        self,
        *,
        replica_id: int,
        address: str,
        router_id: str,
        window: int,
        timing: LinkTiming,
        owner: LinkOwner,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.address = address
        self.state = LinkState.CONNECTING
        self.reason = "not connected yet"
        """Why it is not live, for people."""
        self.capacity: Capacity | None = None
        self._router_id = router_id
        self._window = window
        self._timing = timing
        self._owner = owner
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._stub: worker_pb2_grpc.WorkerAsyncStub | None = None
        self._n_losses = 0
        """Live sessions in a row that were lost soon."""
        self._n_unreached = 0
        """Attempts in a row that never became one."""
        self._said = ""
        self._heard_s = 0.0
        """When the worker last gave a sign of life."""

    def send(self, step: Step) -> None:
        """Queues a step for the live session."""
        self._steps.put_nowait(step)

    async def prepare(self, grammar: Grammar, *, timeout_s: float) -> PrepareResponse:
        """Raises LostError when the worker can't be asked."""
        if self._stub is None:
            raise LostError("not connected")
        try:
            return await self._stub.Prepare(PrepareRequest(grammar=grammar), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise LostError(_cause(error)) from None

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            while True:
                pause_s = await self._attempt()
                await asyncio.sleep(pause_s)
                self._move(LinkState.CONNECTING, self.reason)
        finally:
            self._move(LinkState.CLOSED, "closed")

    async def _attempt(self) -> float:
        """One session; returns how long to wait before the next."""
        began_s = self._clock()
        was_live = False
        try:
            async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                self._stub = worker_pb2_grpc.WorkerStub(channel)
                try:
                    await self._session(self._stub)
                finally:
                    self._stub = None
                    was_live = self.state is LinkState.LIVE
        except ReplicaMismatchError as error:
            self._say(error.message, level=logging.ERROR)
            self._move(LinkState.REFUSED, error.message)
            return self._timing.max_backoff_s
        except (LostError, StepProtocolError, grpc.aio.AioRpcError) as error:
            reason = _cause(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
            loss = error.loss if isinstance(error, LostError) else Loss.FAULT
            self._move(LinkState.WAITING, reason)
            if not was_live:
                self._say(reason, level=logging.INFO)
                self._n_unreached += 1
                return self._pause_s(self._n_unreached, longest_s=LONGEST_UNREACHED_PAUSE_S)
            self._n_unreached = 0
            if self._clock() - began_s > self._timing.max_backoff_s:
                self._n_losses = 0
            self._n_losses += 1
            self._owner.link_down(self, reason, loss)
            return self._pause_s(self._n_losses, longest_s=self._timing.max_backoff_s)
        except asyncio.CancelledError:
            if was_live:
                self._owner.link_down(self, "closed", Loss.PLANNED)
            raise
        raise AssertionError("a session ended without a reason")

    def _pause_s(self, n_failures: int, *, longest_s: float) -> float:
        """Doubles with each failure in a row; spread, so that replicas don't come back in step."""
        pause_s = min(longest_s, FIRST_PAUSE_S * 2.0 ** min(n_failures - 1, 16))
        return pause_s * self._rng.uniform(0.8, 1.2)

    async def _session(self, stub: Any) -> None:
        timing = self._timing
        try:
            capacity = await stub.Describe(
                DescribeRequest(), timeout=timing.connect_timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise LostError(f"not reached: {_cause(error)}") from None
        self._owner.check_capacity(self, capacity)
        self.capacity = capacity
        generation = self._owner.next_generation()
        call = stub.Run()
        # Iterated, for `read` gives no more of what has arrived once a write has met the end of the stream.
        results = aiter(call)
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._open(call, results, generation)
            self._steps = asyncio.Queue()
            self._said = ""
            self._move(LinkState.LIVE, "")
            self._owner.link_up(self, capacity, generation=generation, probing=self._n_losses > 0)
            tasks = [
                asyncio.create_task(self._write(call, self._steps)),
                asyncio.create_task(self._read(call, results)),
                asyncio.create_task(self._watch(stub)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _open(self, call: Any, results: AsyncIterator[StepResult], generation: int) -> None:
        """A worker answers once its last step of an older Run has ended."""
        opening = Open(
            router_id=self._router_id,
            generation=generation,
            protocol_version=PROTOCOL_VERSION,
            window=self._window,
        )
        try:
            async with asyncio.timeout(self._timing.stall_timeout_s):
                await call.write(Step(seq=0, open=opening))
                first = await anext(results)
        except TimeoutError:
            raise LostError(
                f"the worker did not open a stream within {self._timing.stall_timeout_s:g} s "
                "(--stall-timeout-s)"
            ) from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, StopAsyncIteration):
            raise await self._end_of(call) from None
        if first.seq != 0 or first.generation != generation:
            raise StepProtocolError(
                f"the worker answered `open` with seq {first.seq}, generation {first.generation}; expected 0 "
                f"and {generation}"
            )

    async def _write(self, call: Any, steps: asyncio.Queue[Step]) -> None:
        while True:
            step = await steps.get()
            try:
                await call.write(step)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reader takes what came before the end, and only then learns how the worker ended it.
                await asyncio.sleep(LAST_WORD_WITHIN_S)
                raise await self._end_of(call) from None

    async def _read(self, call: Any, results: AsyncIterator[StepResult]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for result in results:
                self._heard_s = self._clock()
                if result.run_end:
                    raise _ended_by_worker(result.run_end, result.run_end_message)
                self._owner.link_result(self, result)
        raise await self._end_of(call)

    async def _watch(self, stub: Any) -> None:
        """Asks for the worker's health; a silent or stuck one is lost."""
        timing = self._timing
        self._heard_s = self._clock()
        suspect = False
        while True:
            slept_s = self._clock()
            await asyncio.sleep(timing.health_interval_s)
            asked_s = self._clock()
            self._excuse_own_pause(asked_s - slept_s - timing.health_interval_s)
            left_s = max(0.01, self._heard_s + timing.health_timeout_s - asked_s)
            patience_s = min(left_s, max(timing.health_interval_s, 0.2))
            try:
                health = await stub.Health(HealthRequest(), timeout=patience_s)
            except grpc.aio.AioRpcError as error:
                self._excuse_own_pause(self._clock() - asked_s - patience_s)
                silent_s = self._clock() - self._heard_s
                if silent_s >= timing.health_timeout_s:
                    raise LostError(
                        f"no answer for {silent_s:.1f} s (--health-timeout-s {timing.health_timeout_s:g}): "
                        f"{_cause(error)}",
                        Loss.SILENT,
                    ) from None
                # A result that came meanwhile is a sign of life as well.
                if not suspect and silent_s >= patience_s:
                    suspect = True
                    self._owner.link_suspect(self, True)
                continue
            self._heard_s = self._clock()
            if health.stalled_us > timing.stall_timeout_s * 1e6:
                raise LostError(
                    f"no progress for {health.stalled_us / 1e6:.1f} s (--stall-timeout-s "
                    f"{timing.stall_timeout_s:g})"
                )
            if suspect:
                suspect = False
                self._owner.link_suspect(self, False)

    def _excuse_own_pause(self, late_s: float) -> None:
        """Where this process was stopped itself, the worker's silence meanwhile says nothing."""
        if late_s > OWN_PAUSE_S:
            self._heard_s = self._clock()

    async def _end_of(self, call: Any) -> LostError:
        """How the worker says that the stream ended."""
        try:
            async with asyncio.timeout(LAST_WORD_WITHIN_S):
                while True:
                    code, details = await call.code(), await call.details()
                    trailing = dict(await call.trailing_metadata() or ())
                    if code is not grpc.StatusCode.INTERNAL or details != MET_THE_END or trailing:
                        break
                    await asyncio.sleep(0.005)
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.CancelledError):
            return LostError("the stream broke", Loss.SILENT)
        word = trailing.get(RUN_END_KEY)
        if word is None:  # nobody was there to say it
            name = code.name if code is not None else "unknown"
            return LostError(f"the stream ended ({name}): {details}", Loss.SILENT)
        return _ended_by_worker(word, details)

    def _move(self, state: LinkState, reason: str) -> None:
        if state is not self.state and state not in LEGAL_MOVES[self.state]:
            raise AssertionError(f"link {self.address}: {self.state.name} can't become {state.name}")
        changed = state is not self.state or reason != self.reason
        self.state = state
        self.reason = reason
        if changed:
            self._owner.link_changed(self)

    def _say(self, reason: str, *, level: int) -> None:
        """Each cause once, not at every attempt."""
        if reason == self._said:
            return
        self._said = reason
        log.log(level, "worker not in use", address=self.address, cause=reason)


def _ended_by_worker(word: str, message: str | None) -> LostError:
    planned = word in (RunEnd.SHUTDOWN, RunEnd.REPLACED)
    return LostError(f"the stream ended ({word}): {message}", Loss.PLANNED if planned else Loss.FAULT)


def _cause(error: grpc.aio.AioRpcError) -> str:
    details = error.details() or ""
    return (
        f"{error.code().name.lower().replace('_', ' ')}: {details}" if details else error.code().name.lower()
    )
