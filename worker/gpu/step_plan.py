"""One step, resolved into the words that the device needs: pure numpy, no torch.

`pack` fills a staging buffer and says where everything lies; `runner.py` copies and launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.gpu.sharing import Sharing
from worker.gpu.staging import ALIGN, HeadLayout, TableDelta, TailWriter
from worker.runner import StepBatch

I32 = npt.NDArray[np.int32]
Span = tuple[int, int]
"""(offset, length) in words of the staging buffer."""


@dataclass(slots=True)
class SampleKeys:
    """Per sampled row, in their order in the step."""

    key0: npt.NDArray[np.uint32]
    key1: npt.NDArray[np.uint32]
    temperature: npt.NDArray[np.float32]
    top_k: I32
    top_p: npt.NDArray[np.float32]
    log_min_p: npt.NDArray[np.float32]


@dataclass(slots=True)
class StepPlan:
    n_decode: int
    """Decode rows, padding excluded."""
    n_padded: int
    """Decode rows that the pass computes."""
    n_chunk_tokens: int
    n_words: int
    """Of the staging buffer; what is copied."""
    sampled: npt.NDArray[np.int64]
    """Places in `batch.rows` of the rows that sample."""
    delta: tuple[Span, Span, Span] | None
    """rows, columns, blocks of new block table entries"""
    chunk_ids: Span
    chunk_positions: Span
    chunk_token_rows: Span
    chunk_rows: Span
    page_indptr: Span
    kv_indptr: Span
    n_pages: int
    most_pages: int
    """Of one chunk row."""
    chunk_q_lens: I32
    chunk_kv_lens: I32

    @property
    def n_tokens(self) -> int:
        return self.n_padded + self.n_chunk_tokens


def sampled_places(batch: StepBatch) -> npt.NDArray[np.int64]:
    return np.flatnonzero(batch.samples)


def n_words_needed(batch: StepBatch, *, layout: HeadLayout, delta: TableDelta) -> int:
    """An upper bound of what `pack` writes."""
    n_chunk_tokens = int(batch.q_lens[batch.n_decode :].sum())
    n_chunks = len(batch.rows) - batch.n_decode
    n_new = delta.n_missing(batch.rows, batch.kv_lens)
    return layout.n_words + 3 * (n_new + n_chunk_tokens) + 3 * n_chunks + 2 + 9 * ALIGN


def pack(
    batch: StepBatch,
    *,
    buffer: I32,
    layout: HeadLayout,
    delta: TableDelta,
    n_padded: int,
    keys: SampleKeys,
    slot: int,
    chunk: int,
    sharing: Sharing,
) -> StepPlan:
    """Fill `buffer`, which holds at least `n_words_needed`. slot: where the device puts the result; chunk: KV
    positions of one split of decode attention."""
    n = batch.n_decode
    sampled = sampled_places(batch)
    _fill_head(
        batch, buffer=buffer, layout=layout, n_padded=n_padded, sampled=sampled, keys=keys, sharing=sharing
    )
    buffer[layout.slot_offset], buffer[layout.chunk_offset] = slot, chunk
    tail = TailWriter(buffer, start=layout.n_words)
    spans = None
    new_rows, new_columns, new_blocks = delta.take(batch.rows, batch.kv_lens, batch.block_tables)
    if len(new_rows):
        spans = (tail.add(new_rows), tail.add(new_columns), tail.add(new_blocks))
    q_lens, kv_lens, rows = batch.q_lens[n:].copy(), batch.kv_lens[n:].copy(), batch.rows[n:]
    n_pages = -(-kv_lens // delta.block_size)
    return StepPlan(
        n_decode=n,
        n_padded=n_padded,
        n_chunk_tokens=int(q_lens.sum()),
        sampled=sampled,
        delta=spans,
        chunk_ids=tail.add(_chunk_ids(batch, rows=rows, q_lens=q_lens, kv_lens=kv_lens)),
        chunk_positions=tail.add(_chunk_positions(q_lens, kv_lens)),
        chunk_token_rows=tail.add(np.repeat(rows, q_lens)),
        chunk_rows=tail.add(rows),
        page_indptr=tail.add(np.concatenate(([0], np.cumsum(n_pages)))),
        kv_indptr=tail.add(np.concatenate(([0], np.cumsum(kv_lens)))),
        n_words=tail.n_words,
        n_pages=int(n_pages.sum()),
        most_pages=int(n_pages.max()) if len(n_pages) else 0,
        chunk_q_lens=q_lens,
        chunk_kv_lens=kv_lens,
    )


def _fill_head(
    batch: StepBatch,
    *,
    buffer: I32,
    layout: HeadLayout,
    n_padded: int,
    sampled: npt.NDArray[np.int64],
    keys: SampleKeys,
    sharing: Sharing,
) -> None:
    n, n_sampled = batch.n_decode, len(sampled)

    def field(name: str) -> I32:
        start = layout.offset(name)
        return buffer[start : start + layout.stride]

    field("rows")[:n] = batch.rows[:n]
    field("rows")[n:] = 0
    field("lens")[:n] = batch.kv_lens[:n]
    field("lens")[n:] = 0
    field("prefix")[:n] = sharing.prefix
    field("prefix")[n:] = 0
    members = sharing.members.reshape(-1)
    field("members")[: len(members)] = members
    field("members")[len(members) :] = -1
    field("sample_rows")[:n_sampled] = batch.rows[sampled]
    field("sample_rows")[n_sampled:] = -1
    ends = np.cumsum(batch.q_lens) - 1
    ends[n:] += n_padded - n
    field("sample_index")[:n_sampled] = ends[sampled]
    field("sample_index")[n_sampled:] = 0
    for name, values in (
        ("key0", keys.key0),
        ("key1", keys.key1),
        ("temperature", keys.temperature),
        ("top_k", keys.top_k),
        ("top_p", keys.top_p),
        ("log_min_p", keys.log_min_p),
    ):
        field(name)[:n_sampled] = np.ascontiguousarray(values).view(np.int32)


def _chunk_ids(batch: StepBatch, *, rows: I32, q_lens: I32, kv_lens: I32) -> I32:
    if not len(rows):
        return np.zeros(0, dtype=np.int32)
    parts = [
        batch.tokens[row, end - length : end]
        for row, length, end in zip(rows.tolist(), q_lens.tolist(), kv_lens.tolist(), strict=True)
    ]
    return np.concatenate(parts)


def _chunk_positions(q_lens: I32, kv_lens: I32) -> I32:
    """kv_len - q_len … kv_len - 1 of each chunk."""
    ends = np.cumsum(q_lens)
    return (np.arange(int(q_lens.sum())) + np.repeat(kv_lens - ends, q_lens)).astype(np.int32)
