"""Does the last token of the budget fit? Almost all memory is taken away first, so that what the warm-up
found is what there is; then every block is filled, in the largest steps, with the costliest sampling."""

from __future__ import annotations

import gc

import numpy as np
import torch

from bench.run_ahead import Request, RunAhead
from checkpoint.checkpoint import Checkpoint
from proto.worker_pb2 import Sampling
from worker.config import WorkerConfig
from worker.gpu.start import make_gpu_runner

_LEFT_BYTES = 7 << 30
N_ROWS = 256
N_NEW = 80
"""Enough that all rows decode together at the end."""
COSTLY = Sampling(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, typical_p=0.9, repetition_penalty=1.1,
    presence_penalty=0.1, frequency_penalty=0.1, seed=1, logprobs=True, top_logprobs=20,
)  # fmt: skip


def fill_budget(model: str, checkpoint: Checkpoint) -> str:
    """What happened, in words. An out-of-memory error is not caught."""
    gc.collect()
    torch.cuda.empty_cache()
    ballast = torch.empty(
        max(0, torch.cuda.mem_get_info()[0] - _LEFT_BYTES), dtype=torch.uint8, device="cuda"
    )
    runner = make_gpu_runner(WorkerConfig(model=model, attention="flashinfer"), checkpoint)
    capacity = runner.capacity
    size, n_blocks = capacity.block_size, capacity.n_blocks - 1
    rng = np.random.default_rng(1)
    # Each row's last block is filled to its last position.
    lengths = [
        min((n_blocks // N_ROWS + (row < n_blocks % N_ROWS)) * size, capacity.max_context) - N_NEW
        for row in range(N_ROWS)
    ]
    requests = [
        Request(rng.integers(3, capacity.vocab_size, length).tolist(), N_NEW, COSTLY) for length in lengths
    ]
    driver = RunAhead(runner)
    outputs = driver.run(requests)
    used = len({block for request in requests for block in request.blocks})
    most = max(int(result.step_us) for result in driver.results)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0] >> 20
    assert all(len(output) == N_NEW for output in outputs)
    taken = ballast.nbytes >> 20
    del ballast
    return (
        f"KV budget: {taken} MiB were taken away first. {capacity.memory_arithmetic}. {N_ROWS} rows of up to "
        f"{max(lengths) + N_NEW} tokens filled {used} of {n_blocks} blocks, with penalties, filters and 20 "
        f"logprobs on all of them; {free} MiB were left; no step ran out of memory (longest "
        f"{most / 1000:.0f} ms)."
    )
