"""Which decode rows attend to a shared prefix together. Pure numpy.

Rows whose block tables begin alike are put into groups of at most `group_rows` (as many as fill one tensor
core tile); a group reads what all its rows share once. The answer changes only with the set of rows, so it
is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]

MIN_TOKENS = 256
"""Shorter prefixes are not worth a second pass and a merge."""


@dataclass(slots=True)
class Sharing:
    prefix: I32
    """[n] leading positions that a row's group attends to for it; a multiple of the block size, 0 without a
    group"""
    members: I32
    """[n groups, group_rows] places of the rows in the step; -1 for none"""

    @property
    def n_positions(self) -> int:
        """Of all groups' prefixes, each once."""
        return int(self.prefix[self.members[:, 0]].sum()) if len(self.members) else 0


def find_sharing(tables: I32, kv_lens: I32, *, block_size: int, group_rows: int, max_groups: int) -> Sharing:
    """tables: [n, width] of the decode rows, in their order. When there are more groups than `max_groups`,
    those that save most are kept."""
    n = len(tables)
    prefix = np.zeros(n, dtype=np.int32)
    none = Sharing(prefix, np.zeros((0, max(group_rows, 1)), dtype=np.int32))
    if group_rows < 2 or n < 2 or max_groups < 1:
        return none
    order = np.argsort(tables[:, 0], kind="stable")
    starts = np.flatnonzero(np.diff(tables[order, 0], prepend=-1))
    if len(starts) == n:
        return none
    found: list[tuple[int, int, npt.NDArray[np.int64]]] = []
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), n], strict=True):
        for at in range(start, end - 1, group_rows):
            rows = order[at : min(at + group_rows, end)]
            if len(rows) < 2:
                continue
            # The new token's own block is nobody else's.
            width = int((kv_lens[rows].min() - 1) // block_size)
            differs = np.flatnonzero((tables[rows, :width] != tables[rows[0], :width]).any(axis=0))
            shared = int(differs[0]) if len(differs) else width
            if shared * block_size >= MIN_TOKENS:
                found.append(((len(rows) - 1) * shared, shared * block_size, rows))
    found.sort(key=lambda item: -item[0])
    members = np.full((min(len(found), max_groups), group_rows), -1, dtype=np.int32)
    for index, (_, length, rows) in enumerate(found[:max_groups]):
        members[index, : len(rows)] = rows
        prefix[rows] = length
    return Sharing(prefix, members)


class SharingCache:
    """Remembers the last answer: blocks that rows share stay shared as long as the rows live."""

    def __init__(self, *, block_size: int, group_rows: int) -> None:
        self._block_size = block_size
        self.group_rows = group_rows
        self._key = b""
        self._sharing: Sharing | None = None

    def find(self, *, rows: I32, epochs: I32, kv_lens: I32, block_tables: I32, max_groups: int) -> Sharing:
        """Arguments of the decode rows alone; block_tables of all rows, indexed by row."""
        key = rows.tobytes() + epochs.tobytes() + max_groups.to_bytes(4, "little")
        if self._sharing is None or key != self._key:
            most = max(1, -(-int(kv_lens.max()) // self._block_size)) if len(kv_lens) else 1
            self._sharing = find_sharing(
                block_tables[rows, :most],
                kv_lens,
                block_size=self._block_size,
                group_rows=self.group_rows,
                max_groups=max_groups,
            )
            self._key = key
        return self._sharing

    def reset(self) -> None:
        self._sharing = None
