"""What the tests see of a radix allocator's inside."""

from __future__ import annotations

from typing import Any

from allocator.allocator import RadixAllocator
from allocator.node import ID_BYTES, Node, salt_of


def cached_blocks(allocator: RadixAllocator) -> dict[tuple[str, bytes], tuple[int, int]]:
    """(salt, whole prefix) of each published block: its id and the number of leases that hold it."""
    n_edge = allocator.block_size * ID_BYTES
    found: dict[tuple[str, bytes], tuple[int, int]] = {}
    for salt, root in allocator._trie.roots.items():
        stack: list[tuple[Node, bytes]] = [(root, b"")]
        while stack:
            node, prefix = stack.pop()
            for i, block in enumerate(node.block_ids().tolist()):
                found[salt, prefix + bytes(node.edge[: (i + 1) * n_edge])] = block, node.refs
            whole = prefix + bytes(node.edge)
            stack.extend((child, whole) for child in node.children.values())
    return found


def edges(allocator: RadixAllocator, salt: str = "") -> list[tuple[int, int, int]]:
    """(start, end, refs) of each node of one trie, in blocks, sorted."""
    found = [
        (node.start, node.end, node.refs) for node in allocator._trie.nodes() if salt_of(_root(node)) == salt
    ]
    return sorted(found)


def snapshot(allocator: RadixAllocator) -> dict[str, Any]:
    """Everything that the allocator knows, in a form that compares."""
    trie, pool = allocator._trie, allocator._pool
    return {
        "stats": allocator.stats(),
        "free": pool.free_ids().tolist(),
        "dirty": pool._dirty.tolist(),
        "now": trie.now,
        "roots": {salt: (root.uid, root.refs) for salt, root in trie.roots.items()},
        "nodes": {node.uid: _state(node) for node in trie.nodes()},
        "queue": [(stamp, uid) for stamp, uid, _ in trie.queue._heap],
        "leases": [
            (lease.state, lease.blocks.tolist(), lease.n_published, lease.node and lease.node.uid)
            for lease in allocator._leases
        ],
    }


def _state(node: Node) -> tuple[Any, ...]:
    parent = node.parent
    assert parent is not None
    return (
        parent.uid,
        node.start,
        node.end,
        bytes(node.edge),
        bytes(node.ids),
        node.refs,
        node.stamp,
        node.hits,
        node.queued,
        list(node.twins or ()),
        node.used_s,
    )


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
