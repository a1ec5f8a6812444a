"""The one place that chooses an allocator."""

from __future__ import annotations

from allocator.allocator import RadixAllocator
from allocator.interface import Allocator
from allocator.simple import SimpleAllocator


def make_allocator(*, n_blocks: int, block_size: int, prefix_caching: bool) -> Allocator:
    """An allocator over blocks 1 .. n_blocks - 1 (block 0 is reserved) of `block_size` tokens each. Raises
    ArgumentError when there is no block to hand out."""
    if prefix_caching:
        return RadixAllocator(n_blocks=n_blocks, block_size=block_size)
    return SimpleAllocator(n_blocks=n_blocks, block_size=block_size)
