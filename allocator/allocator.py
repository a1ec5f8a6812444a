"""The radix allocator: prefix caching on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from allocator.arguments import as_run, check_published, check_room, count_blocks, own
from allocator.blockmap import inspect_radix
from allocator.errors import ArgumentError
from allocator.interface import I32, AllocatorStats, Lease
from allocator.invariants import check_radix
from allocator.lease import BlockLease, LeaseState
from allocator.node import Node
from allocator.pool import N_RESERVED, Pool
from allocator.radix import RadixTrie, Walk


class RadixAllocator:
    """Owns one replica's pool, trie and leases. One thread. Implements `allocator.interface.Allocator`.

    Cost of a call: a constant, plus one step per trie node on the text's path, plus memcpy and memcmp of its
    tokens and ids; no Python work per token or block.
    """

    def __init__(
        self, *, n_blocks: int, block_size: int, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        if block_size < 1:
            raise ArgumentError(f"block_size is {block_size}; at least 1 token is needed")
        self._block_size = block_size
        self._clock_s = clock_s
        self._pool = Pool(n_blocks)
        self._trie = RadixTrie(self._pool, block_size=block_size, clock_s=clock_s)
        self._leases: dict[BlockLease, None] = {}
        self._hit_tokens = 0
        self._asked_tokens = 0
        self._generation = 0

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def n_available(self) -> int:
        return self._pool.n_free + self._trie.n_evictable

    @property
    def n_leased(self) -> int:
        return self._pool.n_blocks - N_RESERVED - self._pool.n_free - self._trie.n_evictable

    def match(self, tokens: I32, *, salt: str = "") -> int:
        run = as_run(tokens)
        walk = self._find(run, salt)
        n_hit = (walk.path[-1].end if walk.path else 0) + walk.n_branch
        return n_hit * self._block_size

    def allocate(self, tokens: I32, *, n_tokens: int, salt: str = "") -> Lease | None:
        run = as_run(tokens)
        check_room(n_tokens, run)
        pool = self._pool
        trie = self._trie
        walk = self._find(run, salt)
        path, branch, n_hit = walk
        if path:
            n_hit += path[-1].end
        n_new = -(-n_tokens // self._block_size) - n_hit
        n_free = pool.n_free
        if n_new > n_free:
            # What this request shares can't be evicted for it.
            n_evictable = trie.n_evictable
            for node in path:
                if node.refs == 0:
                    n_evictable -= node.end - node.start
            if branch is not None and branch.refs == 0:
                n_evictable -= walk.n_branch
            if n_new > n_free + n_evictable:
                return None
        tip = trie.hold(salt, walk)
        if n_new > n_free:
            trie.evict(n_new - n_free)
        table = bytearray().join([*[node.ids for node in path], pool.take(n_new).data])
        lease = BlockLease(
            self,
            np.frombuffer(table, dtype=np.int32),
            n_cached=n_hit * self._block_size,
            n_published=n_hit,
            node=tip,
        )
        self._leases[lease] = None
        self._asked_tokens += len(run)
        self._hit_tokens += lease.n_cached
        return lease

    def grow(self, lease: Lease, *, n_tokens: int) -> I32 | None:
        held = own(lease, self)
        n_new = count_blocks(n_tokens, self._block_size) - held.n_blocks
        if n_new <= 0:
            return held.slice(0, 0)
        lack = n_new - self._pool.n_free
        if lack > 0:
            if lack > self._trie.n_evictable:
                return None
            self._trie.evict(lack)
        return held.extend(self._pool.take(n_new))

    def publish(self, lease: Lease, tokens: I32, *, n_tokens: int) -> None:
        held = own(lease, self)
        n_full = n_tokens // self._block_size
        if n_full <= held.n_published or held.state is LeaseState.SEALED:
            return
        run = as_run(tokens)
        check_published(n_tokens, len(run), held, self._block_size)
        self._trie.publish(held, run, n_full)
        held.n_published = n_full

    def release(self, lease: Lease) -> None:
        held = own(lease, self)
        held.enter(LeaseState.RELEASED)
        del self._leases[held]
        self._trie.release(held)

    def invalidate(self, lease: Lease) -> Sequence[Lease]:
        held = own(lease, self)
        n_hit = held.n_cached // self._block_size
        held.enter(LeaseState.SEALED)
        self._pool.mark_dirty(held.slice(n_hit, held.n_blocks))
        top = self._trie.own_top(held, n_hit)
        if top is None:
            return []
        first = max(top.start, n_hit)
        victims = [other for other in self._leases if other is not held and _passes(other, top)]
        if top.attached:
            for node in self._trie.detach(top):
                self._pool.mark_dirty(node.block_ids())
        self._trie.lose(held, top.start)
        for victim in victims:
            # What it computed after it read a bad block is as bad.
            victim.enter(LeaseState.SEALED)
            self._pool.mark_dirty(victim.slice(first, victim.n_blocks))
            self._trie.lose(victim, top.start)
        return victims

    def take_dirty(self, blocks: I32) -> I32:
        return self._pool.take_dirty(blocks)

    def flush(self) -> int:
        for lease in self._leases:
            lease.enter(LeaseState.SEALED)
        self._generation += 1
        return self._trie.flush(self._leases)

    def stats(self) -> AllocatorStats:
        return AllocatorStats(
            n_blocks=self._pool.n_blocks,
            block_size=self._block_size,
            free=self._pool.n_free,
            cached=self._trie.n_evictable,
            leased=self.n_leased,
            shared=self._trie.n_shared,
            n_leases=len(self._leases),
            hit_tokens=self._hit_tokens,
            asked_tokens=self._asked_tokens,
            evicted_blocks=self._trie.n_evicted,
            generation=self._generation,
        )

    def inspect(self, *, limit: int) -> dict[str, Any]:
        return inspect_radix(self._trie, self._pool, list(self._leases), limit=limit, now_s=self._clock_s())

    def check(self) -> None:
        check_radix(self._trie, self._pool, list(self._leases), block_size=self._block_size)

    def _find(self, run: memoryview, salt: str) -> Walk:
        """The longest published prefix. The last token is always left to compute: no shared position is ever
        written again, and the request has logits to sample from."""
        root = self._trie.roots.get(salt)
        if root is None:
            return Walk([], None, 0)
        return self._trie.walk(root, run, (len(run) - 1) // self._block_size)


def _passes(lease: BlockLease, node: Node) -> bool:
    """Whether the lease holds the node or one below it."""
    for deepest in (lease.node, *lease.lost[:1]):
        here = deepest
        while here is not None and here.end > node.start:
            if here is node:
                return True
            here = here.parent
    return False
