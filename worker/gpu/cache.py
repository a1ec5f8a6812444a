"""The paged KV cache in device memory: [layer][block][position][head][dim], keys and values apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class CacheStrides:
    """In elements, within one layer's keys or values."""

    block: int
    position: int
    head: int


class PagedCache:
    """Owns the memory. Block 0 is reserved: padding rows never write, so it stays zero.

    `k[layer]`, `v[layer]`: [n_blocks, block_size, n_kv_heads, head_dim] (FlashInfer's NHD layout). A value is
    stored divided by `scale` (1 unless the cache is 8-bit)."""

    def __init__(
        self, spec: ModelSpec, *, n_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.scale = 1.0
        shape = (spec.n_layers, 2, n_blocks, block_size, spec.n_kv_heads, spec.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        # An 8-bit format has no fill kernel of its own; zero is all bits zero in each.
        self.data.view(torch.uint8).zero_()
        self.k = [self.data[layer, 0] for layer in range(spec.n_layers)]
        self.v = [self.data[layer, 1] for layer in range(spec.n_layers)]
        self.strides = CacheStrides(
            block=block_size * spec.n_kv_heads * spec.head_dim,
            position=spec.n_kv_heads * spec.head_dim,
            head=spec.head_dim,
        )

    def zero_blocks(self, blocks: npt.NDArray[np.int32]) -> None:
        """In stream order: steps launched earlier still read the old values."""
        flat = self.data.view(torch.uint8)
        for block in blocks.tolist():
            flat[:, :, block].zero_()
