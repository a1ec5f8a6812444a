"""What a figure was measured on: a figure without it is worth nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("grpcio", "numpy", "torch", "tokenizers", "uvloop", "uvicorn", "starlette", "flashinfer-python")


def describe_host() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, Python and the packages that speed depends on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "vector": _vector_width(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": _versions(PACKAGES),
        "revision": _revision(),
    }


def host_line(host: dict[str, Any]) -> str:
    """One line for a table's caption."""
    gpus = "; " + ", ".join(host["gpus"]) if host["gpus"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in host["packages"].items())
    return (
        f"{host['cpu']}, {host['cores']} cores ({host['vector']}), {host['memory_gib']:g} GiB{gpus}; "
        f"Python {host['python']}; {packages}; revision {host['revision']}; "
        f"load average at start {host['load_average']:g}"
    )


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _cpu_name() -> str:
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    family = _cpuinfo("cpu family")
    return f"{name} (family {family})" if family else name


def _vector_width() -> str:
    flags = _cpuinfo("flags").split()
    named = (("avx512_bf16", "AVX-512 with bf16"), ("avx512f", "AVX-512"), ("avx2", "AVX2"))
    return next((name for flag, name in named if flag in flags), "no AVX2")


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _revision() -> str:
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parent, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() or "unknown"
