"""A lease: the blocks that one request holds."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from allocator.errors import LeaseError
from allocator.interface import I32

if TYPE_CHECKING:
    from allocator.node import Node

_MIN_SLACK_BLOCKS = 8


class LeaseState(enum.Enum):
    LIVE = enum.auto()
    """Publishes what it computes."""
    SEALED = enum.auto()
    """Keeps its blocks, never publishes again: invalidated, or older than a flush."""
    RELEASED = enum.auto()


TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.LIVE: frozenset({LeaseState.SEALED, LeaseState.RELEASED}),
    LeaseState.SEALED: frozenset({LeaseState.SEALED, LeaseState.RELEASED}),
    LeaseState.RELEASED: frozenset(),
}


class BlockLease:
    """Owns one block table and the lease's state; which of its blocks are published is the trie's to know.

    `node` is the deepest trie node that this lease holds (the trie's root when none, None without a trie),
    and `lost` are the nodes, deepest first, that it still holds after they were taken out of the trie. The
    table's other blocks are private: copies of a twin's blocks, or not published. An entry of the table is
    written once and never changes, so views handed out stay true.
    """

    __slots__ = ("_n_blocks", "_table", "lost", "n_cached", "n_published", "node", "owner", "state")

    def __init__(
        self, owner: object, table: I32, *, n_cached: int, n_published: int, node: Node | None
    ) -> None:
        self.owner = owner
        self.state = LeaseState.LIVE
        self.n_cached = n_cached
        """Leading tokens found in the cache at allocation."""
        self.n_published = n_published
        """Leading blocks whose text was in the trie at the last publish, as this lease's or a twin's."""
        self.node = node
        self.lost: list[Node] = []
        self._table = table
        self._n_blocks = len(table)

    @property
    def n_blocks(self) -> int:
        return self._n_blocks

    @property
    def blocks(self) -> I32:
        """A read-only view."""
        view = self._table[: self._n_blocks]
        view.flags.writeable = False
        return view

    def slice(self, start: int, end: int) -> I32:
        """Block ids of the positions start .. end - 1, in blocks. A view."""
        return self._table[start:end]

    def extend(self, ids: I32) -> I32:
        """Append ids; the view of them inside the table. Amortised O(len(ids))."""
        start = self._n_blocks
        end = start + len(ids)
        if end > len(self._table):
            table: I32 = np.empty(end + end // 2 + _MIN_SLACK_BLOCKS, dtype=np.int32)
            table[:start] = self._table[:start]
            self._table = table
        self._table[start:end] = ids
        self._n_blocks = end
        return self._table[start:end]

    def enter(self, state: LeaseState) -> None:
        """Change the state. Raises LeaseError where the table of transitions has no such step."""
        if state not in TRANSITIONS[self.state]:
            raise LeaseError(
                f"a lease of {self._n_blocks} blocks is {self.state.name}, it can't become {state.name}"
            )
        self.state = state
