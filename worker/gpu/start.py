"""From the settings to a warm GPU runner."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import structlog
import torch

from checkpoint.checkpoint import Checkpoint
from worker.attention.interface import kv_bytes_per_token
from worker.config import WorkerConfig
from worker.errors import StartError
from worker.gpu.buffers import Buffers, make_buffers
from worker.gpu.cache import PagedCache
from worker.gpu.choices import most_decode_programs
from worker.gpu.core import LAUNCH_DEPTH, CoreShape, GpuCore
from worker.gpu.device import Gpu, check_model, find_gpu
from worker.gpu.graph_sizes import graph_sizes
from worker.gpu.kernel_files import check_kernels
from worker.gpu.memory import Measured, gpu_kv_budget
from worker.gpu.prebuild import specs
from worker.gpu.runner import GpuRunner
from worker.gpu.token_sizes import measure
from worker.gpu.warmup import blocks_for_largest_step, largest_step
from worker.grammar.start import make_grammar_rows
from worker.models.config import spec_from_config
from worker.models.spec import DecoderWeights, ModelSpec
from worker.runner import RunnerCapacity
from worker.weights import dummy_weights, load_weights

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
MAX_LOGPROBS = 20
_GRAPH_BYTES = 4 << 20
"""What a captured size takes of the driver's memory, generously."""


@dataclass(slots=True)
class _Parts:
    gpu: Gpu
    spec: ModelSpec
    weights: DecoderWeights
    shape: CoreShape
    buffers: Buffers
    dtype: torch.dtype
    kv_dtype: torch.dtype


def make_gpu_runner(config: WorkerConfig, checkpoint: Checkpoint) -> GpuRunner:
    """Load, measure, size the KV cache, capture graphs. Raises StartError or CheckpointError with a message
    for the user."""
    log = structlog.get_logger("worker.gpu")
    gpu = find_gpu()
    spec = spec_from_config(checkpoint.config)
    check_model(spec)
    dtype, kv_dtype = _dtypes(config)
    _check_kernels(gpu, spec, config, dtype=dtype, kv_dtype=kv_dtype)
    grammars = make_grammar_rows(config, checkpoint)
    torch.cuda.set_device(gpu.device)
    started = time.perf_counter()
    try:
        if config.load_format == "dummy":
            weights = dummy_weights(spec, device=gpu.device, dtype=dtype)
        else:
            weights = load_weights(checkpoint, spec, device=gpu.device, dtype=dtype)
        torch.cuda.synchronize(gpu.device)
        weight_bytes = torch.cuda.memory_allocated(gpu.device)
        log.info(
            "weights loaded",
            seconds=round(time.perf_counter() - started, 2),
            mib=weight_bytes >> 20,
            dtype=str(dtype)[6:],
        )
        shape = CoreShape(
            max_rows=config.max_batch_size,
            max_step_tokens=config.max_step_tokens,
            max_context=min(checkpoint.max_context, config.max_total_tokens or checkpoint.max_context),
            block_size=config.block_size,
            graph_sizes=graph_sizes(config.max_batch_size) if config.cuda_graphs == "on" else (),
        )
        n_programs = most_decode_programs(
            max_rows=shape.max_rows, n_kv_heads=spec.n_kv_heads, n_sms=gpu.n_sms
        )
        buffers = make_buffers(
            spec,
            max_tokens=shape.max_step_tokens + 64,
            max_rows=shape.max_rows,
            n_programs=n_programs,
            dtype=dtype,
            device=gpu.device,
        )
        parts = _Parts(gpu, spec, weights, shape, buffers, dtype, kv_dtype)
        measured = _measure(parts, config, weight_bytes=weight_bytes)
        per_token = kv_bytes_per_token(spec, kv_dtype)
        budget = gpu_kv_budget(config, measured, bytes_per_token=per_token, max_context=shape.max_context)
        log.info("KV cache sized", arithmetic=budget.arithmetic)
        core = _core(parts, n_blocks=budget.n_blocks)
        if shape.graph_sizes:
            core.capture_graphs(measure(core.decoder, shape.max_step_tokens, stream=core.stream))
            assert core.graphs is not None
            log.info(
                "graphs captured",
                sizes=len(shape.graph_sizes),
                token_sizes=len(core.token_sizes),
                seconds=round(core.graphs.seconds, 2),
            )
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"the model does not fit into the {gpu.memory_bytes >> 20} MiB of {gpu.name}: "
            f"{str(error).splitlines()[0]} Lower --max-batch-prefill-tokens or --max-batch-size, "
            "or use a smaller model"
        ) from error
    log.info("ready to compute", gpu=gpu.name, seconds=round(time.perf_counter() - started, 2))
    capacity = RunnerCapacity(
        model_id=checkpoint.name,
        model_hash=checkpoint.fingerprint,
        model_path=str(checkpoint.path),
        block_size=config.block_size,
        n_blocks=budget.n_blocks,
        max_rows=shape.max_rows,
        max_step_tokens=shape.max_step_tokens,
        max_context=shape.max_context,
        vocab_size=spec.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
        attention="flashinfer",
        device=f"cuda:{gpu.device.index or 0} {gpu.name}",
        dtype=str(dtype)[6:],
        kv_cache_dtype=str(kv_dtype)[6:],
        max_batch_total_tokens=budget.n_tokens,
        memory_arithmetic=budget.arithmetic,
        graph_sizes=shape.graph_sizes,
        max_logprobs=MAX_LOGPROBS,
        features=("prompt_logprobs", "grammar") if grammars is not None else ("prompt_logprobs",),
        launch_depth=LAUNCH_DEPTH,
    )
    return GpuRunner(core, capacity, use_graphs=bool(shape.graph_sizes), grammars=grammars)


