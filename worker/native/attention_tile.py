"""The inner pieces of attention: a tile of keys and values, its products with some queries, its softmax.

A tile is `width` positions: two registers of them. Queries lie one behind the other, [query, head_dim].
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from worker.native.code import F32_PTR, I64, I64_PTR, Vectors, count, int64, least, repeat
from worker.native.heads import Heads
from worker.native.machine import REGISTERS

NEVER = -1e30
"""Stands for minus infinity, without making NaN of differences."""
_UNROLL = 4


def write_product(
    module: ir.Module, v: Vectors, *, rows: int, a_stride: int, c_stride: int, name: str
) -> ir.Function:
    """void(n, a, b, b_stride, c, add): c[rows, tile width] = a[rows, n] · b[n, tile width], added to what
    is there when `add` is 1. n is a multiple of 4."""
    kind = ir.FunctionType(ir.VoidType(), [I64, F32_PTR, F32_PTR, I64, F32_PTR, I64])
    function = ir.Function(module, kind, name=f"{name}_{rows}")
    function.linkage = "internal"
    n, a, right, right_stride, c, add = function.args
    b = ir.IRBuilder(function.append_basic_block())

    def turn(_: Any, carried: list[Any]) -> list[Any]:
        a, right, *sums = carried
        for step in range(_UNROLL):
            others = [v.load(b, right, r * v.lanes, v.floats) for r in range(REGISTERS)]
            for row in range(rows):
                value = v.spread(b, b.load(b.gep(a, [int64(row * a_stride + step)])))
                for register, other in enumerate(others):
                    at = row * REGISTERS + register
                    sums[at] = v.fma(b, value, other, sums[at])
            right = b.gep(right, [right_stride])
        return [b.gep(a, [int64(_UNROLL)]), right, *sums]

    start = [a, right, *[v.zero] * (rows * REGISTERS)]
    _, _, *sums = repeat(b, b.udiv(n, int64(_UNROLL)), start, turn)
    keep = b.icmp_unsigned("!=", add, int64(0))
    for at, total in enumerate(sums):
        place = b.gep(c, [int64(at // REGISTERS * c_stride + at % REGISTERS * v.lanes)])
        old = b.select(keep, v.load(b, place, 0, v.floats), v.zero)
        v.store(b, b.fadd(total, old), place)
    b.ret_void()
    return function


def write_softmax(module: ir.Module, v: Vectors, heads: Heads, *, registers: int, name: str) -> ir.Function:
    """void(scores, n_valid, maximum, total, out): one query's online softmax over some registers of
    scores. Turns them into weights relative to the new maximum (0 from `n_valid` on) and brings what was
    summed so far to it."""
    kind = ir.FunctionType(ir.VoidType(), [F32_PTR, I64, F32_PTR, F32_PTR, F32_PTR])
    function = ir.Function(module, kind, name=name)
    function.linkage = "internal"
    scores, n_valid, maximum, total, out = function.args
    b = ir.IRBuilder(function.append_basic_block())
    limit = b.trunc(n_valid, ir.IntType(32))
    undefined = ir.Constant(v.ints, ir.Undefined)
    limit = b.shuffle_vector(
        b.insert_element(undefined, limit, ir.Constant(ir.IntType(32), 0)), undefined, v.constant(0)
    )
    parts, inside = [], []
    for register in range(registers):
        places = ir.Constant(v.ints, [register * v.lanes + lane for lane in range(v.lanes)])
        inside.append(b.icmp_signed("<", places, limit))
        part = v.load(b, scores, register * v.lanes, v.floats)
        parts.append(b.select(inside[-1], part, v.number(NEVER)))
    best = parts[0]
    for part in parts[1:]:
        best = v.larger(b, best, part)
    old = b.load(maximum)
    new = v.largest(b, v.larger(b, best, v.spread(b, old)))
    b.store(new, maximum)
    new = v.spread(b, new)
    weights = []
    for register, part in enumerate(parts):
        weight = b.select(inside[register], v.exp(b, b.fsub(part, new)), v.zero)
        v.store(b, weight, b.gep(scores, [int64(register * v.lanes)]))
        weights.append(weight)
    shrink = v.exp(b, b.fsub(v.spread(b, old), new))
    summed = weights[0]
    for weight in weights[1:]:
        summed = b.fadd(summed, weight)
    first = b.extract_element(shrink, ir.Constant(ir.IntType(32), 0))
    b.store(b.fadd(b.fmul(b.load(total), first), v.sum(b, summed)), total)
    for at in range(0, heads.head_dim, v.lanes):
        place = b.gep(out, [int64(at)])
        v.store(b, b.fmul(v.load(b, place, 0, v.floats), shrink), place)
    b.ret_void()
    return function


def write_load_tile(module: ir.Module, v: Vectors, heads: Heads) -> ir.Function:
    """void(cache, slots, first, n, keys, values): positions first … of one KV head, whose keys begin at
    `cache`. keys: [head_dim, width], values: [width, head_dim]. Positions from n on repeat the last one."""
    kind = ir.FunctionType(ir.VoidType(), [F32_PTR, I64_PTR, I64, I64, F32_PTR, F32_PTR])
    function = ir.Function(module, kind, name="load_tile")
    function.linkage = "internal"
    cache, slots, first, n, keys, values = function.args
    b = ir.IRBuilder(function.append_basic_block())
    dim, width = heads.head_dim, REGISTERS * v.lanes
    last = b.sub(n, int64(1))
    with count(b, int64(0), int64(REGISTERS)) as register:
        begin = b.mul(register, int64(v.lanes))
        places = []
        for lane in range(v.lanes):
            position = least(b, b.add(b.add(first, begin), int64(lane)), last)
            slot = b.load(b.gep(slots, [position]))
            places.append(b.gep(cache, [b.mul(slot, int64(heads.slot_stride))]))
        with count(b, int64(0), int64(dim // v.lanes)) as part:
            at = b.mul(part, int64(v.lanes))
            square = [v.load(b, b.gep(place, [at]), 0, v.floats) for place in places]
            for row, column in enumerate(v.transpose(b, square)):
                line = b.mul(b.add(at, int64(row)), int64(width))
                v.store(b, column, b.gep(keys, [b.add(line, begin)]))
            for lane, place in enumerate(places):
                value = v.load(b, b.gep(place, [at]), heads.n_kv_heads * dim, v.floats)
                line = b.mul(b.add(begin, int64(lane)), int64(dim))
                v.store(b, value, b.gep(values, [b.add(line, at)]))
    b.ret_void()
    return function


def fetch_position(b: ir.IRBuilder, v: Vectors, heads: Heads, cache: Any, slot: Any) -> None:
    """Its key and value will soon be read."""
    place = b.gep(cache, [b.mul(slot, int64(heads.slot_stride))])
    for at in (0, heads.n_kv_heads * heads.head_dim):
        v.prefetch(b, b.gep(place, [int64(at)]), heads.head_dim, level=2)
