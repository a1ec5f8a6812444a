"""Which sizes are captured as CUDA graphs, and which of them serves a step."""

from __future__ import annotations

from bisect import bisect_left


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then by 8 to 256, then by 32: ascending, up to and including `max_rows`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_rows + 1, 32)]
    found = [size for size in sizes if size <= max_rows]
    if not found or found[-1] != max_rows:
        found.append(max_rows)
    return tuple(found)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Token counts of mixed steps that are captured piece by piece: by 16 to 256, by 32 to 512, by 64 to 1,024, by
    128 to 2,048, by 256 beyond, so that padding wastes little. The last one holds `max_tokens`; steps of more than
    4,352 tokens keep the device busy longer than they take to launch, so they need none."""
    steps = [
        *range(16, 256, 16),
        *range(256, 512, 32),
        *range(512, 1024, 64),
        *range(1024, 2048, 128),
        *range(2048, 4353, 256),
    ]
    sizes = [size for size in steps if size < max_tokens]
    if len(sizes) < len(steps):
        sizes.append(-(-max_tokens // 64) * 64)
    return tuple(sizes)


def pick_size(sizes: tuple[int, ...], n_rows: int) -> int | None:
    """The smallest captured size that holds `n_rows` (or tokens); None when none does."""
    index = bisect_left(sizes, n_rows)
    return sizes[index] if index < len(sizes) else None
