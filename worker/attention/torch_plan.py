"""How one step's attention is cut into dense pieces: shared prefixes, tails of decode rows, chunks.

Pure numpy. Nothing here copies KV: it only says which slots are read together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.attention.interface import AttentionBatch

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 64
"""A shared part shorter than this is read by each row on its own: the merge would cost more."""
_MAX_PADDING = 1.5
"""Decode rows are attended together while the longest is at most this many times the shortest …"""
_FREE_PADDING_TOKENS = 64
"""… or this much longer."""


@dataclass(slots=True, frozen=True)
class Shared:
    """Leading blocks that several decode rows have in common."""

    rows: I64
    """Places within the decode rows."""
    slots: I64
    """[n_shared] the slots that all of them attend to."""


@dataclass(slots=True, frozen=True)
class Tails:
    """Decode rows of similar remaining length, attended as one padded batch."""

    rows: I64
    slots: I64
    """[n_rows, longest]; padding reads slot 0."""
    lengths: I64
    """[n_rows]"""


@dataclass(slots=True, frozen=True)
class Chunk:
    """A row's run of prompt tokens."""

    start: int
    """Index of its first token within the step."""
    q_len: int
    slots: I64
    """[n_kv] what its tokens attend to, oldest first; the last `q_len` are its own."""


@dataclass(slots=True, frozen=True)
class Pieces:
    shared: list[Shared]
    tails: list[Tails]
    chunks: list[Chunk]


def cut(batch: AttentionBatch, *, block_size: int, window: int | None, share: bool) -> Pieces:
    """The pieces of a step for layers of this sliding window (None: full attention)."""
    n = batch.n_decode
    starts = np.zeros(n, dtype=np.int64)
    ends = batch.kv_lens[:n].astype(np.int64)
    shared: list[Shared] = []
    if window is not None:
        starts = np.maximum(ends - window, 0)
    elif share and n > 1:
        shared = find_shared(batch, block_size=block_size)
        for group in shared:
            starts[group.rows] = len(group.slots)
    tails = _tails(batch.block_tables[:n], starts, ends, block_size=block_size)
    return Pieces(shared, tails, _chunks(batch, block_size=block_size, window=window))


def token_slots(batch: AttentionBatch, *, block_size: int) -> tuple[I64, I64]:
    """Positions and slots of every token of the step, [n_tokens] each."""
    q_lens = batch.q_lens.astype(np.int64)
    rows = np.repeat(np.arange(len(q_lens)), q_lens)
    first = np.cumsum(q_lens) - q_lens
    positions = np.arange(len(rows)) - (first - (batch.kv_lens - q_lens))[rows]
    blocks = batch.block_tables[rows, positions // block_size].astype(np.int64)
    return positions, blocks * block_size + positions % block_size


def as_run(slots: I64) -> slice | None:
    """The slots as one slice, when they are consecutive."""
    first = int(slots[0])
    if int(slots[-1]) - first != len(slots) - 1 or (np.diff(slots) != 1).any():
        return None
    return slice(first, first + len(slots))


def find_shared(batch: AttentionBatch, *, block_size: int) -> list[Shared]:
    """Groups of decode rows whose leading blocks are the same. A row is in one group at most; the group's
    length is what all its members share, short of each one's newest token."""
    n = batch.n_decode
    tables = batch.block_tables[:n]
    full = (batch.kv_lens[:n] - 1) // block_size
    candidates = np.flatnonzero(full * block_size >= MIN_SHARED_TOKENS)
    if len(candidates) < 2:
        return []
    _, inverse, counts = np.unique(tables[candidates, 0], return_inverse=True, return_counts=True)
    groups: list[Shared] = []
    for index in np.flatnonzero(counts > 1):
        rows = candidates[inverse == index]
        limit = int(full[rows].min())
        differs = (tables[rows, :limit] != tables[rows[0], :limit]).any(axis=0)
        n_blocks = int(differs.argmax()) if differs.any() else limit
        if n_blocks * block_size >= MIN_SHARED_TOKENS:
            groups.append(
                Shared(rows, slots_of(tables[rows[0]], 0, n_blocks * block_size, block_size=block_size))
            )
    return groups


def _tails(tables: I32, starts: I64, ends: I64, *, block_size: int) -> list[Tails]:
    lengths = ends - starts
    order = np.argsort(lengths, kind="stable")
    out: list[Tails] = []
    begin = 0
    while begin < len(order):
        shortest = int(lengths[order[begin]])
        most = max(shortest * _MAX_PADDING, shortest + _FREE_PADDING_TOKENS)
        stop = int(np.searchsorted(lengths[order], most, side="right"))
        rows = np.sort(order[begin:stop])
        longest = int(lengths[rows].max())
        positions = starts[rows, None] + np.arange(longest)
        inside = positions < ends[rows, None]
        blocks = np.take_along_axis(
            tables[rows], np.where(inside, positions, 0) // block_size, axis=1
        ).astype(np.int64)
        slots = np.where(inside, blocks * block_size + positions % block_size, 0)
        out.append(Tails(rows, slots, lengths[rows]))
        begin = stop
    return out


def _chunks(batch: AttentionBatch, *, block_size: int, window: int | None) -> list[Chunk]:
    chunks: list[Chunk] = []
    start = batch.n_decode
    for row in range(batch.n_decode, len(batch.q_lens)):
        q_len, kv_len = int(batch.q_lens[row]), int(batch.kv_lens[row])
        first = 0 if window is None else max(kv_len - q_len - window + 1, 0)
        slots = slots_of(batch.block_tables[row], first, kv_len, block_size=block_size)
        chunks.append(Chunk(start, q_len, slots))
        start += q_len
    return chunks


def slots_of(table: I32, first: int, last: int, *, block_size: int) -> I64:
    positions = np.arange(first, last, dtype=np.int64)
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size
