"""What fits: all or nothing, the order of eviction, growth, the budget."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.errors import ArgumentError, LeaseError
from tests.allocator.helpers import allocate, cache, publish, radix, release, span, tokens
from tests.allocator.peek import cached_blocks, snapshot


def test_a_refused_request_changes_nothing() -> None:
    allocator = radix(12)
    held = allocate(allocator, span(0, 4))
    publish(allocator, held, span(0, 4))
    cache(allocator, span(50, 56))
    before = snapshot(allocator)
    assert allocator.allocate(span(50, 70), n_tokens=20) is None
    assert allocator.allocate(span(80, 89), n_tokens=9) is None
    assert allocator.allocate(span(80, 81), n_tokens=1000, salt="new") is None
    assert allocator.grow(held, n_tokens=13) is None
    assert snapshot(allocator) == before


def test_what_a_request_shares_is_not_evicted_for_it() -> None:
    allocator = radix(8)
    cache(allocator, span(0, 8))
    assert allocator.n_available == 8
    assert allocator.allocate(span(0, 6), n_tokens=9) is None
    lease = allocate(allocator, span(0, 6), 8)
    assert lease.n_cached == 5
    assert allocator.n_available == 0


def test_the_last_blocks_of_a_partly_matched_edge_can_be_evicted_for_it() -> None:
    allocator = radix(8)
    blocks = cache(allocator, span(0, 8))
    lease = allocate(allocator, np.concatenate([span(0, 3), tokens(70, 71, 72, 73, 74)]))
    assert lease.n_cached == 3
    assert lease.blocks.tolist()[:3] == blocks[:3]
    assert set(lease.blocks.tolist()[3:]) == set(blocks[3:])


def test_the_least_recently_used_leaf_goes_first_and_no_block_more_than_needed() -> None:
    allocator = radix(12)
    cache(allocator, span(0, 4))
    cache(allocator, span(10, 14))
    cache(allocator, span(20, 24))
    again = allocate(allocator, span(0, 4))
    # Its last token is computed again; the block that held it was the oldest leaf and made room for that.
    assert allocator.stats().evicted_blocks == 1
    release(allocator, again)
    release(allocator, allocate(allocator, span(90, 96)))
    # One block was free. Of the other five, four were the oldest text and one the end of the next.
    assert allocator.stats().evicted_blocks == 6
    assert allocator.match(span(10, 15)) == 0
    assert allocator.match(span(20, 25)) == 3
    assert allocator.match(span(0, 5)) == 3


def test_a_prefix_outlives_its_branches() -> None:
    allocator = radix(10)
    prefix = span(0, 4)
    cache(allocator, np.concatenate([prefix, span(20, 23)]))
    cache(allocator, np.concatenate([prefix, span(30, 33)]))
    release(allocator, allocate(allocator, span(50, 56)))
    assert {len(key[1]) // 4 for key in cached_blocks(allocator)} == {1, 2, 3, 4}


def test_held_blocks_are_never_evicted() -> None:
    allocator = radix(8)
    lease = allocate(allocator, span(0, 6))
    publish(allocator, lease, span(0, 6))
    cache(allocator, span(50, 52))
    assert allocator.allocate(span(60, 63), n_tokens=3) is None
    assert allocate(allocator, span(60, 62)) is not None
    assert allocator.match(span(0, 7)) == 6


def test_growth_is_block_by_block() -> None:
    allocator = radix(8, block_size=4)
    lease = allocate(allocator, span(0, 6))
    assert lease.n_blocks == 2
    for n_tokens, n_new in [(7, 0), (8, 0), (9, 1), (12, 0), (20, 2), (3, 0)]:
        grown = allocator.grow(lease, n_tokens=n_tokens)
        assert grown is not None
        assert len(grown) == n_new
        assert lease.blocks.tolist()[lease.n_blocks - n_new :] == grown.tolist()
        allocator.check()
    assert lease.n_blocks == 5


def test_growth_evicts_when_it_must() -> None:
    allocator = radix(8)
    cache(allocator, span(0, 6))
    lease = allocate(allocator, span(50, 52))
    grown = allocator.grow(lease, n_tokens=5)
    assert grown is not None
    assert len(grown) == 3
    assert allocator.match(span(0, 7)) == 3
    assert allocator.stats().evicted_blocks == 3


def test_a_block_that_was_released_and_used_again_does_not_leak() -> None:
    """T801, S6914: many short requests; every block is somewhere, none twice."""
    allocator = radix(32, block_size=4)
    draw = np.random.default_rng(7)
    for _ in range(2000):
        text = draw.integers(0, 3, draw.integers(1, 60)).astype(np.int32)
        lease = allocator.allocate(text, n_tokens=len(text) + 4)
        assert lease is not None
        allocator.publish(lease, text, n_tokens=len(text))
        allocator.release(lease)
    allocator.check()
    assert allocator.n_available == 32
    assert allocator.n_leased == 0
    assert len(allocator._trie.queue) <= 32


def test_hits_do_not_pile_up_in_the_eviction_queue() -> None:
    allocator = radix(64)
    cache(allocator, span(0, 8))
    for _ in range(1000):
        cache(allocator, span(0, 8))
    assert len(allocator._trie.queue) <= 2


class TestBadCalls:
    def test_double_release(self) -> None:
        allocator = radix(8)
        lease = allocate(allocator, span(0, 4))
        allocator.release(lease)
        before = snapshot(allocator)
        for call in (
            lambda: allocator.release(lease),
            lambda: allocator.grow(lease, n_tokens=8),
            lambda: allocator.publish(lease, span(0, 4), n_tokens=4),
            lambda: allocator.invalidate(lease),
        ):
            with pytest.raises(LeaseError, match="already released"):
                call()
        assert snapshot(allocator) == before

    def test_another_allocators_lease(self) -> None:
        one, other = radix(8), radix(8)
        lease = allocate(one, span(0, 4))
        with pytest.raises(LeaseError, match="another allocator"):
            other.release(lease)

    @pytest.mark.parametrize(
        "text",
        [
            np.arange(4, dtype=np.int64),
            np.arange(8, dtype=np.int32)[::2],
            np.zeros((2, 2), dtype=np.int32),
            np.array([], dtype=np.int32),
            [1, 2, 3],
        ],
        ids=["int64", "strided", "2d", "empty", "list"],
    )
    def test_arrays_that_are_no_tokens(self, text: np.ndarray) -> None:
        allocator = radix(8)
        with pytest.raises(ArgumentError, match="int32"):
            allocator.allocate(text, n_tokens=4)
        with pytest.raises(ArgumentError, match="int32"):
            allocator.match(text)

    def test_less_room_than_text(self) -> None:
        with pytest.raises(ArgumentError, match="n_tokens is 3, less than the 4 tokens"):
            radix(8).allocate(span(0, 4), n_tokens=3)

    def test_a_block_of_no_tokens(self) -> None:
        with pytest.raises(ArgumentError, match="block_size is 0"):
            radix(8, block_size=0)
