"""Prefill attention by FlashInfer: planned once per step, run once per layer.

On Hopper, long chunks attend to keys and values that were first gathered from their blocks into one piece
(`worker/gpu/kernels/gather.py`): loads of whole tiles by the copy engine make attention 15 % faster than
loads through a block table, and let it read a cache of 8-bit values. Prompts that begin in the step attend to
their keys where the qkv product left them.

A plan lives in page-locked memory until the device has copied it, so there is one wrapper, with its own
buffers, for every step that may be in flight and one more; they are used in turn, and one is planned again
only after the event of the step that used it. Decode rows don't come here: see
`worker/gpu/kernels/decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.models.spec import ModelSpec

I32 = npt.NDArray[np.int32]

FLOAT_WORKSPACE_BYTES = 128 << 20
GATHER_BYTES = 512 << 20
"""Of gathered keys and values; chunks with more behind them read through their block tables."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a plan needs of one step's chunks, on the host."""

    q_lens: I32
    kv_lens: I32


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """Where the chunks' blocks stand, on the device, int32."""

    rows: torch.Tensor
    """[n chunks]"""
    starts: torch.Tensor
    """[n chunks + 1]: KV positions before each chunk's, and of all"""
    table: torch.Tensor
    """[max rows, max blocks per row]"""


class Source(Enum):
    """Where a step's chunks find their keys and values."""

    BLOCKS = auto()
    GATHERED = auto()
    OWN = auto()
    """They are the chunks' own, as they left the product (the keys rotated in place)."""


@dataclass(slots=True)
class _Turn:
    wrappers: dict[int, Any]
    """By window; -1: none."""
    dense: Any = None
    """The wrapper over keys in one piece; None: there never are."""
    source: Source = Source.BLOCKS
    tables: ChunkTables | None = None
    """Of a step that gathers."""
    n_longest: int = 0
    event: torch.cuda.Event | None = None
    indices: dict[str, torch.Tensor] = field(default_factory=dict)


