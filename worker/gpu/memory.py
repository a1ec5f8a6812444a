"""The KV cache's share of the device's memory: the arithmetic of the warm-up, and the line that is
printed."""

from __future__ import annotations

from dataclasses import dataclass

from worker.config import WorkerConfig
from worker.errors import StartError

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes, as the warm-up found them."""

    total: int
    weights: int
    workspace: int
    """Activations of the largest step, allocated for good."""
    transient: int
    """What the largest step allocated beside them, with the costliest sampling."""
    graphs: int
    free: int
    """With weights and workspace in place, nothing else."""


@dataclass(frozen=True, slots=True)
class GpuKvBudget:
    n_blocks: int
    """The reserved block 0 included."""
    n_tokens: int
    arithmetic: str


def gpu_kv_budget(
    config: WorkerConfig, measured: Measured, *, bytes_per_token: int, max_context: int
) -> GpuKvBudget:
    """Raises StartError, naming the flags that help, when not even two blocks fit or more is asked for."""
    m = measured
    usable = max(int((m.free - m.transient - m.graphs) * config.wiggle_room), 0)
    per_block = bytes_per_token * config.block_size
    fits = usable // per_block - 1
    line = (
        f"({m.free // _MIB} MiB free after {m.weights // _MIB} MiB weights and "
        f"{m.workspace // _MIB} MiB workspace of {m.total // _MIB} MiB - {m.transient // _MIB} MiB "
        f"largest step - {m.graphs // _MIB} MiB graphs) * {config.wiggle_room} wiggle_room = "
        f"{usable // _MIB} MiB"
    )
    if fits < 1:
        raise StartError(
            f"not enough GPU memory for one KV block: {line}, but the reserved block and one more take "
            f"{2 * per_block // _MIB + 1} MiB; lower --max-batch-prefill-tokens or --max-batch-size, use "
            "--kv-cache-dtype fp8_e4m3 or a smaller model"
        )
    n_blocks = fits
    asked = config.max_batch_total_tokens
    if asked is not None:
        n_blocks = -(-asked // config.block_size)
        if n_blocks > fits:
            raise StartError(
                f"--max-batch-total-tokens is {asked}, but {fits * config.block_size} tokens fit: {line}"
            )
        line += f", lowered to {asked} tokens by --max-batch-total-tokens"
    # More than every row at full length can never be used.
    most = config.max_batch_size * -(-max_context // config.block_size)
    if asked is None and n_blocks > most:
        n_blocks = most
        line += f", capped at {config.max_batch_size} rows of {max_context} tokens"
    n_tokens = n_blocks * config.block_size
    line += f" / {bytes_per_token} bytes per token = {n_tokens} tokens "
    line += f"in {n_blocks} blocks of {config.block_size}"
    return GpuKvBudget(n_blocks + 1, n_tokens, line)
