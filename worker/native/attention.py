"""Paged attention in compiled code: rotation, append, and online softmax over tiles of positions.

The softmax is that of FlashAttention (arXiv 2205.14135): nothing of the size queries × positions is kept.
What is computed is a list of items, each some query tokens with one piece of positions or several; so rows
that share a prefix read it once, and then each its own tail.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from worker.native.attention_append import write_append
from worker.native.attention_span import SPAN_REGISTERS, span_floats, write_span
from worker.native.attention_tile import NEVER, fetch_position, write_load_tile, write_product, write_softmax
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
from worker.native.heads import Angles, Heads, Items
from worker.native.machine import REGISTERS, Compiled, VectorUnit, vector_unit
from worker.native.panel import X_PADDING
from worker.native.tape import claimed, load_arguments, op_type

ATTEND_ARGUMENTS = (
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
    "n_alone",
    "alone_heads",
)
_FETCHED = 2
"""Positions of the next tile that each query fetches."""
_PIECE = ("first", "n_tokens", "slots", "n_slots", "causal")


class AttentionKernel:
    """The compiled operations for one shape of heads. Needs `worker.native.heads.heads_fit`."""

    def __init__(self, heads: Heads) -> None:
        unit = _unit()
        self._heads = heads
        self._tile_floats = _tile_floats(heads, unit)
        self._append, self._attend, _ = _operations(heads)

    def append_line(self, qkv: torch.Tensor, angles: Angles | None, cache: torch.Tensor) -> Sequence[int]:
        """The operation that rotates q and k of qkv [n_tokens, (n_heads + 2 n_kv_heads) head_dim] in place
        and writes k and v into their slots of the layer's cache. `angles` None: to be filled in."""
        parts = (angles.cos, angles.sin, angles.slots) if angles is not None else ()
        places = [part.data_ptr() for part in parts] or [0, 0, 0]
        return (self._append, qkv.data_ptr(), *places, cache.data_ptr(), qkv.shape[0])

    def attend_line(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        items: Items | None,
        out: torch.Tensor,
        scratch: torch.Tensor | None,
    ) -> Sequence[int]:
        """The operation that attends. out: as `out` makes it; scratch: as `scratch` makes it. `items` and
        `scratch` None: to be filled in."""
        begin = (self._attend, qkv.data_ptr(), cache.data_ptr(), out.data_ptr())
        if items is None or scratch is None:
            return (*begin, *[0] * (len(ATTEND_ARGUMENTS) + 1 - len(begin)))
        return (
            *begin,
            items.items.ctypes.data,
            len(items.items) - 1,
            items.pieces.ctypes.data,
            items.tokens.ctypes.data,
            items.slots.ctypes.data,
            scratch.data_ptr(),
            items.most_tokens,
            items.n_alone,
            items.alone_heads,
        )

    def out(self, n_tokens: int) -> torch.Tensor:
        """[n_tokens, n_heads head_dim] for the result, with room behind each row for a product."""
        width = self._heads.n_heads * self._heads.head_dim
        return torch.empty((n_tokens, width + X_PADDING))[:, :width]

    def scratch(self, items: Items, *, n_threads: int) -> torch.Tensor:
        heads = self._heads
        per_thread = self._tile_floats + items.most_tokens * heads.group * (2 * heads.head_dim + 2)
        return torch.empty((n_threads, per_thread))


def _tile_floats(heads: Heads, unit: VectorUnit) -> int:
    """Keys, values and scores of a tile, or the scores of a span."""
    tile = (2 * heads.head_dim + unit.block_rows) * REGISTERS * unit.lanes
    return max(tile, span_floats(heads, lanes=unit.lanes))


def _unit() -> VectorUnit:
    unit = vector_unit()
    assert unit is not None
    return unit


@functools.cache
def _operations(heads: Heads) -> tuple[int, int, Compiled]:
    code = Compiled(_write(heads, _unit()))
    return code.address("append"), code.address("attend"), code


