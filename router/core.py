"""The scheduler without a clock, a socket or a thread: requests and results in, steps and events out.

Time is an argument. Everything that happens to a request happens here; the shell (`scheduler.py`) only
carries messages.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import numpy as np

from allocator.interface import Allocator
from proto.worker_pb2 import Grammar, Step, StepResult
from router import tracing as traces
from router.admission import make_request
from router.budget import AnswerLengths
from router.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    RouterError,
    RowFailedError,
    UnavailableError,
)
from router.ipc.messages import FinishReason, RequestSpec, Started
from router.limits import Limits
from router.outbox import Outbox
from router.policy import Policy, PolicyHooks
from router.policy_limits import PolicyLimits
from router.queue import RequestQueue
from router.replica_state import ReplicaShape, ReplicaState
from router.request import RUNNING, Request, RequestState
from router.results import ResultApplier
from router.stats import CoreStats
from settings.tracing import Tracing

MAX_DEATHS = 2
"""A request that was running at so many losses of a replica may be their cause: it fails."""
MAX_DAMAGED = 3

MakeAllocator = Callable[[ReplicaShape], Allocator]


class SchedulerCore:
    """Owns all requests, the queue and the state of every live replica."""

    def __init__(
        self,
        *,
        limits: Limits,
        policy: PolicyLimits,
        make_allocator: MakeAllocator,
        window: int,
        max_concurrent_requests: int,
        default_deadline_s: float,
        retry_after_s: float,
        rng: random.Random,
        stats: CoreStats | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.limits = limits
        self.queue = RequestQueue()
        self.stats = stats if stats is not None else CoreStats()
        self.outbox = Outbox()
        self.lengths = AnswerLengths()
        self.replicas: dict[int, ReplicaState] = {}
        self.draining = False
        self._requests: dict[tuple[int, int], Request] = {}
        self._deadlines: list[tuple[float, int, tuple[int, int]]] = []
        """(deadline, arrival number, key) of requests, ended ones among them."""
        self._n_arrivals = 0
        self._make_allocator = make_allocator
        self._window = window
        self._max_concurrent = max_concurrent_requests
        self._default_deadline_s = default_deadline_s
        self._retry_after_s = retry_after_s
        self._rng = rng
        self._tracing = tracing
        self._policy = Policy(
            limits=policy,
            queue=self.queue,
            lengths=self.lengths,
            hooks=PolicyHooks(on_started=self._started, on_preempted=self._preempted),
        )
        is_eos = np.zeros(limits.vocab_size, dtype=np.bool_)
        is_eos[[token for token in limits.eos_token_ids if token < limits.vocab_size]] = True
        self._results = ResultApplier(
            outbox=self.outbox,
            stats=self.stats,
            is_eos=is_eos,
            on_finished=self._finished,
            on_failed=self._row_failed,
            on_damaged=self._damaged,
        )

    @property
    def n_requests(self) -> int:
        """Queued and running."""
        return len(self._requests)

    # ---- from the API ----

    def submit(self, conn: int, specs: Sequence[RequestSpec], *, now: float) -> None:
        """All or nothing. Raises RouterError with the answer for the client."""
        try:
            requests = self._validated(conn, specs, now)
        except RouterError as error:
            self.stats.n_refused[error.status] = self.stats.n_refused.get(error.status, 0) + 1
            raise
        self.stats.n_submitted += len(requests)
        if self._tracing is not None:
            for request, spec in zip(requests, specs, strict=True):
                traces.begin(request, tracing=self._tracing, traceparent=spec.traceparent)
        for request in requests:
            self._requests[conn, request.id] = request
            self.queue.push(request)
            heapq.heappush(self._deadlines, (request.deadline_s, request.order, (conn, request.id)))

    def _validated(self, conn: int, specs: Sequence[RequestSpec], now: float) -> list[Request]:
        if self.draining:
            raise UnavailableError("the server is shutting down", retry_after_s=self._retry_after_s)
        n = len(specs)
        if n > self._max_concurrent:
            raise InvalidRequestError(
                f"{n} answers were asked for at once, but at most {self._max_concurrent} can be served "
                "(max_concurrent_requests)"
            )
        if len(self._requests) + n > self._max_concurrent:
            raise self.overloaded(n)
        requests = []
        ids: set[int] = set()
        for spec in specs:
            if (conn, spec.id) in self._requests or spec.id in ids:
                raise InvalidRequestError(f"request id {spec.id} is already in use")
            ids.add(spec.id)
            requests.append(
                make_request(
                    spec,
                    conn=conn,
                    order=self._n_arrivals,
                    limits=self.limits,
                    default_deadline_s=self._default_deadline_s,
                    rng=self._rng,
                    now=now,
                )
            )
            self._n_arrivals += 1
        return requests

    def overloaded(self, n: int) -> OverloadedError:
        """Why `n` further requests are refused."""
        return OverloadedError(
            f"the server is full: {len(self._requests)} of {self._max_concurrent} requests "
            f"(max_concurrent_requests) are queued or running, {n} more don't fit",
            retry_after_s=self._retry_after_s,
        )

    def cancel(self, conn: int, ids: Sequence[int]) -> None:
        """Blocks and row are free at once; the worker hears of it with the next step."""
        for request_id in ids:
            request = self._requests.get((conn, request_id))
            if request is not None:
                self.stats.n_cancelled += 1
                self._end(request, RequestState.CANCELLED)

    def disconnect(self, conn: int) -> None:
        """An API process is gone: so are its requests."""
        self.cancel(conn, [request_id for c, request_id in self._requests if c == conn])
        self.outbox.drop(conn)

    def abort_all(self, error: RouterError) -> None:
        """Fails whatever is left."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    # ---- replicas ----

    def replica_up(
        self, replica_id: int, *, shape: ReplicaShape, generation: int, probing: bool = False
    ) -> ReplicaState:
        """Its Run is open, all its rows and blocks are free. `probing`: one request at a time until a result
        has come."""
        if replica_id in self.replicas:
            raise AssertionError(f"replica {replica_id} is already up")
        rs = ReplicaState(
            replica_id=replica_id,
            shape=shape,
            allocator=self._make_allocator(shape),
            window=self._window,
            generation=generation,
        )
        rs.probing = probing
        self.replicas[replica_id] = rs
        return rs

    def replica_down(self, replica_id: int) -> list[Request]:
        """Its pool and trie are dropped whole; its requests go on elsewhere from what was committed. Returns
        those that go on, now under suspicion."""
        rs = self.replicas.pop(replica_id, None)
        if rs is None:
            return []
        rs.alive = False
        self.stats.n_replicas_lost += 1
        return self._drop_rows(rs, blame=True)

    def exonerate(self, requests: Sequence[Request]) -> None:
        """The replica that was lost with them turned out to be alive: it was not one of these."""
        for request in requests:
            request.n_deaths = max(0, request.n_deaths - 1)

    def replica_retired(self, replica_id: int) -> None:
        """As `replica_down`, for a replica that was taken away on purpose: no request is blamed."""
        rs = self.replicas.pop(replica_id, None)
        if rs is not None:
            rs.alive = False
            self._drop_rows(rs, blame=False)

    def _drop_rows(self, rs: ReplicaState, *, blame: bool) -> list[Request]:
        kept = []
        for request in sorted(rs.running_requests(), key=lambda r: r.order):
            rs.detach(request.row)
            request.n_deaths += blame
            if request.n_deaths >= MAX_DEATHS:
                self._fail(
                    request,
                    ReplicaLostError(
                        f"{request.n_deaths} workers were lost while they computed this request: it may be "
                        "the cause and is not tried again"
                    ),
                )
                continue
            self.stats.n_migrated += 1
            traces.put_back(request, traces.TraceEvent.MIGRATED, replica_id=rs.replica_id)
            self._requeue(request)
            kept.append(request)
        return kept

    # ---- grammars ----

    def grammars(self) -> list[Grammar]:
        """Of all requests, queued and running, each once."""
        found = {r.grammar_key: r.grammar for r in self._requests.values() if r.grammar is not None}
        return list(found.values())

    def fail_grammar(self, key: bytes, error: RouterError) -> None:
        """Fails the queued requests with this grammar: no replica can take them."""
        for request in [r for r in self.queue if r.grammar_key == key]:
            self._fail(request, error)

    # ---- steps ----

    def compose(self, replica_id: int, *, now: float) -> Step | None:
        """The next step to send to the replica, None when there is none."""
        rs = self.replicas.get(replica_id)
        if rs is None:
            return None
        self.tick(now)
        return self._policy.compose(rs, replicas=self.replicas.values(), now=now)

    def apply_result(self, replica_id: int, result: StepResult, *, now: float) -> None:
        """Results of an older generation are ignored. Raises StepProtocolError when the stream can't go on;
        then call `replica_down`."""
        rs = self.replicas.get(replica_id)
        if rs is None or result.generation != rs.generation or result.seq == 0:
            return
        self._results.apply(rs, result, now)

    def tick(self, now: float) -> None:
        """Fails what is past its deadline."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            request = self._live(heapq.heappop(deadlines))
            if request is not None:
                waited_s = now - request.arrival_s
                where = "in the queue" if request.state is RequestState.QUEUED else "unfinished"
                self._fail(request, DeadlineError(f"the request was still {where} after {waited_s:.1f} s"))
        if len(deadlines) > 2 * len(self._requests) + 1024:
            self._deadlines = [entry for entry in deadlines if self._live(entry) is not None]
            heapq.heapify(self._deadlines)

    @property
    def next_deadline_s(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def _live(self, entry: tuple[float, int, tuple[int, int]]) -> Request | None:
        request = self._requests.get(entry[2])
        return request if request is not None and request.order == entry[1] else None

    # ---- what happens to a request ----

    def _started(self, request: Request, now: float) -> None:
        queue_s = now - request.arrival_s
        self.stats.queue_s.add(queue_s)
        self.stats.hit_tokens += request.n_cached
        self.stats.asked_tokens += len(request.tokens)
        self.outbox.started(request.conn, Started(request.id, request.n_cached, queue_s))

    def _preempted(self, request: Request, rs: ReplicaState) -> None:
        self.stats.n_preempted += 1
        traces.put_back(request, traces.TraceEvent.PREEMPTED, replica_id=rs.replica_id)

    def _requeue(self, request: Request) -> None:
        request.move(RequestState.QUEUED)
        self.queue.push(request)

    def _finished(self, rs: ReplicaState, row: int, reason: int, now: float) -> None:
        request = rs.requests[row]
        assert request is not None
        stats = self.stats
        n_output = int(rs.n_committed[row]) - request.n_prompt
        if reason == FinishReason.STOP:
            stats.n_stopped += 1
        else:
            stats.n_ended_by_length += 1
        self.lengths.add(n_output)
        stats.decode_s.add(now - request.first_token_s)
        stats.e2e_s.add(now - request.arrival_s)
        stats.prompt_tokens.add(float(request.n_prompt))
        stats.output_tokens.add(float(n_output))
        self._end(request, RequestState.FINISHED)

    def _row_failed(self, rs: ReplicaState, row: int, error: RouterError) -> None:
        request = rs.requests[row]
        assert request is not None
        self._fail(request, error)

    def _damaged(self, rs: ReplicaState, row: int) -> None:
        """It read blocks that a failing row wrote: back to what was committed before it met them."""
        known = rs.tokens[row, : int(rs.n_committed[row])].copy()
        n_before = int(rs.target[row])
        request = rs.requests[row]
        assert request is not None
        sent = request.sent if request.sent is not None and len(request.sent) > len(known) else known
        rs.detach(row)
        request.n_damaged += 1
        if request.n_damaged >= MAX_DAMAGED:
            self._fail(
                request, RowFailedError("the blocks that this request read were damaged again and again")
            )
            return
        request.tokens = known[:n_before]
        request.sent = sent if len(sent) > n_before else None
        traces.put_back(request, traces.TraceEvent.RECOMPUTED, replica_id=rs.replica_id)
        self._requeue(request)

    def _fail(self, request: Request, error: RouterError) -> None:
        code = error.code or error.type
        self.stats.n_failed[code] = self.stats.n_failed.get(code, 0) + 1
        self.outbox.failed(request.conn, request.id, error.info)
        self._end(request, RequestState.FAILED, error=code)

    def _end(self, request: Request, state: RequestState, *, error: str = "") -> None:
        if request.state is RequestState.QUEUED:
            self.queue.remove(request)
        elif request.state in RUNNING and request.replica is not None:
            request.replica.detach(request.row)
        request.move(state)
        request.wait = None
        traces.end(request, state, error=error)
        del self._requests[request.conn, request.id]

    # ---- for people and tests ----

    def flush_cache(self) -> int:
        """Drops what is cached on every replica. Returns blocks freed."""
        return sum(rs.allocator.flush() for rs in self.replicas.values())

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant."""
        self.queue.check()
        queued = set(map(id, self.queue))
        running: set[int] = set()
        for rs in self.replicas.values():
            rs.check()
            running |= {id(request) for request in rs.running_requests()}
        known = {id(request) for request in self._requests.values()}
        assert not queued & running, "a request is queued and running"
        assert queued | running == known, "a request is neither queued nor running, or unknown"
        for request in self._requests.values():
            assert (request.state is RequestState.QUEUED) == (id(request) in queued)
