"""What must hold between any two calls. Each function raises AssertionError naming what broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from allocator.interface import I32
from allocator.lease import BlockLease, LeaseState
from allocator.node import ID_BYTES, Node
from allocator.pool import N_RESERVED, Pool
from allocator.radix import RadixTrie


def check_simple(pool: Pool, leases: Sequence[BlockLease]) -> None:
    pool.check()
    _check_partition(pool, [lease.blocks for lease in leases])


def check_radix(trie: RadixTrie, pool: Pool, leases: Sequence[BlockLease], *, block_size: int) -> None:
    pool.check()
    trie.queue.check()
    attached = _check_structure(trie, block_size=block_size)
    held, private = _check_leases(leases, trie)
    for node in {*attached, *held}:
        assert node.refs == held[node], f"{_name(node)} counts {node.refs} leases, {held[node]} hold it"
    _check_partition(pool, [*(node.block_ids() for node in {*attached, *held}), *private])
    n_evictable = sum(node.end - node.start for node in attached if node.refs == 0)
    assert trie.n_evictable == n_evictable, (
        f"{trie.n_evictable} evictable blocks counted, {n_evictable} found"
    )
    n_shared = sum(node.end - node.start for node, n in held.items() if n > 1)
    assert trie.n_shared == n_shared, f"{trie.n_shared} shared blocks counted, {n_shared} found"
    roots = Counter(_root(lease) for lease in leases)
    for salt, root in trie.roots.items():
        assert root.refs == roots[root], (
            f"root {salt!r} counts {root.refs} leases, {roots[root]} are below it"
        )
        assert root.refs or root.children, f"root {salt!r} is of no use"


def _check_structure(trie: RadixTrie, *, block_size: int) -> list[Node]:
    """Edges, keys, links and the order of use of all attached nodes."""
    nodes = list(trie.nodes())
    assert len(nodes) == trie.n_nodes, f"{trie.n_nodes} nodes counted, {len(nodes)} found"
    for root in trie.roots.values():
        _check_children(root)
    for node in nodes:
        name = _name(node)
        n_blocks = node.end - node.start
        assert node.attached, f"{name} is reachable but detached"
        assert n_blocks > 0, f"{name} is empty"
        assert len(node.ids) == n_blocks * ID_BYTES, f"{name} has {len(node.ids)} bytes of ids"
        assert len(node.edge) == n_blocks * block_size * ID_BYTES, (
            f"{name} has {len(node.edge)} bytes of tokens"
        )
        assert node.key == node.edge[: len(node.key)], f"{name} is filed under another first block"
        assert len(node.key) == block_size * ID_BYTES, f"{name} has a key of {len(node.key)} bytes"
        parent = node.parent
        assert parent is not None, f"{name} has no parent"
        assert node.start == parent.end, f"{name} does not begin where its parent ends"
        if parent.parent is not None:
            assert parent.refs or not node.refs, f"{name} is held, its parent is not"
            assert parent.refs or parent.stamp >= node.stamp, f"{name} was used after its parent"
        assert node.refs or node.twins is None, f"{name} is unheld, but twins hold copies of it"
        assert node.refs or node.children or node.queued, f"{name} could be evicted but is not queued"
        _check_children(node)
    return nodes


def _check_children(node: Node) -> None:
    for key, child in node.children.items():
        assert child.parent is node, f"{_name(child)} has another parent"
        assert child.key == key, f"{_name(child)} is filed under another key"


def _check_leases(leases: Sequence[BlockLease], trie: RadixTrie) -> tuple[Counter[Node], list[I32]]:
    """Walk each lease's path: how many leases hold each node, and the blocks that are in no node."""
    held: Counter[Node] = Counter()
    passes: Counter[tuple[Node, BlockLease]] = Counter()
    private: list[I32] = []
    for lease in leases:
        assert lease.state is not LeaseState.RELEASED, "a released lease is registered"
        node = lease.node
        assert node is not None, "a lease has no place in the trie"
        assert node.end <= lease.n_blocks, "a lease's deepest node ends after its table"
        below = np.ones(lease.n_blocks - node.end, dtype=np.bool_)
        for lost in lease.lost:
            held[lost] += 1
            below[lost.start - node.end : lost.end - node.end] = False
            assert not lost.attached, f"{_name(lost)} is lost but attached"
            _check_table(lease, lost)
        private.append(lease.slice(node.end, lease.n_blocks)[below])
        assert lease.state is LeaseState.SEALED or not lease.lost, "a live lease has lost nodes"
        while node.parent is not None:
            mine = lease.slice(node.start, node.end)
            if node.is_twin(lease):
                passes[node, lease] += 1
                private.append(mine)
            else:
                held[node] += 1
                _check_table(lease, node)
            assert node.attached, f"{_name(node)} is detached, but a lease's place in the trie"
            node = node.parent
    known = {*trie.nodes(), *(node for node, _ in passes), *held}
    listed = Counter((node, twin) for node in known for twin in node.twins or ())
    assert listed == passes, "twins are listed where they don't pass"
    return held, private


def _check_table(lease: BlockLease, node: Node) -> None:
    same = np.array_equal(lease.slice(node.start, node.end), node.block_ids())
    assert same, f"{_name(node)} holds other blocks than the table of a lease on it"


def _check_partition(pool: Pool, parts: Sequence[I32]) -> None:
    """Each block is free or in exactly one place."""
    counts = np.bincount(np.concatenate([pool.free_ids(), *parts]), minlength=pool.n_blocks)
    assert not counts[:N_RESERVED].any(), "the reserved block is in use"
    lost = np.flatnonzero(counts[N_RESERVED:] == 0) + N_RESERVED
    assert not len(lost), f"{len(lost)} blocks are lost, the first is {int(lost[0])}"
    many = np.flatnonzero(counts > 1)
    assert not len(many), f"{len(many)} blocks are in two places, the first is {int(many[0])}"


def _root(lease: BlockLease) -> Node:
    node = lease.node
    assert node is not None
    while node.parent is not None:
        node = node.parent
    return node


def _name(node: Node) -> str:
    return f"node {node.uid} (blocks {node.start}..{node.end - 1})"
