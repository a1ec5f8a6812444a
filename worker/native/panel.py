"""The innermost product: some rows of x times one panel of weights.

A panel holds the weights of two registers of outputs. Grouped weights lie group after group in the order in
which they are read: scales, minimums, then the group's words, each for all the panel's outputs side by side.
For few rows a word is unpacked to float32 weights in registers, used for every row, and forgotten; for many
rows a part of the panel is unpacked once, to lines of float32 weights, and used for each block of rows.

x lies in rows of a stride that is fixed in the code: a row's place is then part of an instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from checkpoint.grouped import GROUP, U32, Grouped
from worker.native.code import F32_PTR, I32_PTR, I64, Vectors, int64, repeat
from worker.native.machine import REGISTERS

_CHAINS = 8
"""Sums that must be under way at once to hide the latency of a multiply-add (4 cycles, 2 units)."""
_UNROLL = 8
X_PADDING = 16
"""Floats behind each row of x. Rows a power of two apart would fall into the same places of the cache."""


def panel_words(bits: int, *, n_groups: int, lanes: int) -> int:
    """32-bit words of a panel."""
    return n_groups * (2 + bits) * REGISTERS * lanes


def pack_panels(weight: Grouped, *, lanes: int) -> U32:
    """[n_panels, n_groups, 2 + bits, outputs of a panel]"""
    n_out, n_groups = weight.scale.shape
    width = REGISTERS * lanes
    packed = np.empty((n_out // width, n_groups, 2 + weight.bits, width), dtype=np.uint32)
    for at, values in enumerate((weight.scale, weight.minimum)):
        packed[:, :, at] = values.view(np.uint32).reshape(-1, width, n_groups).swapaxes(1, 2)
    packed[:, :, 2:] = weight.words.reshape(-1, width, n_groups, weight.bits).transpose(0, 2, 3, 1)
    return packed


def input_of(bits: int, place: int) -> int:
    """Offset of the input that `place` of word 0 belongs to; word w adds 4 w (`Grouped.words`)."""
    return place if bits == 8 else place // 2 + GROUP // 2 * (place % 2)


def write_panel(module: ir.Module, v: Vectors, *, bits: int, rows: int, x_stride: int) -> ir.Function:
    """void(n_groups, x, panel, start, out, out_stride, add, ahead): out[r, :] = x[r, :] · panel + start,
    added to what is there when `add` is 1. x is [rows, inputs], out [rows, out_stride], start one line. The
    words `ahead` of those that are read are fetched: memory is far slower than the products of a few rows."""
    function, b, arguments = _product(module, name=f"panel_{bits}_{rows}")
    n_groups, x, panel = arguments[:3]
    ahead = arguments[-1]
    width = REGISTERS * v.lanes
    chains = max(_CHAINS // (rows * REGISTERS), 1)

    def group(_: Any, carried: list[Any]) -> list[Any]:
        x, panel, *sums = carried
        v.prefetch(b, b.gep(panel, [ahead]), 2 * width, level=2)
        scale = [v.load(b, panel, r * v.lanes, v.floats) for r in range(REGISTERS)]
        minimum = [v.load(b, panel, width + r * v.lanes, v.floats) for r in range(REGISTERS)]

        def word(_: Any, carried: list[Any]) -> list[Any]:
            x, panel, *sums = carried
            v.prefetch(b, b.gep(panel, [ahead]), width, level=2)
            words = [v.load(b, panel, r * v.lanes, v.ints) for r in range(REGISTERS)]
            for place in range(32 // bits):
                weights = []
                for register, packed in enumerate(words):
                    q = _bits_at(b, v, packed, bits=bits, place=place)
                    weights.append(v.fma(b, b.sitofp(q, v.floats), scale[register], minimum[register]))
                values = [row * x_stride + input_of(bits, place) for row in range(rows)]
                _add_products(b, v, (x, values), weights, sums, chain=place % chains)
            return [b.gep(x, [int64(4)]), b.gep(panel, [int64(width)]), *sums]

        words = b.gep(panel, [int64(2 * width)])
        _, panel, *sums = repeat(b, int64(bits), [x, words, *sums], word)
        return [b.gep(x, [int64(GROUP)]), panel, *sums]

    start = [x, panel, *[v.zero] * (rows * REGISTERS * chains)]
    _finish(b, v, arguments, repeat(b, n_groups, start, group)[2:], chains=chains)
    return function


def write_unpacked(module: ir.Module, v: Vectors, *, rows: int, x_stride: int) -> ir.Function:
    """The same as `write_panel` for weights that are float32 already: [inputs, outputs of a panel]."""
    function, b, arguments = _product(module, name=f"unpacked_{rows}")
    n_groups, x, panel = arguments[:3]
    panel = b.bitcast(panel, F32_PTR)
    width = REGISTERS * v.lanes
    chains = max(_CHAINS // (rows * REGISTERS), 1)

    def turn(_: Any, carried: list[Any]) -> list[Any]:
        x, panel, *sums = carried
        for step in range(_UNROLL):
            weights = [v.load(b, panel, step * width + r * v.lanes, v.floats) for r in range(REGISTERS)]
            values = [row * x_stride + step for row in range(rows)]
            _add_products(b, v, (x, values), weights, sums, chain=step % chains)
        return [b.gep(x, [int64(_UNROLL)]), b.gep(panel, [int64(_UNROLL * width)]), *sums]

    start = [x, panel, *[v.zero] * (rows * REGISTERS * chains)]
    n = b.mul(n_groups, int64(GROUP // _UNROLL))
    _finish(b, v, arguments, repeat(b, n, start, turn)[2:], chains=chains)
    return function


def write_unpack(module: ir.Module, v: Vectors, *, bits: int) -> ir.Function:
    """void(n_groups, panel, out, ahead): the weights of a panel's part as float32, [inputs, outputs
    of a panel].

    A word's bits are taken where they stand and the scale is lowered by the same power of two, which is exact
    (a half float's scale is far from the smallest number of float32) and saves the shift."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I32_PTR, F32_PTR, I64])
    function = ir.Function(module, kind, name=f"unpack_{bits}")
    function.linkage = "internal"
    n_groups, panel, out, ahead = function.args
    b = ir.IRBuilder(function.append_basic_block())
    width = REGISTERS * v.lanes
    n_places = 32 // bits

    def group(_: Any, carried: list[Any]) -> list[Any]:
        panel, out = carried
        v.prefetch(b, b.gep(panel, [ahead]), (2 + bits) * width, level=2)
        scale = [v.load(b, panel, r * v.lanes, v.floats) for r in range(REGISTERS)]
        minimum = [v.load(b, panel, width + r * v.lanes, v.floats) for r in range(REGISTERS)]
        scales = [
            [b.fmul(one, v.number(2.0 ** (-bits * place))) for one in scale] for place in range(n_places - 1)
        ]

        def word(_: Any, carried: list[Any]) -> list[Any]:
            panel, out = carried
            for register in range(REGISTERS):
                packed = v.load(b, panel, register * v.lanes, v.ints)
                for place in range(n_places):
                    if place < n_places - 1:
                        q = b.and_(packed, v.constant(((1 << bits) - 1) << (place * bits)))
                        factor = scales[place][register]
                    else:  # in place it would be the sign
                        q, factor = b.lshr(packed, v.constant(place * bits)), scale[register]
                    weight = v.fma(b, b.sitofp(q, v.floats), factor, minimum[register])
                    at = input_of(bits, place) * width + register * v.lanes
                    v.store(b, weight, b.gep(out, [int64(at)]))
            return [b.gep(panel, [int64(width)]), b.gep(out, [int64(4 * width)])]

        panel, _ = repeat(b, int64(bits), [b.gep(panel, [int64(2 * width)]), out], word)
        return [panel, b.gep(out, [int64(GROUP * width)])]

    repeat(b, n_groups, [panel, out], group)
    b.ret_void()
    return function


def _product(module: ir.Module, *, name: str) -> tuple[ir.Function, ir.IRBuilder, Sequence[Any]]:
    kind = ir.FunctionType(ir.VoidType(), [I64, F32_PTR, I32_PTR, F32_PTR, F32_PTR, I64, I64, I64])
    function = ir.Function(module, kind, name=name)
    function.linkage = "internal"
    return function, ir.IRBuilder(function.append_basic_block()), function.args


def _bits_at(b: ir.IRBuilder, v: Vectors, packed: Any, *, bits: int, place: int) -> Any:
    q = b.lshr(packed, v.constant(place * bits)) if place else packed
    return b.and_(q, v.constant((1 << bits) - 1)) if place < 32 // bits - 1 else q


def _add_products(
    b: ir.IRBuilder,
    v: Vectors,
    x: tuple[Any, Sequence[int]],
    weights: Sequence[Any],
    sums: list[Any],
    *,
    chain: int,
) -> None:
    """One input of every row: sums are [row, register, chain]."""
    pointer, places = x
    chains = len(sums) // (len(places) * len(weights))
    for row, place in enumerate(places):
        value = v.spread(b, b.load(b.gep(pointer, [int64(place)])))
        for register, weight in enumerate(weights):
            at = (row * len(weights) + register) * chains + chain
            sums[at] = v.fma(b, weight, value, sums[at])


def _finish(
    b: ir.IRBuilder, v: Vectors, arguments: Sequence[Any], sums: Sequence[Any], *, chains: int
) -> None:
    """Sums to their places."""
    _, _, _, start, out, out_stride, add, _ = arguments
    keep = b.icmp_unsigned("!=", add, int64(0))
    for register in range(REGISTERS):
        first = v.load(b, start, register * v.lanes, v.floats)
        for row in range(len(sums) // (REGISTERS * chains)):
            parts = sums[(row * REGISTERS + register) * chains :][:chains]
            total = parts[0]
            for part in parts[1:]:
                total = b.fadd(total, part)
            place = b.gep(out, [b.add(b.mul(out_stride, int64(row)), int64(register * v.lanes))])
            old = b.select(keep, v.load(b, place, 0, v.floats), v.zero)
            v.store(b, b.fadd(b.fadd(total, first), old), place)
    b.ret_void()
