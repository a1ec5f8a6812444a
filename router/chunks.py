"""The size of one prompt's part of a step."""

from __future__ import annotations


def chunk_size(
    *, start: int, end: int, left: int, most: int, block_size: int, chunking: bool, is_first: bool
) -> int:
    """Tokens of [start, end) that go into this step, of which `left` of `most` may still be placed; 0: none
    now. is_first: no other chunk is in the step.

    A chunk that does not end its prompt ends at a block border where it can, so that all of it can be shared.
    Without chunking a prompt goes whole, unless not even an empty step would hold it (a long answer that is
    computed again after a preemption).
    """
    need = end - start
    if need <= left:
        return need
    if left < 1 or (not chunking and (need <= most or not is_first)):
        return 0
    aligned = (start + left) // block_size * block_size - start
    if aligned > 0:
        return aligned
    return left if is_first else 0
