"""What people see of an allocator: a map of block states and the hottest prefixes, as JSON-able data."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from allocator.lease import BlockLease
from allocator.node import Node, salt_of
from allocator.pool import N_RESERVED, Pool
from allocator.radix import RadixTrie

MAX_RUNS = 4096
"""A map with more runs is coarsened: a page that draws it can't show more."""
N_TOKENS_SHOWN = 32
N_LAST_SHOWN = 12
"""Prompts of one template begin alike: the end tells them apart."""

_U8 = npt.NDArray[np.uint8]


class BlockState(enum.IntEnum):
    FREE = 0
    CACHED = 1
    LEASED = 2
    SHARED = 3
    RESERVED = 4


def inspect_radix(
    trie: RadixTrie, pool: Pool, leases: Sequence[BlockLease], *, limit: int, now_s: float
) -> dict[str, Any]:
    """Cheap enough to watch a live server: it looks at leases and at prefixes that were found, not at all."""
    states = _block_states(pool, leases)
    for node in _held_by_many(leases):
        states[node.block_ids()] = BlockState.SHARED
    return {"prefixes": _hottest(trie, limit=limit, now_s=now_s), "map": _encode(states)}


def inspect_simple(pool: Pool, leases: Sequence[BlockLease]) -> dict[str, Any]:
    return {"prefixes": [], "map": _encode(_block_states(pool, leases))}


def _block_states(pool: Pool, leases: Sequence[BlockLease]) -> _U8:
    """What is neither free nor in a lease's table is cached."""
    states = np.full(pool.n_blocks, BlockState.CACHED, dtype=np.uint8)
    states[:N_RESERVED] = BlockState.RESERVED
    states[pool.free_ids()] = BlockState.FREE
    for lease in leases:
        states[lease.blocks] = BlockState.LEASED
    return states


def _held_by_many(leases: Iterable[BlockLease]) -> Iterable[Node]:
    """Nodes that two leases or more hold, detached ones too."""
    seen: set[Node] = set()
    for lease in leases:
        yield from (node for node in lease.lost if node.refs > 1)
        node = lease.node
        while node is not None and node.parent is not None and node not in seen:
            seen.add(node)
            if node.refs > 1:
                yield node
            node = node.parent


def _hottest(trie: RadixTrie, *, limit: int, now_s: float) -> list[dict[str, Any]]:
    """Prefixes by how many allocations found them; of those that always occur together only the longest. What
    finds a node finds its parent, so the search goes down from the roots, hottest first."""
    heap: list[tuple[int, int, Node]] = []

    def push_children(node: Node) -> bool:
        """Whether one of them was found as often as the node itself."""
        found = [child for child in node.children.values() if child.hits]
        for child in found:
            heapq.heappush(heap, (-child.hits, child.uid, child))
        return any(child.hits >= node.hits for child in found)

    for root in trie.roots.values():
        push_children(root)
    top: list[Node] = []
    while heap and len(top) < limit:
        node = heapq.heappop(heap)[2]
        if not push_children(node):
            top.append(node)
    return [_describe(node, now_s=now_s) for node in top]


def _describe(node: Node, *, now_s: float) -> dict[str, Any]:
    n_blocks = node.end
    n_tokens = len(node.edge) // 4 // (node.end - node.start) * n_blocks
    above = [node]
    while (parent := above[-1].parent) is not None:
        above.append(parent)
    first: list[int] = []
    for part in reversed(above):
        if len(first) >= N_TOKENS_SHOWN:
            break
        first.extend(np.frombuffer(part.edge[: 4 * (N_TOKENS_SHOWN - len(first))], dtype=np.int32).tolist())
    n_more = min(max(0, n_tokens - len(first)), N_LAST_SHOWN, len(node.edge) // 4)
    last = np.frombuffer(node.edge[len(node.edge) - 4 * n_more :], dtype=np.int32).tolist()
    return {
        "salt": salt_of(above[-1]),
        "first_tokens": first,
        "last_tokens": last,
        "n_tokens": n_tokens,
        "n_blocks": n_blocks,
        "hits": node.hits,
        "n_leases": node.refs,
        "age_s": round(now_s - node.born_s, 3),
        "idle_s": 0.0 if node.refs else round(now_s - node.used_s, 3),
    }


def _encode(states: _U8) -> dict[str, Any]:
    """Runs of [state, cells] in the order of block ids. A cell is one block, or, in a map that would be too
    long, `blocks_per_cell` blocks shown as the state that most of them have."""
    blocks_per_cell = 1
    cells = states
    while _count_runs(cells) > MAX_RUNS:
        blocks_per_cell *= 2
        cells = _coarsen(states, blocks_per_cell)
    edges = np.flatnonzero(np.diff(cells)) + 1
    starts = np.concatenate(([0], edges))
    lengths = np.diff(np.concatenate((starts, [len(cells)])))
    return {
        "n_blocks": len(states),
        "blocks_per_cell": blocks_per_cell,
        "states": [state.name.lower() for state in BlockState],
        "runs": [[int(state), int(n)] for state, n in zip(cells[starts], lengths, strict=True)],
    }


def _count_runs(cells: _U8) -> int:
    return int(np.count_nonzero(np.diff(cells))) + 1


def _coarsen(states: _U8, blocks_per_cell: int) -> _U8:
    n_cells = -(-len(states) // blocks_per_cell)
    padded = np.full(n_cells * blocks_per_cell, len(BlockState), dtype=np.uint8)
    padded[: len(states)] = states
    grid = padded.reshape(n_cells, blocks_per_cell)
    counts = np.stack([np.count_nonzero(grid == state, axis=1) for state in BlockState])
    commonest: _U8 = counts.argmax(axis=0).astype(np.uint8)
    return commonest
