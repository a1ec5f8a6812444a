"""The simple allocator: prefix caching off. The same interface without the trie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allocator.arguments import as_run, check_published, check_room, count_blocks, own
from allocator.blockmap import inspect_simple
from allocator.errors import ArgumentError
from allocator.interface import I32, AllocatorStats, Lease
from allocator.invariants import check_simple
from allocator.lease import BlockLease, LeaseState
from allocator.pool import N_RESERVED, Pool


class SimpleAllocator:
    """Owns one replica's pool and leases; nothing is ever found or kept. One thread. Implements
    `allocator.interface.Allocator`."""

    def __init__(self, *, n_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ArgumentError(f"block_size is {block_size}; at least 1 token is needed")
        self._block_size = block_size
        self._pool = Pool(n_blocks)
        self._leases: dict[BlockLease, None] = {}
        self._asked_tokens = 0
        self._generation = 0

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def n_available(self) -> int:
        return self._pool.n_free

    @property
    def n_leased(self) -> int:
        return self._pool.n_blocks - N_RESERVED - self._pool.n_free

    def match(self, tokens: I32, *, salt: str = "") -> int:
        as_run(tokens)
        return 0

    def allocate(self, tokens: I32, *, n_tokens: int, salt: str = "") -> Lease | None:
        run = as_run(tokens)
        check_room(n_tokens, run)
        n_new = count_blocks(n_tokens, self._block_size)
        if n_new > self._pool.n_free:
            return None
        lease = BlockLease(self, self._pool.take(n_new).copy(), n_cached=0, n_published=0, node=None)
        self._leases[lease] = None
        self._asked_tokens += len(run)
        return lease

    def grow(self, lease: Lease, *, n_tokens: int) -> I32 | None:
        held = own(lease, self)
        n_new = count_blocks(n_tokens, self._block_size) - held.n_blocks
        if n_new <= 0:
            return held.slice(0, 0)
        if n_new > self._pool.n_free:
            return None
        return held.extend(self._pool.take(n_new))

    def publish(self, lease: Lease, tokens: I32, *, n_tokens: int) -> None:
        held = own(lease, self)
        check_published(n_tokens, len(tokens), held, self._block_size)

    def release(self, lease: Lease) -> None:
        held = own(lease, self)
        held.enter(LeaseState.RELEASED)
        del self._leases[held]
        self._pool.give(held.blocks)

    def invalidate(self, lease: Lease) -> Sequence[Lease]:
        held = own(lease, self)
        held.enter(LeaseState.SEALED)
        self._pool.mark_dirty(held.blocks)
        return []

    def take_dirty(self, blocks: I32) -> I32:
        return self._pool.take_dirty(blocks)

    def flush(self) -> int:
        self._generation += 1
        return 0

    def stats(self) -> AllocatorStats:
        return AllocatorStats(
            n_blocks=self._pool.n_blocks,
            block_size=self._block_size,
            free=self._pool.n_free,
            cached=0,
            leased=self.n_leased,
            shared=0,
            n_leases=len(self._leases),
            hit_tokens=0,
            asked_tokens=self._asked_tokens,
            evicted_blocks=0,
            generation=self._generation,
        )

    def inspect(self, *, limit: int) -> dict[str, Any]:
        return inspect_simple(self._pool, list(self._leases))

    def check(self) -> None:
        check_simple(self._pool, list(self._leases))
