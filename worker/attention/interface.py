"""The seam between the decoder and attention: planned once per step, run once per layer.

The KV cache of the `torch` backend is one tensor

    [n_layers, n_blocks * block_size, 2 * n_kv_heads, head_dim]

A *slot* is one KV position: slot = block * block_size + offset. A slot holds the keys of all KV heads and
then the values, just as they leave the merged qkv product, so appending a token is one row copied and
consecutive blocks are one view. Block 0 is reserved and is never written, so it always reads as zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker.models.spec import ModelSpec

I32 = npt.NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """What one step's attention depends on, on the host. Decode rows come first, then chunks; the tokens of
    the rows follow one another in the same order."""

    n_decode: int
    q_lens: I32
    """[n] tokens of each row in this step; 1 for decode rows."""
    kv_lens: I32
    """[n] KV length after this step."""
    block_tables: I32
    """[n, width] the rows' block tables; entries past the KV length are not looked at."""


class Attention(Protocol):
    """Rotates q and k, appends k and v to the cache, attends."""

    name: str

    def plan(self, batch: AttentionBatch) -> None:
        """Once per step, before the first layer."""
        ...

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: [n_tokens, (n_heads + 2 n_kv_heads) head_dim], may be overwritten.
        Returns [n_tokens, n_heads head_dim]."""
        ...

    def zero_blocks(self, blocks: I32) -> None:
        """Forget what these blocks hold, in all layers."""
        ...


class KvCache:
    """Owns the cache's memory; layout as in the module's docstring."""

    __slots__ = ("block_size", "data", "n_blocks")

    def __init__(
        self,
        spec: ModelSpec,
        *,
        n_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        shape = (spec.n_layers, n_blocks * block_size, 2 * spec.n_kv_heads, spec.head_dim)
        self.data = _zeros(shape, dtype=dtype, device=device)

    def zero(self, blocks: I32) -> None:
        for block in blocks.tolist():
            self.data[:, block * self.block_size : (block + 1) * self.block_size].zero_()


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the system for zeroed pages, which take memory when they are first used; torch.zeros
    # would write all of them at start.
    n_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(n_bytes, dtype=np.uint8)).view(dtype).view(shape)


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    return spec.n_layers * 2 * spec.n_kv_heads * spec.head_dim * dtype.itemsize
