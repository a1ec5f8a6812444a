"""Compile the FlashInfer kernels ahead of time, for images and for hosts without a compiler.

    python -m worker.gpu.prebuild --arch 9.0a --head-dim 64,128

The libraries are installed where FlashInfer looks for ready-made ones, inside its own package, and are then
loaded without a compiler. `--archive` also writes them into a tar file, and `--from` installs such a file
instead of compiling. No GPU is needed, only nvcc and a stub of libcuda.

The worker's own kernels are compiled by Triton when it first starts. On a host where it has run,
`--triton-cache` puts them into the archive as well, so that a start elsewhere compiles nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker.gpu import triton_cache


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
    combinations = itertools.product(
        backends_for(arch), head_dims, dtypes, kv_dtypes, (False, True) if windows else (False,)
    )
    return [
        gen_batch_prefill_module(
            backend,
            names[dtype],
            names[dtype] if kv_dtype == "auto" else names[kv_dtype],
            names[dtype],
            torch.int32,
            head_dim,
            head_dim,
            0,
            window,
            False,
            False,
        )
        for backend, head_dim, dtype, kv_dtype, window in combinations
        if backend == "fa2" or kv_dtype == "auto"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.gpu.prebuild", description=__doc__)
    parser.add_argument("--arch", default="9.0a", help="comma-separated CUDA architectures, e.g. 8.0,9.0a")
    parser.add_argument("--head-dim", default="64,128", help="comma-separated head sizes")
    parser.add_argument("--dtype", default="bfloat16", help="comma-separated: bfloat16, float16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="comma-separated: auto, fp8_e4m3, fp8_e5m2")
    parser.add_argument("--sliding-window", action="store_true", help="also the variants with a window")
    parser.add_argument("--archive", type=Path, help="write the libraries into this .tgz as well")
    parser.add_argument(
        "--triton-cache", action="store_true", help="the archive also takes what Triton compiled on this host"
    )
    parser.add_argument("--from", dest="source", type=Path, help="install this archive; compile nothing")
    args = parser.parse_args(argv)
    archs = args.arch.split(",")
    # FlashInfer reads it once, at import.
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(archs)
    try:
        from flashinfer.jit import build_jit_specs
    except ImportError as error:
        print(
            f"prebuild needs flashinfer and torch ({error}): pip install '.[gpu]' in a checkout",
            file=sys.stderr,
        )
        return 2
    if args.source is not None:
        return _install_archive(args.source)
    wanted: list[Any] = []
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
    for spec in wanted:
        if spec.jit_library_path.exists():
            spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(spec.jit_library_path, spec.aot_path)
    if args.archive is not None:
        with tarfile.open(args.archive, "w:gz") as archive:
            for spec in wanted:
                archive.add(spec.aot_path, arcname=f"{spec.name}/{spec.aot_path.name}")
            if args.triton_cache:
                n_kernels = triton_cache.add_to(archive, triton_cache.cache_dir())
                print(f"{n_kernels} Triton kernels from {triton_cache.cache_dir()}")
    print(f"done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def _install_archive(source: Path) -> int:
    from flashinfer.jit import env

    target = Path(env.FLASHINFER_AOT_DIR)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(source) as archive:
        libraries = [
            member
            for member in archive.getmembers()
            if member.isfile() and not member.name.startswith(f"{triton_cache.PREFIX}/")
        ]
        archive.extractall(target, members=libraries, filter="data")
        n_kernels = triton_cache.install(archive, triton_cache.cache_dir())
    print(f"installed {len(libraries)} libraries into {target}")
    if n_kernels:
        print(f"installed {n_kernels} Triton kernels into {triton_cache.cache_dir()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
