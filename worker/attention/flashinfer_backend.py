"""Prefill attention by FlashInfer: planned once per step, run once per layer.

A plan lives in page-locked memory until the device has copied it, so there is one wrapper, with its own
buffers, for every step that may be in flight and one more; they are used in turn, and one is planned again
only after the event of the step that used it. Decode rows don't come here: see
`worker/gpu/kernels/decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker.models.spec import ModelSpec

I32 = npt.NDArray[np.int32]

FLOAT_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What a plan needs of one step's chunks, on the host."""

    q_lens: I32
    kv_lens: I32


@dataclass(slots=True)
class _Turn:
    wrappers: dict[int, Any]
    """By window; -1: none."""
    event: torch.cuda.Event | None = None
    indices: dict[str, torch.Tensor] = field(default_factory=dict)


class FlashInferPrefill:
    """Owns the wrappers and their workspaces; never touches block tables."""

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
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._spec = spec
        self._block_size = block_size
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self.backend = "fa3" if fa3 and dtype == kv_dtype else "fa2"
        windows = spec.sliding_windows or (None,) * spec.n_layers
        self._windows = [-1 if window is None else int(window) - 1 for window in windows]
        workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns = [
            _Turn(
                {
                    window: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self.backend)
                    for window in sorted(set(self._windows))
                }
            )
            for _ in range(n_turns)
        ]
        self._current = 0
        self.n_waits = 0

    def plan(self, shape: PrefillShape, pages: torch.Tensor) -> None:
        """pages: int32 on the device, the chunks' block ids one after another."""
        self._current = (self._current + 1) % len(self._turns)
        turn = self._turns[self._current]
        if turn.event is not None and not turn.event.query():
            self.n_waits += 1
            turn.event.synchronize()
        n_pages = -(-shape.kv_lens // self._block_size)
        qo_indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(shape.q_lens))).astype(np.int32))
        kv_indptr = torch.from_numpy(np.concatenate(([0], np.cumsum(n_pages))).astype(np.int32))
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
        scale: float,
    ) -> None:
        """q, out: [n tokens, n_heads, head_dim]; cache: one layer's keys and values."""
        wrapper = self._turns[self._current].wrappers[self._windows[layer]]
        if scale == 1.0:
            wrapper.run(q, cache, out=out)
        else:
            wrapper.run(q, cache, out=out, k_scale=scale, v_scale=scale)

    def finish(self, event: torch.cuda.Event) -> None:
        """The step's last kernel precedes `event` on the stream."""
        self._turns[self._current].event = event
