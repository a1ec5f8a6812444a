"""Which replica a request should meet: exact prefix match, load and KV pressure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from router.budget import AnswerLengths, peak_blocks
from router.replica_state import ReplicaState
from router.request import PrefixWait, Request

I64 = npt.NDArray[np.int64]

ROW_COST_TOKENS = 32
"""A running row slows every step of its replica: it weighs as much as this many prompt tokens that would have
to be computed here and not elsewhere."""
PENDING_COST = 0.25
"""A prompt token that a replica has yet to compute for others delays a newcomer; one that is computed a
second time costs device time and cache for good. So the first weighs this much of the second."""
PRESSURE_EXPONENT = 2
"""KV pressure costs the prompt's length times (share of blocks leased) to this power: little until the pool
is nearly full."""
MAX_COMPARED_ROWS = 8
MAX_EVEN = 8
"""Replicas up to which a burst is dealt out evenly."""


@dataclass(slots=True)
class Prospect:
    """What a replica offers a request."""

    replica: ReplicaState
    n_cached: int
    """Tokens found cached now."""
    wait: PrefixWait | None
    """More will be cached once a running row has computed it."""
    cost: float


@dataclass(slots=True, frozen=True)
class Load:
    """The part of a replica's cost that does not depend on the request, but for its length."""

    cost: float
    pressure: float
    """To be multiplied by the prompt's length."""

    def of(self, n_tokens: int) -> float:
        return self.cost + n_tokens * self.pressure


def load_of(rs: ReplicaState) -> Load:
    share = rs.allocator.n_leased / max(1, rs.shape.n_blocks)
    cost = load_cost(n_rows=rs.n_running, n_pending=rs.prefill_pending())
    return Load(cost=cost, pressure=share**PRESSURE_EXPONENT)


@dataclass(slots=True)
class Left:
    """What one composition has left to another replica so far. The other's own load is fixed meanwhile."""

    load: Load
    n_free_rows: int
    n_rows: int = 0
    cost: float = 0.0


def left_cost(n_uncached: int, *, n_replicas: int) -> float:
    """Of a request that a composition leaves to another replica. Few replicas deal a burst out evenly. Among
    many that would ask each about every waiting request again and again: there each takes more at once."""
    return load_cost(n_rows=1, n_pending=n_uncached if n_replicas <= MAX_EVEN else n_uncached * 4)


def left_to(rs: ReplicaState, left: dict[int, Left]) -> Left:
    """The replica's entry, made when it is first asked for."""
    found = left.get(rs.replica_id)
    if found is None:
        found = left[rs.replica_id] = Left(load=load_of(rs), n_free_rows=rs.n_free_rows)
    return found


def prospect(
    rs: ReplicaState, request: Request, *, prefix_caching: bool, load: Load | None = None
) -> Prospect:
    """Exact for what is cached; a prefix that a running row is about to compute counts as cached, for whoever
    waits for it. `load`: the replica's, where it is known already."""
    n_cached = 0
    wait: PrefixWait | None = None
    if prefix_caching:
        n_cached = rs.allocator.match(request.tokens, salt=request.salt)
        wait = _coming_prefix(rs, request, n_cached)
    n_found = n_cached if wait is None else wait.until
    n_tokens = len(request.tokens)
    cost = (n_tokens - n_found) + (load or load_of(rs)).of(n_tokens)
    return Prospect(replica=rs, n_cached=n_cached, wait=wait, cost=cost)


def load_cost(*, n_rows: int, n_pending: int) -> float:
    """Of rows that run and prompt tokens to be computed, in prompt tokens."""
    return ROW_COST_TOKENS * n_rows + PENDING_COST * n_pending


def _coming_prefix(rs: ReplicaState, request: Request, n_cached: int) -> PrefixWait | None:
    """The longest prefix beyond `n_cached` that a row in prefill will compute."""
    best: PrefixWait | None = None
    block_size = rs.shape.block_size
    for row in rs.prefill:
        other = rs.requests[row]
        assert other is not None
        if other.salt != request.salt or other.priority > request.priority:
            continue  # another trie, or a row that may have to give way
        limit = min(int(rs.target[row]), len(request.tokens) - 1) // block_size * block_size
        n_scheduled = int(rs.n_scheduled[row])
        least = max(n_cached, n_scheduled if best is None else best.until)
        if limit <= least:
            continue
        theirs = rs.tokens[row]
        mine = request.tokens
        if not np.array_equal(
            theirs[n_cached : n_cached + block_size], mine[n_cached : n_cached + block_size]
        ):
            continue
        differs = theirs[:limit] != mine[:limit]
        n_common = int(differs.argmax()) if differs.any() else limit
        n_common -= n_common % block_size
        if n_common > least:
            best = PrefixWait(replica=rs, row=row, epoch=int(rs.epoch[row]), until=n_common)
    return best


