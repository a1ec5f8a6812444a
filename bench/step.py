"""Time the bare engine step on a GPU, by rows and context, against the memory floor.

    python -m bench.step --out bench/results/step-h200.json

Weights are random, of the Llama-3.1-8B shape (or of `--model`'s config). Each decode case replays steps as
the engine does: the next one is launched while one runs, results are collected behind it. The floor is the
bytes that a step must read (weights and KV) over the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.gpu.core import GpuCore, Launched
    from worker.models.spec import ModelSpec
    from worker.runner import StepBatch

DECODE_CASES = (
    (1, 256), (8, 640), (16, 1152), (32, 1152), (64, 640), (64, 2240), (128, 640), (256, 640), (4, 30000),
)  # fmt: skip
SHARED_CASES = ((64, 2240, 2048), (16, 8448, 8192), (256, 1408, 1024))
"""(rows, context, positions of it that all rows share)"""


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Prompts' chunks behind what is there already, beside decode rows."""

    n_decode: int
    decode_len: int
    chunks: tuple[int, ...]
    start: int = 0

    @property
    def name(self) -> str:
        if not self.chunks:
            return f"{self.n_decode} × {self.decode_len}"
        size, n = self.chunks[0], len(self.chunks)
        behind = f" behind {self.start}" if self.start else ""
        return f"{self.n_decode} × {self.decode_len} + chunks {size} × {n}{behind}"


PREFILL_CASES = (
    *(PrefillCase(0, 0, (n,)) for n in (128, 256, 512, 1024, 2048, 4096, 8192)),
    *(PrefillCase(0, 0, (512,) * n) for n in (2, 4, 8, 16)),
    *(PrefillCase(0, 0, (n,), start) for n in (2048, 4096, 8192) for start in (8192, 24576 - n)),
    PrefillCase(8, 1088, (1024,)),
    PrefillCase(16, 640, (256,)),
    PrefillCase(16, 640, (1024,)),
    PrefillCase(64, 2240, (128,), 2048),
    PrefillCase(64, 2240, (128,) * 4, 2048),
    PrefillCase(240, 640, (512,)),
    PrefillCase(240, 640, (512,) * 4),
    PrefillCase(240, 640, (512,) * 8),
    PrefillCase(3, 30000, (2048,), 14336),
    PrefillCase(3, 30000, (4096,), 12288),
    PrefillCase(3, 30000, (8192,), 8192),
)

PROFILED = (
    PrefillCase(1, 640, ()),
    PrefillCase(64, 640, ()),
    PrefillCase(256, 640, ()),
    PrefillCase(16, 640, (1024,)),
    PrefillCase(240, 640, (512,) * 4),
    PrefillCase(0, 0, (512,) * 16),
    PrefillCase(3, 30000, (8192,), 8192),
)

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def copy_bandwidth_tb_s() -> float:
    """Device copy, bytes read plus bytes written."""
    import torch

    a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(2 * a.nbytes / statistics.median(times) / 1e9)


def make_core(
    spec: ModelSpec,
    *,
    block_size: int,
    n_kv_tokens: int,
    max_context: int,
    max_prefill: int,
    graph_sizes: tuple[int, ...],
) -> GpuCore:
    import torch

    from worker.gpu.buffers import make_buffers
    from worker.gpu.cache import PagedCache
    from worker.gpu.choices import most_decode_programs
    from worker.gpu.core import CoreShape, GpuCore
    from worker.gpu.device import find_gpu
    from worker.weights import dummy_weights

    gpu = find_gpu()
    shape = CoreShape(
        max_rows=256,
        max_step_tokens=max_prefill + 256,
        max_context=max_context,
        block_size=block_size,
        graph_sizes=graph_sizes,
    )
    buffers = make_buffers(
        spec,
        max_tokens=shape.max_step_tokens,
        max_rows=shape.max_rows,
        n_programs=most_decode_programs(max_rows=256, n_kv_heads=spec.n_kv_heads, n_sms=gpu.n_sms),
        dtype=torch.bfloat16,
        device=gpu.device,
    )
    cache = PagedCache(
        spec,
        n_blocks=n_kv_tokens // block_size + 1,
        block_size=block_size,
        dtype=torch.bfloat16,
        device=gpu.device,
    )
    # Not zeros: they would run faster than real data.
    cache.data.normal_()
    weights = dummy_weights(spec, device=gpu.device, dtype=torch.bfloat16)
    return GpuCore(weights, gpu=gpu, shape=shape, buffers=buffers, cache=cache, dtype=torch.bfloat16)


