"""The innermost product: some rows of x times one panel of grouped weights.

A panel holds the weights of two registers of outputs, group after group in the order in which they are read:
scales, minimums, then the group's words, each for all the panel's outputs side by side. A word is unpacked to
float32 weights in registers, used for every row, and forgotten.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from checkpoint.grouped import GROUP, U32, Grouped
from worker.native.code import F32_PTR, I32_PTR, I64, Vectors, int64, repeat
from worker.native.machine import REGISTERS

_CHAINS = 8
"""Sums that must be under way at once to hide the latency of a multiply-add (4 cycles, 2 units)."""


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


def write_panel(module: ir.Module, vectors: Vectors, *, bits: int, rows: int) -> ir.Function:
    """void(n_groups, x, panel, out, out_stride, add): out[r, :] = x[:, r] · panel, added to what is there
    when `add` is 1. x is [inputs, rows], out [rows, out_stride]."""
    kind = ir.FunctionType(ir.VoidType(), [I64, F32_PTR, I32_PTR, F32_PTR, I64, I64])
    function = ir.Function(module, kind, name=f"panel_{bits}_{rows}")
    function.linkage = "internal"
    n_groups, x, panel, out, out_stride, add = function.args
    b = ir.IRBuilder(function.append_basic_block())
    chains = max(_CHAINS // (rows * REGISTERS), 1)
    n_sums = rows * REGISTERS * chains
    sums = _sum_up(b, vectors, (n_groups, x, panel), bits=bits, rows=rows, n_sums=n_sums)
    keep = b.icmp_unsigned("!=", add, int64(0))
    for row in range(rows):
        for register in range(REGISTERS):
            first = (row * REGISTERS + register) * chains
            total = sums[first]
            for chain in range(1, chains):
                total = b.fadd(total, sums[first + chain])
            place = b.gep(out, [b.add(b.mul(out_stride, int64(row)), int64(register * vectors.lanes))])
            old = vectors.load(b, place, 0, vectors.floats)
            vectors.store(b, b.fadd(total, b.select(keep, old, vectors.zero)), place)
    b.ret_void()
    return function


def _sum_up(
    b: ir.IRBuilder, v: Vectors, arguments: tuple[Any, Any, Any], *, bits: int, rows: int, n_sums: int
) -> list[Any]:
    """The loops over groups and words."""
    n_groups, x, panel = arguments
    width = REGISTERS * v.lanes

    def group(_: Any, carried: list[Any]) -> list[Any]:
        x, panel, *sums = carried
        scale = [v.load(b, panel, r * v.lanes, v.floats) for r in range(REGISTERS)]
        minimum = [v.load(b, panel, width + r * v.lanes, v.floats) for r in range(REGISTERS)]

        def word(_: Any, carried: list[Any]) -> list[Any]:
            x, panel, *sums = carried
            sums = _word(b, v, (x, panel, scale, minimum), sums, bits=bits, rows=rows)
            return [b.gep(x, [int64(4 * rows)]), b.gep(panel, [int64(width)]), *sums]

        words = b.gep(panel, [int64(2 * width)])
        _, panel, *sums = repeat(b, int64(bits), [x, words, *sums], word)
        return [b.gep(x, [int64(GROUP * rows)]), panel, *sums]

    return repeat(b, n_groups, [x, panel, *[v.zero] * n_sums], group)[2:]


def _word(
    b: ir.IRBuilder, v: Vectors, arguments: tuple[Any, ...], sums: list[Any], *, bits: int, rows: int
) -> list[Any]:
    """One word of each output: 32 / bits weights, each for every row."""
    x, panel, scale, minimum = arguments
    sums = list(sums)
    chains = len(sums) // (rows * REGISTERS)
    words = [v.load(b, panel, r * v.lanes, v.ints) for r in range(REGISTERS)]
    n_places = 32 // bits
    for place in range(n_places):
        weights = []
        for register, packed in enumerate(words):
            q = b.lshr(packed, v.constant(place * bits)) if place else packed
            if place < n_places - 1:
                q = b.and_(q, v.constant((1 << bits) - 1))
            weights.append(v.fma(b, b.sitofp(q, v.floats), scale[register], minimum[register]))
        for row in range(rows):
            value = v.spread(b, b.load(b.gep(x, [int64(input_of(bits, place) * rows + row)])))
            for register, weight in enumerate(weights):
                at = (row * REGISTERS + register) * chains + place % chains
                sums[at] = v.fma(b, weight, value, sums[at])
    return sums
