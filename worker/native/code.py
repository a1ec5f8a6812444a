"""Small vocabulary for writing LLVM code: types, constants, loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32_PTR = F32.as_pointer()
I32_PTR = I32.as_pointer()
I64_PTR = I64.as_pointer()


def int64(value: int) -> Any:
    return ir.Constant(I64, value)


def least(b: ir.IRBuilder, first: Any, second: Any) -> Any:
    return b.select(b.icmp_unsigned("<", first, second), first, second)


def ceil_div(b: ir.IRBuilder, value: Any, by: int) -> Any:
    return b.udiv(b.add(value, int64(by - 1)), int64(by))


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


class Vectors:
    """Operations on `lanes` numbers at once."""

    def __init__(self, module: ir.Module, *, lanes: int) -> None:
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.ints = ir.VectorType(I32, lanes)
        self.zero = ir.Constant(self.floats, [0.0] * lanes)
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        self._fma = ir.Function(module, kind, name=f"llvm.fma.v{lanes}f32")

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
