"""The order in which unheld leaves are evicted."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocator.node import Node

_MIN_ENTRIES = 64


class EvictionQueue:
    """Unheld leaves by the stamp of their last use, oldest first, with lazy deletion.

    A node has at most one entry. An entry may be stale: its node has since been held, extended, removed or
    used again. `oldest` repairs or drops stale entries when they surface, so `push` costs nothing for a node
    that is already queued and O(log n) otherwise.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.stamp, node.uid, node))

    def oldest(self) -> Node:
        """The least recently used unheld leaf. It stays queued. Raises IndexError when there is none."""
        heap = self._heap
        while True:
            stamp, _, node = heap[0]
            if not node.attached or node.refs or node.children:
                heapq.heappop(heap)
                node.queued = False
            elif stamp != node.stamp:
                heapq.heapreplace(heap, (node.stamp, node.uid, node))
            else:
                return node

    def pop(self) -> None:
        """Drop the entry of the node that `oldest` has just returned."""
        _, _, node = heapq.heappop(self._heap)
        node.queued = False

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()

    def compact(self, n_nodes: int) -> None:
        """Drop entries of dead nodes once they outnumber the living ones."""
        if len(self._heap) <= 2 * n_nodes + _MIN_ENTRIES:
            return
        entries = self._heap
        self._heap = []
        for _, _, node in entries:
            node.queued = False
            if node.attached and not node.refs and not node.children:
                self.push(node)

    def check(self) -> None:
        """Raises AssertionError unless each queued node has exactly one entry."""
        seen: set[int] = set()
        for stamp, uid, node in self._heap:
            assert node.queued, f"node {uid} has an entry but is not marked queued"
            assert uid not in seen, f"node {uid} is queued twice"
            assert stamp <= node.stamp, (
                f"node {uid} is queued with stamp {stamp}, after its last use {node.stamp}"
            )
            seen.add(uid)
