"""Can the kernels that a model needs be had here: built ahead, or by a compiler?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from worker.errors import StartError


class KernelSpec(Protocol):
    """What FlashInfer calls a JitSpec."""

    @property
    def name(self) -> str: ...

    @property
    def aot_path(self) -> Path: ...

    @property
    def jit_library_path(self) -> Path: ...


def check_kernels(specs: Sequence[KernelSpec], *, arch: str, head_dim: int) -> None:
    """Raises StartError when some were never built and no nvcc is here to build them."""
    missing = [spec for spec in specs if not (spec.aot_path.exists() or spec.jit_library_path.exists())]
    if not missing or find_nvcc() is not None:
        return
    names = ", ".join(spec.name for spec in missing)
    raise StartError(
        f"FlashInfer's kernels for head size {head_dim} are not built here ({names}), and there is no CUDA "
        "compiler to build them (nvcc on the PATH, or under CUDA_HOME); install one, or where there is one "
        f"run: python -m worker.gpu.prebuild --arch {arch} --head-dim {head_dim} --archive kernels.tgz, and "
        "here: python -m worker.gpu.prebuild --from kernels.tgz; --attention torch needs none of them"
    )


def find_nvcc() -> Path | None:
    """Where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")) is not None:
        return Path(found)
    path = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return path if path.exists() else None
