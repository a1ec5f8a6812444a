"""What is found: prefixes, splits, partial overlap, salts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.allocator.helpers import allocate, cache, publish, radix, release, span, tokens
from tests.allocator.peek import edges


def test_one_token_is_always_left_to_compute() -> None:
    allocator = radix(16)
    cache(allocator, span(0, 8))
    assert allocator.match(span(0, 8)) == 7
    assert allocator.match(span(0, 9)) == 8
    assert allocator.match(span(0, 1)) == 0


@pytest.mark.parametrize(("n_tokens", "n_found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_a_hit_is_whole_blocks(n_tokens: int, n_found: int) -> None:
    allocator = radix(16, block_size=4)
    cache(allocator, span(0, 11))
    assert allocator.match(span(0, n_tokens)) == n_found
    assert allocate(allocator, span(0, n_tokens)).n_cached == n_found


def test_a_hit_shares_the_blocks_in_order() -> None:
    allocator = radix(16, block_size=2)
    blocks = cache(allocator, span(0, 8))
    lease = allocate(allocator, np.concatenate([span(0, 6), tokens(50, 51)]))
    assert lease.n_cached == 6
    assert lease.blocks.tolist()[:3] == blocks[:3]
    assert lease.blocks.tolist()[3] != blocks[3]


def test_a_branch_in_the_middle_of_an_edge_splits_it() -> None:
    allocator = radix(32, block_size=2)
    left, right = span(0, 12), np.concatenate([span(0, 6), span(50, 56)])
    left_blocks = cache(allocator, left)
    assert edges(allocator) == [(0, 6, 0)]
    right_blocks = cache(allocator, right)
    assert edges(allocator) == [(0, 3, 0), (3, 6, 0), (3, 6, 0)]
    assert right_blocks[:3] == left_blocks[:3]
    for text, blocks in ((left, left_blocks), (right, right_blocks)):
        again = allocate(allocator, text)
        assert again.n_cached == 10
        assert again.blocks.tolist()[:5] == blocks[:5]


def test_a_difference_inside_a_block_ends_the_hit_before_it() -> None:
    allocator = radix(16, block_size=4)
    cache(allocator, span(0, 12))
    other = span(0, 12)
    other[6] = 99
    assert allocator.match(other) == 4
    other[0] = 99
    assert allocator.match(other) == 0


def test_a_difference_deep_in_a_long_edge_is_found() -> None:
    """Edges are compared in growing windows: differences in, at and after each of them."""
    allocator = radix(40_000)
    cache(allocator, span(0, 30_000))
    for position in (0, 1, 255, 256, 257, 1279, 1280, 6399, 22_783, 29_998):
        other = span(0, 30_000)
        other[position] = -1
        assert allocator.match(other) == position


def test_a_split_of_a_held_edge_keeps_both_holders() -> None:
    allocator = radix(32)
    text = span(0, 8)
    first = allocate(allocator, text)
    publish(allocator, first, text)
    second = allocate(allocator, text[:5])
    assert edges(allocator) == [(0, 4, 2), (4, 8, 1)]
    release(allocator, first)
    assert edges(allocator) == [(0, 4, 1), (4, 8, 0)]
    release(allocator, second)
    assert allocator.stats().cached == 8
    assert allocator.n_available == 32


def test_salts_root_separate_tries() -> None:
    allocator = radix(64, block_size=4)
    plain = cache(allocator, span(0, 16))
    tuned = cache(allocator, span(0, 16), salt="adapter")
    assert set(plain).isdisjoint(tuned)
    assert allocator.match(span(0, 16), salt="another") == 0
    assert allocate(allocator, span(0, 16)).blocks.tolist()[:3] == plain[:3]
    assert allocate(allocator, span(0, 16), salt="adapter").blocks.tolist()[:3] == tuned[:3]


def test_a_salt_that_nothing_uses_is_forgotten() -> None:
    allocator = radix(8)
    for i in range(100):
        cache(allocator, span(0, 8), salt=f"image-{i}")
        assert len(allocator._trie.roots) == 1
    release(allocator, allocate(allocator, span(0, 4), salt="never published"))
    assert "never published" not in allocator._trie.roots


def test_an_odd_salt_is_a_salt() -> None:
    allocator = radix(8)
    cache(allocator, span(0, 4), salt="\ud800 \U0001f600")
    assert allocator.match(span(0, 5), salt="\ud800 \U0001f600") == 4
    assert allocator.inspect(limit=1)["prefixes"] == []
    cache(allocator, span(0, 8))
    assert list(allocator._trie.roots) == [""]


def test_matching_changes_nothing() -> None:
    allocator = radix(8)
    old, new = cache(allocator, span(0, 4)), cache(allocator, span(10, 14))
    assert allocator.match(span(0, 5)) == 4
    lease = allocate(allocator, span(20, 22))
    assert lease.blocks.tolist() == [old[3], old[2]] or set(lease.blocks.tolist()) == set(old[2:])
    assert set(lease.blocks.tolist()).isdisjoint(new)


def test_very_deep_tries_work() -> None:
    """Each request ends one block before the one before it: one node a level, past any recursion limit."""
    allocator = radix(3000)
    text = span(0, 2500)
    cache(allocator, text)
    for n in range(2500, 1, -1):
        lease = allocator.allocate(text[:n], n_tokens=n)
        assert lease is not None
        assert lease.n_cached == n - 1
        allocator.release(lease)
    allocator.check()
    assert edges(allocator) == [(n, n + 1, 0) for n in range(2500)]
    assert allocator.match(text) == 2499
    held = allocate(allocator, text)
    assert allocator.inspect(limit=3)["prefixes"][0]["hits"] == 2500
    release(allocator, allocate(allocator, span(5000, 5500)))
    assert allocator.stats().evicted_blocks == 1
    assert allocator.flush() == 0
    release(allocator, held)
    assert allocator.stats().free == 3000
