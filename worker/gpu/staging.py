"""What a step sends to the device: one packed int32 buffer, one copy.

The head has a fixed place for every array that captured graphs read; the tail holds what varies in size. Host
buffers form a ring: one is refilled only after the copy that read it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]

ALIGN = 16
"""Words: every array starts on 64 bytes, so that kernels may load wide."""

HEAD_FIELDS = (
    "rows",
    "lens",
    "sample_rows",
    "sample_index",
    "key0",
    "key1",
    "temperature",
    "top_k",
    "top_p",
    "log_min_p",
    "prefix",
    "members",
)
"""Per row of the step; each `max_rows` words."""
FLOAT_FIELDS = frozenset({"temperature", "top_p", "log_min_p"})
"""Those that hold float32 bits."""


def align(n_words: int) -> int:
    return -(-n_words // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Where the head's arrays lie."""

    max_rows: int

    @property
    def stride(self) -> int:
        return align(self.max_rows)

    def offset(self, field: str) -> int:
        return HEAD_FIELDS.index(field) * self.stride

    @property
    def slot_offset(self) -> int:
        return len(HEAD_FIELDS) * self.stride

    @property
    def chunk_offset(self) -> int:
        return self.slot_offset + ALIGN

    @property
    def n_words(self) -> int:
        return self.chunk_offset + ALIGN


class TailWriter:
    """Appends arrays behind the head. Raises `TailFull` when the buffer can't take one."""

    def __init__(self, buffer: I32, *, start: int) -> None:
        self._buffer = buffer
        self.n_words = start

    def add(self, values: npt.ArrayLike) -> tuple[int, int]:
        """Returns (offset, length) in words."""
        array = np.asarray(values, dtype=np.int32)
        offset = self.n_words
        end = offset + len(array)
        if end > len(self._buffer):
            raise TailFull(f"{end} words, but the staging buffer holds {len(self._buffer)}")
        self._buffer[offset:end] = array
        self.n_words = align(end)
        return offset, len(array)


class TailFull(RuntimeError):  # noqa: N818 (a condition, not a fault)
    """The step's variable part exceeds the staging buffer."""


class CopyEvent(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class Slot:
    """One host buffer and the event of the last copy that read it."""

    buffer: I32
    event: CopyEvent | None = None


class StagingRing:
    """Hands out host buffers in turn; waits, rarely, for the copy that still reads the next one."""

    def __init__(self, *, n_slots: int, make_buffer: Callable[[], I32]) -> None:
        self._slots = [Slot(make_buffer()) for _ in range(n_slots)]
        self._next = 0
        self.n_waits = 0

    def take(self) -> Slot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.event is not None:
            if not slot.event.query():
                self.n_waits += 1
                slot.event.synchronize()
            slot.event = None
        return slot


class TableDelta:
    """Which block table entries the device does not know yet."""

    def __init__(self, *, max_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self._n_synced = np.zeros(max_rows, dtype=np.int32)

    def forget(self, row: int) -> None:
        self._n_synced[row] = 0

    def reset(self) -> None:
        self._n_synced[:] = 0

    def n_missing(self, rows: I32, kv_lens: I32) -> int:
        """How many entries `take` would return."""
        need = -(-kv_lens // self.block_size)
        return int(np.maximum(need - self._n_synced[rows], 0).sum())

    def take(self, rows: I32, kv_lens: I32, block_tables: I32) -> tuple[I32, I32, I32]:
        """(row, column, block) of every entry that this step needs and no step before has sent."""
        need = -(-kv_lens // self.block_size)
        have = self._n_synced[rows]
        behind = np.flatnonzero(need > have)
        if not len(behind):
            empty = np.zeros(0, dtype=np.int32)
            return empty, empty, empty
        which, first = rows[behind], have[behind]
        n_new = need[behind] - first
        at = np.repeat(which, n_new)
        starts = np.cumsum(n_new) - n_new
        columns = np.arange(int(n_new.sum()), dtype=np.int32) - np.repeat(starts - first, n_new).astype(
            np.int32
        )
        self._n_synced[which] = need[behind]
        return at.astype(np.int32), columns, block_tables[at, columns]
