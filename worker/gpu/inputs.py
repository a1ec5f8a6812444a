"""A step's inputs on the device: one packed copy, then the row table, the token ids and FlashInfer's pages.

Owns the packed copy and the device's block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.attention.flashinfer_backend import ChunkTables
from worker.gpu.buffers import Buffers
from worker.gpu.head import HeadTensors
from worker.gpu.packed import PackedBuffer
from worker.gpu.staging import FLOAT_FIELDS, HEAD_FIELDS, HeadLayout, Slot, TableDelta
from worker.gpu.step_plan import StepPlan, n_words_needed
from worker.runner import StepBatch


@dataclass(slots=True)
class RowState:
    """The device's row table."""

    table: torch.Tensor
    """int32 [max rows, max blocks per row]"""
    last: torch.Tensor
    """int32 [max rows]: the token that each row sampled last"""


class StepInputs:
    def __init__(
        self,
        *,
        max_rows: int,
        max_step_tokens: int,
        max_blocks_per_row: int,
        block_size: int,
        n_blocks: int,
        buffers: Buffers,
        device: torch.device,
        n_slots: int,
    ) -> None:
        """`n_slots`: steps in flight plus one."""
        self._device = device
        self._buffers = buffers
        self._max_rows = max_rows
        self.layout = HeadLayout(max_rows)
        n_words = self.layout.n_words + 4 * max_step_tokens + (1 << 16)
        self._packed = PackedBuffer(n_words=n_words, n_slots=n_slots, device=device)
        self.staged = self._packed.words
        self._tail = self.staged
        self.delta = TableDelta(max_rows=max_rows, block_size=block_size)
        self._pages = torch.zeros(max(1 << 16, min(n_blocks, 1 << 24)), dtype=torch.int32, device=device)
        self.rows = RowState(
            table=torch.zeros((max_rows, max_blocks_per_row), dtype=torch.int32, device=device),
            last=torch.zeros(max_rows, dtype=torch.int32, device=device),
        )
        self.head = self._head_views()

    def clear(self) -> None:
        """The head describes no live row then: all is padding."""
        self.staged.zero_()
        for name in ("sample_rows", "members"):
            start = self.layout.offset(name)
            self.staged[start : start + self.layout.stride] = -1
        self._buffers.token_row.fill_(-1)

    def take(self, batch: StepBatch) -> Slot:
        """A host buffer to pack the step into."""
        return self._packed.take(n_words_needed(batch, layout=self.layout, delta=self.delta))

    def send(self, staging: Slot, plan: StepPlan) -> None:
        """Copy the packed step to the device, on the current stream."""
        self._tail = self._packed.send(staging, n_words=plan.n_words, n_fixed=self.layout.n_words)
        if plan.delta is not None:
            self._update_table(plan)

    def stage_chunks(self, plan: StepPlan, *, n_total: int) -> None:
        """Of a mixed step: token ids, positions and rows of `n_total` tokens, padding included."""
        from worker.gpu.kernels.rows import mixed_inputs_kernel

        b, head = self._buffers, self.head
        mixed_inputs_kernel[(-(-n_total // 256),)](
            head.rows,
            head.lens,
            self.rows.last,
            self._span(plan.chunk_ids),
            self._span(plan.chunk_positions),
            self._span(plan.chunk_token_rows),
            b.ids,
            b.position,
            b.token_row,
            plan.n_decode,
            plan.n_chunk_tokens,
            n_total,
            BLOCK=256,
        )

    def chunk_pages(self, plan: StepPlan) -> torch.Tensor:
        """The chunks' block ids, one chunk's after another's."""
        from worker.gpu.kernels.rows import gather_pages_kernel

        n_chunks = len(plan.chunk_q_lens)
        if plan.n_pages > len(self._pages):
            self._pages = torch.zeros(plan.n_pages, dtype=torch.int32, device=self._device)
        pages = self._pages[: plan.n_pages]
        gather_pages_kernel[(n_chunks, -(-plan.most_pages // 1024))](
            self._span(plan.chunk_rows),
            self._span(plan.page_indptr),
            self.rows.table,
            pages,
            self.rows.table.stride(0),
            BLOCK=1024,
        )
        return pages

    def chunk_tables(self, plan: StepPlan) -> ChunkTables:
        return ChunkTables(
            rows=self._span(plan.chunk_rows), starts=self._span(plan.kv_indptr), table=self.rows.table
        )

    def decode_inputs(self, size: int) -> None:
        """Of a decode step of `size` rows, padding included."""
        from worker.gpu.kernels.rows import decode_inputs_kernel

        b, head = self._buffers, self.head
        decode_inputs_kernel[(-(-size // 256),)](
            head.rows, head.lens, self.rows.last, b.ids, b.position, b.token_row, size, BLOCK=256
        )

    def _head_views(self) -> HeadTensors:
        def field_view(name: str) -> torch.Tensor:
            start = self.layout.offset(name)
            view = self.staged[start : start + self._max_rows]
            return view.view(torch.float32) if name in FLOAT_FIELDS else view

        return HeadTensors(
            **{name: field_view(name) for name in HEAD_FIELDS},
            slot=self.staged[self.layout.slot_offset : self.layout.slot_offset + 1],
            chunk=self.staged[self.layout.chunk_offset : self.layout.chunk_offset + 1],
        )

    def _span(self, span: tuple[int, int]) -> torch.Tensor:
        return self._tail[span[0] : span[0] + span[1]]

    def _update_table(self, plan: StepPlan) -> None:
        from worker.gpu.kernels.rows import scatter_blocks_kernel

        assert plan.delta is not None
        rows, columns, blocks = plan.delta
        n = rows[1]
        scatter_blocks_kernel[(-(-n // 256),)](
            self._span(rows),
            self._span(columns),
            self._span(blocks),
            self.rows.table,
            n,
            self.rows.table.stride(0),
            BLOCK=256,
        )
