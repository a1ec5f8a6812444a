"""Compiled work shared among OpenMP's threads, the same ones that torch uses."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from worker.native.code import I32, I64, I64_PTR, int64
from worker.native.machine import openmp


def share_type() -> ir.FunctionType:
    """void(arguments, number, n_threads): what thread `number` computes."""
    return ir.FunctionType(ir.VoidType(), [I64_PTR, I64, I64])


def write_entry(module: ir.Module, share: ir.Function, *, name: str, n_arguments: int) -> None:
    """Exports `name`(argument …, n_threads), integers all: one share here, or all on OpenMP's threads."""
    shared = openmp()
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (n_arguments + 1)), name=name)
    b = ir.IRBuilder(entry.append_basic_block())
    *values, n_threads = entry.args
    arguments = b.alloca(I64, n_arguments)
    for at, value in enumerate(values):
        b.store(value, b.gep(arguments, [int64(at)]))
    if shared is None:
        b.call(share, [arguments, int64(0), int64(1)])
        b.ret_void()
        return
    outlined = _write_outlined(module, share, name=f"{name}_on_thread")
    with b.if_else(b.icmp_unsigned("<=", n_threads, int64(1))) as (alone, together):
        with alone:
            b.call(share, [arguments, int64(0), int64(1)])
        with together:
            kind = ir.FunctionType(ir.VoidType(), [outlined.type, I64_PTR, I32, I32])
            parallel = b.inttoptr(int64(shared.parallel), kind.as_pointer())
            b.call(parallel, [outlined, arguments, b.trunc(n_threads, I32), ir.Constant(I32, 0)])
    b.ret_void()


def _write_outlined(module: ir.Module, share: ir.Function, *, name: str) -> ir.Function:
    shared = openmp()
    assert shared is not None
    outlined = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64_PTR]), name=name)
    outlined.linkage = "internal"
    b = ir.IRBuilder(outlined.append_basic_block())

    def ask(address: int) -> Any:
        function = b.inttoptr(int64(address), ir.FunctionType(I32, []).as_pointer())
        return b.zext(b.call(function, []), I64)

    b.call(share, [outlined.args[0], ask(shared.thread_num), ask(shared.num_threads)])
    b.ret_void()
    return outlined
