"""Bad values and flushes: what leaves the trie, who must be preempted, what must be zeroed."""

from __future__ import annotations

import numpy as np

from tests.allocator.helpers import allocate, cache, publish, radix, release, span
from tests.allocator.peek import edges


def test_what_the_lease_published_leaves_with_all_below_it() -> None:
    allocator = radix(64)
    shared, text = span(0, 4), span(0, 10)
    cache(allocator, shared)
    bad = allocate(allocator, text)
    publish(allocator, bad, text)
    cache(allocator, span(0, 14))
    assert list(allocator.invalidate(bad)) == []
    allocator.check()
    assert allocator.match(span(0, 15)) == 4
    own = bad.blocks.tolist()[4:]
    release(allocator, bad)
    assert allocator.stats().cached == 4
    new = allocate(allocator, span(50, 110))
    dirty = allocator.take_dirty(new.blocks)
    assert set(own) < set(dirty.tolist())
    assert len(dirty) == 10
    assert len(allocator.take_dirty(new.blocks)) == 0


def test_the_hit_part_of_a_grown_edge_stays() -> None:
    """The lease extended the edge that it had hit: only its own part is bad."""
    allocator = radix(32)
    cache(allocator, span(0, 4))
    bad = allocate(allocator, span(0, 5), 10)
    publish(allocator, bad, span(0, 10))
    assert edges(allocator) == [(0, 10, 1)]
    allocator.invalidate(bad)
    allocator.check()
    assert edges(allocator) == [(0, 4, 1)]


def test_leases_that_hold_a_bad_block_are_named_and_keep_their_blocks() -> None:
    allocator = radix(64)
    text = span(0, 8)
    bad = allocate(allocator, text)
    publish(allocator, bad, text)
    victim = allocate(allocator, span(0, 12))
    bystander = allocate(allocator, span(60, 64))
    publish(allocator, victim, span(0, 12))
    publish(allocator, bystander, span(60, 64))
    assert list(allocator.invalidate(bad)) == [victim]
    allocator.check()
    assert allocator.match(span(0, 12)) == 0
    assert allocator.match(span(60, 65)) == 4
    publish(allocator, victim, span(0, 12))
    assert allocator.match(span(0, 12)) == 0, "what was computed from bad values must not be published"
    release(allocator, bad)
    assert allocator.stats().leased == 16
    release(allocator, victim)
    assert allocator.stats().free == 60


def test_a_twin_is_no_victim_and_publishes_its_own_copy() -> None:
    allocator = radix(64)
    text = span(0, 8)
    bad, twin = allocate(allocator, text), allocate(allocator, text, 10)
    publish(allocator, bad, text)
    publish(allocator, twin, text)
    assert list(allocator.invalidate(bad)) == []
    publish(allocator, twin, span(0, 9))
    assert allocator.match(span(0, 12)) == 9
    lease = allocate(allocator, span(0, 12))
    assert lease.blocks.tolist()[:8] == twin.blocks.tolist()[:8]


def test_nothing_published_means_nothing_to_take_out() -> None:
    allocator = radix(16)
    lease = allocate(allocator, span(0, 8))
    assert list(allocator.invalidate(lease)) == []
    assert list(allocator.invalidate(lease)) == []
    blocks = lease.blocks.tolist()
    release(allocator, lease)
    assert sorted(allocator.take_dirty(np.array(blocks, dtype=np.int32)).tolist()) == sorted(blocks)


def test_a_flush_forgets_everything() -> None:
    allocator = radix(32)
    cache(allocator, span(0, 8))
    live = allocate(allocator, span(50, 56))
    publish(allocator, live, span(50, 56))
    sharer = allocate(allocator, span(50, 57))
    assert sharer.n_cached == 6
    assert allocator.flush() == 8
    allocator.check()
    stats = allocator.stats()
    assert (stats.cached, stats.leased, stats.shared, stats.generation) == (0, 7, 6, 1)
    assert allocator.match(span(0, 9)) == 0
    assert allocator.match(span(50, 57)) == 0
    release(allocator, live)
    assert allocator.n_leased == 7
    release(allocator, sharer)
    assert allocator.stats().free == 32


def test_what_was_allocated_before_a_flush_is_never_published_after_it() -> None:
    allocator = radix(32)
    text = span(0, 8)
    lease = allocate(allocator, text, 12)
    publish(allocator, lease, text, 4)
    allocator.flush()
    publish(allocator, lease, text)
    assert allocator.match(text) == 0
    assert allocator.grow(lease, n_tokens=14) is not None
    release(allocator, lease)
    cache(allocator, text)
    assert allocator.match(span(0, 9)) == 8


def test_victims_are_found_after_a_flush_too() -> None:
    allocator = radix(32)
    text = span(0, 8)
    bad = allocate(allocator, text)
    publish(allocator, bad, text)
    victim = allocate(allocator, span(0, 9))
    allocator.flush()
    assert list(allocator.invalidate(bad)) == [victim]
    allocator.check()


def test_after_a_flush_only_what_the_lease_computed_is_dirty() -> None:
    """The bad lease had extended the edge that it hit, and the edge was lost as a whole."""
    allocator = radix(32)
    good = cache(allocator, span(0, 4))
    bad = allocate(allocator, span(0, 5), 10)
    publish(allocator, bad, span(0, 10))
    victim = allocate(allocator, span(0, 11))
    allocator.flush()
    assert list(allocator.invalidate(bad)) == [victim]
    release(allocator, bad)
    release(allocator, victim)
    everything = allocate(allocator, span(50, 82))
    dirty = set(allocator.take_dirty(everything.blocks).tolist())
    assert len(dirty) == 7
    assert dirty.isdisjoint(good)


def test_a_copy_of_an_invalidated_lease_never_enters_the_trie() -> None:
    """The lease passed another's prompt as a twin; its copy of it may be as bad as the rest."""
    allocator = radix(64)
    prompt = span(0, 6)
    good, bad = allocate(allocator, prompt, 8), allocate(allocator, prompt, 8)
    publish(allocator, good, np.concatenate([prompt, span(20, 22)]))
    publish(allocator, bad, np.concatenate([prompt, span(30, 32)]))
    allocator.invalidate(bad)
    allocator.check()
    good_blocks = good.blocks.tolist()
    release(allocator, good)
    lease = allocate(allocator, span(0, 7))
    assert lease.blocks.tolist()[:6] == good_blocks[:6]
    release(allocator, lease)
    release(allocator, bad)