def leased_prefix(rs: ReplicaState, rows: I64, request: Request, n_cached: int) -> int:
    """How many of the `n_cached` tokens lie in blocks that these rows hold anyway: they cost nothing more."""
    if n_cached == 0:
        return 0
    block_size = rs.shape.block_size
    same = (rs.tokens[rows, :block_size] == request.tokens[:block_size]).all(axis=1)
    best = 0
    for row in rows[same][:MAX_COMPARED_ROWS].tolist():
        other = rs.requests[row]
        assert other is not None
        n = min(n_cached, int(rs.n_scheduled[row]), int(rs.n_committed[row]))
        if other.salt != request.salt or n <= best:
            continue
        differs = rs.tokens[row, :n] != request.tokens[:n]
        n_common = int(differs.argmax()) if differs.any() else n
        best = max(best, n_common - n_common % block_size)
        if best == n_cached:
            break
    return best


def fits(
    rs: ReplicaState, request: Request, *, n_cached: int, lengths: AnswerLengths, without: Sequence[int] = ()
) -> bool:
    """Whether the replica can take the request now and finish what it then runs, as far as can be foreseen;
    `without`: as if these rows had been preempted. A replica that runs nothing takes whatever validation
    accepted."""
    shape = rs.shape
    if min(len(rs.free_rows), shape.max_batch_size - rs.n_running) + len(without) < 1:
        return False
    rows = np.flatnonzero(rs.leased)
    n_available = rs.allocator.n_available
    n_leased = rs.allocator.n_leased
    if without:
        gone = np.asarray(without)
        freed = int((rs.room[gone] // shape.block_size - rs.n_cached[gone] // shape.block_size).sum())
        n_available += freed
        n_leased -= freed
        rows = np.setdiff1d(rows, gone)
    if not len(rows):
        return True
    n_tokens = len(request.tokens)
    held = leased_prefix(rs, rows, request, n_cached) // shape.block_size
    n_new = rs.blocks_for(n_tokens) - held
    # Cached blocks that nobody holds are counted as available, and the request would hold them.
    if n_new > n_available:
        return False
    room = rs.room[rows].astype(np.int64)
    slack = room - np.maximum(rs.n_scheduled[rows], rs.target[rows])
    own = room // shape.block_size - rs.n_cached[rows] // shape.block_size
    n_left = (rs.end_len[rows] - rs.n_committed[rows]).astype(np.int64)
    expected = lengths.expected((rs.n_committed[rows] - rs.n_prompt[rows]).astype(np.int64))
    remaining = np.where(rs.ignore_eos[rows], n_left, np.minimum(n_left, expected))
    mine_left = request.end_len - n_tokens
    if not request.ignore_eos:
        guess = int(lengths.expected(np.array([n_tokens - request.n_prompt], dtype=np.int64))[0])
        # A request that was preempted before met a guess too low.
        mine_left = min(mine_left, guess * 2 ** min(request.n_preempted, 16))
    own = np.append(own, n_new)
    slack = np.append(slack, rs.blocks_for(n_tokens) * shape.block_size - n_tokens)
    remaining = np.append(remaining, mine_left)
    shared = max(0, n_leased - int(own[:-1].sum()))
    peak = peak_blocks(own=own, slack=slack, remaining=remaining, block_size=shape.block_size)
    return shared + peak <= shape.n_blocks


def by_cost(prospects: Sequence[Prospect], *, tie_break: float) -> list[Prospect]:
    """Cheapest first. Ties are broken at random, so that equal replicas share the load; a request's
    `tie_break` in [0, 1) stays the same, so that every replica's composition comes to the same answer."""

    def rank(offer: Prospect) -> tuple[float, float]:
        # A fraction that depends on the request and the replica alone (golden ratio: spread evenly).
        return (offer.cost, (tie_break + offer.replica.replica_id * 0.6180339887498949) % 1.0)

    return sorted(prospects, key=rank)
