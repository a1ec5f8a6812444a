"""How a step is composed: growth and preemption, all decode rows, then prefill chunks.

Nothing here waits, sends or reads a clock: replica states and the queue in, a plan out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from proto.codec import pack_i32
from proto.worker_pb2 import Admit, Step
from router.budget import AnswerLengths
from router.chunks import chunk_size
from router.dealing import Placement, dealt
from router.pace import pace_of
from router.placement import Left, Prospect, by_cost, fits, left_cost, left_to, load_cost, prospect
from router.plan import StepPlan
from router.policy_limits import PolicyLimits
from router.preemption import fewest_to_preempt
from router.queue import RequestQueue
from router.replica_state import InFlight, ReplicaState
from router.request import Request, RequestState

MAX_SCANNED = 256
"""Waiting requests that one composition looks at."""
MAX_BLOCKED = 8
"""Waiting requests that did not fit, after which one composition looks no further."""


@dataclass(slots=True)
class PolicyHooks:
    """What the policy tells its owner."""

    on_started: Callable[[Request, float], None]
    on_preempted: Callable[[Request, ReplicaState], None]


class Policy:
    def __init__(
        self,
        *,
        limits: PolicyLimits,
        queue: RequestQueue,
        lengths: AnswerLengths,
        hooks: PolicyHooks,
    ) -> None:
        self.limits = limits
        self._queue = queue
        self._lengths = lengths
        self._hooks = hooks

    def compose(self, rs: ReplicaState, *, replicas: Collection[ReplicaState], now: float) -> Step | None:
        """The next step for this replica; None when its window is full or nothing is to be computed."""
        if not rs.alive or len(rs.in_flight) >= (1 if rs.probing else rs.window):
            return None
        plan = StepPlan()
        rs.settle_joins()
        rows = np.flatnonzero(rs.decoding)
        if len(rows):
            self._retire(rs, rows)
        pace = pace_of(rs, self._queue, limits=self.limits, n_replicas=len(replicas))
        if not pace.hold_decode:
            self._grow(rs, plan)
        if pace.n_tokens:
            self._fill(rs, plan, replicas=replicas, now=now, n_tokens=pace.n_tokens)
        if pace.hold_decode and not plan.chunk_rows:  # nothing that waits could be placed
            self._grow(rs, plan)
        plan.hold_decode = pace.hold_decode and bool(plan.chunk_rows)
        rows = np.flatnonzero(rs.decoding & (not plan.hold_decode))
        if not len(rows) and not plan.chunk_rows:
            return None
        rs.n_held = rs.n_held + 1 if plan.hold_decode else 0
        rs.n_scheduled[rows] += 1
        for row in plan.chunk_rows:
            if rs.n_scheduled[row] == rs.target[row]:
                self._complete(rs, row)
        step = plan.encode(seq=rs.next_seq, evicts=rs.pending_evicts, n_decode=len(rows))
        rs.pending_evicts = []
        rs.in_flight.append(
            InFlight(seq=rs.next_seq, sent_s=now, n_decode=len(rows), n_prefill_tokens=plan.n_prefill_tokens)
        )
        rs.next_seq += 1
        rs.steps_since_admit = 0 if plan.admits else rs.steps_since_admit + 1
        return step

    # ---- decode rows ----

    @staticmethod
    def _retire(rs: ReplicaState, rows: np.ndarray) -> None:
        """Rows whose last token is sampled by a step already sent leave the decode set: nothing is wasted on
        them. Their leases stay until the results are in, so that the whole answer can be cached."""
        for row in rows[rs.n_scheduled[rows] + 1 >= rs.end_len[rows]].tolist():
            request = rs.requests[row]
            assert request is not None
            request.move(RequestState.DRAINING)
            rs.decoding[row] = False
            rs.leased[row] = False
            rs.draining.add(row)
            rs.version += 1
            rs.evict(row)

    def _grow(self, rs: ReplicaState, plan: StepPlan) -> None:
        """Every decode row gets room for the position it writes; the worst rows give way if there is none."""
        rows = np.flatnonzero(rs.decoding)
        needy = rows[rs.n_scheduled[rows] >= rs.room[rows]].tolist()
        if len(needy) > rs.allocator.n_available:
            needy.sort(key=lambda row: _request(rs, row).key)
        for row in needy:
            while rs.decoding[row]:
                lease = rs.leases[row]
                assert lease is not None
                blocks = rs.allocator.grow(lease, n_tokens=int(rs.n_scheduled[row]) + 1)
                if blocks is not None:
                    rs.room[row] = lease.n_blocks * rs.shape.block_size
                    self._clean(rs, plan, blocks)
                    plan.grow(row, blocks.tolist())
                    break
                if rs.release_draining():
                    continue
                victim = rs.worst()
                assert victim is not None
                self._preempt(rs, plan, victim)

    def _preempt(self, rs: ReplicaState, plan: StepPlan, row: int) -> None:
        plan.forget_growth(row)
        plan.n_preempted += 1
        request = rs.detach(row)
        request.n_preempted += 1
        request.move(RequestState.QUEUED)
        self._queue.push(request)
        self._hooks.on_preempted(request, rs)

    @staticmethod
    def _clean(rs: ReplicaState, plan: StepPlan, blocks: np.ndarray) -> None:
        if rs.may_be_dirty and len(blocks):
            plan.zero_blocks.extend(rs.allocator.take_dirty(blocks).tolist())

    # ---- prefill ----

    def _fill(
        self, rs: ReplicaState, plan: StepPlan, *, replicas: Iterable[ReplicaState], now: float, n_tokens: int
    ) -> None:
        """Chunks of running prompts, then waiting requests, by priority class."""
        if not rs.prefill and not len(self._queue):
            return
        n_decode = int(np.count_nonzero(rs.decoding))
        most = min(n_tokens, rs.shape.max_step_tokens - n_decode)
        running = sorted((_request(rs, row) for row in rs.prefill), key=lambda request: request.key)
        if plan.n_preempted == 0 and self._may_join(rs):
            self._admit_waiting(rs, plan, running=running, most=most, replicas=replicas, now=now)
        for request in running:
            self._continue(rs, plan, request, most=most)

    def _may_join(self, rs: ReplicaState) -> bool:
        """TGI's gate: `waiting_served_ratio` and `max_waiting_tokens`."""
        n_waiting = len(self._queue)
        if n_waiting == 0 or not rs.takes_new:
            return False
        if rs.probing:
            return rs.n_running == 0
        enough = max(1, int(rs.n_running * self.limits.waiting_served_ratio))
        return n_waiting >= enough or rs.steps_since_admit >= self.limits.max_waiting_tokens

    def _admit_waiting(
        self,
        rs: ReplicaState,
        plan: StepPlan,
        *,
        running: list[Request],
        most: int,
        replicas: Iterable[ReplicaState],
        now: float,
    ) -> None:
        candidates = [other for other in replicas if other.alive]
        seen = (self._queue.version, rs.version, rs.takes_new, rs.probing, len(candidates))
        if rs.tried_in_vain == seen:
            return
        blocked: list[Request] = []
        left: dict[int, Left] = {}
        n_scanned = n_left = 0
        for request in self._queue:
            if request.wait is not None and request.wait.holds:
                n_left += 1
                continue
            # Prompts that run already go before waiting ones of the same class or a later one.
            while running and running[0].priority <= request.priority:
                self._continue(rs, plan, running.pop(0), most=most)
            if len(blocked) >= MAX_BLOCKED:
                break
            if plan.n_prefill_tokens >= most or n_scanned >= MAX_SCANNED:
                return
            if request.grammar_key and request.grammar_key not in rs.grammars:
                n_left += 1  # another replica's, or this one's once it has compiled it
                continue
            if rs.n_free_rows < 1 and not self._outranks(rs, request):
                return
            n_scanned += 1
            request.wait = None
            best = self._place(rs, plan, request, candidates, left)
            if best is None and self._make_way(rs, plan, request, candidates):
                best = self._place(rs, plan, request, [rs], left)
            if best is not None and best.wait is not None:
                request.wait = best.wait
                n_left += 1
                continue
            if best is not None and best.replica is not rs:
                n_left += 1
                # The next one should know that this one goes there.
                other = left_to(best.replica, left)
                other.n_rows += 1
                other.cost += left_cost(len(request.tokens) - best.n_cached, n_replicas=len(candidates))
                continue
            if best is None or not self._admit(rs, plan, request, best, most=most, now=now):
                blocked.append(request)
                if request.n_passed >= self.limits.max_passes:
                    break
                continue
            for passed in blocked:
                passed.n_passed += 1
            if any(passed.n_passed >= self.limits.max_passes for passed in blocked):
                return
            if rs.probing:
                return
        if blocked and not n_left and not plan.admits and not running and not rs.prefill:
            rs.tried_in_vain = seen

    def _place(
        self,
        rs: ReplicaState,
        plan: StepPlan,
        request: Request,
        candidates: list[ReplicaState],
        left: dict[int, Left],
    ) -> Prospect | None:
        """Where it should run; None when it does not fit on `rs`, wherever else it may. Every replica's
        composition comes to the same choice. `left`: what this composition leaves to others."""
        if not self._may_take(rs, request, candidates):
            return None
        if self.limits.placement is not Placement.EXACT:
            takers = [other for other in candidates if self._may_take(other, request, candidates)]
            chosen = dealt(self.limits.placement, request, takers)
            if chosen is not rs:
                return Prospect(replica=chosen, n_cached=0, wait=None, cost=0.0)
            candidates = [rs]
        mine = prospect(rs, request, prefix_caching=self.limits.prefix_caching)
        if mine.wait is None and not self._fits(rs, request, mine.n_cached):
            return None
        mine.cost += load_cost(n_rows=0, n_pending=plan.n_prefill_tokens)
        offers = [mine]
        for other in candidates:
            if other is rs or not self._may_take(other, request, candidates):
                continue
            taken = left_to(other, left)
            if taken.n_rows and taken.n_rows >= taken.n_free_rows:
                continue
            # Even with the whole prompt cached it would be no better.
            if taken.load.of(len(request.tokens)) + taken.cost > mine.cost:
                continue
            offer = prospect(other, request, prefix_caching=self.limits.prefix_caching, load=taken.load)
            offer.cost += taken.cost
            if offer.cost <= mine.cost:
                offers.append(offer)
        for offer in by_cost(offers, tie_break=request.tie_break):
            if offer is mine or offer.wait is not None:
                return offer
            if self._fits(offer.replica, request, offer.n_cached):
                return offer
        raise AssertionError("the own offer is among the offers")

    @staticmethod
    def _may_take(rs: ReplicaState, request: Request, candidates: list[ReplicaState]) -> bool:
        if not rs.takes_new or (request.grammar_key and request.grammar_key not in rs.grammars):
            return False
        if not rs.probing:
            return True
        # A request that has seen a loss is no good probe: it may be the cause, and a second loss ends it.
        proven = request.n_deaths > 0 and any(not r.probing and r.takes_new for r in candidates)
        return rs.n_running == 0 and not proven

    def _fits(self, rs: ReplicaState, request: Request, n_cached: int) -> bool:
        """As `fits`; a refusal holds until the replica's set of requests changes."""
        if rs.misfits_version != rs.version:
            rs.misfits_version = rs.version
            rs.misfits.clear()
        if request.order in rs.misfits:
            return False
        if fits(rs, request, n_cached=n_cached, lengths=self._lengths):
            return True
        rs.misfits.add(request.order)
        return False

    @staticmethod
    def _outranks(rs: ReplicaState, request: Request) -> bool:
        """Whether a row of a later priority class runs."""
        return bool((rs.priority[rs.leased] > request.priority).any())

    def _make_way(
        self, rs: ReplicaState, plan: StepPlan, request: Request, candidates: list[ReplicaState]
    ) -> bool:
        """Preempt rows of a later priority class, the fewest that let the request in, unless it fits
        elsewhere. Whether any were."""
        if rs.probing or not rs.takes_new or not self._outranks(rs, request):
            return False
        for other in candidates:
            if other is not rs and self._may_take(other, request, candidates):
                offer = prospect(other, request, prefix_caching=self.limits.prefix_caching)
                if offer.wait is not None or self._fits(other, request, offer.n_cached):
                    return False
        n_cached = rs.allocator.match(request.tokens, salt=request.salt) if self.limits.prefix_caching else 0
        rows = fewest_to_preempt(
            rs, request, n_cached=n_cached, lengths=self._lengths, spared=plan.chunk_rows
        )
        for row in rows:
            self._preempt(rs, plan, row)
        return bool(rows)

    def _admit(
        self, rs: ReplicaState, plan: StepPlan, request: Request, offer: Prospect, *, most: int, now: float
    ) -> bool:
        left = most - plan.n_prefill_tokens
        if (
            self._chunk_size(rs, plan, start=offer.n_cached, end=len(request.tokens), left=left, most=most)
            == 0
        ):
            return False
        n_tokens = len(request.tokens)
        lease = rs.allocator.allocate(request.tokens, n_tokens=n_tokens, salt=request.salt)
        if lease is None and rs.release_draining():
            lease = rs.allocator.allocate(request.tokens, n_tokens=n_tokens, salt=request.salt)
        if lease is None:
            return False
        blocks = lease.blocks
        n_cached = lease.n_cached
        self._clean(rs, plan, blocks[n_cached // rs.shape.block_size :])
        self._queue.remove(request)
        row = rs.attach(request, lease)
        plan.admits.append(
            Admit(
                row=row,
                epoch=int(rs.epoch[row]),
                tokens=pack_i32(request.tokens),
                n_prompt=request.n_prompt,
                blocks=pack_i32(blocks),
                n_cached=n_cached,
                sampling=request.sampling,
                grammar=request.grammar,
                adapter_id=request.adapter_id,
                traceparent=request.span.traceparent if request.span is not None else "",
            )
        )
        self._place_chunk(rs, plan, row, most=most)
        if request.started_s < 0:
            request.started_s = now
            request.n_cached = n_cached
            self._hooks.on_started(request, now)
        return True

    def _chunk_size(
        self, rs: ReplicaState, plan: StepPlan, *, start: int, end: int, left: int, most: int
    ) -> int:
        return chunk_size(
            start=start,
            end=end,
            left=left,
            most=most,
            block_size=rs.shape.block_size,
            chunking=self.limits.prefill_chunking,
            is_first=not plan.chunk_rows,
        )

    def _continue(self, rs: ReplicaState, plan: StepPlan, request: Request, *, most: int) -> None:
        """The next chunk of a prompt that was begun earlier, unless it has given way meanwhile."""
        if request.replica is rs and request.row not in plan.chunk_rows:
            self._place_chunk(rs, plan, request.row, most=most)

    def _place_chunk(self, rs: ReplicaState, plan: StepPlan, row: int, *, most: int) -> None:
        start, end = int(rs.n_scheduled[row]), int(rs.target[row])
        n = self._chunk_size(rs, plan, start=start, end=end, left=most - plan.n_prefill_tokens, most=most)
        if n == 0:
            return
        plan.chunk(row, n)
        rs.n_scheduled[row] += n
        rs.publish(row)

    @staticmethod
    def _complete(rs: ReplicaState, row: int) -> None:
        _request(rs, row).move(RequestState.DECODE)
        rs.prefill.remove(row)
        rs.joining.append(row)


def _request(rs: ReplicaState, row: int) -> Request:
    request = rs.requests[row]
    assert request is not None
    return request
