"""What becomes visible and when: publishing, twins in flight, growth."""

from __future__ import annotations

import numpy as np
import pytest

from allocator.errors import ArgumentError
from tests.allocator.helpers import allocate, cache, publish, radix, release, span
from tests.allocator.peek import edges


def test_a_block_that_was_never_computed_is_never_hit() -> None:
    """TGI #2489: a request that was put back had published blocks which no step had computed."""
    allocator = radix(64, block_size=4)
    text = span(0, 40)
    lease = allocate(allocator, text)
    assert allocator.match(text) == 0
    release(allocator, lease)
    assert allocator.match(text) == 0
    assert allocator.stats().free == 64


def test_only_full_blocks_of_the_placed_chunk_are_published() -> None:
    allocator = radix(64, block_size=4)
    text = span(0, 40)
    lease = allocate(allocator, text)
    publish(allocator, lease, text, 3)
    assert allocator.match(text) == 0
    publish(allocator, lease, text, 18)
    assert allocator.match(text) == 16
    release(allocator, lease)
    assert allocator.match(text) == 16
    assert allocator.stats().cached == 4


def test_a_published_prefix_can_be_shared_while_its_lease_lives() -> None:
    allocator = radix(12, block_size=4)
    text = span(0, 32)
    first = allocate(allocator, text)
    publish(allocator, first, text)
    second = allocate(allocator, text)
    assert second.n_cached == 28
    stats = allocator.stats()
    assert (stats.leased, stats.shared, stats.n_leases) == (9, 7, 2)
    assert allocator.n_leased == 9
    assert allocator.n_available == 3


def test_publishing_is_monotonic() -> None:
    allocator = radix(16)
    text = span(0, 8)
    lease = allocate(allocator, text)
    publish(allocator, lease, text, 6)
    publish(allocator, lease, text, 2)
    assert allocator.match(text) == 6


def test_a_growing_answer_extends_its_own_leaf() -> None:
    allocator = radix(600, block_size=4)
    text = span(0, 2000)
    lease = allocate(allocator, text[:10])
    for n in range(10, 2000):
        assert allocator.grow(lease, n_tokens=n) is not None
        allocator.publish(lease, text[:n], n_tokens=n)
    allocator.check()
    assert edges(allocator) == [(0, 499, 1)]
    blocks = lease.blocks.tolist()
    release(allocator, lease)
    again = allocate(allocator, text)
    assert again.n_cached == 499 * 4
    assert again.blocks.tolist()[:499] == blocks[:499]


def test_an_answer_does_not_extend_an_edge_that_others_hold() -> None:
    allocator = radix(64)
    prompt = span(0, 8)
    cache(allocator, prompt)
    first = allocate(allocator, span(0, 9), 20)
    second = allocate(allocator, np.concatenate([prompt, span(50, 51)]), 20)
    publish(allocator, first, span(0, 12))
    publish(allocator, second, np.concatenate([prompt, span(50, 53)]))
    assert edges(allocator) == [(0, 8, 2), (8, 11, 1), (8, 12, 1)]
    release(allocator, first)
    release(allocator, second)
    assert allocator.match(span(0, 13)) == 12


def test_the_next_turn_of_a_chat_hits_prompt_and_answer() -> None:
    allocator = radix(64, block_size=4)
    text = span(0, 30)
    lease = allocate(allocator, text[:10], 30)
    publish(allocator, lease, text)
    release(allocator, lease)
    assert allocate(allocator, np.concatenate([text, span(90, 95)])).n_cached == 28


class TestTwins:
    """Two requests computed the same text at the same time."""

    def test_the_second_keeps_its_own_blocks_outside_the_trie(self) -> None:
        allocator = radix(32, block_size=2)
        text = span(0, 8)
        first, second = allocate(allocator, text), allocate(allocator, text)
        mine = second.blocks.tolist()
        publish(allocator, first, text)
        publish(allocator, second, text)
        assert second.blocks.tolist() == mine
        assert edges(allocator) == [(0, 4, 1)]
        third = allocate(allocator, np.concatenate([text, span(9, 10)]))
        assert third.blocks.tolist()[:4] == first.blocks.tolist()
        release(allocator, second)
        assert set(mine) <= set(allocator._pool.free_ids().tolist())
        release(allocator, first)
        release(allocator, third)
        assert allocator.stats().cached == 4

    @pytest.mark.parametrize("first_to_leave", [0, 1])
    def test_its_answer_is_published_below_the_other_ones_prompt(self, first_to_leave: int) -> None:
        allocator = radix(32)
        prompt = span(0, 6)
        texts = [np.concatenate([prompt, span(20, 24)]), np.concatenate([prompt, span(30, 34)])]
        leases = [allocate(allocator, prompt, 10) for _ in texts]
        for lease, text in zip(leases, texts, strict=True):
            publish(allocator, lease, text)
        assert allocator.stats().leased == 20
        release(allocator, leases[first_to_leave])
        # Nobody holds the prompt's copy of the one that left, so the other's copy is the only one now.
        assert allocator.stats().leased == 10
        assert allocator.stats().cached == 4
        for text in texts:
            assert allocator.match(np.concatenate([text, text])) == 10
        release(allocator, leases[1 - first_to_leave])
        assert allocator.stats().cached == 14
        for text in texts:
            assert allocator.match(np.concatenate([text, text])) == 10

    def test_a_copy_takes_the_place_of_a_cached_block_that_nobody_holds(self) -> None:
        """A full hit recomputes its last token, whose block is cached already; its answer goes on below."""
        allocator = radix(32)
        text = span(0, 12)
        blocks = cache(allocator, text[:8])
        lease = allocate(allocator, text[:8], 12)
        assert lease.n_cached == 7
        publish(allocator, lease, text)
        assert allocator.stats().cached == 0
        assert blocks[7] in allocator._pool.free_ids()
        release(allocator, lease)
        assert allocator.match(np.concatenate([text, text])) == 12

    def test_three_of_them(self) -> None:
        allocator = radix(64)
        prompt = span(0, 6)
        leases = [allocate(allocator, prompt, 8) for _ in range(3)]
        texts = [np.concatenate([prompt, span(10 * i, 10 * i + 2)]) for i in (2, 3, 4)]
        for lease, text in zip(leases, texts, strict=True):
            publish(allocator, lease, text)
        for lease in leases:
            release(allocator, lease)
        assert allocator.stats().cached == 6 + 3 * 2
        for text in texts:
            assert allocator.match(np.concatenate([text, text])) == 8


class TestBadCalls:
    def test_another_text(self) -> None:
        """Two requests' texts mixed up would poison the cache for all who come later."""
        allocator = radix(32, block_size=4)
        lease = allocate(allocator, span(0, 8), 16)
        publish(allocator, lease, span(0, 8))
        with pytest.raises(ArgumentError, match="does not go on from the 2 blocks"):
            allocator.publish(lease, span(100, 112), n_tokens=12)
        allocator.check()
        assert allocator.match(span(100, 112)) == 0

    def test_more_than_the_text(self) -> None:
        allocator = radix(16)
        lease = allocate(allocator, span(0, 4), 8)
        with pytest.raises(ArgumentError, match="n_tokens is 6, more than the 5 tokens"):
            allocator.publish(lease, span(0, 5), n_tokens=6)

    def test_more_than_the_blocks(self) -> None:
        allocator = radix(16, block_size=2)
        lease = allocate(allocator, span(0, 4))
        with pytest.raises(ArgumentError, match="n_tokens is 6, more than the 2 leased blocks of 2 tokens"):
            allocator.publish(lease, span(0, 6), n_tokens=6)
        allocator.check()
