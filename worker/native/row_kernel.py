"""The operations `norm` and `gather`, row by row: RMS norm, and copies of chosen rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from worker.native.code import F32, F32_PTR, I32, I64_PTR, Vectors, ceil_div, count, int64, least, repeat
from worker.native.machine import Compiled, vector_unit
from worker.native.tape import claimed, load_arguments, op_type

NORM_ARGUMENTS = ("x", "x_stride", "weight", "out", "out_stride", "n_rows", "n_vectors", "eps_bits")
"""out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight; eps_bits: the float32's."""
GATHER_ARGUMENTS = ("x", "x_stride", "index", "out", "out_stride", "n_rows", "n_vectors")
"""out[r] = x[index[r]]; index: int64."""
_UNIT_ROWS = 4


@dataclass(frozen=True, slots=True)
class RowKernel:
    """Addresses of the operations."""

    norm: int
    gather: int
    lanes: int
    """A row is a whole number of vectors of so many floats."""
    code: Compiled


@functools.cache
def row_kernel() -> RowKernel:
    unit = vector_unit()
    assert unit is not None
    module = ir.Module()
    v = Vectors(module, lanes=unit.lanes)
    _write_norm(module, v)
    _write_gather(module, v)
    code = Compiled(module)
    return RowKernel(code.address("norm"), code.address("gather"), unit.lanes, code)


def _write_norm(module: ir.Module, v: Vectors) -> None:
    b, a, claims = _begin(module, "norm", NORM_ARGUMENTS)
    weight = b.inttoptr(a["weight"], F32_PTR)
    eps = b.bitcast(b.trunc(a["eps_bits"], I32), F32)
    n_floats = b.uitofp(b.mul(a["n_vectors"], int64(v.lanes)), F32)
    root = ir.Function(module, ir.FunctionType(F32, [F32]), name="llvm.sqrt.f32")
    with _rows(b, a, claims) as row:
        source = b.gep(a["x"], [b.mul(row, a["x_stride"])])
        target = b.gep(a["out"], [b.mul(row, a["out_stride"])])

        def add_square(index: Any, carried: list[Any]) -> list[Any]:
            value = v.load(b, b.gep(source, [b.mul(index, int64(v.lanes))]), 0, v.floats)
            return [v.fma(b, value, value, carried[0])]

        squares = repeat(b, a["n_vectors"], [v.zero], add_square)[0]
        mean = b.fdiv(v.sum(b, squares), n_floats)
        factor = b.fdiv(ir.Constant(F32, 1.0), b.call(root, [b.fadd(mean, eps)]))
        factor = v.spread(b, factor)
        with count(b, int64(0), a["n_vectors"]) as index:
            at = b.mul(index, int64(v.lanes))
            value = b.fmul(v.load(b, b.gep(source, [at]), 0, v.floats), factor)
            value = b.fmul(value, v.load(b, b.gep(weight, [at]), 0, v.floats))
            v.store(b, value, b.gep(target, [at]))
    b.ret_void()


def _write_gather(module: ir.Module, v: Vectors) -> None:
    b, a, claims = _begin(module, "gather", GATHER_ARGUMENTS)
    index = b.inttoptr(a["index"], I64_PTR)
    with _rows(b, a, claims) as row:
        source = b.gep(a["x"], [b.mul(b.load(b.gep(index, [row])), a["x_stride"])])
        target = b.gep(a["out"], [b.mul(row, a["out_stride"])])
        with count(b, int64(0), a["n_vectors"]) as part:
            at = b.mul(part, int64(v.lanes))
            v.store(b, v.load(b, b.gep(source, [at]), 0, v.floats), b.gep(target, [at]))
    b.ret_void()


def _begin(module: ir.Module, name: str, names: tuple[str, ...]) -> tuple[ir.IRBuilder, dict[str, Any], Any]:
    function = ir.Function(module, op_type(), name=name)
    b = ir.IRBuilder(function.append_basic_block())
    arguments, _, claims = function.args
    a = load_arguments(b, arguments, names)
    for key in ("x", "out"):
        a[key] = b.inttoptr(a[key], F32_PTR)
    return b, a, claims


@contextmanager
def _rows(b: ir.IRBuilder, a: dict[str, Any], claims: Any) -> Iterator[Any]:
    """Each of this thread's rows."""
    with claimed(b, claims, ceil_div(b, a["n_rows"], _UNIT_ROWS)) as unit:
        first = b.mul(unit, int64(_UNIT_ROWS))
        end = least(b, a["n_rows"], b.add(first, int64(_UNIT_ROWS)))
        with count(b, first, end) as row:
            yield row
