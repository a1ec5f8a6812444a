"""Compile the FlashInfer kernels ahead of time, for images and for hosts without a compiler.

    python -m worker.gpu.prebuild --arch 9.0a --head-dim 64,128

The libraries land in FlashInfer's cache (`$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer`, by default in the home
folder) and are found there by the worker. No GPU is needed, only nvcc and a stub of libcuda.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def backends_for(arch: str) -> tuple[str, ...]:
    """FlashInfer's attention back ends that an architecture can run, best first."""
    return ("fa3", "fa2") if arch.startswith("9.0") else ("fa2",)


def specs(
    *, arch: str, head_dims: Sequence[int], dtypes: Sequence[str], kv_dtypes: Sequence[str], windows: bool
) -> list[Any]:
    """FlashInfer's build specifications of every kernel that the worker may ask for."""
    import torch
    from flashinfer.jit.attention import gen_batch_prefill_module

    names = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    found = []
    for backend in backends_for(arch):
        for head_dim in head_dims:
            for dtype in dtypes:
                for kv_dtype in kv_dtypes:
                    kv = names[dtype] if kv_dtype == "auto" else names[kv_dtype]
                    if backend == "fa3" and kv_dtype != "auto":
                        continue
                    for window in (False, True) if windows else (False,):
                        found.append(
                            gen_batch_prefill_module(
                                backend,
                                names[dtype],
                                kv,
                                names[dtype],
                                torch.int32,
                                head_dim,
                                head_dim,
                                0,
                                window,
                                False,
                                False,
                            )
                        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.gpu.prebuild", description=__doc__)
    parser.add_argument("--arch", default="9.0a", help="comma-separated CUDA architectures, e.g. 8.0,9.0a")
    parser.add_argument("--head-dim", default="64,128", help="comma-separated head sizes")
    parser.add_argument("--dtype", default="bfloat16", help="comma-separated: bfloat16, float16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="comma-separated: auto, fp8_e4m3, fp8_e5m2")
    parser.add_argument("--sliding-window", action="store_true", help="also the variants with a window")
    args = parser.parse_args(argv)
    archs = args.arch.split(",")
    # FlashInfer reads it once, at import.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(archs)
    try:
        from flashinfer.jit import build_jit_specs
    except ImportError as error:
        print(f"prebuild needs flashinfer and torch ({error}): pip install 'quire[gpu]'", file=sys.stderr)
        return 2
    wanted = []
    for arch in archs:
        for spec in specs(
            arch=arch,
            head_dims=[int(size) for size in args.head_dim.split(",")],
            dtypes=args.dtype.split(","),
            kv_dtypes=args.kv_cache_dtype.split(","),
            windows=args.sliding_window,
        ):
            if all(spec.name != other.name for other in wanted):
                wanted.append(spec)
    started = time.monotonic()
    print(
        f"compiling {len(wanted)} modules for {args.arch}: {', '.join(spec.name for spec in wanted)}",
        flush=True,
    )
    build_jit_specs(wanted, verbose=False, skip_prebuilt=True)
    print(f"done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
