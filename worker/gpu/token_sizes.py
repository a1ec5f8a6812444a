"""Which token counts of mixed steps are worth capturing: those whose products are quick for their size.

A matrix product is computed in tiles, tiles in waves, so its time is a staircase of the rows, with steps
that differ from library to library. The sizes are therefore measured, once, at start (about a second on an
H200): a size is kept when no larger one is as quick.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from worker.gpu.graphs import capture_one, no_garbage_collection

if TYPE_CHECKING:
    from worker.gpu.decoder import GpuDecoder

MAX_TOKENS = 4352
"""Larger steps keep the device busy longer than they take to launch, so they need no graphs."""
_MIN_GAIN = 0.015
_REPEATS = 3


def candidates(max_tokens: int) -> tuple[int, ...]:
    """Multiples of 16, up to what holds `max_tokens`: tiles of 176 or 208 rows are among the quick ones."""
    most = min(-(-max_tokens // 16) * 16, MAX_TOKENS)
    return tuple(range(16, most + 1, 16))


def worth_capturing(sizes: Sequence[int], times: Sequence[float]) -> tuple[int, ...]:
    """Ascending sizes and the time of each: those that beat every larger one clearly, and the largest."""
    kept: list[int] = []
    best = float("inf")
    for size, time in sorted(zip(sizes, times, strict=True), reverse=True):
        if time < best * (1 - _MIN_GAIN) or not kept:
            kept.append(size)
            best = min(best, time)
    return tuple(reversed(kept))


def measure(decoder: GpuDecoder, max_tokens: int, *, stream: torch.cuda.Stream) -> tuple[int, ...]:
    """Times one layer's products at every candidate on the device, inside a CUDA graph: launched one by one,
    small products would wait for the host and all look alike. Overwrites the activations."""
    sizes = candidates(max_tokens)
    times = []
    # Not zeros, nor all rows alike: such products run faster than real ones.
    for tensor in (decoder.buffers.hidden, decoder.buffers.attention):
        tensor.normal_()
    with no_garbage_collection(), torch.inference_mode(), torch.cuda.stream(stream):
        for size in sizes:
            body = partial(_products, decoder, size)
            body()  # loads the kernels
            stream.synchronize()
            graph = capture_one(body, None)
            samples = []
            for _ in range(_REPEATS + 1):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                samples.append((start, end))
            stream.synchronize()
            times.append(statistics.median(start.elapsed_time(end) for start, end in samples[1:]))
    return worth_capturing(sizes, times)


def _products(decoder: GpuDecoder, n_tokens: int) -> None:
    # The second of two layers: their weights don't stay in the cache in between.
    decoder.after_attention(0, n_tokens=n_tokens)
    decoder.before_attention(decoder.spec.n_layers - 1, n_tokens=n_tokens, first_chunk=n_tokens)
