"""Paged attention in compiled code: rotation, append, and online softmax over tiles of positions.

The softmax is that of FlashAttention (arXiv 2205.14135): nothing of the size queries × positions is kept.
What is computed is a list of items, each some query tokens with one piece of positions or several; so rows
that share a prefix read it once, and then each its own tail.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from llvmlite import ir

from worker.native.attention_tile import NEVER, write_load_tile, write_product, write_softmax
from worker.native.code import (
    F32,
    F32_PTR,
    I64,
    I64_PTR,
    Vectors,
    ceil_div,
    count,
    even_blocks,
    int64,
    least,
    table_of,
)
from worker.native.heads import Heads, Items
from worker.native.machine import REGISTERS, Compiled, VectorUnit, vector_unit
from worker.native.parallel import share_type, write_entry

_ARGUMENTS = (
    "qkv",
    "cache",
    "out",
    "items",
    "n_items",
    "pieces",
    "tokens",
    "slots",
    "scratch",
    "most_tokens",
)
_PIECE = ("first", "n_tokens", "slots", "n_slots", "causal")


class AttentionKernel:
    """The compiled functions for one shape of heads. Needs `worker.native.heads.heads_fit`."""

    def __init__(self, heads: Heads) -> None:
        unit = _unit()
        self._heads = heads
        width = REGISTERS * unit.lanes
        self._tile_floats = (2 * heads.head_dim + unit.block_rows) * width
        self._rope, self._attend = _functions(heads)

    def append(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """Rotate q and k of qkv [n_tokens, (n_heads + 2 n_kv_heads) head_dim] in place, and write k and v
        into their slots of the layer's cache. cos, sin: [n_tokens, head_dim / 2]."""
        self._rope(
            qkv.data_ptr(), qkv.shape[0], cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), cache.data_ptr()
        )

    def attend(self, qkv: torch.Tensor, cache: torch.Tensor, items: Items) -> torch.Tensor:
        """[n_tokens, n_heads head_dim]"""
        heads = self._heads
        out = qkv.new_empty((qkv.shape[0], heads.n_heads * heads.head_dim))
        n_threads = torch.get_num_threads()
        per_thread = self._tile_floats + items.most_tokens * heads.group * (2 * heads.head_dim + 2)
        scratch = qkv.new_empty((n_threads, per_thread))
        self._attend(
            qkv.data_ptr(),
            cache.data_ptr(),
            out.data_ptr(),
            items.items.ctypes.data,
            len(items.items) - 1,
            items.pieces.ctypes.data,
            items.tokens.ctypes.data,
            items.slots.ctypes.data,
            scratch.data_ptr(),
            items.most_tokens,
            n_threads,
        )
        return out


def _unit() -> VectorUnit:
    unit = vector_unit()
    assert unit is not None
    return unit


@functools.cache
def _functions(heads: Heads) -> tuple[Any, Any]:
    code = Compiled(_write(heads, _unit()))
    rope = code.function("append", *[ctypes.c_int64] * 6)
    attend = code.function("attend", *[ctypes.c_int64] * (len(_ARGUMENTS) + 1))
    rope.code = attend.code = code
    return rope, attend


def _write(heads: Heads, unit: VectorUnit) -> ir.Module:
    module = ir.Module()
    v = Vectors(module, lanes=unit.lanes)
    _write_append(module, v, heads)
    item = _write_item(module, v, heads, unit)
    share = ir.Function(module, share_type(), name="share")
    share.linkage = "internal"
    b = ir.IRBuilder(share.append_basic_block())
    arguments, number, n_threads = share.args
    a = _load(b, arguments, _ARGUMENTS)
    floats = b.mul(a["most_tokens"], int64(heads.group * (2 * heads.head_dim + 2)))
    floats = b.add(floats, int64((2 * heads.head_dim + unit.block_rows) * REGISTERS * unit.lanes))
    scratch = b.gep(b.inttoptr(a["scratch"], F32_PTR), [b.mul(number, floats)])
    n_tasks = b.mul(a["n_items"], int64(heads.n_kv_heads))
    n_own = b.udiv(b.sub(b.add(n_tasks, b.sub(n_threads, int64(1))), number), n_threads)
    with count(b, int64(0), n_own) as turn:
        task = b.add(number, b.mul(turn, n_threads))
        index, head = b.udiv(task, int64(heads.n_kv_heads)), b.urem(task, int64(heads.n_kv_heads))
        b.call(item, [arguments, index, head, scratch])
    b.ret_void()
    write_entry(module, share, name="attend", n_arguments=len(_ARGUMENTS))
    return module