def _check_kernels(
    gpu: Gpu, spec: ModelSpec, config: WorkerConfig, *, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    arch = f"{gpu.capability[0]}.{gpu.capability[1]}"
    with_fa3 = arch == "9.0" and kv_dtype == dtype
    found = specs(
        arch=arch,
        head_dims=[spec.head_dim],
        dtypes=[str(dtype)[6:]],
        kv_dtypes=["auto" if kv_dtype == dtype else config.kv_cache_dtype],
        windows=any(spec.sliding_windows or ()),
    )
    check_kernels(
        [kernel for kernel in found if kernel.name.endswith("_sm90") == with_fa3],
        arch="9.0a" if arch == "9.0" else arch,
        head_dim=spec.head_dim,
    )


def _dtypes(config: WorkerConfig) -> tuple[torch.dtype, torch.dtype]:
    dtype = DTYPES.get(config.dtype)
    if dtype is None:
        raise StartError(
            f"--dtype is {config.dtype}, but FlashInfer computes in bfloat16 or float16; "
            f"--attention torch serves {config.dtype}"
        )
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else KV_DTYPES.get(config.kv_cache_dtype)
    if kv_dtype is None or (kv_dtype.itemsize > 1 and kv_dtype != dtype):
        raise StartError(
            f"--kv-cache-dtype is {config.kv_cache_dtype}, but with --dtype {config.dtype} it must be auto, "
            "fp8_e4m3 or fp8_e5m2"
        )
    return dtype, kv_dtype


def _core(parts: _Parts, *, n_blocks: int) -> GpuCore:
    cache = PagedCache(
        parts.spec,
        n_blocks=n_blocks,
        block_size=parts.shape.block_size,
        dtype=parts.kv_dtype,
        device=parts.gpu.device,
    )
    return GpuCore(
        parts.weights,
        gpu=parts.gpu,
        shape=parts.shape,
        buffers=parts.buffers,
        cache=cache,
        dtype=parts.dtype,
    )


def _measure(parts: _Parts, config: WorkerConfig, *, weight_bytes: int) -> Measured:
    """Run the largest step over a cache just large enough for it, and see what it takes."""
    device = parts.gpu.device
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    workspace = parts.buffers.n_bytes
    core = _core(
        parts,
        n_blocks=blocks_for_largest_step(parts.shape, max_prefill_tokens=config.max_batch_prefill_tokens),
    )
    torch.cuda.reset_peak_memory_stats(device)
    cache_bytes = core.cache.data.nbytes
    largest_step(core, max_prefill_tokens=config.max_batch_prefill_tokens)
    torch.cuda.synchronize(device)
    after = torch.cuda.mem_get_info(device)[0]
    # What the driver gave away since, the test cache excepted: kernels' code, libraries' workspaces, the
    # core's own tables and the allocator's peak.
    transient = max(0, free - after - cache_bytes)
    del core
    gc.collect()
    torch.cuda.empty_cache()
    return Measured(
        total=total,
        weights=weight_bytes,
        workspace=workspace,
        transient=transient,
        graphs=_GRAPH_BYTES * (2 * len(parts.shape.graph_sizes) + 64 if parts.shape.graph_sizes else 0),
        free=free,
    )
