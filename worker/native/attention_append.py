"""The operation `append`: rotates q and k, and writes k and v into the cache."""

from __future__ import annotations

from llvmlite import ir

from worker.native.code import F32_PTR, I64_PTR, Vectors, ceil_div, count, int64, least
from worker.native.heads import Heads
from worker.native.tape import claimed, load_arguments, op_type

APPEND_ARGUMENTS = ("qkv", "cos", "sin", "slots", "cache", "n_tokens")
_UNIT_TOKENS = 4
"""Tokens that a thread takes at a time."""


def write_append(module: ir.Module, v: Vectors, heads: Heads) -> None:
    function = ir.Function(module, op_type(), name="append")
    b = ir.IRBuilder(function.append_basic_block())
    arguments, _, claims = function.args
    a = load_arguments(b, arguments, APPEND_ARGUMENTS)
    qkv, cos, sin, cache = (b.inttoptr(a[name], F32_PTR) for name in ("qkv", "cos", "sin", "cache"))
    slots = b.inttoptr(a["slots"], I64_PTR)
    dim, half = heads.head_dim, heads.head_dim // 2
    with claimed(b, claims, ceil_div(b, a["n_tokens"], _UNIT_TOKENS)) as unit:
        first = b.mul(unit, int64(_UNIT_TOKENS))
        end = least(b, a["n_tokens"], b.add(first, int64(_UNIT_TOKENS)))
        with count(b, first, end) as token:
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
