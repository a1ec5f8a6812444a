"""How many KV blocks fit: the arithmetic of the warm-up, as numbers and as the line that is printed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.attention.interface import kv_bytes_per_token
from worker.config import WorkerConfig
from worker.errors import StartError
from worker.host_memory import HostMemory, host_memory
from worker.models.size import step_bytes
from worker.models.spec import ModelSpec

_MIB = 1 << 20
CPU_DEFAULT_CAP_BYTES = 4 << 30
"""Unless the user sets max_batch_total_tokens, a worker takes no more of a shared host than this."""


@dataclass(frozen=True, slots=True)
class KvBudget:
    n_blocks: int
    """The reserved block 0 included."""
    n_tokens: int
    """What requests may use."""
    arithmetic: str


def cpu_kv_budget(
    config: WorkerConfig, spec: ModelSpec, *, dtype: torch.dtype, memory: HostMemory | None = None
) -> KvBudget:
    """Call it when the weights are loaded: what they took is no longer available. Raises StartError when not
    even one block fits, or when the user asks for more than fits."""
    memory = memory or host_memory()
    per_token = kv_bytes_per_token(spec, dtype)
    work = activation_bytes(config, spec, dtype=dtype)
    usable = max(int((memory.available - work) * config.wiggle_room), 0)
    fits = usable // (per_token * config.block_size) - 1
    line = (
        f"({memory.available // _MIB} MiB available ({memory.bound}) - {work // _MIB} MiB activations) "
        f"* {config.wiggle_room} wiggle_room = {usable // _MIB} MiB"
    )
    if fits < 1:
        raise StartError(
            f"not enough memory for one KV block: {line}, but the reserved block and one more take "
            f"{2 * per_token * config.block_size // _MIB + 1} MiB (--block-size {config.block_size}); lower "
            "--max-batch-prefill-tokens or --max-batch-size, or give the worker more memory"
        )
    asked = config.max_batch_total_tokens
    if asked is not None:
        n_blocks = -(-asked // config.block_size)
        if n_blocks > fits:
            raise StartError(
                f"--max-batch-total-tokens is {asked}, but {fits * config.block_size} tokens fit: {line}"
            )
        line += f", lowered to {asked} tokens by --max-batch-total-tokens"
    else:
        n_blocks = fits
        cap = max(CPU_DEFAULT_CAP_BYTES // (per_token * config.block_size), 1)
        if n_blocks > cap:
            n_blocks = cap
            line += f", of which {CPU_DEFAULT_CAP_BYTES // _MIB} MiB by default"
    n_tokens = n_blocks * config.block_size
    line += f" / {per_token} bytes per token = {n_tokens} tokens in {n_blocks} blocks of {config.block_size}"
    return KvBudget(n_blocks + 1, n_tokens, line)


def activation_bytes(config: WorkerConfig, spec: ModelSpec, *, dtype: torch.dtype) -> int:
    """An upper estimate of what the largest step needs beside weights and KV."""
    return step_bytes(
        spec,
        max_step_tokens=config.max_step_tokens,
        max_batch_size=config.max_batch_size,
        itemsize=dtype.itemsize,
    )
