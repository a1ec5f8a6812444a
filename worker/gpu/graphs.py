"""CUDA graphs of decode steps: per size one of the forward pass and one of the lean sampler.

Both are replayed one after the other; a step whose rows need more than the lean sampler replays only the first.
Graphs read the step from the staging head at fixed addresses, so replaying is all that a step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class DecodeGraph:
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph


@dataclass(slots=True)
class GraphSet:
    """All captured sizes; they share one memory pool."""

    graphs: dict[int, DecodeGraph]
    seconds: float


def capture(
    sizes: tuple[int, ...],
    *,
    forward: Callable[[int], None],
    sample: Callable[[int], None],
    stream: torch.cuda.Stream,
) -> GraphSet:
    """Run each size once, so that every kernel is compiled and loaded, then capture it; the largest first, so
    that the pool never grows afterwards."""
    started = time.perf_counter()
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[int, DecodeGraph] = {}
    for size in sorted(sizes, reverse=True):
        with torch.cuda.stream(stream):
            forward(size)
            sample(size)
        stream.synchronize()
        captured = []
        for body in (forward, sample):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                body(size)
            captured.append(graph)
        graphs[size] = DecodeGraph(*captured)
    stream.synchronize()
    return GraphSet(graphs, time.perf_counter() - started)
