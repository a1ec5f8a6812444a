"""y = x · W for grouped weights, computed in float32 straight from their few bits.

The weights are those of the file to the bit; only the order of the sums differs from a dense product. A step
of few rows is bound by how fast weights come from memory: 4-bit weights take a sixth of float32's bytes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from llvmlite import ir

from checkpoint.grouped import GROUP, Grouped
from worker.native.code import (
    F32_PTR,
    I32_PTR,
    Vectors,
    ceil_div,
    count,
    even_blocks,
    int64,
    least,
    table_of,
)
from worker.native.machine import REGISTERS, Compiled, VectorUnit, vector_unit
from worker.native.panel import pack_panels, panel_words, write_panel
from worker.native.parallel import share_type, write_entry

_CHUNK_BLOCKS = 8
"""Blocks of rows that go over the panels together: their x stays in the second-level cache."""
_ROWS_PER_THREAD = 48
"""From so many rows for each thread on, threads share the rows out; below, the panels."""
_ARGUMENTS = (
    "x",
    "x_stride",
    "panels",
    "out",
    "out_stride",
    "add",
    "n_rows",
    "n_panels",
    "n_groups",
    "scratch",
)


class GroupedLinear:
    """Implements `worker.models.linear.Linear`."""

    __slots__ = ("_bias", "_call", "_chunk_rows", "_n_groups", "_n_out", "_n_panels", "_panels")

    def __init__(self, weight: Grouped, bias: torch.Tensor | None) -> None:
        """Needs `worker.native.machine.can_keep(weight)`."""
        unit = _unit()
        self._panels = torch.from_numpy(pack_panels(weight, lanes=unit.lanes).view("i4"))
        self._n_out, self._n_groups = weight.scale.shape
        self._n_panels = self._panels.shape[0]
        self._bias = bias
        self._chunk_rows = _CHUNK_BLOCKS * unit.block_rows
        self._call = kernel(weight.bits)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self._n_out))
        self._run(x, out, add=0)
        return out if self._bias is None else out.add_(self._bias)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self._run(x, residual, add=1)
        return residual if self._bias is None else residual.add_(self._bias)

    def _run(self, x: torch.Tensor, out: torch.Tensor, *, add: int) -> None:
        n_rows, n_in = x.shape
        n_threads = torch.get_num_threads()
        scratch = x.new_empty((n_threads, min(n_rows, self._chunk_rows), n_in))
        self._call(
            x.data_ptr(),
            x.stride(0),
            self._panels.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            add,
            n_rows,
            self._n_panels,
            self._n_groups,
            scratch.data_ptr(),
            n_threads,
        )


@functools.cache
def kernel(bits: int) -> Any:
    """The compiled function for weights of so many bits; its parameters are `_ARGUMENTS` and the number of
    threads. Takes about a quarter of a second the first time."""
    code = Compiled(_write(bits, _unit()))
    call = code.function("linear", *[ctypes.c_int64] * (len(_ARGUMENTS) + 1))
    call.code = code
    return call


def _unit() -> VectorUnit:
    unit = vector_unit()
    assert unit is not None
    return unit


def _write(bits: int, unit: VectorUnit) -> ir.Module:
    module = ir.Module()
    vectors = Vectors(module, lanes=unit.lanes)
    blocks = [write_panel(module, vectors, bits=bits, rows=n + 1) for n in range(unit.block_rows)]
    table = table_of(module, blocks, name="blocks")
    share = _write_share(module, table, bits=bits, unit=unit)
    write_entry(module, share, name="linear", n_arguments=len(_ARGUMENTS))
    return module


def _write_share(module: ir.Module, table: ir.GlobalVariable, *, bits: int, unit: VectorUnit) -> ir.Function:
    share = ir.Function(module, share_type(), name="share")
    share.linkage = "internal"
    b = ir.IRBuilder(share.append_basic_block())
    arguments, number, n_threads = share.args
    a = {name: b.load(b.gep(arguments, [int64(at)])) for at, name in enumerate(_ARGUMENTS)}
    x, out, scratch = (b.inttoptr(a[name], F32_PTR) for name in ("x", "out", "scratch"))
    panels = b.inttoptr(a["panels"], I32_PTR)
    n_inputs = b.mul(a["n_groups"], int64(GROUP))
    most = unit.block_rows
    chunk = _CHUNK_BLOCKS * most
    scratch = b.gep(scratch, [b.mul(b.mul(number, least(b, a["n_rows"], int64(chunk))), n_inputs)])

    by_rows = b.icmp_unsigned(">=", a["n_rows"], b.mul(n_threads, int64(_ROWS_PER_THREAD)))
    n_units = b.select(by_rows, ceil_div(b, a["n_rows"], most), a["n_panels"])
    begin = b.udiv(b.mul(n_units, number), n_threads)
    end = b.udiv(b.mul(n_units, b.add(number, int64(1))), n_threads)
    first_row = b.select(by_rows, b.mul(begin, int64(most)), int64(0))
    last_row = b.select(by_rows, least(b, b.mul(end, int64(most)), a["n_rows"]), a["n_rows"])
    first_panel = b.select(by_rows, int64(0), begin)
    last_panel = b.select(by_rows, a["n_panels"], end)
    words = b.mul(a["n_groups"], int64(panel_words(bits, n_groups=1, lanes=unit.lanes)))

    with count(b, int64(0), ceil_div(b, b.sub(last_row, first_row), chunk)) as turn:
        start = b.add(first_row, b.mul(turn, int64(chunk)))
        n = least(b, b.sub(last_row, start), int64(chunk))
        n_blocks = ceil_div(b, n, most)
        block = even_blocks(b, n, n_blocks)
        with count(b, int64(0), n_blocks) as at:
            begin, rows = block(at)
            target = b.gep(scratch, [b.mul(begin, n_inputs)])
            source = b.gep(x, [b.mul(b.add(start, begin), a["x_stride"])])
            _write_transpose(b, source, a["x_stride"], target, rows, n_inputs)
        with count(b, first_panel, last_panel) as panel, count(b, int64(0), n_blocks) as at:
            begin, rows = block(at)
            row = b.mul(b.add(start, begin), a["out_stride"])
            function = b.load(b.gep(table, [int64(0), b.sub(rows, int64(1))]))
            b.call(
                function,
                [
                    a["n_groups"],
                    b.gep(scratch, [b.mul(begin, n_inputs)]),
                    b.gep(panels, [b.mul(panel, words)]),
                    b.gep(out, [b.add(row, b.mul(panel, int64(REGISTERS * unit.lanes)))]),
                    a["out_stride"],
                    a["add"],
                ],
            )
    b.ret_void()
    return share


def _write_transpose(b: ir.IRBuilder, x: Any, stride: Any, target: Any, rows: Any, n_inputs: Any) -> None:
    """target[k, r] = x[r, k]"""
    together = 8
    with count(b, int64(0), rows) as row:
        source, place = b.gep(x, [b.mul(row, stride)]), b.gep(target, [row])
        with count(b, int64(0), b.udiv(n_inputs, int64(together))) as turn:
            k = b.mul(turn, int64(together))
            for offset in range(together):
                at = b.add(k, int64(offset))
                b.store(b.load(b.gep(source, [at])), b.gep(place, [b.mul(at, rows)]))
