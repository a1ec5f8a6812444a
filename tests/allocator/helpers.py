from __future__ import annotations

import numpy as np

from allocator.allocator import RadixAllocator
from allocator.interface import I32, Lease


def tokens(*values: int) -> I32:
    return np.array(values, dtype=np.int32)


def span(start: int, end: int) -> I32:
    return np.arange(start, end, dtype=np.int32)


def radix(n_blocks: int, block_size: int = 1) -> RadixAllocator:
    """`n_blocks` that can be handed out, the reserved one aside."""
    return RadixAllocator(n_blocks=n_blocks + 1, block_size=block_size)


def allocate(allocator: RadixAllocator, text: I32, n_tokens: int | None = None, *, salt: str = "") -> Lease:
    lease = allocator.allocate(text, n_tokens=len(text) if n_tokens is None else n_tokens, salt=salt)
    assert lease is not None
    allocator.check()
    return lease


def publish(allocator: RadixAllocator, lease: Lease, text: I32, n_tokens: int | None = None) -> None:
    allocator.publish(lease, text, n_tokens=len(text) if n_tokens is None else n_tokens)
    allocator.check()


def release(allocator: RadixAllocator, lease: Lease) -> None:
    allocator.release(lease)
    allocator.check()


def cache(allocator: RadixAllocator, text: I32, *, salt: str = "") -> list[int]:
    """Run a request for this text and end it. Returns its blocks."""
    lease = allocate(allocator, text, salt=salt)
    blocks: list[int] = lease.blocks.tolist()
    publish(allocator, lease, text)
    release(allocator, lease)
    return blocks