class FlashInferPrefill:
    """Owns the wrappers, their workspaces and the gathered keys; never writes block tables."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        n_turns: int,
        fa3: bool,
        max_context: int,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        self._spec = spec
        self._block_size = block_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self.backend = "fa3" if fa3 and dtype == kv_dtype else "fa2"
        windows = spec.sliding_windows or (None,) * spec.n_layers
        self._windows = [-1 if window is None else int(window) - 1 for window in windows]
        width = spec.n_kv_heads * spec.head_dim
        self._gather_tokens = (
            min(max_context, GATHER_BYTES // (2 * width * dtype.itemsize))
            if fa3 and set(self._windows) == {-1}
            else 0
        )
        gathered = torch.empty(
            (2, self._gather_tokens, spec.n_kv_heads, spec.head_dim), dtype=dtype, device=device
        )
        self._gathered = (gathered[0], gathered[1])
        self.attends_own = self._gather_tokens > 0 and dtype == kv_dtype
        """Whether rotated keys have to be left in place."""
        workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns = [
            _Turn(
                {
                    window: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self.backend)
                    for window in sorted(set(self._windows))
                },
                BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
                if self._gather_tokens
                else None,
            )
            for _ in range(n_turns)
        ]
        self._current = 0
        self.n_waits = 0

    def source(self, shape: PrefillShape) -> Source:
        """Which way to plan a step of this shape."""
        if self.attends_own and bool((shape.q_lens == shape.kv_lens).all()):
            return Source.OWN
        group = self._spec.n_heads // self._spec.n_kv_heads
        fits = int(shape.kv_lens.sum()) <= self._gather_tokens
        return Source.GATHERED if fits and worth_gathering(shape, group=group) else Source.BLOCKS

    def plan_own(self, shape: PrefillShape) -> None:
        turn = self._plan_dense(shape)
        turn.source, turn.tables = Source.OWN, None

    def plan_gathered(self, shape: PrefillShape, tables: ChunkTables) -> None:
        turn = self._plan_dense(shape)
        turn.source = Source.GATHERED
        turn.tables, turn.n_longest = tables, int(shape.kv_lens.max())

    def _plan_dense(self, shape: PrefillShape) -> _Turn:
        turn = self._next_turn()
        spec = self._spec
        turn.dense.plan(
            _indptr(shape.q_lens),
            _indptr(shape.kv_lens),
            spec.n_heads,
            spec.n_kv_heads,
            spec.head_dim,
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        return turn

    def plan(self, shape: PrefillShape, pages: torch.Tensor) -> None:
        """pages: int32 on the device, the chunks' block ids one after another."""
        turn = self._next_turn()
        turn.source, turn.tables = Source.BLOCKS, None
        n_pages = -(-shape.kv_lens // self._block_size)
        qo_indptr, kv_indptr = _indptr(shape.q_lens), _indptr(n_pages)
        last = torch.from_numpy(((shape.kv_lens - 1) % self._block_size + 1).astype(np.int32))
        spec = self._spec
        for window, wrapper in turn.wrappers.items():
            wrapper.plan(
                qo_indptr,
                kv_indptr,
                pages,
                last,
                spec.n_heads,
                spec.n_kv_heads,
                spec.head_dim,
                self._block_size,
                causal=True,
                window_left=window,
                q_data_type=self._dtype,
                kv_data_type=self._kv_dtype,
            )

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        *,
        own: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> None:
        """q, out: [n tokens, n_heads, head_dim]; cache: one layer's keys and values; own: the chunks' keys
        and values [n tokens, n_kv_heads, head_dim], read where that is planned."""
        turn = self._turns[self._current]
        if turn.source is not Source.BLOCKS:
            if turn.tables is not None:
                self._gather(turn.tables, cache, n_longest=turn.n_longest, scale=scale)
                own = self._gathered
            turn.dense.run(q, *own, out=out)
            return
        wrapper = turn.wrappers[self._windows[layer]]
        if scale == 1.0:
            wrapper.run(q, cache, out=out)
        else:
            wrapper.run(q, cache, out=out, k_scale=scale, v_scale=scale)

    def finish(self, event: torch.cuda.Event) -> None:
        """The step's last kernel precedes `event` on the stream."""
        self._turns[self._current].event = event

    def _next_turn(self) -> _Turn:
        self._current = (self._current + 1) % len(self._turns)
        turn = self._turns[self._current]
        if turn.event is not None and not turn.event.query():
            self.n_waits += 1
            turn.event.synchronize()
        return turn

    def _gather(
        self, tables: ChunkTables, cache: tuple[torch.Tensor, torch.Tensor], *, n_longest: int, scale: float
    ) -> None:
        from worker.gpu.kernels.gather import TOKENS, gather_kv_kernel

        width = self._spec.n_kv_heads * self._spec.head_dim
        gather_kv_kernel[(-(-n_longest // TOKENS), len(tables.rows))](
            *cache,
            *self._gathered,
            tables.rows,
            tables.starts,
            tables.table,
            tables.table.stride(0),
            scale,
            WIDTH=width,
            WIDTH_PAD=1 << (width - 1).bit_length(),
            BLOCK_SIZE=self._block_size,
            N_TOKENS=TOKENS,
        )


def worth_gathering(shape: PrefillShape, *, group: int) -> bool:
    """Whether what the chunks gain exceeds the gathering, by measured times (bench/prefill_attention.py on an
    H200): a seventh of attention's time, which grows with queries × keys × query heads, against a copy of the
    keys, which grows with keys × KV heads. group: query heads of one KV head."""
    q, kv = shape.q_lens.astype(np.int64), shape.kv_lens.astype(np.int64)
    return bool(group * int((q * (2 * kv - q)).sum()) // 2 >= 2200 * int(kv.sum()) + 6_000_000)


def _indptr(lens: I32) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32))