def run_steps(core: GpuCore, batch: StepBatch, *, n_steps: int, allow_graph: bool) -> dict[str, float]:
    """Steps as the engine runs them: two in flight. Medians in ms; idle is the device's between steps."""
    import torch

    in_flight: deque[Launched] = deque()
    step_ms: list[float] = []
    idle_ms: list[float] = []
    launch_ms: list[float] = []

    def collect() -> None:
        launched = in_flight.popleft()
        launched.copied.synchronize()
        step_ms.append(launched.started.elapsed_time(launched.ended))
        if launched.before is not None:
            idle_ms.append(launched.before.elapsed_time(launched.started))

    torch.cuda.synchronize()
    # A cool start: the first steps run at the highest clock.
    time.sleep(0.2)
    wall = 0.0
    with torch.inference_mode(), torch.cuda.stream(core.stream):
        for index in range(n_steps):
            if index == n_steps // 3:
                wall = time.perf_counter()
            started = time.perf_counter()
            launched = core.launch(batch, allow_graph=allow_graph)
            core.copy_out(launched)
            launch_ms.append((time.perf_counter() - started) * 1000)
            in_flight.append(launched)
            if len(in_flight) == 2:
                collect()
        while in_flight:
            collect()
    # One step was in flight when the clock started.
    wall_ms = (time.perf_counter() - wall) * 1000 / (n_steps - n_steps // 3 + 1)
    core.reset()
    skip = n_steps // 3
    return {
        "step_ms": statistics.median(step_ms[skip:]),
        "wall_ms": wall_ms,
        "idle_ms": statistics.median(idle_ms[skip:]),
        "launch_ms": statistics.median(launch_ms[skip:]),
        "first_step_ms": step_ms[0],
        "last_step_ms": step_ms[-1],
    }


def kernel_profile(core: GpuCore, batch: StepBatch, *, allow_graph: bool) -> list[tuple[str, int, float]]:
    """(kernel, launches, total µs) of one steady step, the costliest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), torch.cuda.stream(core.stream):
        for _ in range(2):
            core.copy_out(core.launch(batch, allow_graph=allow_graph))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            core.copy_out(core.launch(batch, allow_graph=allow_graph))
            torch.cuda.synchronize()
    core.reset()
    rows = [(event.key, event.count, float(event.self_device_time_total)) for event in prof.key_averages()]
    return sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--n-layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--prefill", action="store_true", help="also steps with prompts")
    parser.add_argument("--cases", help="decode cases, e.g. 64x640,256x640")
    parser.add_argument("--no-pdl", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--shared", action="store_true", help="also rows that share a prefix")
    parser.add_argument("--profile", action="store_true", help="kernels of one step at 1, 64 and 256 rows")
    args = parser.parse_args(argv)
    import torch
    import triton

    from worker.gpu.warmup import make_batch
    from worker.models.config import spec_from_config

    spec = spec_from_config(LLAMA_8B)
    if args.n_layers:
        spec = replace(spec, n_layers=args.n_layers)
    cases: tuple[tuple[int, int], ...] = DECODE_CASES
    if args.cases:
        cases = tuple(
            (int(rows), int(context)) for rows, context in (case.split("x") for case in args.cases.split(","))
        )
    sizes = tuple(sorted({rows for rows, _ in cases} | {rows for rows, _, _ in SHARED_CASES}))
    bandwidth = copy_bandwidth_tb_s()
    started = time.perf_counter()
    core = make_core(
        spec,
        block_size=args.block_size,
        n_kv_tokens=370_000,
        max_context=32768,
        max_prefill=8192,
        graph_sizes=sizes,
    )
    torch.cuda.synchronize()
    made_s = time.perf_counter() - started
    if args.no_pdl:
        core.decoder.pdl = False
    if not args.eager:
        from worker.gpu.token_sizes import measure

        started = time.perf_counter()
        token_sizes = (
            measure(core.decoder, core.shape.max_step_tokens, stream=core.stream)
            if args.prefill or args.profile
            else ()
        )
        print(f"token sizes measured in {time.perf_counter() - started:.1f} s: {token_sizes}", flush=True)
        core.capture_graphs(token_sizes)
        assert core.graphs is not None
        print(
            f"weights and cache {made_s:.1f} s, {len(sizes)} graphs captured in {core.graphs.seconds:.1f} s",
            flush=True,
        )
    layer_elements = (
        (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim * spec.hidden_size
        + spec.n_heads * spec.head_dim * spec.hidden_size
        + 3 * spec.intermediate_size * spec.hidden_size
    )
    weight_bytes = 2 * (spec.n_layers * layer_elements + spec.vocab_size * spec.hidden_size)
    kv_bytes = spec.n_layers * 2 * spec.n_kv_heads * spec.head_dim * 2
    results: list[dict[str, Any]] = []
    n_blocks = core.cache.n_blocks
    print(
        f"copy bandwidth {bandwidth:.2f} TB/s\n"
        "| rows × context | step ms | floor ms | idle ms | wall ms | host launch ms | first … last |\n"
        "|---|---|---|---|---|---|---|",
        flush=True,
    )
    for rows, context in cases:
        batch = make_batch(core.shape, n_decode=rows, decode_len=context, chunk_lens=[], n_blocks=n_blocks)
        timing = run_steps(core, batch, n_steps=args.steps, allow_graph=not args.eager)
        floor = (weight_bytes + kv_bytes * rows * context) / bandwidth / 1e9
        results.append({"rows": rows, "context": context, "floor_ms": floor, **timing})
        print(
            f"| {rows} × {context} | {timing['step_ms']:.2f} | {floor:.2f} | {timing['idle_ms']:.3f} | "
            f"{timing['wall_ms']:.2f} | {timing['launch_ms']:.2f} | "
            f"{timing['first_step_ms']:.2f} … {timing['last_step_ms']:.2f} |",
            flush=True,
        )
    if args.shared:
        for rows, context, shared in SHARED_CASES:
            batch = make_batch(
                core.shape, n_decode=rows, decode_len=context, chunk_lens=[], n_blocks=n_blocks
            )
            n_shared = shared // core.shape.block_size
            batch.block_tables[:rows, :n_shared] = batch.block_tables[0, :n_shared]
            timing = run_steps(core, batch, n_steps=args.steps, allow_graph=not args.eager)
            floor = (weight_bytes + kv_bytes * (rows * (context - shared) + shared)) / bandwidth / 1e9
            results.append({"rows": rows, "context": context, "shared": shared, "floor_ms": floor, **timing})
            print(
                f"| {rows} × {context}, {shared} shared | {timing['step_ms']:.2f} | {floor:.2f} | "
                f"{timing['idle_ms']:.3f} | {timing['wall_ms']:.2f} | {timing['launch_ms']:.2f} |",
                flush=True,
            )
    if args.prefill:
        for case in PREFILL_CASES:
            batch = make_batch(
                core.shape,
                n_decode=case.n_decode,
                decode_len=case.decode_len,
                chunk_lens=list(case.chunks),
                chunk_start=case.start,
                n_blocks=n_blocks,
            )
            timing = run_steps(core, batch, n_steps=9, allow_graph=not args.eager)
            results.append({**asdict(case), **timing})
            print(
                f"| {case.name} | {timing['step_ms']:.2f} | | "
                f"{timing['idle_ms']:.3f} | {timing['wall_ms']:.2f} | {timing['launch_ms']:.2f} |",
                flush=True,
            )
    profiles: dict[str, Any] = {}
    if args.profile:
        for case in PROFILED:
            batch = make_batch(
                core.shape,
                n_decode=case.n_decode,
                decode_len=case.decode_len,
                chunk_lens=list(case.chunks),
                chunk_start=case.start,
                n_blocks=n_blocks,
            )
            key = case.name
            profiles[key] = kernel_profile(core, batch, allow_graph=not args.eager)
            print(f"\n{key}: {sum(us for _, _, us in profiles[key]) / 1000:.2f} ms of kernels")
            for name, count, us in profiles[key][:14]:
                print(f"  {us:9.1f} µs  {count:4d} ×  {us / count:7.2f}  {name[:90]}", flush=True)
    if args.out is not None:
        args.out.write_text(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda,
                    "command": " ".join(
                        ["python -m bench.step", *(argv if argv is not None else sys.argv[1:])]
                    ),
                    "block_size": args.block_size,
                    "triton": triton.__version__,
                    "copy_tb_s": bandwidth,
                    "results": results,
                    "profiles": profiles,
                },
                indent=1,
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
