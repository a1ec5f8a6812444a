"""Compiles vector code for this machine's processor at start, with LLVM from the llvmlite wheel.

A worker needs no compiler of its own; where llvmlite or the vector unit is missing, torch computes instead.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from checkpoint.grouped import Grouped

if TYPE_CHECKING:
    from llvmlite import ir


REGISTERS = 2
"""Registers of outputs that a product computes at once."""


@dataclass(frozen=True, slots=True)
class VectorUnit:
    lanes: int
    """float32 numbers in a register."""
    block_rows: int
    """Rows of x whose sums for two registers of outputs fit into the register file."""


@dataclass(frozen=True, slots=True)
class OpenMp:
    """Addresses in the OpenMP library that torch runs on: its threads are shared, not doubled."""

    parallel: int
    thread_num: int
    num_threads: int


@functools.cache
def vector_unit() -> VectorUnit | None:
    """None: no compiled code here."""
    try:
        from llvmlite import binding
    except ImportError:
        return None
    machine = platform.machine().lower()
    features = binding.get_host_cpu_features()
    if machine in ("x86_64", "amd64"):
        if features.get("avx512f"):
            return VectorUnit(lanes=16, block_rows=12)
        return VectorUnit(lanes=8, block_rows=5) if features.get("avx2") and features.get("fma") else None
    return VectorUnit(lanes=4, block_rows=10) if machine in ("aarch64", "arm64") else None


def can_keep(weight: Grouped) -> bool:
    """Whether products with it can be computed from its own few bits."""
    unit = vector_unit()
    return unit is not None and weight.scale.shape[0] % (REGISTERS * unit.lanes) == 0


@functools.cache
def openmp() -> OpenMp | None:
    """None: compiled code runs on one thread."""
    package = Path(torch.__file__).parent
    for path in [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")]:
        try:
            library = ctypes.CDLL(str(path))
            return OpenMp(
                *(
                    _address(library, name)
                    for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
                )
            )
        except (OSError, AttributeError):
            continue
    return None


class Compiled:
    """Owns the machine code of one module; its functions are valid as long as it lives."""

    def __init__(self, module: ir.Module) -> None:
        from llvmlite import binding

        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        binding.initialize_native_asmparser()
        module.triple = binding.get_process_triple()
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        target = binding.Target.from_triple(module.triple).create_target_machine(
            cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
        )
        self._engine = binding.create_mcjit_compiler(parsed, target)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Of a function that the module exports."""
        return int(self._engine.get_function_address(name))


def _address(library: ctypes.CDLL, name: str) -> int:
    value = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    if not value:
        raise AttributeError(name)
    return value
