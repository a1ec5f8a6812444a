"""The pool of block ids: which are free, and which must be zeroed before they are used again."""

from __future__ import annotations

import numpy as np

from allocator.errors import ArgumentError
from allocator.interface import I32

N_RESERVED = 1
"""Block 0 belongs to the padding rows of graphs."""

_EMPTY: I32 = np.empty(0, dtype=np.int32)
_EMPTY.flags.writeable = False


class Pool:
    """Owns the free list over block ids 1 .. n_blocks - 1. It knows nothing of leases or tokens.

    The free list is a stack inside one int32 array that is filled from its end, so that taking and giving
    are one memcpy each and a fresh pool hands out ascending ids.
    """

    __slots__ = ("_dirty", "_free", "_head", "_n_dirty", "n_blocks")

    def __init__(self, n_blocks: int) -> None:
        if n_blocks <= N_RESERVED:
            raise ArgumentError(
                f"n_blocks is {n_blocks}; at least {N_RESERVED + 1} are needed (block 0 is reserved)"
            )
        self.n_blocks = n_blocks
        self._free: I32 = np.arange(N_RESERVED, n_blocks, dtype=np.int32)
        self._head = 0
        self._dirty = np.zeros(n_blocks, dtype=np.bool_)
        self._n_dirty = 0

    @property
    def n_free(self) -> int:
        return len(self._free) - self._head

    def take(self, n: int) -> I32:
        """The next `n` free ids, n <= n_free. A view into the free list: copy it before the next `give`."""
        head = self._head
        self._head = head + n
        return self._free[head : head + n]

    def give(self, ids: I32) -> None:
        """Put ids back. Each must have been taken; only `check` notices when one was not."""
        head = self._head
        self._head = head - len(ids)
        self._free[head - len(ids) : head] = ids

    def free_ids(self) -> I32:
        """The free ids, next one first. A view."""
        return self._free[self._head :]

    def mark_dirty(self, ids: I32) -> None:
        """These blocks may hold bad values (NaN times a zero weight is still NaN): zero them before reuse."""
        self._dirty[ids] = True
        self._n_dirty = int(np.count_nonzero(self._dirty))

    def take_dirty(self, ids: I32) -> I32:
        """The dirty ones among `ids`; they count as clean afterwards."""
        if self._n_dirty == 0:
            return _EMPTY
        dirty: I32 = ids[self._dirty[ids]]
        self._dirty[dirty] = False
        self._n_dirty -= len(dirty)
        return dirty

    def check(self) -> None:
        """Raises AssertionError when an id is out of range or free twice."""
        free = self.free_ids()
        assert 0 <= self._head <= len(self._free), f"free list head {self._head} outside 0..{len(self._free)}"
        if len(free):
            assert int(free.min()) >= N_RESERVED, f"block {int(free.min())} is reserved but free"
            assert int(free.max()) < self.n_blocks, f"block {int(free.max())} does not exist"
        counts = np.bincount(free, minlength=self.n_blocks)
        assert int(counts.max()) <= 1, f"block {int(counts.argmax())} is free {int(counts.max())} times"
        n_dirty = int(np.count_nonzero(self._dirty))
        assert n_dirty == self._n_dirty, f"{n_dirty} dirty blocks, but {self._n_dirty} counted"
