"""Attention of one token: the queries of one KV head's group against a span of positions, read in place.

With so few queries, moving keys about would cost more than the products. Keys are multiplied as they lie, and
the partial sums of as many positions as a register has lanes are folded into one register of scores.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from worker.native.attention_tile import write_softmax
from worker.native.code import F32_PTR, I64, I64_PTR, Vectors, ceil_div, count, int64, least, repeat
from worker.native.heads import Heads

SPAN_REGISTERS = 4
"""Registers of scores, for each query, between two updates of its maximum."""
_ACCUMULATORS = 24


def span_floats(heads: Heads, *, lanes: int) -> int:
    """Room for the scores."""
    return heads.group * SPAN_REGISTERS * lanes


def write_span(module: ir.Module, v: Vectors, heads: Heads) -> ir.Function:
    """void(cache, slots, n, scores, q, sums, maxima, totals, next_cache, next_slots): the next n positions, 1
    to `SPAN_REGISTERS` registers of them, for one KV head, whose keys begin at `cache`. q, sums: [group,
    head_dim]. next_cache and next_slots say the same of the span that will be read after this one: its keys
    are fetched meanwhile."""
    kind = ir.FunctionType(ir.VoidType(), [F32_PTR, I64_PTR, I64, *[F32_PTR] * 6, I64_PTR])
    function = ir.Function(module, kind, name="span")
    function.linkage = "internal"
    cache, slots, n, scores, q, sums, maxima, totals, next_cache, next_slots = function.args
    softmax = write_softmax(module, v, heads, registers=SPAN_REGISTERS, name="span_softmax")
    b = ir.IRBuilder(function.append_basic_block())
    width, dim = SPAN_REGISTERS * v.lanes, heads.head_dim
    with count(b, int64(0), ceil_div(b, n, v.lanes)) as register:
        first = b.mul(register, int64(v.lanes))
        places = [
            _place(b, heads, cache, slots, least(b, b.add(first, int64(i)), b.sub(n, int64(1))))
            for i in range(v.lanes)
        ]
        for place in places:
            v.prefetch(b, b.gep(place, [int64(heads.n_kv_heads * dim)]), dim)
        for query in range(heads.group):
            own = [v.load(b, q, query * dim + at, v.floats) for at in range(0, dim, v.lanes)]
            products = []
            for place in places:
                total = b.fmul(own[0], v.load(b, place, 0, v.floats))
                for part, value in enumerate(own[1:], start=1):
                    total = v.fma(b, value, v.load(b, place, part * v.lanes, v.floats), total)
                products.append(total)
            v.store(b, v.fold(b, products), b.gep(scores, [b.add(first, int64(query * width))]))
    for query in range(heads.group):
        line = b.gep(sums, [int64(query * dim)])
        own = [b.gep(pointer, [int64(query)]) for pointer in (maxima, totals)]
        b.call(softmax, [b.gep(scores, [int64(query * width)]), n, *own, line])
    together = max(_ACCUMULATORS // heads.group, 1)
    for part in range(0, dim // v.lanes, together):
        following = (next_cache, next_slots) if part == 0 else None
        _write_mix(
            b,
            v,
            heads,
            (cache, slots, n, scores, sums),
            following,
            range(part, min(part + together, dim // v.lanes)),
        )
    b.ret_void()
    return function


def _write_mix(
    b: ir.IRBuilder,
    v: Vectors,
    heads: Heads,
    arguments: tuple[Any, ...],
    following: tuple[Any, Any] | None,
    parts: range,
) -> None:
    """sums += weights · values, for some registers of the head."""
    cache, slots, n, scores, sums = arguments
    width, dim = SPAN_REGISTERS * v.lanes, heads.head_dim
    places = [
        b.gep(sums, [int64(query * dim + part * v.lanes)]) for query in range(heads.group) for part in parts
    ]

    def turn(position: Any, carried: list[Any]) -> list[Any]:
        if following is not None:
            v.prefetch(b, _place(b, heads, *following, position), dim)
        place = _place(b, heads, cache, slots, position)
        values = [v.load(b, place, heads.n_kv_heads * dim + part * v.lanes, v.floats) for part in parts]
        out: list[Any] = []
        for query in range(heads.group):
            weight = v.spread(b, b.load(b.gep(scores, [b.add(position, int64(query * width))])))
            for value in values:
                out.append(v.fma(b, weight, value, carried[len(out)]))
        return out

    for place, total in zip(
        places, repeat(b, n, [v.load(b, place, 0, v.floats) for place in places], turn), strict=True
    ):
        v.store(b, total, place)


def _place(b: ir.IRBuilder, heads: Heads, cache: Any, slots: Any, position: Any) -> Any:
    return b.gep(cache, [b.mul(b.load(b.gep(slots, [position])), int64(heads.slot_stride))])