def _write(heads: Heads, unit: VectorUnit) -> ir.Module:
    module = ir.Module()
    v = Vectors(module, lanes=unit.lanes)
    write_append(module, v, heads)
    span = write_span(module, v, heads)
    item = _write_item(module, v, heads, unit, span)
    alone = _write_alone(module, v, heads, unit, span)
    attend = ir.Function(module, op_type(), name="attend")
    b = ir.IRBuilder(attend.append_basic_block())
    arguments, number, claims = attend.args
    a = load_arguments(b, arguments, ATTEND_ARGUMENTS)
    floats = b.mul(a["most_tokens"], int64(heads.group * (2 * heads.head_dim + 2)))
    floats = b.add(floats, int64(_tile_floats(heads, unit)))
    scratch = b.gep(b.inttoptr(a["scratch"], F32_PTR), [b.mul(number, floats)])
    n_others = b.sub(a["n_items"], a["n_alone"])
    n_tasks = b.mul(n_others, int64(heads.n_kv_heads))
    n_parts = b.udiv(int64(heads.n_kv_heads), a["alone_heads"])
    n_tasks_alone = b.mul(a["n_alone"], n_parts)
    with (
        claimed(b, claims, b.add(n_tasks, n_tasks_alone)) as task,
        b.if_else(b.icmp_unsigned("<", task, n_tasks)) as (others, single),
    ):
        with others:
            index, head = b.udiv(task, int64(heads.n_kv_heads)), b.urem(task, int64(heads.n_kv_heads))
            b.call(item, [arguments, index, head, scratch])
        with single:
            own = b.sub(task, n_tasks)
            index = b.add(n_others, b.udiv(own, n_parts))
            head = b.mul(b.urem(own, n_parts), a["alone_heads"])
            b.call(alone, [arguments, index, head, scratch])
    b.ret_void()
    return module


def _write_item(
    module: ir.Module, v: Vectors, heads: Heads, unit: VectorUnit, span: ir.Function
) -> ir.Function:
    """void(arguments, index, head, scratch): one item's queries of the heads of one KV head."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64_PTR, I64, I64, F32_PTR]), name="item")
    function.linkage = "internal"
    arguments, index, head, scratch = function.args
    b = ir.IRBuilder(function.append_basic_block())
    piece_function = _write_piece(module, v, heads, unit, span)
    a = load_arguments(b, arguments, ATTEND_ARGUMENTS)
    qkv, cache, out = (b.inttoptr(a[name], F32_PTR) for name in ("qkv", "cache", "out"))
    items, pieces, tokens = (b.inttoptr(a[name], I64_PTR) for name in ("items", "pieces", "tokens"))
    first, n_tokens, begin = (
        b.load(b.gep(items, [b.add(b.mul(index, int64(3)), int64(at))])) for at in range(3)
    )
    end = b.load(b.gep(items, [b.add(b.mul(index, int64(3)), int64(5))]))
    dim, group = heads.head_dim, heads.group
    n_queries = b.mul(a["most_tokens"], int64(group))
    q = b.gep(scratch, [int64(_tile_floats(heads, unit))])
    sums = b.gep(q, [b.mul(n_queries, int64(dim))])
    maxima = b.gep(sums, [b.mul(n_queries, int64(dim))])
    totals = b.gep(maxima, [n_queries])
    first_head = b.mul(head, int64(group))

    def each_query() -> Any:
        return count(b, int64(0), b.mul(n_tokens, int64(group)))

    def place_of(query: Any, stride: int) -> Any:
        """Where the query's head begins in rows so far apart."""
        token = b.load(b.gep(tokens, [b.add(first, b.udiv(query, int64(group)))]))
        own = b.add(first_head, b.urem(query, int64(group)))
        return b.add(b.mul(token, int64(stride)), b.mul(own, int64(dim)))

    with each_query() as query:
        source = b.gep(qkv, [place_of(query, (heads.n_heads + 2 * heads.n_kv_heads) * dim)])
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
        target = b.gep(out, [place_of(query, heads.n_heads * dim + X_PADDING)])
        total = v.spread(b, b.load(b.gep(totals, [query])))
        line = b.gep(sums, [b.mul(query, int64(dim))])
        for at in range(0, dim, v.lanes):
            v.store(b, b.fdiv(v.load(b, line, at, v.floats), total), b.gep(target, [int64(at)]))
    b.ret_void()
    return function


