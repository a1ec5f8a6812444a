"""A tape: operations that all threads go through together, with a barrier behind each.

One call computes many operations, so that neither Python nor the threads' coming and going stands between
them. An operation is a line of integers: the address of its function, then its arguments. Its work is cut
into units, which the threads claim one after another: a thread that is held up delays one unit, not its half.
The threads are OpenMP's, the same ones that torch uses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from worker.native.barrier import BARRIER_WORDS, write_barrier
from worker.native.code import I32, I64, I64_PTR, count, int64
from worker.native.machine import Compiled, openmp

I64Array = npt.NDArray[np.int64]

OP_WORDS = 16
_CLAIM_WORDS = 8
"""A cache line for each counter."""
_RUN = ("ops", "n_ops", "claims", "barrier")


def op_type() -> ir.FunctionType:
    """void(arguments, number, claims): what thread `number` does for one operation."""
    return ir.FunctionType(ir.VoidType(), [I64_PTR, I64, I64_PTR])


def load_arguments(b: ir.IRBuilder, pointer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: b.load(b.gep(pointer, [int64(at)])) for at, name in enumerate(names)}


@contextmanager
def claimed(b: ir.IRBuilder, claims: Any, n_units: Any) -> Iterator[Any]:
    """The units that fall to this thread; the builder goes on behind the loop."""
    ask, body = b.append_basic_block(), b.append_basic_block()
    after = b.append_basic_block()
    b.branch(ask)
    b.position_at_end(ask)
    unit = b.atomic_rmw("add", claims, int64(1), "monotonic")
    b.cbranch(b.icmp_unsigned("<", unit, n_units), body, after)
    b.position_at_end(body)
    yield unit
    b.branch(ask)
    b.position_at_end(after)


class Tape:
    """Owns the operations' lines and what the threads share while they go through them. Whoever fills the
    lines keeps the memory alive that they point to. Not thread-safe."""

    def __init__(self, n_ops: int) -> None:
        self.ops: I64Array = np.zeros((n_ops, OP_WORDS), dtype=np.int64)
        self._claims: I64Array = np.zeros((n_ops, _CLAIM_WORDS), dtype=np.int64)
        self._barrier: I64Array = np.zeros(BARRIER_WORDS, dtype=np.int64)
        self._run = _runner()
        # ndarray.ctypes costs microseconds each time.
        self._addresses = tuple(array.ctypes.data for array in (self.ops, self._claims, self._barrier))

    def run(self, *, n_threads: int) -> None:
        self._claims.fill(0)
        ops, claims, barrier = self._addresses
        self._run.call(ops, len(self.ops), claims, barrier, n_threads)


@dataclass(frozen=True, slots=True)
class _Run:
    call: Any
    code: Compiled


@functools.cache
def _runner() -> _Run:
    code = Compiled(_write())
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (len(_RUN) + 1))(code.address("run"))
    return _Run(run, code)


def _write() -> ir.Module:
    module = ir.Module()
    walk = _write_walk(module)
    shared = openmp()
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (len(_RUN) + 1)), name="run")
    b = ir.IRBuilder(entry.append_basic_block())
    *values, n_threads = entry.args
    arguments = b.alloca(I64, len(_RUN))
    for at, value in enumerate(values):
        b.store(value, b.gep(arguments, [int64(at)]))
    if shared is None:
        b.call(walk, [arguments, int64(0), int64(1)])
        b.ret_void()
        return module
    outlined = _write_outlined(module, walk)
    with b.if_else(b.icmp_unsigned("<=", n_threads, int64(1))) as (alone, together):
        with alone:
            b.call(walk, [arguments, int64(0), int64(1)])
        with together:
            kind = ir.FunctionType(ir.VoidType(), [outlined.type, I64_PTR, I32, I32])
            parallel = b.inttoptr(int64(shared.parallel), kind.as_pointer())
            b.call(parallel, [outlined, arguments, b.trunc(n_threads, I32), ir.Constant(I32, 0)])
    b.ret_void()
    return module


def _write_walk(module: ir.Module) -> ir.Function:
    """void(arguments, number, n_threads)"""
    walk = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64_PTR, I64, I64]), name="walk")
    walk.linkage = "internal"
    barrier = write_barrier(module)
    b = ir.IRBuilder(walk.append_basic_block())
    arguments, number, n_threads = walk.args
    a = load_arguments(b, arguments, _RUN)
    ops, claims, shared = (b.inttoptr(a[name], I64_PTR) for name in ("ops", "claims", "barrier"))
    with count(b, int64(0), a["n_ops"]) as index:
        op = b.gep(ops, [b.mul(index, int64(OP_WORDS))])
        function = b.inttoptr(b.load(op), op_type().as_pointer())
        b.call(
            function,
            [b.gep(op, [int64(1)]), number, b.gep(claims, [b.mul(index, int64(_CLAIM_WORDS))])],
        )
        b.call(barrier, [shared, n_threads])
    b.ret_void()
    return walk


def _write_outlined(module: ir.Module, walk: ir.Function) -> ir.Function:
    """void(arguments), as OpenMP calls it on each thread."""
    shared = openmp()
    assert shared is not None
    outlined = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64_PTR]), name="on_thread")
    outlined.linkage = "internal"
    b = ir.IRBuilder(outlined.append_basic_block())

    def ask(address: int) -> Any:
        function = b.inttoptr(int64(address), ir.FunctionType(I32, []).as_pointer())
        return b.zext(b.call(function, []), I64)

    b.call(walk, [outlined.args[0], ask(shared.thread_num), ask(shared.num_threads)])
    b.ret_void()
    return outlined
