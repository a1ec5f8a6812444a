"""One node of the trie: a run of whole blocks with the tokens that they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allocator.interface import I32

if TYPE_CHECKING:
    from allocator.lease import BlockLease

ID_BYTES = 4
"""Tokens and block ids are int32."""


class Node:
    """Owns one edge: `edge` holds the tokens and `ids` the block ids as int32 bytes, for the positions
    start .. end - 1, counted in blocks from the root. Both grow at their end in amortised O(1) and are cut at
    either end.

    All blocks of a node share their fate: the same leases hold them, and they were last used together. A hit
    or a branch in the middle of an edge splits the node. `refs` counts the leases that hold the node's
    blocks; a root (parent None, no blocks) counts the leases below it. `twins` are leases with published
    blocks below this node that hold own copies of its text instead of its blocks.
    A detached node is out of the trie: it lives as long as leases hold it, in their `lost`, unchanged.
    """

    __slots__ = (
        "attached",
        "born_s",
        "children",
        "edge",
        "end",
        "hits",
        "ids",
        "key",
        "parent",
        "queued",
        "refs",
        "stamp",
        "start",
        "twins",
        "uid",
        "used_s",
    )

    def __init__(
        self, *, uid: int, parent: Node | None, key: bytes, edge: bytearray, ids: bytearray, start: int
    ) -> None:
        self.uid = uid
        self.parent = parent
        self.key = key
        """The first block's tokens: the key in the parent's `children`. A root's is its salt in UTF-8."""
        self.edge = edge
        self.ids = ids
        self.start = start
        self.end = start + len(ids) // ID_BYTES
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.twins: list[BlockLease] | None = None
        self.stamp = 0
        """Logical time of the last release by a lease that held this node."""
        self.queued = False
        """Has an entry in the eviction queue."""
        self.attached = True
        self.hits = 0
        """Allocations that found this node, or its beginning before it grew."""
        self.born_s = 0.0
        self.used_s = 0.0

    def block_ids(self) -> I32:
        """A view of `ids`: drop it before the node changes."""
        return np.frombuffer(self.ids, dtype=np.int32)

    def is_twin(self, lease: BlockLease) -> bool:
        """Whether this lease passes here with own copies."""
        return self.twins is not None and lease in self.twins


def new_root(uid: int, salt: str) -> Node:
    return Node(
        uid=uid,
        parent=None,
        key=salt.encode(errors="surrogatepass"),
        edge=bytearray(),
        ids=bytearray(),
        start=0,
    )


def salt_of(root: Node) -> str:
    return root.key.decode(errors="surrogatepass")


def count_common(edge: bytearray, run: memoryview) -> int:
    """Leading tokens that `edge` (int32 bytes) and `run` (int32) share; `run` is not longer than the edge."""
    if edge.startswith(run):
        return len(run)
    mine = np.frombuffer(edge, dtype=np.int32, count=len(run))
    theirs = np.frombuffer(run, dtype=np.int32)
    start, size = 0, 256
    while start < len(run):
        differ = mine[start : start + size] != theirs[start : start + size]
        first = int(differ.argmax())
        if differ[first]:
            return start + first
        start += size
        size = min(4 * size, 16384)
    return len(run)
