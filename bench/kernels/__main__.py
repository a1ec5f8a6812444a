"""Measure the worker's GPU kernels one by one and choose between them.

    python -m bench.kernels linear --out results.json      matrix products of the 8B Llama shape by rows
    python -m bench.kernels decode --out results.json      decode attention: own kernel and FlashInfer's
    python -m bench.kernels prefill --out results.json     prefill attention: FlashInfer fa3 and fa2

Times are medians of CUDA graph replays in µs, weights cold (each launch reads other memory than the last).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.kernels.decode import bench_decode
from bench.kernels.linear import bench_linear
from bench.kernels.prefill import bench_prefill

if TYPE_CHECKING:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("part", choices=("linear", "decode", "prefill"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--deadline-s", type=float, default=200.0)
    parser.add_argument("--shared-only", action="store_true", help="decode: only rows that share a prefix")
    args = parser.parse_args(argv)
    import torch

    parts = {"linear": bench_linear, "decode": bench_decode, "prefill": bench_prefill}
    if args.shared_only:
        result = bench_decode(deadline_s=args.deadline_s, shared_only=True)
    else:
        result = parts[args.part](deadline_s=args.deadline_s)
    result["device"] = torch.cuda.get_device_name()
    result["torch"] = torch.__version__
    result["command"] = " ".join(["python -m bench.kernels", *(argv if argv is not None else sys.argv[1:])])
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
