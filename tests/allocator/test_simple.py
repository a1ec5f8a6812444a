"""Prefix caching off: the same interface, nothing is found and nothing is kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from allocator import make_allocator
from allocator.errors import ArgumentError, LeaseError
from allocator.interface import Allocator, Lease
from tests.allocator.helpers import span


def simple(n_blocks: int, block_size: int = 4) -> Allocator:
    return make_allocator(n_blocks=n_blocks + 1, block_size=block_size, prefix_caching=False)


def test_nothing_is_ever_found() -> None:
    """TGI #2676, #3333: with prefix caching off, the hit counter stays 0."""
    allocator = simple(32)
    for _ in range(3):
        lease = allocator.allocate(span(0, 40), n_tokens=40)
        assert lease is not None
        assert lease.n_cached == 0
        allocator.publish(lease, span(0, 40), n_tokens=40)
        assert allocator.match(span(0, 40)) == 0
        allocator.release(lease)
        allocator.check()
    stats = allocator.stats()
    assert (stats.free, stats.cached, stats.hit_tokens, stats.asked_tokens) == (32, 0, 0, 120)


def test_all_or_nothing() -> None:
    allocator = simple(8)
    lease = allocator.allocate(span(0, 20), n_tokens=21)
    assert lease is not None
    assert lease.n_blocks == 6
    assert allocator.allocate(span(0, 9), n_tokens=9) is None
    assert allocator.grow(lease, n_tokens=33) is None
    assert allocator.n_available == 2
    grown = allocator.grow(lease, n_tokens=32)
    assert grown is not None
    assert len(grown) == 2
    assert sorted(lease.blocks.tolist()) == list(range(1, 9))
    allocator.check()


def test_invalid_blocks_are_dirty() -> None:
    allocator = simple(4)
    lease = allocator.allocate(span(0, 8), n_tokens=8)
    assert lease is not None
    blocks = lease.blocks.copy()
    assert list(allocator.invalidate(lease)) == []
    allocator.release(lease)
    assert sorted(allocator.take_dirty(blocks).tolist()) == sorted(blocks.tolist())


def test_bad_calls() -> None:
    allocator = simple(4)
    lease = allocator.allocate(span(0, 8), n_tokens=8)
    assert lease is not None
    with pytest.raises(ArgumentError, match="more than the 8 tokens"):
        allocator.publish(lease, span(0, 8), n_tokens=9)
    allocator.release(lease)
    with pytest.raises(LeaseError):
        allocator.release(lease)
    with pytest.raises(ArgumentError):
        make_allocator(n_blocks=8, block_size=0, prefix_caching=False)
    with pytest.raises(ArgumentError):
        make_allocator(n_blocks=1, block_size=4, prefix_caching=False)


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_random_operations_keep_every_block_in_one_place(block_size: int) -> None:
    rng = random.Random(block_size)
    allocator = simple(24, block_size)
    leases: list[Lease] = []
    for _ in range(1000):
        n_tokens = rng.randint(1, 9 * block_size)
        n_free = allocator.n_available
        if leases and rng.random() < 0.4:
            allocator.release(leases.pop(rng.randrange(len(leases))))
        elif leases and rng.random() < 0.4:
            lease = rng.choice(leases)
            n_new = max(0, -(-n_tokens // block_size) - lease.n_blocks)
            assert (allocator.grow(lease, n_tokens=n_tokens) is None) == (n_new > n_free)
        else:
            got = allocator.allocate(span(0, n_tokens), n_tokens=n_tokens)
            assert (got is None) == (-(-n_tokens // block_size) > n_free)
            leases += [got] if got is not None else []
        allocator.check()
        held = np.concatenate([lease.blocks for lease in leases] or [span(0, 0)])
        assert len(np.unique(held)) == len(held) == allocator.n_leased
