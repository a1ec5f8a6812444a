"""Small vocabulary for writing LLVM code: types, constants, loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32_PTR = F32.as_pointer()
I32_PTR = I32.as_pointer()
I64_PTR = I64.as_pointer()

_LINE_FLOATS = 16
"""Of a cache line of 64 bytes."""
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def int64(value: int) -> Any:
    return ir.Constant(I64, value)


def least(b: ir.IRBuilder, first: Any, second: Any) -> Any:
    return b.select(b.icmp_unsigned("<", first, second), first, second)


def ceil_div(b: ir.IRBuilder, value: Any, by: int) -> Any:
    return b.udiv(b.add(value, int64(by - 1)), int64(by))


def even_blocks(b: ir.IRBuilder, n: Any, n_blocks: Any) -> Callable[[Any], tuple[Any, Any]]:
    """n things in n_blocks blocks as even as can be: a block of few rows costs nearly as much as a full one.
    Returns what gives (first, length) of a block."""
    base, n_larger = b.udiv(n, n_blocks), b.urem(n, n_blocks)

    def block(at: Any) -> tuple[Any, Any]:
        first = b.add(b.mul(at, base), least(b, at, n_larger))
        return first, b.add(base, b.zext(b.icmp_unsigned("<", at, n_larger), I64))

    return block


def table_of(module: ir.Module, functions: Sequence[ir.Function], *, name: str) -> ir.GlobalVariable:
    """A constant array of functions, to be chosen from while running."""
    table = ir.GlobalVariable(module, ir.ArrayType(functions[0].type, len(functions)), name=name)
    table.initializer = ir.Constant(table.value_type, functions)
    table.global_constant = True
    return table


@contextmanager
def count(b: ir.IRBuilder, begin: Any, end: Any) -> Iterator[Any]:
    """for i in range(begin, end); the builder goes on behind the loop."""
    before, body = b.block, b.append_basic_block()
    after = b.append_basic_block()
    b.cbranch(b.icmp_unsigned("<", begin, end), body, after)
    b.position_at_end(body)
    i = b.phi(I64)
    i.add_incoming(begin, before)
    yield i
    following = b.add(i, int64(1))
    i.add_incoming(following, b.block)
    b.cbranch(b.icmp_unsigned("<", following, end), body, after)
    b.position_at_end(after)


def repeat(
    b: ir.IRBuilder, n: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """for i in range(n), n at least 1: carried = body(i, carried). The values stay in registers."""
    before, inside = b.block, b.append_basic_block()
    after = b.append_basic_block()
    b.branch(inside)
    b.position_at_end(inside)
    i = b.phi(I64)
    i.add_incoming(int64(0), before)
    values = [b.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    results = list(body(i, list(values)))
    following = b.add(i, int64(1))
    for phi, value in zip([i, *values], [following, *results], strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_unsigned("<", following, n), inside, after)
    b.position_at_end(after)
    return results


class Vectors:
    """Operations on `lanes` numbers at once."""

    def __init__(self, module: ir.Module, *, lanes: int) -> None:
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.ints = ir.VectorType(I32, lanes)
        self.zero = ir.Constant(self.floats, [0.0] * lanes)
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        self._fma = ir.Function(module, kind, name=f"llvm.fma.v{lanes}f32")
        kind = ir.FunctionType(F32, [self.floats])
        self._largest = ir.Function(module, kind, name=f"llvm.vector.reduce.fmax.v{lanes}f32")
        kind = ir.FunctionType(F32, [F32, self.floats])
        self._sum = ir.Function(module, kind, name=f"llvm.vector.reduce.fadd.v{lanes}f32")

        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        self._prefetch = module.declare_intrinsic("llvm.prefetch", [pointer], kind)

    def prefetch(self, b: ir.IRBuilder, pointer: Any, n: int, *, level: int = 1) -> None:
        """Ask for the n numbers that begin at the pointer, which will be read soon, into that cache."""
        for at in range(0, n, _LINE_FLOATS):
            place = b.bitcast(b.gep(pointer, [int64(at)]), ir.IntType(8).as_pointer())
            b.call(self._prefetch, [place, *(ir.Constant(I32, value) for value in (0, 4 - level, 1))])

    def constant(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.lanes)

    def load(self, b: ir.IRBuilder, pointer: Any, at: int, kind: Any) -> Any:
        """The vector that begins `at` elements behind the pointer."""
        return b.load(b.bitcast(b.gep(pointer, [int64(at)]), kind.as_pointer()), align=4)

    def store(self, b: ir.IRBuilder, value: Any, pointer: Any) -> None:
        b.store(value, b.bitcast(pointer, value.type.as_pointer()), align=4)

    def spread(self, b: ir.IRBuilder, number: Any) -> Any:
        """The same float in every lane."""
        undefined = ir.Constant(self.floats, ir.Undefined)
        one = b.insert_element(undefined, number, ir.Constant(I32, 0))
        return b.shuffle_vector(one, undefined, self.constant(0))

    def fma(self, b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
        """x * y + z, rounded once."""
        return b.call(self._fma, [x, y, z])

    def number(self, value: float) -> Any:
        return ir.Constant(self.floats, [value] * self.lanes)

    def larger(self, b: ir.IRBuilder, x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    def largest(self, b: ir.IRBuilder, x: Any) -> Any:
        """Of all lanes."""
        return b.call(self._largest, [x], fastmath=("nnan",))

    def sum(self, b: ir.IRBuilder, x: Any) -> Any:
        """Of all lanes, in any order."""
        return b.call(self._sum, [ir.Constant(F32, 0.0), x], fastmath=("reassoc",))

    def exp(self, b: ir.IRBuilder, x: Any) -> Any:
        """e^x for x <= 0, to about one unit in the last place; below -87 it stays at e^-87. x is split into
        n ln 2 + r, and e^r is Cephes' polynomial for |r| <= ln 2 / 2."""
        x = self.larger(b, x, self.number(-87.0))
        # Adding 1.5 * 2^23 rounds to an integer, which is then the low bits of the sum.
        shifted = self.fma(b, x, self.number(1.4426950408889634), self.number(12582912.0))
        n = b.fsub(shifted, self.number(12582912.0))
        r = self.fma(b, n, self.number(-0.693359375), x)
        r = self.fma(b, n, self.number(2.12194440e-4), r)
        y = self.number(_EXP[0])
        for coefficient in _EXP[1:]:
            y = self.fma(b, y, r, self.number(coefficient))
        y = b.fadd(self.fma(b, y, b.fmul(r, r), r), self.number(1.0))
        exponent = b.sub(b.bitcast(shifted, self.ints), self.constant(0x4B400000 - 127))
        return b.fmul(y, b.bitcast(b.shl(exponent, self.constant(23)), self.floats))

    def silu(self, b: ir.IRBuilder, x: Any) -> Any:
        """x / (1 + e^-x), without overflow."""
        e = self.exp(b, b.select(b.fcmp_ordered("<", x, self.zero), x, b.fsub(self.zero, x)))
        top = b.select(b.fcmp_ordered("<", x, self.zero), e, self.number(1.0))
        return b.fmul(x, b.fdiv(top, b.fadd(self.number(1.0), e)))

    def fold(self, b: ir.IRBuilder, rows: Sequence[Any]) -> Any:
        """The sums of `lanes` vectors, side by side: halves of two rows are added until each lane is one
        row's sum."""
        rows = list(rows)
        half = self.lanes // 2
        while half:
            lanes = range(self.lanes)
            low = ir.Constant(self.ints, [n if not n & half else self.lanes + n - half for n in lanes])
            high = ir.Constant(self.ints, [n + half if not n & half else self.lanes + n for n in lanes])
            rows = [
                b.fadd(
                    b.shuffle_vector(rows[i], rows[i + half], low),
                    b.shuffle_vector(rows[i], rows[i + half], high),
                )
                for i in range(half)
            ]
            half //= 2
        return rows[0]

    def transpose(self, b: ir.IRBuilder, rows: Sequence[Any]) -> list[Any]:
        """`lanes` vectors, as the rows of a square, to its columns: squares of half the size swap places,
        then within them those of a quarter."""
        rows = list(rows)
        half = self.lanes // 2
        while half:
            lanes = range(self.lanes)
            low = [n if not n & half else self.lanes + n - half for n in lanes]
            high = [n + half if not n & half else self.lanes + n for n in lanes]
            for i in lanes:
                if not i & half:
                    first, second = rows[i], rows[i + half]
                    rows[i] = b.shuffle_vector(first, second, ir.Constant(self.ints, low))
                    rows[i + half] = b.shuffle_vector(first, second, ir.Constant(self.ints, high))
            half //= 2
        return rows
