"""What both allocators refuse before they change anything."""

from __future__ import annotations

from allocator.errors import ArgumentError, LeaseError
from allocator.interface import I32, Lease
from allocator.lease import BlockLease, LeaseState


def as_run(tokens: I32) -> memoryview:
    """The memory of a contiguous, not empty, one-dimensional int32 array, as a memoryview of ints."""
    try:
        run = tokens.data
    except AttributeError as error:
        raise ArgumentError(f"tokens must be an int32 array, not {type(tokens).__name__}") from error
    if run.format != "i" or run.ndim != 1 or not run.c_contiguous or not len(run):
        raise ArgumentError(
            f"tokens must be a contiguous int32 array of one or more tokens, not dtype {tokens.dtype} "
            f"of shape {tokens.shape} with strides {tokens.strides}"
        )
    return run


def count_blocks(n_tokens: int, block_size: int) -> int:
    """Blocks that `n_tokens` positions need."""
    return -(-n_tokens // block_size)


def check_room(n_tokens: int, run: memoryview) -> None:
    """An allocation covers its text at least."""
    if n_tokens < len(run):
        raise ArgumentError(f"n_tokens is {n_tokens}, less than the {len(run)} tokens of the text")


def check_published(n_tokens: int, n_known: int, lease: BlockLease, block_size: int) -> None:
    """Only known text in leased blocks can be published."""
    if n_tokens > n_known:
        raise ArgumentError(f"n_tokens is {n_tokens}, more than the {n_known} tokens of the text")
    if n_tokens > lease.n_blocks * block_size:
        raise ArgumentError(
            f"n_tokens is {n_tokens}, more than the {lease.n_blocks} leased blocks "
            f"of {block_size} tokens hold"
        )


def own(lease: Lease, owner: object) -> BlockLease:
    """The lease, if `owner` granted it and it is not released. Raises LeaseError."""
    if not isinstance(lease, BlockLease) or lease.owner is not owner:
        raise LeaseError("the lease was granted by another allocator")
    if lease.state is LeaseState.RELEASED:
        raise LeaseError(f"the lease of {lease.n_blocks} blocks is already released")
    return lease
