"""The operations `linear` and `gated`: products of rows with all panels of one grouped weight.

A unit of work is one panel (for `gated` a pair: gate and up) and a chunk of rows, whose x stays in the
second-level cache while panel after panel goes over it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from checkpoint.grouped import GROUP
from worker.native.code import (
    F32_PTR,
    I32_PTR,
    I64,
    Vectors,
    ceil_div,
    count,
    even_blocks,
    int64,
    least,
    table_of,
)
from worker.native.machine import REGISTERS, Compiled, VectorUnit, vector_unit
from worker.native.panel import panel_words, write_panel, write_unpack, write_unpacked
from worker.native.tape import claimed, load_arguments, op_type

ARGUMENTS = (
    "x",
    "panels",
    "bias",
    "out",
    "out_stride",
    "add",
    "n_rows",
    "chunk_rows",
    "n_panels",
    "n_groups",
    "scratch",
    "scratch_floats",
    "ahead",
)
"""Of both operations. bias: a line of outputs, zero where there is none. scratch_floats: of each thread.
ahead: words between what is read and what is fetched meanwhile."""
_CHUNK_BLOCKS = 8
"""Blocks of rows that go over the panels together."""
_PART_GROUPS = 6
"""Groups of a panel that are unpacked at once: with 32 outputs 24 KB, half of a first-level cache."""


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """Addresses of the operations for weights of so many bits and rows of x so far apart."""

    linear: int
    gated: int
    code: Compiled


def chunk_rows(n_rows: int) -> int:
    """Rows of a unit: even chunks, none larger than the caches like; 1 of no rows."""
    most = _CHUNK_BLOCKS * _unit().block_rows
    n_chunks = max(-(-n_rows // most), 1)
    return max(-(-n_rows // n_chunks), 1)


def scratch_floats() -> int:
    """What a thread needs, whatever the number of rows."""
    unit = _unit()
    width = REGISTERS * unit.lanes
    return _PART_GROUPS * GROUP * width + _CHUNK_BLOCKS * unit.block_rows * 2 * width


@functools.cache
def linear_kernel(bits: int, *, x_stride: int) -> LinearKernel:
    """Takes about half a second the first time."""
    code = Compiled(_write(bits, x_stride, _unit()))
    return LinearKernel(code.address("linear"), code.address("gated"), code)


def _unit() -> VectorUnit:
    unit = vector_unit()
    assert unit is not None
    return unit


def _write(bits: int, x_stride: int, unit: VectorUnit) -> ir.Module:
    module = ir.Module()
    v = Vectors(module, lanes=unit.lanes)
    rows = range(1, unit.block_rows + 1)
    packed = [write_panel(module, v, bits=bits, rows=n, x_stride=x_stride) for n in rows]
    unpacked = [write_unpacked(module, v, rows=n, x_stride=x_stride) for n in rows]
    tables = tuple(
        table_of(module, functions, name=name)
        for functions, name in ((packed, "packed"), (unpacked, "unpacked"))
    )
    zeros = ir.GlobalVariable(module, ir.ArrayType(v.floats, REGISTERS), name="zeros")
    zeros.initializer = ir.Constant(zeros.value_type, [v.zero] * REGISTERS)
    unpack = write_unpack(module, v, bits=bits)
    panel = _write_one_panel(module, v, tables, (unpack, zeros), bits=bits, x_stride=x_stride, unit=unit)
    _write_linear(module, v, panel, bits=bits, x_stride=x_stride)
    _write_gated(module, v, panel, bits=bits, x_stride=x_stride)
    return module


def _write_one_panel(
    module: ir.Module,
    v: Vectors,
    tables: tuple[Any, ...],
    helpers: tuple[Any, Any],
    *,
    bits: int,
    x_stride: int,
    unit: VectorUnit,
) -> ir.Function:
    """void(x, panel, start, out, out_stride, add, n_rows, n_groups, scratch, ahead)"""
    kind = ir.FunctionType(
        ir.VoidType(), [F32_PTR, I32_PTR, F32_PTR, F32_PTR, I64, I64, I64, I64, F32_PTR, I64]
    )
    function = ir.Function(module, kind, name="one_panel")
    function.linkage = "internal"
    x, panel, start, out, out_stride, add, n_rows, n_groups, scratch, ahead = function.args
    b = ir.IRBuilder(function.append_basic_block())
    packed, unpacked = tables
    unpack, zeros = helpers
    zero_line = b.bitcast(zeros, F32_PTR)
    n_blocks = ceil_div(b, n_rows, unit.block_rows)
    block = even_blocks(b, n_rows, n_blocks)

    def choose(table: Any, rows: Any) -> Any:
        return b.load(b.gep(table, [int64(0), b.sub(rows, int64(1))]))

    with b.if_else(b.icmp_unsigned("==", n_blocks, int64(1))) as (few, many):
        with few:
            b.call(choose(packed, n_rows), [n_groups, x, panel, start, out, out_stride, add, ahead])
        with many, count(b, int64(0), ceil_div(b, n_groups, _PART_GROUPS)) as part:
            first = b.mul(part, int64(_PART_GROUPS))
            n = least(b, b.sub(n_groups, first), int64(_PART_GROUPS))
            words = b.mul(first, int64(panel_words(bits, n_groups=1, lanes=v.lanes)))
            b.call(unpack, [n, b.gep(panel, [words]), scratch, ahead])
            is_first = b.icmp_unsigned("==", part, int64(0))
            line = b.select(is_first, start, zero_line)
            adds = b.select(is_first, add, int64(1))
            weights = b.bitcast(scratch, I32_PTR)
            inputs = b.gep(x, [b.mul(first, int64(GROUP))])
            with count(b, int64(0), n_blocks) as at:
                row, rows = block(at)
                source = b.gep(inputs, [b.mul(row, int64(x_stride))])
                target = b.gep(out, [b.mul(row, out_stride)])
                b.call(choose(unpacked, rows), [n, source, weights, line, target, out_stride, adds, int64(0)])
    b.ret_void()
    return function


def _begin(module: ir.Module, name: str) -> tuple[ir.IRBuilder, dict[str, Any], Any, Any]:
    """Builder, arguments with their types, this thread's scratch, the claims."""
    function = ir.Function(module, op_type(), name=name)
    b = ir.IRBuilder(function.append_basic_block())
    arguments, number, claims = function.args
    a = load_arguments(b, arguments, ARGUMENTS)
    for key in ("x", "bias", "out", "scratch"):
        a[key] = b.inttoptr(a[key], F32_PTR)
    a["panels"] = b.inttoptr(a["panels"], I32_PTR)
    scratch = b.gep(a["scratch"], [b.mul(number, a["scratch_floats"])])
    return b, a, scratch, claims


