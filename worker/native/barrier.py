"""A barrier that spins for some microseconds and then sleeps.

Spinning bridges the moment until the other threads are through, which on an idle machine is all there is to
wait for. Where another process has the core that a thread needs, the waiting ones give theirs up.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

from llvmlite import ir

from worker.native.code import I32, I64, I64_PTR, int64

_ARRIVED, _GENERATION, _SLEEPERS = 0, 8, 16
"""Words, each in a cache line of its own."""
BARRIER_WORDS = 24
_SPINS = 1500
"""Each some 40 to 140 cycles of a pause instruction."""
_FUTEX_NUMBERS = {"x86_64": 202, "amd64": 202, "aarch64": 98, "arm64": 98}
_WAIT, _WAKE = 128, 129
"""FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE"""
_ALL = 2**31 - 1


def write_barrier(module: ir.Module) -> ir.Function:
    """void(words, n_threads); words: `BARRIER_WORDS` integers, zero before the first use."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64_PTR, I64]), name="barrier")
    function.linkage = "internal"
    words, n_threads = function.args
    b = ir.IRBuilder(function.append_basic_block())
    arrived, generation, sleepers = (b.gep(words, [int64(at)]) for at in (_ARRIVED, _GENERATION, _SLEEPERS))
    generation = b.bitcast(generation, I32.as_pointer())
    turn = b.load_atomic(generation, "seq_cst", 4)
    before = b.atomic_rmw("add", arrived, int64(1), "seq_cst")
    last = b.icmp_unsigned("==", before, b.sub(n_threads, int64(1)))
    with b.if_else(last) as (release, wait):
        with release:
            b.store_atomic(int64(0), arrived, "seq_cst", 8)
            b.store_atomic(b.add(turn, ir.Constant(I32, 1)), generation, "seq_cst", 4)
            some = b.icmp_unsigned("!=", b.load_atomic(sleepers, "seq_cst", 8), int64(0))
            with b.if_then(some):
                _write_wake(b, generation)
        with wait:
            _write_wait(b, generation, turn, sleepers)
    b.ret_void()
    return function


def _write_wait(b: ir.IRBuilder, generation: Any, turn: Any, sleepers: Any) -> None:
    spin, sleep, done = (b.append_basic_block() for _ in range(3))
    before = b.block
    b.branch(spin)
    b.position_at_end(spin)
    n = b.phi(I64)
    n.add_incoming(int64(0), before)
    b.asm(ir.FunctionType(ir.VoidType(), []), _pause(), "", [], True)
    moved = b.icmp_unsigned("!=", b.load_atomic(generation, "acquire", 4), turn)
    following = b.add(n, int64(1))
    more = b.append_basic_block()
    b.cbranch(moved, done, more)
    b.position_at_end(more)
    n.add_incoming(following, more)
    b.cbranch(b.icmp_unsigned("<", following, int64(_SPINS)), spin, sleep)
    b.position_at_end(sleep)
    b.atomic_rmw("add", sleepers, int64(1), "seq_cst")
    _write_sleep(b, generation, turn)
    b.atomic_rmw("sub", sleepers, int64(1), "seq_cst")
    moved = b.icmp_unsigned("!=", b.load_atomic(generation, "acquire", 4), turn)
    b.cbranch(moved, done, sleep)
    b.position_at_end(done)


def _write_sleep(b: ir.IRBuilder, generation: Any, turn: Any) -> None:
    """Until woken; returns at once when the generation is no longer `turn`."""
    if _has_futex():
        _write_futex(b, generation, _WAIT, b.zext(turn, I64))
    else:
        give_up = ir.FunctionType(I32, [])
        b.call(b.inttoptr(int64(_address("sched_yield")), give_up.as_pointer()), [])


def _write_wake(b: ir.IRBuilder, generation: Any) -> None:
    if _has_futex():
        _write_futex(b, generation, _WAKE, int64(_ALL))


def _write_futex(b: ir.IRBuilder, place: Any, operation: int, value: Any) -> None:
    kind = ir.FunctionType(I64, [I64, I64_PTR, I64, I64, I64], var_arg=True)
    call = b.inttoptr(int64(_address("syscall")), kind.as_pointer())
    number = _FUTEX_NUMBERS[platform.machine().lower()]
    b.call(call, [int64(number), b.bitcast(place, I64_PTR), int64(operation), value, int64(0)])


def _has_futex() -> bool:
    return sys.platform == "linux" and platform.machine().lower() in _FUTEX_NUMBERS


def _pause() -> str:
    return "pause" if platform.machine().lower() in ("x86_64", "amd64") else "yield"


def _address(name: str) -> int:
    value = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert value
    return value
