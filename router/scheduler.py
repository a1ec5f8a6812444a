"""The shell around the scheduler core: API connections on one side, worker streams on the other, one event
loop, no decisions.

Supervised: whatever goes wrong in it ends it loudly (`failed`), for a scheduler that stands still in silence
is worse than one that is started again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from proto.worker_pb2 import Capacity, StepResult
from router.admin import AdminOps
from router.config import RouterConfig
from router.connections import Connections
from router.core import SchedulerCore
from router.core_factory import make_core
from router.discovery import Lookup, look_up
from router.errors import InvalidRequestError, RouterError, UnavailableError
from router.fleet import Fleet
from router.grammars import GrammarBook
from router.guard import Guard
from router.intake import Intake, IntakeHost
from router.ipc.messages import (
    AdminCall,
    AdminReply,
    Cancel,
    ErrorInfo,
    Hello,
    ModelInfo,
    ServerState,
    Submit,
    ToScheduler,
)
from router.ipc.port import Send
from router.limits import (
    Limits,
    arithmetic,
    check_replica,
    model_info,
    resolve_limits,
    shape_of,
)
from router.loop_stats import LoopStats
from router.metrics import SchedulerCollector
from router.replica import Loss, ReplicaLink
from router.request import Request
from router.server_state import server_state
from router.stats import CoreStats
from settings.tracing import Tracing

TICK_S = 0.1
"""How late a deadline may act while no step is composed."""

log = structlog.get_logger("router.scheduler")


class Scheduler:
    """Implements `SchedulerPort` for API connections and `LinkOwner` for worker streams. `start`, then
    `drain` and `close`; `failed` is done (with the exception) when it can't go on."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        lookup: Lookup = look_up,
        on_limits: Callable[[str], None] | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.config = config
        self.stats = CoreStats()
        self.loop_stats = LoopStats()
        self.core: SchedulerCore | None = None
        """Made when the first worker has told what it is."""
        self.limits: Limits | None = None
        self.model: ModelInfo | None = None
        self.router_id = f"router-{uuid.uuid4().hex[:12]}"
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._rng = rng if rng is not None else random.Random()
        self._on_limits = on_limits
        self._tracing = tracing
        self._connections = Connections()
        self._suspects: dict[int, tuple[str, list[Request]]] = {}
        """By replica: who it was when it fell silent, and what it ran."""
        self._closing: set[str] = set()
        """Ids of workers that are to be taken away."""
        self._background: set[asyncio.Task[None]] = set()
        self._grammars = GrammarBook(spawn=self._spawn, on_ready=self._pump_soon)
        self._pumping = False
        self._draining = False
        self._idle = asyncio.Event()
        self.fleet = Fleet(
            config,
            router_id=self.router_id,
            lookup=lookup,
            clock=clock,
            owner=self,
            on_task_done=self._on_task_done,
        )
        self.intake = Intake(
            IntakeHost(
                core=lambda: self.core,
                why_not_ready=lambda: self._state.reason,
                links=lambda: self.fleet.links.values(),
                clock=clock,
                spawn=self._spawn,
                on_accepted=self._accepted,
            ),
            connections=self._connections,
            grammars=self._grammars,
            max_concurrent_requests=config.max_concurrent_requests,
            retry_after_s=config.retry_after_s,
        )
        self._state = self._make_state()
        self._admin = AdminOps(self, SchedulerCollector(self))

    # ---- life ----

    async def start(self) -> None:
        """Begins to connect to the workers; returns at once."""
        await self.fleet.resolve()
        self._push_state()
        self._spawn(self._tick_forever(), "tick")
        self._spawn(self.fleet.resolve_forever(self._push_state), "discovery")

    async def drain(self, *, grace_s: float) -> None:
        """Takes no new work and returns when what runs has ended, or `grace_s` is over."""
        self.begin_drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            n_left = self.core.n_requests if self.core is not None else 0
            log.warning("grace time is over: requests are cut off", n_requests=n_left, grace_s=grace_s)
            if self.core is not None:
                self.core.abort_all(UnavailableError("the server was shut down"))
                self._flush()

    def begin_drain(self) -> None:
        if not self._draining:
            self._draining = True
            log.info("draining: no new requests")
            if self.core is not None:
                self.core.draining = True
            self._push_state()
        self._note_idle()

    def drain_replica(self, address: str, *, on: bool) -> int:
        """Gives the worker nothing new any more (or again); it stays closed when its stream breaks. Returns
        how many requests still run there. Raises InvalidRequestError when no such worker is live."""
        links = [link for link in self.fleet.links.values() if link.address == address]
        rs = self.core.replicas.get(links[0].replica_id) if self.core is not None and links else None
        if rs is None:
            known = ", ".join(sorted(link.address for link in self.fleet.links.values())) or "none"
            raise InvalidRequestError(
                f"no live worker has the address {address!r}; known addresses: {known}", param="address"
            )
        capacity = links[0].capacity
        assert capacity is not None
        if on:
            self._closing.add(capacity.worker_id)
        else:
            self._closing.discard(capacity.worker_id)
        if rs.closing != on:
            rs.closing = on
            log.info("worker drains" if on else "worker is back", address=address, n_running=rs.n_running)
            self._push_state()
            self._pump_soon()
        return rs.n_running

    @property
    def oldest_wait_s(self) -> float:
        """How long the first of the queue has waited; 0 when nothing waits."""
        if self.core is None or not len(self.core.queue):
            return 0.0
        return self._clock() - min(request.arrival_s for request in self.core.queue)

    async def close(self) -> None:
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.fleet.close()

    # ---- SchedulerPort ----

    def attach(self, send: Send) -> int:
        conn = self._connections.add(send)
        send(self._state)
        return conn

    def receive(self, conn: int, message: ToScheduler) -> None:
        with self._guard():
            if isinstance(message, Submit):
                self.intake.submit(conn, message.requests)
            elif isinstance(message, Cancel):
                self.intake.cancel(conn, message.ids)
                if self.core is not None:
                    self.core.cancel(conn, message.ids)
                    self._note_idle()
                    self._pump_soon()
            elif isinstance(message, AdminCall):
                self._call(conn, message)
            else:
                assert isinstance(message, Hello)

    def detach(self, conn: int) -> None:
        with self._guard():
            self._connections.remove(conn)
            self.intake.disconnect(conn)
            if self.core is not None:
                self.core.disconnect(conn)
                self._note_idle()
                self._pump_soon()

    def _call(self, conn: int, call: AdminCall) -> None:
        try:
            reply = AdminReply(call_id=call.call_id, value=self._admin.call(call.op, call.args))
        except RouterError as error:
            reply = AdminReply(call_id=call.call_id, error=error.info)
        except AssertionError as error:
            info = ErrorInfo(status=500, type="server_error", message=f"an invariant is broken: {error}")
            reply = AdminReply(call_id=call.call_id, error=info)
        self._connections.send(conn, reply)

    # ---- LinkOwner ----

    def check_capacity(self, link: ReplicaLink, capacity: Capacity) -> None:
        check_replica(self.limits, self.config, capacity)
        self.fleet.check_unique(link, capacity)
        if self.limits is None:
            self._make_core(capacity)

    def next_generation(self) -> int:
        return self.fleet.next_generation()

    def link_up(self, link: ReplicaLink, capacity: Capacity, *, generation: int, probing: bool) -> None:
        assert self.core is not None
        assert self.limits is not None
        worker_id, suspects = self._suspects.pop(link.replica_id, ("", []))
        if worker_id == capacity.worker_id:
            self.core.exonerate(suspects)  # the network failed, not the worker
        self._learn_features(capacity)
        shape = shape_of(self.limits, self.config, capacity)
        rs = self.core.replica_up(link.replica_id, shape=shape, generation=generation, probing=probing)
        rs.closing = capacity.worker_id in self._closing
        log.info(
            "replica is live",
            address=link.address,
            worker=capacity.worker_id,
            device=capacity.device,
            attention=capacity.attention,
            budget=arithmetic(self.limits, self.config, capacity),
            half_open=probing,
        )
        self._grammars.link_up(self.core, link)
        self._push_state()
        self._pump_soon()

    def link_result(self, link: ReplicaLink, result: StepResult) -> None:
        core = self.core
        assert core is not None
        with self.loop_stats.step():
            core.apply_result(link.replica_id, result, now=self._clock())
            self._pump()
        if core.n_requests == 0:
            self._note_idle()

    def link_suspect(self, link: ReplicaLink, suspect: bool) -> None:
        rs = self.core.replicas.get(link.replica_id) if self.core is not None else None
        if rs is not None:
            rs.suspect = suspect
            log.warning("replica is silent" if suspect else "replica answers again", address=link.address)
            self._pump_soon()

    def link_down(self, link: ReplicaLink, reason: str, loss: Loss) -> None:
        assert self.core is not None
        assert link.capacity is not None
        self._suspects.pop(link.replica_id, None)
        if loss is Loss.PLANNED:
            self.core.replica_retired(link.replica_id)
        else:
            suspects = self.core.replica_down(link.replica_id)
            if loss is Loss.SILENT:
                self._suspects[link.replica_id] = (link.capacity.worker_id, suspects)
        log.log(
            logging.INFO if loss is Loss.PLANNED else logging.WARNING,
            "replica has ended" if loss is Loss.PLANNED else "replica is lost",
            address=link.address,
            cause=reason,
            n_waiting=len(self.core.queue),
        )
        self._push_state()
        self._note_idle()
        self._pump_soon()

    def link_changed(self, link: ReplicaLink) -> None:
        self._push_state()

    def _make_core(self, capacity: Capacity) -> None:
        """Raises ConfigError when the settings don't fit this worker: the process ends with it."""
        limits = resolve_limits(self.config, capacity)
        self.core = make_core(self.config, limits, rng=self._rng, stats=self.stats, tracing=self._tracing)
        self.core.draining = self._draining
        self.limits = limits
        self.model = model_info(self.config, limits)
        if self._on_limits is not None:
            self._on_limits(arithmetic(limits, self.config, capacity))

    def _learn_features(self, capacity: Capacity) -> None:
        """What one worker can do is offered; requests that need it go where it is."""
        assert self.limits is not None
        further = sorted(set(capacity.features) - set(self.limits.features))
        if further and self.core is not None:
            self.limits = replace(self.limits, features=(*self.limits.features, *further))
            self.core.limits = self.limits
            self.model = model_info(self.config, self.limits)

    # ---- steps ----

    def _pump_soon(self) -> None:
        """One composition for everything that this turn of the loop brings."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump_once)

    def _pump_once(self) -> None:
        self._pumping = False
        with self._guard():
            self._pump()

    def _pump(self) -> None:
        """Fills the window of every replica, then hands out the events."""
        core = self.core
        if core is None:
            return
        now = self._clock()
        moved = True
        while moved:
            moved = False
            for replica_id in list(core.replicas):
                link = self.fleet.links[replica_id]
                while (step := core.compose(replica_id, now=now)) is not None:
                    link.send(step)
                    # What one replica took can make another one the better choice for those that still wait.
                    moved = bool(core.queue) and len(core.replicas) > 1
        self._flush()

    def _flush(self) -> None:
        assert self.core is not None
        for conn, events in self.core.outbox.take():
            self._connections.send(conn, events)

    def _accepted(self) -> None:
        self._idle.clear()
        self._pump_soon()

    def _note_idle(self) -> None:
        if self._draining and (self.core is None or self.core.n_requests == 0):
            self._idle.set()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            core = self.core
            if core is None:
                continue
            due = core.next_deadline_s
            if due is not None and due <= self._clock():
                core.tick(self._clock())
                self._note_idle()
            if core.queue or due is not None:
                self._pump()

    # ---- state ----

    def _make_state(self) -> ServerState:
        return server_state(
            failed=self.failed.done(),
            draining=self._draining,
            fleet=self.fleet,
            core=self.core,
            model=self.model,
        )

    def _push_state(self) -> None:
        state = self._make_state()
        if state == self._state:
            return
        self._state = state
        self._connections.tell_all(state)

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def links(self) -> dict[int, ReplicaLink]:
        """The connections to workers, by replica."""
        return self.fleet.links

    # ---- supervision ----

    def _spawn(self, coroutine: Any, name: str) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _guard(self) -> Guard:
        return Guard(self.fail)

    def fail(self, error: BaseException) -> None:
        """The scheduler can't go on: readiness turns false and `failed` is done."""
        if self.failed.done():
            return
        self.failed.set_exception(error)
        self._push_state()
