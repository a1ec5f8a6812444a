"""CUDA graphs. A decode step has, per size, one of the forward pass and one of the lean sampler.

Both are replayed one after the other; a step whose rows need more than the lean sampler replays the first
only. Graphs read the step from the staging head at fixed addresses, so replaying is all that a step does.

A mixed step is captured in pieces: per number of tokens everything between one layer's attention and the
next, per number of decode rows each layer's decode attention, and per number of sampled rows what lies behind
the last. Prefill attention, whose launch depends
on the step's plan, is launched between them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(slots=True)
class DecodeGraph:
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph


@dataclass(slots=True)
class GraphSet:
    """All captured sizes; they share one memory pool."""

    graphs: dict[int, DecodeGraph]
    pieces: dict[int, list[torch.cuda.CUDAGraph]]
    """By number of tokens: what lies in front of each layer's attention."""
    attends: dict[int, list[torch.cuda.CUDAGraph]]
    """By number of decode rows: each layer's decode attention."""
    tails: dict[int, torch.cuda.CUDAGraph]
    """By number of sampled rows: what lies behind the last attention."""
    seconds: float


def capture(
    sizes: tuple[int, ...],
    *,
    forward: Callable[[int], None],
    sample: Callable[[int], None],
    token_sizes: tuple[int, ...],
    pieces: Callable[[int], list[Callable[[], None]]],
    attend: Callable[[int, int], None],
    tail: Callable[[int], None],
    n_layers: int,
    stream: torch.cuda.Stream,
) -> GraphSet:
    """Run each size once, so that every kernel is compiled and loaded, then capture it; the largest first, so
    that the pool never grows afterwards."""
    started = time.perf_counter()
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[int, DecodeGraph] = {}
    piece_graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
    attends: dict[int, list[torch.cuda.CUDAGraph]] = {}
    tails: dict[int, torch.cuda.CUDAGraph] = {}
    with no_garbage_collection(), torch.inference_mode(), torch.cuda.stream(stream):
        for n_tokens in sorted(token_sizes, reverse=True):
            bodies = pieces(n_tokens)
            # All layers are alike: the first two pieces load every kernel.
            for body in bodies[:2]:
                body()
            stream.synchronize()
            piece_graphs[n_tokens] = [capture_one(body, pool) for body in bodies]
        for size in sorted(sizes, reverse=True):
            forward(size)
            sample(size)
            stream.synchronize()
            graphs[size] = DecodeGraph(
                capture_one(partial(forward, size), pool), capture_one(partial(sample, size), pool)
            )
            if token_sizes:
                tail(size)
                stream.synchronize()
                tails[size] = capture_one(partial(tail, size), pool)
                attends[size] = [capture_one(partial(attend, layer, size), pool) for layer in range(n_layers)]
    stream.synchronize()
    return GraphSet(graphs, piece_graphs, attends, tails, time.perf_counter() - started)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Freeing a tensor, an event or a graph of old while a capture runs would invalidate it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def capture_one(body: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """On the current stream, which is not the default one; pool None: memory of its own."""
    # Not `torch.cuda.graph`: it collects garbage and empties the allocator's cache each time.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    body()
    graph.capture_end()
    return graph
