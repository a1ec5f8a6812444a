"""Steps that nobody asked for: they compile, load and measure what later steps will need."""

from __future__ import annotations

import numpy as np
import torch

from proto.worker_pb2 import Sampling
from worker.gpu.core import CoreShape, GpuCore
from worker.runner import StepBatch

N_WARM_TOKENS = 1 << 15
"""Token ids of steps that nobody asked for; an id outside the vocabulary counts as 0."""

_MAX_START = 8192


def blocks_for_largest_step(shape: CoreShape, *, max_prefill_tokens: int) -> int:
    """Blocks that `largest_step` writes, the reserved one included."""
    return 2 + shape.max_rows + -(-max_prefill_tokens // shape.block_size)


def make_batch(
    shape: CoreShape,
    *,
    n_decode: int,
    decode_len: int,
    chunk_lens: list[int],
    n_blocks: int,
    chunk_start: int = 0,
    seq: int = 1,
) -> StepBatch:
    """Decode rows of `decode_len` tokens and prompts' chunks of `chunk_lens` behind `chunk_start` positions
    that are there already. Blocks are given out in order from 1 and, when they run out, again from 1
    (contents don't matter here)."""
    n = n_decode + len(chunk_lens)
    kv_lens = np.array(
        [decode_len] * n_decode + [chunk_start + length for length in chunk_lens], dtype=np.int32
    )
    q_lens = np.array([1] * n_decode + chunk_lens, dtype=np.int32)
    tables = np.zeros((shape.max_rows, shape.max_blocks_per_row), dtype=np.int32)
    at = 0
    for row in range(n):
        need = -(-int(kv_lens[row]) // shape.block_size)
        tables[row, :need] = (np.arange(at, at + need) % max(1, n_blocks - 1)) + 1
        at += need
    longest = int(kv_lens.max(initial=1))
    rows = np.arange(n, dtype=np.int32)
    return StepBatch(
        seq=seq,
        admits=[],
        evicts=rows[:0],
        zero_blocks=rows[:0],
        rows=rows,
        n_decode=n_decode,
        q_lens=q_lens,
        kv_lens=kv_lens,
        samples=np.ones(n, dtype=np.bool_),
        epochs=np.zeros(n, dtype=np.int32),
        block_tables=tables,
        # Not all alike: equal rows draw less power, so that products run faster than real ones do.
        tokens=np.random.default_rng(seq).integers(
            0, N_WARM_TOKENS, (shape.max_rows, longest), dtype=np.int32
        ),
        n_known=np.full(shape.max_rows, longest, dtype=np.int32),
    )


def run_step(core: GpuCore, batch: StepBatch, *, allow_graph: bool) -> None:
    with torch.inference_mode(), torch.cuda.stream(core.stream):
        launched = core.launch(batch, allow_graph=allow_graph)
        core.copy_out(launched)
    launched.copied.synchronize()
    for row in batch.rows.tolist():
        core.forget_row(row)


def largest_step(core: GpuCore, *, max_prefill_tokens: int) -> None:
    """Full prompts beside every decode row, then the costliest sampling of all rows."""
    shape, n_blocks = core.shape, core.cache.n_blocks
    longest = min(shape.max_context, max_prefill_tokens)
    n_chunks = max(1, min(shape.max_rows, max_prefill_tokens // longest))
    n_decode = shape.max_rows - n_chunks
    chunks = [longest] * n_chunks
    run_step(
        core,
        make_batch(shape, n_decode=n_decode, decode_len=1, chunk_lens=chunks, n_blocks=n_blocks),
        allow_graph=False,
    )
    # Chunks behind positions that are there already are attended to in other ways, depending on their length.
    for length in (1, min(longest, max(1, shape.max_context // 2))):
        start = min(shape.max_context, _MAX_START + length) - length
        batch = make_batch(
            shape, n_decode=0, decode_len=1, chunk_lens=[length], chunk_start=start, n_blocks=n_blocks
        )
        run_step(core, batch, allow_graph=False)
    costly = Sampling(
        temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.9, repetition_penalty=1.1,
        presence_penalty=0.1, frequency_penalty=0.1, seed=1, logprobs=True, top_logprobs=20,
    )  # fmt: skip
    plain = Sampling(temperature=0.0)
    filtered = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=1)
    one = np.zeros(1, dtype=np.int32)
    for sampling in (costly, filtered, plain):
        for row in range(shape.max_rows):
            core.sampler.admit(row, sampling, tokens=one, n_prompt=1)
        run_step(
            core,
            make_batch(shape, n_decode=shape.max_rows, decode_len=2, chunk_lens=[], n_blocks=n_blocks),
            allow_graph=False,
        )