def _write_linear(module: ir.Module, v: Vectors, panel_function: Any, *, bits: int, x_stride: int) -> None:
    b, a, scratch, claims = _begin(module, "linear")
    width = REGISTERS * v.lanes
    words = b.mul(a["n_groups"], int64(panel_words(bits, n_groups=1, lanes=v.lanes)))
    n_chunks = b.udiv(b.sub(b.add(a["n_rows"], a["chunk_rows"]), int64(1)), a["chunk_rows"])
    with claimed(b, claims, b.mul(n_chunks, a["n_panels"])) as unit:
        chunk, panel = b.udiv(unit, a["n_panels"]), b.urem(unit, a["n_panels"])
        row = b.mul(chunk, a["chunk_rows"])
        place = b.mul(panel, int64(width))
        b.call(
            panel_function,
            [
                b.gep(a["x"], [b.mul(row, int64(x_stride))]),
                b.gep(a["panels"], [b.mul(panel, words)]),
                b.gep(a["bias"], [place]),
                b.gep(a["out"], [b.add(b.mul(row, a["out_stride"]), place)]),
                a["out_stride"],
                a["add"],
                least(b, b.sub(a["n_rows"], row), a["chunk_rows"]),
                a["n_groups"],
                scratch,
                a["ahead"],
            ],
        )
    b.ret_void()


def _write_gated(module: ir.Module, v: Vectors, panel_function: Any, *, bits: int, x_stride: int) -> None:
    """Panels and bias come in pairs, gate and up; out has half as many outputs."""
    b, a, scratch, claims = _begin(module, "gated")
    width = REGISTERS * v.lanes
    words = b.mul(a["n_groups"], int64(panel_words(bits, n_groups=1, lanes=v.lanes)))
    n_chunks = b.udiv(b.sub(b.add(a["n_rows"], a["chunk_rows"]), int64(1)), a["chunk_rows"])
    n_pairs = b.udiv(a["n_panels"], int64(2))
    tile = b.gep(scratch, [int64(_PART_GROUPS * GROUP * width)])
    with claimed(b, claims, b.mul(n_chunks, n_pairs)) as unit:
        chunk, pair = b.udiv(unit, n_pairs), b.urem(unit, n_pairs)
        row = b.mul(chunk, a["chunk_rows"])
        n = least(b, b.sub(a["n_rows"], row), a["chunk_rows"])
        x = b.gep(a["x"], [b.mul(row, int64(x_stride))])
        for half in range(2):
            panel = b.add(b.mul(pair, int64(2)), int64(half))
            line = b.gep(a["bias"], [b.mul(panel, int64(width))])
            own = b.gep(a["panels"], [b.mul(panel, words)])
            target = b.gep(tile, [int64(half * width)])
            b.call(
                panel_function,
                [x, own, line, target, int64(2 * width), int64(0), n, a["n_groups"], scratch, a["ahead"]],
            )
        place = b.add(b.mul(row, a["out_stride"]), b.mul(pair, int64(width)))
        with count(b, int64(0), n) as at:
            source = b.gep(tile, [b.mul(at, int64(2 * width))])
            target = b.gep(a["out"], [b.add(place, b.mul(at, a["out_stride"]))])
            for register in range(REGISTERS):
                gate, up = (
                    v.load(b, source, half * width + register * v.lanes, v.floats) for half in range(2)
                )
                value = b.fmul(v.silu(b, gate), up)
                v.store(b, value, b.gep(target, [int64(register * v.lanes)]))
    b.ret_void()
