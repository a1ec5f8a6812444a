"""What the scheduler knows of one replica: its rows as arrays, its allocator, its steps in flight.

Arrays are indexed by row and touched whole in a steady step; single rows are touched only when something
happens to them. Lengths follow two clocks: *scheduled* advances when a step is sent, *committed* when its
result arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from allocator.interface import Allocator, Lease
from router.request import Request, RequestState

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class InFlight:
    """One step that was sent and has no result yet."""

    seq: int
    sent_s: float
    n_decode: int
    n_prefill_tokens: int


MAX_GRAMMARS = 100_000
"""Remembered per replica; the oldest is forgotten and would be compiled again."""


@dataclass(slots=True, frozen=True)
class ReplicaShape:
    """The part of a worker's capacity that scheduling needs."""

    n_blocks: int
    """Blocks that requests may use (the reserved one left out), `max_batch_total_tokens` applied."""
    block_size: int
    max_rows: int
    max_batch_size: int
    """Most requests that run at once; at most `max_rows`."""
    max_step_tokens: int
    row_tokens: int
    """Longest request (prompt + output) in tokens."""
    vocab_size: int


class ReplicaState:
    """One live replica. Made when its Run opens, dropped whole when it ends."""

    def __init__(
        self, *, replica_id: int, shape: ReplicaShape, allocator: Allocator, window: int, generation: int
    ) -> None:
        self.replica_id = replica_id
        self.shape = shape
        self.allocator = allocator
        self.window = window
        self.generation = generation
        self.alive = True
        self.probing = False
        """Half open after a loss: one request and one step at a time until a result has come."""
        self.suspect = False
        """It has stopped answering and may be lost: nothing new is given to it."""
        self.closing = False
        """It is to be taken away: what runs there ends there, nothing new is given to it."""
        self.grammars: dict[bytes, None] = {}
        """Keys of grammars that the worker has compiled, in the order in which it did."""
        n = shape.max_rows
        # np.zeros maps pages lazily: only what rows really use takes memory.
        self.tokens: I32 = np.zeros((n, shape.row_tokens + 1), dtype=np.int32)
        self.n_committed: I32 = np.zeros(n, dtype=np.int32)
        """Known tokens: prompt + output whose results have arrived."""
        self.n_scheduled: I32 = np.zeros(n, dtype=np.int32)
        """KV positions that steps sent so far (the one being composed included) write or found cached."""
        self.target: I32 = np.zeros(n, dtype=np.int32)
        """Known tokens at admission: prefill ends there."""
        self.priority: I64 = np.zeros(n, dtype=np.int64)
        self.n_prompt: I32 = np.zeros(n, dtype=np.int32)
        self.end_len: I32 = np.zeros(n, dtype=np.int32)
        self.room: I32 = np.zeros(n, dtype=np.int32)
        """KV positions that the lease covers."""
        self.n_cached: I32 = np.zeros(n, dtype=np.int32)
        self.publish_at: I32 = np.zeros(n, dtype=np.int32)
        """The next length at which a block is complete."""
        self.quiet_until: I32 = np.zeros(n, dtype=np.int32)
        """Tokens below this position were sent to the client before."""
        self.epoch: I32 = np.zeros(n, dtype=np.int32)
        self.conn: I32 = np.zeros(n, dtype=np.int32)
        self.request_id: I64 = np.zeros(n, dtype=np.int64)
        self.last_token_s: npt.NDArray[np.float64] = np.full(n, -1.0)
        self.ignore_eos: npt.NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        self.watched: npt.NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        """Rows whose request has stop token ids of its own."""
        self.decoding: npt.NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        self.leased: npt.NDArray[np.bool_] = np.zeros(n, dtype=np.bool_)
        """Rows that still need their lease: prefill, joining and decode rows."""
        self.requests: list[Request | None] = [None] * n
        self.leases: list[Lease | None] = [None] * n
        self.free_rows: list[int] = list(range(n - 1, -1, -1))
        self.prefill: list[int] = []
        """Rows with known tokens still to place."""
        self.joining: list[int] = []
        """Rows whose last known token is in the newest step: they decode from the next one on."""
        self.draining: set[int] = set()
        """Rows whose last step is sent: evicted on the worker, results awaited here."""
        self.on_worker: set[int] = set()
        self.pending_evicts: list[int] = []
        self.in_flight: deque[InFlight] = deque()
        self.next_seq = 1
        self.n_watched = 0
        self.n_quiet = 0
        self.may_be_dirty = False
        """Whether blocks were ever invalidated, so that fresh ones have to be asked for."""
        self.version = 0
        """Changes when a request comes, goes or needs its place no more."""
        self.tried_in_vain: object = None
        """What queue and replicas were like when nothing that waits fitted. Steps only make it tighter, so
        it is not tried again before one of them changes."""
        self.misfits: set[int] = set()
        """Arrival numbers of requests that did not fit, valid for `misfits_version`."""
        self.misfits_version = -1
        self.steps_since_admit = 0
        self.n_held = 0
        """Steps in a row that held the decode rows back."""
        self.n_prefill_tokens = 0
        """Prompt tokens that its steps have computed."""
        self.n_output_tokens = 0
        """Tokens that it has sampled for requests."""
        self.last_step_us = 0
        self.idle_us = 0
        self.steady_us = 0
        """Of decode steps that follow one another; and the device's idle time between them."""
        self.steady_idle_us = 0
        self._was_decode = False
        self.worker_queue = 0

    def note_idle(self, step: InFlight, *, step_us: int, idle_us: int) -> None:
        """Of a step that has come back: how long it took, and how long the device stood idle before it."""
        self.idle_us = idle_us
        is_decode = step.n_prefill_tokens == 0
        if is_decode and self._was_decode:
            self.steady_us += step_us
            self.steady_idle_us += idle_us
        self._was_decode = is_decode

    # ---- what it holds ----

    @property
    def takes_new(self) -> bool:
        """Whether requests may be given to it."""
        return not (self.suspect or self.closing)

    @property
    def n_running(self) -> int:
        """Requests that need a place in the batch (draining ones don't)."""
        return int(np.count_nonzero(self.leased))

    @property
    def n_free_rows(self) -> int:
        return min(len(self.free_rows), self.shape.max_batch_size - self.n_running)

    def running_requests(self) -> list[Request]:
        return [request for request in self.requests if request is not None]

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.shape.block_size)

    def prefill_left(self) -> int:
        """Prompt tokens admitted and not yet scheduled."""
        if not self.prefill:
            return 0
        return int((self.target[self.prefill] - self.n_scheduled[self.prefill]).sum())

    def prefill_pending(self) -> int:
        """Prompt tokens admitted and not known to be computed: those of the steps in flight among them."""
        return self.prefill_left() + sum(step.n_prefill_tokens for step in self.in_flight)

    def worst(self, *, but: Iterable[int] = ()) -> int | None:
        """The row to preempt first: lowest priority, then latest arrival."""
        skip = set(but)
        worst: int | None = None
        worst_key: tuple[int, int] | None = None
        for row in np.flatnonzero(self.leased).tolist():
            request = self.requests[row]
            assert request is not None
            if row not in skip and (worst_key is None or request.key > worst_key):
                worst, worst_key = row, request.key
        return worst

    def add_grammar(self, key: bytes) -> None:
        """The worker has compiled it: requests with it may be placed here."""
        self.version += 1
        self.grammars[key] = None
        if len(self.grammars) > MAX_GRAMMARS:
            del self.grammars[next(iter(self.grammars))]

    # ---- a request comes and goes ----

    def attach(self, request: Request, lease: Lease) -> int:
        """Give the request a row. Its lease covers its known tokens."""
        row = self.free_rows.pop()
        self.version += 1
        n_known = len(request.tokens)
        self.tokens[row, :n_known] = request.tokens
        self.n_committed[row] = n_known
        self.n_scheduled[row] = lease.n_cached
        self.target[row] = n_known
        self.n_prompt[row] = request.n_prompt
        self.priority[row] = request.priority
        self.end_len[row] = request.end_len
        self.room[row] = lease.n_blocks * self.shape.block_size
        self.n_cached[row] = lease.n_cached
        self.publish_at[row] = lease.n_cached + self.shape.block_size
        self.quiet_until[row] = 0 if request.sent is None else len(request.sent)
        self.conn[row] = request.conn
        self.request_id[row] = request.id
        self.last_token_s[row] = request.last_token_s
        self.ignore_eos[row] = request.ignore_eos
        self.watched[row] = bool(request.stop_token_ids)
        self.n_watched += bool(request.stop_token_ids)
        self.n_quiet += request.sent is not None
        self.leased[row] = True
        self.requests[row] = request
        self.leases[row] = lease
        self.prefill.append(row)
        self.on_worker.add(row)
        request.replica = self
        request.row = row
        request.wait = None
        request.move(RequestState.PREFILL)
        return row

    def detach(self, row: int) -> Request:
        """Take the request off its row: complete blocks stay in the trie, everything else is free at once,
        results still to come are dropped by epoch. Its known tokens return to the request."""
        request = self.requests[row]
        assert request is not None
        self.version += 1
        self.release_lease(row)
        request.tokens = self.tokens[row, : int(self.n_committed[row])].copy()
        request.last_token_s = float(self.last_token_s[row])
        request.replica = None
        request.row = -1
        self.n_watched -= bool(request.stop_token_ids)
        if request.sent is not None:
            self.n_quiet -= 1
            if len(request.tokens) >= len(request.sent):
                request.sent = None
        self.requests[row] = None
        self.watched[row] = False
        self.decoding[row] = False
        if row in self.prefill:
            self.prefill.remove(row)
        if row in self.joining:
            self.joining.remove(row)
        self.draining.discard(row)
        self.evict(row)
        self.epoch[row] += 1
        self.free_rows.append(row)
        return request

    def evict(self, row: int) -> None:
        """Tell the worker with the next step that the row is free."""
        if row in self.on_worker:
            self.on_worker.discard(row)
            self.pending_evicts.append(row)

    def release_lease(self, row: int) -> None:
        lease = self.leases[row]
        self.leased[row] = False
        if lease is None:
            return
        self.publish(row)
        self.leases[row] = None
        self.allocator.release(lease)

    def release_draining(self) -> bool:
        """Free the blocks of rows that need no further step, before their results are there. What they had
        not yet committed is not cached then. Whether there were any."""
        rows = [row for row in self.draining if self.leases[row] is not None]
        for row in rows:
            self.release_lease(row)
        self.version += bool(rows)
        return bool(rows)

    def publish(self, row: int) -> None:
        """Put the blocks into the trie whose tokens are committed and whose KV is in a step sent (or being
        composed)."""
        lease = self.leases[row]
        assert lease is not None
        n = min(int(self.n_committed[row]), int(self.n_scheduled[row]))
        if n < int(self.publish_at[row]):
            return
        self.allocator.publish(lease, self.tokens[row, :n], n_tokens=n)
        self.publish_at[row] = (n // self.shape.block_size + 1) * self.shape.block_size

    def settle_joins(self) -> None:
        """Rows whose prompt was completed by the step before now decode."""
        for row in self.joining:
            self.decoding[row] = True
        self.joining.clear()

    # ---- invariants ----

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant. For tests and the admin route."""
        n = self.shape.max_rows
        used = [row for row in range(n) if self.requests[row] is not None]
        assert sorted(self.free_rows + used) == list(range(n)), "a row is neither free nor used, or both"
        assert len(self.in_flight) <= self.window, "more steps in flight than the window"
        states: dict[RequestState, set[int]] = {state: set() for state in RequestState}
        for row in used:
            request = self.requests[row]
            assert request is not None
            assert request.replica is self, f"row {row} and its request disagree"
            assert request.row == row, f"row {row} and its request disagree"
            states[request.state].add(row)
            lease = self.leases[row]
            assert (lease is not None) or row in self.draining, f"row {row} runs without a lease"
            if lease is not None:
                assert lease.n_blocks * self.shape.block_size == self.room[row], f"row {row}: room"
                assert self.n_scheduled[row] <= self.room[row], f"row {row} writes past its blocks"
            assert self.n_committed[row] <= self.end_len[row], f"row {row} is longer than allowed"
        assert states[RequestState.PREFILL] == set(self.prefill), "prefill rows"
        decode = set(np.flatnonzero(self.decoding).tolist())
        assert states[RequestState.DECODE] == decode | set(self.joining), "decode rows"
        assert states[RequestState.DRAINING] == self.draining, "draining rows"
        leased = set(np.flatnonzero(self.leased).tolist())
        assert leased == set(used) - self.draining, "leased rows"
        assert self.n_watched == int(np.count_nonzero(self.watched)), "watched rows"
        self.allocator.check()
        assert self.allocator.n_leased <= self.shape.n_blocks
        holders = sum(lease is not None for lease in self.leases)
        assert self.allocator.stats().n_leases == holders, "a lease has no row"
