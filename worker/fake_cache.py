"""The fake worker's KV cache: one hash per position, and the proof that a row reads what it should.

Every block keeps the sum of the hashes written into it (its digest). A row knows, from its tokens alone,
what the digests of its blocks have to be; comparing the two shows each block that was never computed, was
overwritten or belongs to another text, at the cost of one comparison per block and step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bool = npt.NDArray[np.bool_]

_ZERO = np.uint64(0)


@dataclass(frozen=True, slots=True)
class Violation:
    """A row read a block that does not hold its text."""

    seq: int
    row: int
    epoch: int
    block: int
    first_position: int
    """Of the positions that the block should hold."""
    message: str


class FakeCache:
    """[n_blocks, block_size] hashes with their digests, and what each row expects of its blocks."""

    def __init__(self, *, n_blocks: int, block_size: int, max_rows: int, max_blocks_per_row: int) -> None:
        self.block_size = block_size
        self.values: U64 = np.zeros((n_blocks, block_size), dtype=np.uint64)
        self.digests: U64 = np.zeros(n_blocks, dtype=np.uint64)
        self.fill: I32 = np.zeros(n_blocks, dtype=np.int32)
        """Leading positions written since the block was last started."""
        self.poisoned: Bool = np.zeros(n_blocks, dtype=np.bool_)
        """Holds bad values after an injected fault; reading them is no violation, the result is garbage."""
        self.expected: U64 = np.zeros((max_rows, max_blocks_per_row), dtype=np.uint64)
        self._open_sums: U64 = np.zeros(max_rows, dtype=np.uint64)

    def zero(self, blocks: I32) -> None:
        self.values[blocks] = _ZERO
        self.digests[blocks] = _ZERO
        self.fill[blocks] = 0
        self.poisoned[blocks] = False

    # ---- one position for each of many rows ----

    def expect_decode(self, rows: I32, positions: I32, hashes: U64) -> None:
        sums = np.where(positions % self.block_size == 0, _ZERO, self._open_sums[rows]) + hashes
        self._open_sums[rows] = sums
        self.expected[rows, positions // self.block_size] = sums

    def write_decode(self, blocks: I32, slots: I32, hashes: U64) -> None:
        """`blocks` are distinct."""
        fill = self.fill[blocks]
        starts = slots == 0
        old = np.where((slots < fill) & ~starts, self.values[blocks, slots], _ZERO)
        self.digests[blocks] = np.where(starts, _ZERO, self.digests[blocks]) + hashes - old
        self.fill[blocks] = np.where(starts, 1, np.maximum(fill, slots + 1))
        self.values[blocks, slots] = hashes
        if starts.any():
            self.poisoned[blocks[starts]] = False

    # ---- a run of positions of one row ----

    def expect_run(self, row: int, start: int, hashes: U64) -> None:
        if len(hashes) == 0:
            return
        first, sums = self._block_sums(start, hashes)
        if start % self.block_size:
            sums[:1] += self._open_sums[row : row + 1]
        self.expected[row, first : first + len(sums)] = sums
        self._open_sums[row] = sums[-1]

    def write_run(self, table: I32, start: int, hashes: U64) -> None:
        """`table`: the row's blocks."""
        size = self.block_size
        first, sums = self._block_sums(start, hashes)
        blocks = table[first : first + len(sums)]
        positions = np.arange(start, start + len(hashes))
        slots = positions % size
        ends = np.full(len(sums), size, dtype=np.int32)
        ends[-1] = slots[-1] + 1
        n_head = min(size - start % size, len(hashes)) if start % size else 0
        if n_head:
            head, low, high = int(blocks[0]), start % size, start % size + n_head
            known = max(low, min(high, int(self.fill[head])))
            replaced = np.add.reduce(self.values[head : head + 1, low:known], axis=1, dtype=np.uint64)
            sums[:1] += self.digests[head : head + 1] - replaced
            ends[0] = max(high, int(self.fill[head]))
        else:
            self.poisoned[blocks[0]] = False
        self.values[blocks[positions // size - first], slots] = hashes
        self.digests[blocks] = sums
        self.fill[blocks] = ends
        self.poisoned[blocks[1:]] = False

    def _block_sums(self, start: int, hashes: U64) -> tuple[int, U64]:
        """The first block's index and the sum of the hashes that fall into each block."""
        size = self.block_size
        first = start // size
        cuts = np.arange(first * size, start + len(hashes), size) - start
        cuts[0] = 0
        return first, np.add.reduceat(hashes, cuts, dtype=np.uint64)

    # ---- reading ----

    def last_hashes(self, rows: I32, kv_lens: I32, tables: I32) -> U64:
        """What stands in the last position of each row, read through its block table."""
        last = kv_lens - 1
        return self.values[tables[rows, last // self.block_size], last % self.block_size]

    def differences(self, rows: I32, kv_lens: I32, tables: I32) -> tuple[I64, I64, U64]:
        """Blocks that don't hold what their row expects, as (index into `rows`, index into the row's table,
        difference)."""
        n_blocks = (kv_lens + self.block_size - 1) // self.block_size
        widest = int(n_blocks.max())
        if len(rows) * widest <= 2 * int(n_blocks.sum()) + 4096:
            wrong = self.digests[tables[rows, :widest]] - self.expected[rows, :widest]
            wrong[np.arange(widest) >= n_blocks[:, None]] = _ZERO
            if not wrong.any():
                return _NOTHING
            which, places = np.nonzero(wrong)
            return which, places, wrong[which, places]
        # One long row among short ones: as a flat list, the short ones don't pay for it.
        which = np.repeat(np.arange(len(rows)), n_blocks)
        places = np.arange(len(which)) - np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
        flat_rows = rows[which]
        flat = self.digests[tables[flat_rows, places]] - self.expected[flat_rows, places]
        bad = np.flatnonzero(flat)
        return which[bad], places[bad], flat[bad]

    def describe(self, *, seq: int, row: int, epoch: int, place: int, block: int, kv_len: int) -> Violation:
        first = place * self.block_size
        n_needed = min(self.block_size, kv_len - first)
        n_there = int(self.fill[block])
        if n_there < n_needed:
            what = f"{n_there} of the {n_needed} positions it needs there were computed"
        else:
            what = "it holds other tokens than the row's"
        return Violation(
            seq=seq,
            row=row,
            epoch=epoch,
            block=block,
            first_position=first,
            message=f"step {seq}: row {row} (epoch {epoch}) reads block {block} for positions {first} to "
            f"{first + n_needed - 1}, but {what}",
        )


_NOTHING: tuple[I64, I64, U64] = (
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.int64),
    np.zeros(0, dtype=np.uint64),
)
