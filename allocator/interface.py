"""The allocator as the scheduler sees it: one per replica, exact, all or nothing.

Both allocators (radix: prefix caching on; simple: off) implement `Allocator`. Block 0 is reserved for
padding rows and never handed out. Token arrays are contiguous int32 numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]


class Lease(Protocol):
    """The blocks that one request holds: a shared cached prefix, then its own."""

    @property
    def blocks(self) -> I32:
        """Block table, one id per `block_size` positions, shared prefix first. A view: valid until the
        next operation on this lease."""
        ...

    @property
    def n_blocks(self) -> int: ...

    @property
    def n_cached(self) -> int:
        """Leading tokens whose KV was found in the cache at allocation: a multiple of the block size,
        at most len(tokens) - 1."""
        ...


@dataclass(slots=True, frozen=True)
class AllocatorStats:
    """In blocks, unless said otherwise. free + cached + leased == n_blocks - 1 (the reserved one)."""

    n_blocks: int
    block_size: int
    free: int
    cached: int
    """In the trie and held by no lease: evictable."""
    leased: int
    """Held by at least one lease; a shared block counts once."""
    shared: int
    """Held by two leases or more."""
    n_leases: int
    hit_tokens: int
    """Tokens found in the cache by all allocations so far."""
    asked_tokens: int
    """Tokens asked for by all allocations so far."""
    evicted_blocks: int
    generation: int
    """Raised by `flush`."""


class Allocator(Protocol):
    @property
    def block_size(self) -> int: ...

    @property
    def n_available(self) -> int:
        """Blocks that an allocation could get now: free + evictable. O(1)."""
        ...

    @property
    def n_leased(self) -> int:
        """Blocks held by at least one lease, shared ones once. O(1)."""
        ...

    def match(self, tokens: I32, *, salt: str = "") -> int:
        """Cached tokens that `allocate` would find (block multiple, at most len - 1), without leasing
        them or touching their recency: for placement."""
        ...

    def allocate(self, tokens: I32, *, n_tokens: int, salt: str = "") -> Lease | None:
        """Lease blocks for `n_tokens` >= len(tokens) positions, sharing the longest published prefix of
        `tokens`. None when it does not fit; then nothing has changed and nothing was evicted."""
        ...

    def grow(self, lease: Lease, *, n_tokens: int) -> I32 | None:
        """Make the lease cover `n_tokens` positions. Returns the new block ids (maybe none); None when
        they can't be had, and then nothing has changed."""
        ...

    def publish(self, lease: Lease, tokens: I32, *, n_tokens: int) -> None:
        """The first `n_tokens` of `tokens` (the request's whole known text) have their KV written or in
        the step being composed: put the full blocks among them into the trie. Monotonic and cheap when
        nothing new is complete. If a twin published the same text first, the lease keeps its own block
        outside the trie; once no lease holds the twin's block and this lease has published below it, the
        lease's copy takes its place there and the twin's is free. A lease that was invalidated, named by
        `invalidate` or granted before a `flush` never publishes again: then this does nothing."""

    def release(self, lease: Lease) -> None:
        """Give everything back: published blocks stay cached, the rest is free at once. Once only: a second
        release, like any other use of a released lease, raises LeaseError."""

    def invalidate(self, lease: Lease) -> Sequence[Lease]:
        """The lease's own blocks may hold bad values: take every block that it published, with all
        descendants, out of the trie. Returns the other live leases that hold any of them (they must be
        preempted). Such blocks are freed at release and must be zeroed before reuse: see `take_dirty`."""
        ...

    def take_dirty(self, blocks: I32) -> I32:
        """Which of these freshly handed out blocks must be zeroed before use; they are clean afterwards."""
        ...

    def flush(self) -> int:
        """Drop every cached block that no lease holds, and unpublish the rest. Returns blocks freed."""
        ...

    def stats(self) -> AllocatorStats: ...

    def inspect(self, *, limit: int) -> dict[str, Any]:
        """For people: the hottest prefixes (tokens, blocks, hits, age) and a map of block states."""
        ...

    def check(self) -> None:
        """Raises AssertionError naming the broken invariant. O(n_blocks)."""
