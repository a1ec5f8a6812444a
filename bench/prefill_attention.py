"""Time a layer's prefill attention on a Hopper GPU: through block tables, over gathered keys, and over the
chunks' own keys where nothing is in front of them.

    python -m bench.prefill_attention --out bench/results/prefill-attention.json

The Llama-3.1-8B shape, bf16, blocks of 16 in random order. `gathered` includes the gathering. The last column
says which of them the worker would choose.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

CASES = (
    ((512,) * 16, 0),
    ((1024,) * 8, 0),
    ((128,) * 4, 2048),
    ((1024,), 0),
    ((2048,), 0),
    ((4096,), 0),
    ((8192,), 0),
    *(((n,), 30000 - n) for n in (512, 1024, 2048, 4096, 8192)),
)
"""(chunks, positions in front of each)"""
BLOCK_SIZE = 16
N_BLOCKS = 8192
REPEATS = 7


def time_us(run: Callable[[], None]) -> float:
    """Median of a few runs after two for warming up; all are queued, so that none waits for the host."""
    import torch

    events = []
    for _ in range(REPEATS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) * 1000 for start, end in events[2:]))


def measure() -> list[dict[str, Any]]:
    import torch

    from bench.step import LLAMA_8B
    from worker.attention.flashinfer_backend import ChunkTables, FlashInferPrefill, PrefillShape
    from worker.models.config import spec_from_config

    spec = spec_from_config(LLAMA_8B)
    device, dtype = torch.device("cuda"), torch.bfloat16
    prefill = FlashInferPrefill(
        spec,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        n_turns=2,
        fa3=torch.cuda.get_device_capability()[0] == 9,
        max_context=65536,
    )
    shape = (N_BLOCKS, BLOCK_SIZE, spec.n_kv_heads, spec.head_dim)
    cache = (torch.randn(shape, dtype=dtype, device=device), torch.randn(shape, dtype=dtype, device=device))
    found = []
    for chunks, start in CASES:
        q_lens = np.array(chunks, dtype=np.int32)
        kv_lens = q_lens + start
        n_pages = -(-kv_lens // BLOCK_SIZE)
        pages = (torch.randperm(N_BLOCKS - 1, device=device)[: int(n_pages.sum())] + 1).to(torch.int32)
        table = torch.zeros((len(chunks), int(n_pages.max())), dtype=torch.int32, device=device)
        ends = np.cumsum(n_pages).tolist()
        for row, (end, n) in enumerate(zip(ends, n_pages.tolist(), strict=True)):
            table[row, :n] = pages[end - n : end]
        tables = ChunkTables(
            rows=torch.arange(len(chunks), dtype=torch.int32, device=device),
            starts=torch.from_numpy(np.concatenate(([0], np.cumsum(kv_lens))).astype(np.int32)).to(device),
            table=table,
        )
        q = torch.randn((int(q_lens.sum()), spec.n_heads, spec.head_dim), dtype=dtype, device=device)
        outs = torch.empty_like(q), torch.empty_like(q)
        own = (cache[0].view(-1, *cache[0].shape[2:]), cache[1].view(-1, *cache[1].shape[2:]))
        step = PrefillShape(q_lens, kv_lens)
        prefill.plan(step, pages)
        paged_us = time_us(partial(prefill.run, 0, q, cache, outs[0], own=own, scale=1.0))
        prefill.plan_gathered(step, tables)
        gathered_us = time_us(partial(prefill.run, 0, q, cache, outs[1], own=own, scale=1.0))
        own_us = None
        if not start:
            prefill.plan_own(step)
            own_us = time_us(partial(prefill.run, 0, q, cache, outs[1], own=own, scale=1.0))
            prefill.plan_gathered(step, tables)
            prefill.run(0, q, cache, outs[1], own=own, scale=1.0)
        work = float((q_lens.astype(np.int64) * (2 * kv_lens - q_lens)).sum()) / 2
        tflop = 4 * spec.n_heads * spec.head_dim * work / 1e12
        found.append(
            {
                "chunks": list(chunks),
                "start": start,
                "paged_us": paged_us,
                "gathered_us": gathered_us,
                "own_us": own_us,
                "paged_tflop_s": tflop / paged_us * 1e6,
                "gathered_tflop_s": tflop / gathered_us * 1e6,
                "difference": float((outs[0] - outs[1]).float().norm() / outs[0].float().norm()),
                "chosen": prefill.source(step).name.lower(),
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefill_attention", description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = measure()
    print(
        "| chunks | in front | paged µs (TFLOP/s) | gathered µs (TFLOP/s) | own µs | difference | chosen |\n"
        "|---|---|---|---|---|---|---|"
    )
    for row in found:
        print(
            f"| {row['chunks'][0]} × {len(row['chunks'])} | {row['start']} "
            f"| {row['paged_us']:.0f} ({row['paged_tflop_s']:.0f}) "
            f"| {row['gathered_us']:.0f} ({row['gathered_tflop_s']:.0f}) "
            f"| {'' if row['own_us'] is None else round(row['own_us'])} "
            f"| {row['difference']:.1e} | {row['chosen']} |"
        )
    if args.out is not None:
        import torch

        device = torch.cuda.get_device_name()
        args.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "rows": found}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