def _write_alone(
    module: ir.Module, v: Vectors, heads: Heads, unit: VectorUnit, span: ir.Function
) -> ir.Function:
    """void(arguments, index, head, scratch): an item of one token with one piece, for `alone_heads` KV heads.
    The heads take turns at each span, so that memory is read in the order in which it lies."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64_PTR, I64, I64, F32_PTR]), name="alone")
    function.linkage = "internal"
    arguments, index, head, scratch = function.args
    b = ir.IRBuilder(function.append_basic_block())
    a = load_arguments(b, arguments, ATTEND_ARGUMENTS)
    qkv, cache, out = (b.inttoptr(a[name], F32_PTR) for name in ("qkv", "cache", "out"))
    items, pieces, tokens = (b.inttoptr(a[name], I64_PTR) for name in ("items", "pieces", "tokens"))
    first, _, begin = (b.load(b.gep(items, [b.add(b.mul(index, int64(3)), int64(at))])) for at in range(3))
    p = load_arguments(b, b.gep(pieces, [b.mul(begin, int64(len(_PIECE)))]), _PIECE)
    slots = b.gep(b.inttoptr(a["slots"], I64_PTR), [p["slots"]])
    token = b.load(b.gep(tokens, [first]))
    dim, group, width = heads.head_dim, heads.group, SPAN_REGISTERS * v.lanes
    n_heads, first_head = b.mul(a["alone_heads"], int64(group)), b.mul(head, int64(group))
    q = b.gep(scratch, [int64(_tile_floats(heads, unit))])
    sums = b.gep(q, [b.mul(n_heads, int64(dim))])
    maxima = b.gep(sums, [b.mul(n_heads, int64(dim))])
    totals = b.gep(maxima, [n_heads])
    source = b.mul(token, int64((heads.n_heads + 2 * heads.n_kv_heads) * dim))
    source = b.gep(qkv, [b.add(source, b.mul(first_head, int64(dim)))])
    with count(b, int64(0), b.mul(n_heads, int64(dim // v.lanes))) as part:
        at = b.mul(part, int64(v.lanes))
        scaled = b.fmul(v.load(b, b.gep(source, [at]), 0, v.floats), v.number(1.0 / math.sqrt(dim)))
        v.store(b, scaled, b.gep(q, [at]))
        v.store(b, v.zero, b.gep(sums, [at]))
    with count(b, int64(0), n_heads) as query:
        b.store(ir.Constant(F32, NEVER), b.gep(maxima, [query]))
        b.store(ir.Constant(F32, 0.0), b.gep(totals, [query]))
    with (
        count(b, int64(0), ceil_div(b, p["n_slots"], width)) as tile,
        count(b, int64(0), a["alone_heads"]) as turn,
    ):
        start = b.mul(tile, int64(width))
        query = b.mul(turn, int64(group))
        line = b.mul(query, int64(dim))
        # After the last head the first one goes on with the next positions; behind them lie the next row's.
        is_last = b.icmp_unsigned("==", b.add(turn, int64(1)), a["alone_heads"])
        next_start = b.select(is_last, least(b, b.add(start, int64(width)), p["n_slots"]), start)
        next_head = b.select(is_last, head, b.add(b.add(head, turn), int64(1)))
        b.call(
            span,
            [
                b.gep(cache, [b.mul(b.add(head, turn), int64(dim))]),
                b.gep(slots, [start]),
                least(b, b.sub(p["n_slots"], start), int64(width)),
                scratch,
                *(b.gep(pointer, [line]) for pointer in (q, sums)),
                *(b.gep(pointer, [query]) for pointer in (maxima, totals)),
                b.gep(cache, [b.mul(next_head, int64(dim))]),
                b.gep(slots, [next_start]),
            ],
        )
    target = b.add(b.mul(token, int64(heads.n_heads * dim + X_PADDING)), b.mul(first_head, int64(dim)))
    with count(b, int64(0), n_heads) as query:
        line = b.mul(query, int64(dim))
        total = v.spread(b, b.load(b.gep(totals, [query])))
        for at in range(0, dim, v.lanes):
            value = b.fdiv(v.load(b, b.gep(sums, [line]), at, v.floats), total)
            v.store(b, value, b.gep(out, [b.add(b.add(target, line), int64(at))]))
    b.ret_void()
    return function


def _write_piece(
    module: ir.Module, v: Vectors, heads: Heads, unit: VectorUnit, span: ir.Function
) -> ir.Function:
    """void(piece, slots, cache, scratch, q, sums, maxima, totals)"""
    kind = ir.FunctionType(ir.VoidType(), [I64_PTR, I64_PTR, *[F32_PTR] * 6])
    function = ir.Function(module, kind, name="piece")
    function.linkage = "internal"
    piece, all_slots, cache, keys, q, sums, maxima, totals = function.args
    b = ir.IRBuilder(function.append_basic_block())
    dim, group, width, most = heads.head_dim, heads.group, REGISTERS * v.lanes, unit.block_rows
    load_tile = write_load_tile(module, v, heads)
    softmax = write_softmax(module, v, heads, registers=REGISTERS, name="softmax")
    rows = range(1, most + 1)
    score = [write_product(module, v, rows=n, a_stride=dim, c_stride=width, name="score") for n in rows]
    mix = [write_product(module, v, rows=n, a_stride=width, c_stride=dim, name="mix") for n in rows]
    score_table, mix_table = table_of(module, score, name="scores"), table_of(module, mix, name="mixes")
    values = b.gep(keys, [int64(dim * width)])
    scores = b.gep(values, [int64(dim * width)])

    p = load_arguments(b, piece, _PIECE)
    slots = b.gep(all_slots, [p["slots"]])
    causal = b.icmp_unsigned("!=", p["causal"], int64(0))
    n_slots = p["n_slots"]
    with b.if_then(b.icmp_unsigned("==", p["n_tokens"], int64(1))):
        _write_spans(b, v, heads, span, (cache, slots, n_slots, keys, q, sums, maxima, totals), p["first"])
        b.ret_void()
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
                # The next tile is fetched bit by bit: all at once would hold up what is computed.
                ahead = b.add(
                    b.mul(b.sub(b.add(begin, row), skipped), int64(_FETCHED)), b.add(start, int64(width))
                )
                for offset in range(_FETCHED):
                    position = least(b, b.add(ahead, int64(offset)), b.sub(n_slots, int64(1)))
                    fetch_position(b, v, heads, cache, b.load(b.gep(slots, [position])))
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


def _write_spans(
    b: ir.IRBuilder, v: Vectors, heads: Heads, span: ir.Function, arguments: tuple[Any, ...], token: Any
) -> None:
    """A piece of one token sees all of its positions."""
    cache, slots, n_slots, scores, q, sums, maxima, totals = arguments
    width = SPAN_REGISTERS * v.lanes
    query = b.mul(token, int64(heads.group))
    line = b.mul(query, int64(heads.head_dim))
    with count(b, int64(0), ceil_div(b, n_slots, width)) as tile:
        start = b.mul(tile, int64(width))
        n = least(b, b.sub(n_slots, start), int64(width))
        own = [b.gep(pointer, [line]) for pointer in (q, sums)]
        own += [b.gep(pointer, [query]) for pointer in (maxima, totals)]
        following = b.gep(slots, [least(b, b.add(start, int64(width)), n_slots)])
        b.call(span, [cache, b.gep(slots, [start]), n, scores, *own, cache, following])
