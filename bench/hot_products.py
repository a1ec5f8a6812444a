"""The rate of a layer's matrix products on a GPU that has been at work for a while: large products draw all
the power that the card may take, and its clock falls until they fit.

    python -m bench.hot_products --out bench/results/hot-products.json

The Llama-3.1-8B shape in bf16, four layers' weights in turn; the second half of each run is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(outputs, inputs) of qkv, o, gate and up, down"""
TOKENS = (512, 1024, 2048, 4096, 8192)
SECONDS = 0.8
N_LAYERS = 32
_GUESS_TFLOP_S = 700
_N_WEIGHTS = 4


def measure(weights: list[list[torch.Tensor]], n_tokens: int) -> dict[str, Any]:
    import torch

    def tensor(width: int) -> torch.Tensor:
        return torch.randn((n_tokens, width), dtype=torch.bfloat16, device="cuda")

    x, hidden, inner = tensor(4096), tensor(4096), tensor(14336)
    qkv, gate_up = tensor(6144), tensor(28672)

    def layer(w: list[torch.Tensor]) -> None:
        torch.mm(x, w[0].t(), out=qkv)
        torch.addmm(hidden, x, w[1].t(), out=hidden, beta=0.5)
        torch.mm(x, w[2].t(), out=gate_up)
        torch.addmm(hidden, inner, w[3].t(), out=hidden, beta=0.5)

    tflop = 2 * n_tokens * sum(n * k for n, k in SHAPES) / 1e12
    n = max(8, int(SECONDS * _GUESS_TFLOP_S / tflop))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for index in range(n):
        if index == n // 2:
            start.record()
        layer(weights[index % _N_WEIGHTS])
    end.record()
    time.sleep(SECONDS * 0.6)
    clock_mhz, watts = torch.cuda.clock_rate(), torch.cuda.power_draw() / 1000
    torch.cuda.synchronize()
    us = start.elapsed_time(end) * 1000 / (n - n // 2)
    return {
        "n_tokens": n_tokens,
        "us_per_token": us * N_LAYERS / n_tokens,
        "tflop_s": tflop / us * 1e6,
        "clock_mhz": clock_mhz,
        "watts": watts,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hot_products", description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    import torch

    weights = [
        [torch.randn((n, k), dtype=torch.bfloat16, device="cuda").mul_(0.02) for n, k in SHAPES]
        for _ in range(_N_WEIGHTS)
    ]
    print("| tokens | µs a token, 32 layers | TFLOP/s | clock MHz | W |\n|---|---|---|---|---|")
    found = []
    for n_tokens in TOKENS:
        row = measure(weights, n_tokens)
        found.append(row)
        print(
            f"| {n_tokens} | {row['us_per_token']:.1f} | {row['tflop_s']:.0f} | {row['clock_mhz']} "
            f"| {row['watts']:.0f} |",
            flush=True,
        )
    if args.out is not None:
        device = torch.cuda.get_device_name()
        args.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "rows": found}, indent=1)
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
