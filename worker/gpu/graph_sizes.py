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


def pick_size(sizes: tuple[int, ...], n_rows: int) -> int | None:
    """The smallest captured size that holds `n_rows` (or tokens); None when none does."""
    index = bisect_left(sizes, n_rows)
    return sizes[index] if index < len(sizes) else None
