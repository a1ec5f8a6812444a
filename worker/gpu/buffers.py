"""Every activation of a step, allocated once: captured graphs need fixed addresses, and no later step may run
out of memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.gpu.linear import SplitWorkspace
from worker.models.spec import ModelSpec

SAMPLE_TILE = 2048
"""Vocabulary entries that one sampling program looks at."""


@dataclass(slots=True)
class Buffers:
    """[max tokens, …] unless said otherwise; a step uses the first rows."""

    ids: torch.Tensor
    position: torch.Tensor
    token_row: torch.Tensor
    hidden: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attention: torch.Tensor
    gate_up: torch.Tensor
    inner: torch.Tensor
    sampled_hidden: torch.Tensor
    """[max rows, hidden]"""
    sampled_attention: torch.Tensor
    """[max rows, n_heads * head_dim]"""
    logits: torch.Tensor
    """float32 [max rows, vocab]"""
    work: torch.Tensor
    """The same, changed by penalties, bias and masks."""
    seen: torch.Tensor
    """int32 [max rows, vocab], by row of the table: see `kernels/adjust.py`"""
    floor: torch.Tensor
    best: torch.Tensor
    best_id: torch.Tensor
    attention_part: torch.Tensor
    attention_ml: torch.Tensor
    attention_count: torch.Tensor
    split: SplitWorkspace

    @property
    def n_bytes(self) -> int:
        tensors = [
            value
            for value in (getattr(self, name) for name in self.__slots__)
            if isinstance(value, torch.Tensor)
        ]
        tensors += [self.split.part, self.split.count]
        return sum(tensor.nbytes for tensor in tensors)


def make_buffers(
    spec: ModelSpec,
    *,
    max_tokens: int,
    max_rows: int,
    n_programs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Buffers:
    """`n_programs`: the most rows * n_kv_heads * splits of any decode size."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    n_tiles = -(-spec.vocab_size // SAMPLE_TILE)
    q_width = spec.n_heads * spec.head_dim
    group = spec.n_heads // spec.n_kv_heads
    return Buffers(
        ids=torch.zeros(max_tokens, dtype=torch.int32, device=device),
        position=torch.zeros(max_tokens, dtype=torch.int32, device=device),
        token_row=torch.full((max_tokens,), -1, dtype=torch.int32, device=device),
        hidden=empty(max_tokens, spec.hidden_size),
        normed=empty(max_tokens, spec.hidden_size),
        qkv=empty(max_tokens, q_width + 2 * spec.n_kv_heads * spec.head_dim),
        q=empty(max_tokens, q_width),
        attention=torch.zeros((max_tokens, q_width), dtype=dtype, device=device),
        gate_up=empty(max_tokens, 2 * spec.intermediate_size),
        inner=empty(max_tokens, spec.intermediate_size),
        sampled_hidden=empty(max_rows, spec.hidden_size),
        sampled_attention=empty(max_rows, q_width),
        logits=empty(max_rows, spec.vocab_size, of=torch.float32),
        work=empty(max_rows, spec.vocab_size, of=torch.float32),
        seen=torch.zeros((max_rows, spec.vocab_size), dtype=torch.int32, device=device),
        floor=torch.full((max_rows,), -torch.inf, dtype=torch.float32, device=device),
        best=empty(max_rows * n_tiles, of=torch.float32),
        best_id=empty(max_rows * n_tiles, of=torch.int32),
        # Own and shared splits side by side.
        attention_part=empty(2 * n_programs * group * spec.head_dim, of=torch.float32),
        attention_ml=empty(2 * n_programs * group * 2, of=torch.float32),
        attention_count=torch.zeros(max_rows * spec.n_kv_heads, dtype=torch.int32, device=device),
        split=SplitWorkspace(
            part=empty(4 << 20, of=torch.float32), count=torch.zeros(4096, dtype=torch.int32, device=device)
        ),
    )
