"""Runs random operations on a radix allocator and on the naive model, and compares them after each."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from allocator.allocator import RadixAllocator
from allocator.errors import LeaseError
from allocator.interface import I32
from allocator.lease import BlockLease
from tests.allocator.model import Entry, Model, ModelLease
from tests.allocator.peek import cached_blocks, snapshot

N_PATTERNS = 3
N_REMEMBERED = 6


class Driver:
    def __init__(self, *, seed: int, block_size: int, n_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.model = Model(n_blocks=n_blocks, block_size=block_size)
        self.allocator = RadixAllocator(n_blocks=n_blocks, block_size=block_size, clock_s=lambda: 0.0)
        self.leases: dict[BlockLease, ModelLease] = {}
        draw = np.random.default_rng(seed)
        # Few patterns and few remembered texts: prefixes meet all the time, also in the middle of a block.
        self.patterns = [draw.integers(0, 50, block_size).astype(np.int32) for _ in range(N_PATTERNS)]
        self.texts: list[I32] = [self.patterns[0].copy()]
        self.done: Counter[str] = Counter()

    def run(self, n_operations: int, *, mood: str) -> None:
        operations = [
            self.allocate,
            self.publish,
            self.grow,
            self.release,
            self.match,
            self.invalidate,
            self.flush,
        ]
        weights = {
            "crowded": [30, 30, 12, 22, 5, 0.7, 0.3],
            "sparse": [30, 45, 8, 30, 5, 0.7, 0.3],
            "broken": [30, 40, 8, 24, 5, 6, 2],
        }[mood]
        for operation in self.rng.choices(operations, weights, k=n_operations):
            operation()
            self.done[operation.__name__] += 1
            self.compare()

    # ---- operations ----

    def allocate(self) -> None:
        rng = self.rng
        text = self.new_text()
        salt = rng.choice(["", "", "", "adapter"])
        n_tokens = len(text) + rng.choice([0, 0, 1, self.block_size, rng.randrange(4 * self.block_size)])
        plan = self.model.plan_allocate(text, n_tokens, salt)
        if plan.victims is None:
            before = snapshot(self.allocator)
            assert self.allocator.allocate(text, n_tokens=n_tokens, salt=salt) is None
            assert snapshot(self.allocator) == before, "a refused request changed something"
            self.done["refused"] += 1
            return
        lease = self.allocator.allocate(text, n_tokens=n_tokens, salt=salt)
        assert isinstance(lease, BlockLease)
        n_hit = len(plan.hits)
        assert lease.n_cached == n_hit * self.block_size
        table = lease.blocks.tolist()
        assert len(table) == n_hit + plan.n_new == lease.n_blocks
        for i, (block, entry) in enumerate(zip(table, plan.hits, strict=False)):
            assert block == entry.block
            assert self.model.kv[block] == self.model.key(salt, text, i + 1), "a hit block holds other tokens"
        self.take(plan.victims, table[n_hit:])
        self.leases[lease] = self.model.lease(text, salt, table, plan.hits)
        self.done["hit"] += n_hit > 0

    def grow(self) -> None:
        if not self.leases:
            return
        lease, twin = self.pick()
        n_tokens = lease.n_blocks * self.block_size + self.rng.choice(
            [-1, 0, 1, self.block_size, 3 * self.block_size, 8 * self.block_size]
        )
        n_new = max(0, -(-n_tokens // self.block_size) - lease.n_blocks)
        victims = self.model.victims(n_new, keep=[])
        before = snapshot(self.allocator) if victims is None else None
        grown = self.allocator.grow(lease, n_tokens=n_tokens)
        if victims is None:
            assert grown is None
            assert snapshot(self.allocator) == before, "a refused growth changed something"
            self.done["refused"] += 1
            return
        assert grown is not None
        assert len(grown) == n_new
        self.take(victims, grown.tolist())
        twin.table.extend(grown.tolist())
        assert lease.blocks.tolist() == twin.table

    def publish(self) -> None:
        if not self.leases:
            return
        lease, twin = self.pick()
        room = lease.n_blocks * self.block_size
        if len(twin.text) < room and self.rng.random() < 0.7:
            twin.text = np.concatenate([twin.text, self.tail(room - len(twin.text))])
            self.remember(twin.text)
        n_tokens = self.rng.randint(0, min(room, len(twin.text)))
        if self.rng.random() < 0.5:
            n_tokens = min(room, len(twin.text))
        self.model.publish(twin, n_tokens)
        self.allocator.publish(lease, twin.text, n_tokens=n_tokens)

    def release(self) -> None:
        if not self.leases:
            return
        lease, twin = self.pick()
        self.allocator.release(lease)
        del self.leases[lease]
        self.model.release(twin)
        with pytest.raises(LeaseError):
            self.allocator.release(lease)

    def match(self) -> None:
        text = self.new_text()
        before = snapshot(self.allocator)
        assert self.allocator.match(text) == len(self.model.hits(text, "")) * self.block_size
        assert snapshot(self.allocator) == before

    def invalidate(self) -> None:
        if not self.leases:
            return
        lease, twin = self.pick()
        victims = self.allocator.invalidate(lease)
        expected = self.model.invalidate(twin)
        assert [self.leases[victim] for victim in victims if isinstance(victim, BlockLease)] == expected
        self.done["preempted"] += len(victims)

    def flush(self) -> None:
        assert self.allocator.flush() == self.model.flush()

    # ---- comparing ----

    def take(self, victims: list[Entry], new: list[int]) -> None:
        """The new blocks come from the free ones and from exactly the expected victims."""
        self.model.evict(victims)
        self.done["evicted"] += len(victims)
        dirty = self.allocator.take_dirty(np.array(new, dtype=np.int32))
        assert set(dirty.tolist()) == self.model.hand_out(new)
        self.done["dirty"] += len(dirty)

    def compare(self) -> None:
        model, allocator = self.model, self.allocator
        allocator.check()
        actual = cached_blocks(allocator)
        assert actual == {key: (e.block, len(e.holders)) for key, e in model.entries.items()}
        for key, (block, _) in actual.items():
            assert model.kv[block] == key, "a published block holds other tokens"
        assert set(allocator._pool.free_ids().tolist()) == model.free
        stats = allocator.stats()
        assert stats.free + stats.cached + stats.leased == stats.n_blocks - 1
        assert stats.cached == model.n_cached()
        assert stats.shared == model.n_shared()
        assert stats.leased == allocator.n_leased == len({b for x in model.leases for b in x.table})
        assert allocator.n_available == stats.free + stats.cached

    # ---- texts ----

    def pick(self) -> tuple[BlockLease, ModelLease]:
        return self.rng.choice(list(self.leases.items()))

    def new_text(self) -> I32:
        """A cut of a known text, most often at or beside a block's border, then something new or nothing."""
        rng = self.rng
        known = rng.choice(self.texts)
        if rng.random() < 0.3:
            cut = rng.randint(0, len(known))
        else:
            border = rng.randint(0, len(known) // self.block_size) * self.block_size
            cut = min(max(border + rng.choice([-1, 0, 0, 0, 1]), 0), len(known))
        text = known[:cut]
        if not len(text) or rng.random() < 0.6:
            text = np.concatenate([text, self.tail(5 * self.block_size)])
        self.remember(text)
        return text

    def tail(self, n_tokens_max: int) -> I32:
        n = self.rng.randint(1, n_tokens_max)
        parts = self.rng.choices(self.patterns, k=-(-n // self.block_size))
        return np.concatenate(parts)[:n]

    def remember(self, text: I32) -> None:
        if len(text) > self.model.n_blocks * self.block_size:
            return
        if len(self.texts) >= N_REMEMBERED:
            self.texts.pop(self.rng.randrange(len(self.texts)))
        self.texts.append(text)