def _load(b: ir.IRBuilder, pointer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: b.load(b.gep(pointer, [int64(at)])) for at, name in enumerate(names)}


def _write_append(module: ir.Module, v: Vectors, heads: Heads) -> None:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 6), name="append")
    b = ir.IRBuilder(function.append_basic_block())
    addresses = function.args
    n_tokens = addresses[1]
    qkv, cos, sin, cache = (b.inttoptr(addresses[at], F32_PTR) for at in (0, 2, 3, 5))
    slots = b.inttoptr(addresses[4], I64_PTR)
    dim, half = heads.head_dim, heads.head_dim // 2
    with count(b, int64(0), n_tokens) as token:
        line = b.gep(qkv, [b.mul(token, int64((heads.n_heads + 2 * heads.n_kv_heads) * dim))])
        angle = b.mul(token, int64(half))
        with count(b, int64(0), int64(heads.n_heads + heads.n_kv_heads)) as head:
            start = b.gep(line, [b.mul(head, int64(dim))])
            for at in range(0, half, v.lanes):
                x, y = v.load(b, start, at, v.floats), v.load(b, start, half + at, v.floats)
                c, s = (v.load(b, b.gep(table, [angle]), at, v.floats) for table in (cos, sin))
                v.store(b, v.fma(b, y, b.fsub(v.zero, s), b.fmul(x, c)), b.gep(start, [int64(at)]))
                v.store(b, v.fma(b, x, s, b.fmul(y, c)), b.gep(start, [int64(half + at)]))
        slot = b.load(b.gep(slots, [token]))
        target = b.gep(cache, [b.mul(slot, int64(heads.slot_stride))])
        with count(b, int64(0), int64(heads.slot_stride // v.lanes)) as part:
            at = b.mul(part, int64(v.lanes))
            value = v.load(b, b.gep(line, [at]), heads.n_heads * dim, v.floats)
            v.store(b, value, b.gep(target, [at]))
    b.ret_void()


def _write_item(module: ir.Module, v: Vectors, heads: Heads, unit: VectorUnit) -> ir.Function:
    """void(arguments, index, head, scratch): one item's queries of the heads of one KV head."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64_PTR, I64, I64, F32_PTR]), name="item")
    function.linkage = "internal"
    arguments, index, head, scratch = function.args
    b = ir.IRBuilder(function.append_basic_block())
    piece_function = _write_piece(module, v, heads, unit)
    a = _load(b, arguments, _ARGUMENTS)
    qkv, cache, out = (b.inttoptr(a[name], F32_PTR) for name in ("qkv", "cache", "out"))
    items, pieces, tokens = (b.inttoptr(a[name], I64_PTR) for name in ("items", "pieces", "tokens"))
    first, n_tokens, begin = (
        b.load(b.gep(items, [b.add(b.mul(index, int64(3)), int64(at))])) for at in range(3)
    )
    end = b.load(b.gep(items, [b.add(b.mul(index, int64(3)), int64(5))]))
    dim, group = heads.head_dim, heads.group
    n_queries = b.mul(a["most_tokens"], int64(group))
    tile = (2 * dim + unit.block_rows) * REGISTERS * v.lanes
    q = b.gep(scratch, [int64(tile)])
    sums = b.gep(q, [b.mul(n_queries, int64(dim))])
    maxima = b.gep(sums, [b.mul(n_queries, int64(dim))])
    totals = b.gep(maxima, [n_queries])
    first_head = b.mul(head, int64(group))

    def each_query() -> Any:
        return count(b, int64(0), b.mul(n_tokens, int64(group)))

    def place_of(query: Any, n_heads: int) -> Any:
        """Where the query's head begins in rows of so many heads."""
        token = b.load(b.gep(tokens, [b.add(first, b.udiv(query, int64(group)))]))
        own = b.add(first_head, b.urem(query, int64(group)))
        return b.mul(b.add(b.mul(token, int64(n_heads)), own), int64(dim))

    with each_query() as query:
        source = b.gep(qkv, [place_of(query, heads.n_heads + 2 * heads.n_kv_heads)])
        line = b.mul(query, int64(dim))
        for at in range(0, dim, v.lanes):
            scaled = b.fmul(v.load(b, source, at, v.floats), v.number(1.0 / math.sqrt(dim)))
            v.store(b, scaled, b.gep(q, [b.add(line, int64(at))]))
            v.store(b, v.zero, b.gep(sums, [b.add(line, int64(at))]))
        b.store(ir.Constant(F32, NEVER), b.gep(maxima, [query]))
        b.store(ir.Constant(F32, 0.0), b.gep(totals, [query]))
    own_cache = b.gep(cache, [b.mul(head, int64(dim))])
    with count(b, begin, end) as number:
        piece = b.gep(pieces, [b.mul(number, int64(len(_PIECE)))])
        slots = b.inttoptr(a["slots"], I64_PTR)
        b.call(piece_function, [piece, slots, own_cache, scratch, q, sums, maxima, totals])
    with each_query() as query:
        target = b.gep(out, [place_of(query, heads.n_heads)])
        total = v.spread(b, b.load(b.gep(totals, [query])))
        line = b.gep(sums, [b.mul(query, int64(dim))])
        for at in range(0, dim, v.lanes):
            v.store(b, b.fdiv(v.load(b, line, at, v.floats), total), b.gep(target, [int64(at)]))
    b.ret_void()
    return function


def _write_piece(module: ir.Module, v: Vectors, heads: Heads, unit: VectorUnit) -> ir.Function:
    """void(piece, slots, cache, scratch, q, sums, maxima, totals)"""
    kind = ir.FunctionType(ir.VoidType(), [I64_PTR, I64_PTR, *[F32_PTR] * 6])
    function = ir.Function(module, kind, name="piece")
    function.linkage = "internal"
    piece, all_slots, cache, keys, q, sums, maxima, totals = function.args
    b = ir.IRBuilder(function.append_basic_block())
    dim, group, width, most = heads.head_dim, heads.group, REGISTERS * v.lanes, unit.block_rows
    load_tile, softmax = write_load_tile(module, v, heads), write_softmax(module, v, heads)
    rows = range(1, most + 1)
    score = [write_product(module, v, rows=n, a_stride=dim, c_stride=width, name="score") for n in rows]
    mix = [write_product(module, v, rows=n, a_stride=width, c_stride=dim, name="mix") for n in rows]
    score_table, mix_table = table_of(module, score, name="scores"), table_of(module, mix, name="mixes")
    values = b.gep(keys, [int64(dim * width)])
    scores = b.gep(values, [int64(dim * width)])

    p = _load(b, piece, _PIECE)
    slots = b.gep(all_slots, [p["slots"]])
    causal = b.icmp_unsigned("!=", p["causal"], int64(0))
    n_slots = p["n_slots"]
    before = b.select(causal, b.sub(n_slots, p["n_tokens"]), n_slots)
    with count(b, int64(0), ceil_div(b, n_slots, width)) as tile:
        start = b.mul(tile, int64(width))
        b.call(load_tile, [cache, slots, start, n_slots, keys, values])
        # Earlier query tokens see nothing of this tile.
        late = b.icmp_unsigned(">", start, before)
        skipped = b.mul(b.select(late, b.sub(start, before), int64(0)), int64(group))
        n = b.sub(b.mul(p["n_tokens"], int64(group)), skipped)
        base = b.mul(p["first"], int64(group))
        n_blocks = ceil_div(b, n, most)
        block = even_blocks(b, n, n_blocks)
        with count(b, int64(0), n_blocks) as at:
            begin, n_rows = block(at)
            begin = b.add(skipped, begin)
            query = b.add(base, begin)
            own_sums = b.gep(sums, [b.mul(query, int64(dim))])
            choice = b.sub(n_rows, int64(1))
            function_of = b.load(b.gep(score_table, [int64(0), choice]))
            own_q = b.gep(q, [b.mul(query, int64(dim))])
            b.call(function_of, [int64(dim), own_q, keys, int64(width), scores, int64(0)])
            with count(b, int64(0), n_rows) as row:
                token = b.udiv(b.add(begin, row), int64(group))
                limit = b.select(causal, b.add(b.add(before, token), int64(1)), n_slots)
                line, own = b.mul(row, int64(width)), b.add(query, row)
                b.call(
                    softmax,
                    [
                        b.gep(scores, [line]),
                        least(b, b.sub(limit, start), int64(width)),
                        b.gep(maxima, [own]),
                        b.gep(totals, [own]),
                        b.gep(sums, [b.mul(own, int64(dim))]),
                    ],
                )
            function_of = b.load(b.gep(mix_table, [int64(0), choice]))
            for part in range(0, dim, width):
                target = b.gep(own_sums, [int64(part)])
                b.call(
                    function_of,
                    [int64(width), scores, b.gep(values, [int64(part)]), int64(dim), target, int64(1)],
                )
    b.ret_void()
    return function
