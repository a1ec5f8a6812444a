"""Time of a kernel inside a captured graph, so that launches cost nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def graph_time_us(body: Callable[[int], None], *, n_inner: int, n_replays: int = 7) -> float:
    """Median time of one `body(i)` in µs, i from 0 to n_inner - 1 inside one captured graph."""
    import torch

    body(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n_inner):
            body(i)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(n_replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / n_inner)
    del graph
    return float(statistics.median(times))
