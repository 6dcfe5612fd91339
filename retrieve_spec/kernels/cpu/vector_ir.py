"""Vectors in LLVM code: the operations that kernels' products are put together from.

Every function adds instructions at a builder's place; vectors have as many lanes as they are given with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

BYTE, SHORT, WORD, LONG = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT, HALF = ir.FloatType(), ir.HalfType()


def vector(kind: Any, lanes: int) -> Any:
    """Type of a vector."""
    return ir.VectorType(kind, lanes)


def constant(kind: Any, number: float) -> Any:
    """A number in every lane of a type of vectors."""
    return ir.Constant(kind, [number] * kind.count)


def lanes_of(numbers: Sequence[int]) -> Any:
    """Lanes that a shuffle picks."""
    return ir.Constant(vector(WORD, len(numbers)), list(numbers))


def zeros(lanes: int) -> Any:
    """A vector of floats that are 0."""
    return constant(vector(FLOAT, lanes), 0.0)


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """A scalar in every lane."""
    nothing = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, scalar, WORD(0)), nothing, lanes_of([0] * lanes))


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """A call of an instruction that LLVM has a name for."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def load(builder: Any, address: Any, at: int, kind: Any, align: int = 1) -> Any:
    """Load from so many bytes after an address."""
    return builder.load(builder.inttoptr(builder.add(address, LONG(at)), kind.as_pointer()), align=align)


def store(builder: Any, values: Any, address: Any, align: int) -> None:
    """Write values to an address."""
    builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=align)


def place(builder: Any, start: Any, index: int, each: Any) -> Any:
    """Address of one of many that are so many bytes apart."""
    return builder.add(start, builder.mul(each, LONG(index)))


def pointer(builder: Any, address: Any) -> Any:
    """An address as instructions take it."""
    return builder.inttoptr(address, BYTE.as_pointer())


def prefetch(builder: Any, address: Any, level: int = 1) -> None:
    """Prefetch the line at an address into a level of the caches, to read it once."""
    at = pointer(builder, address)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), at, WORD(0), WORD(4 - level), WORD(1))


def keep_order(builder: Any) -> None:
    """Read what is read after this place anew: LLVM would keep it, and run out of registers."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a · b + c` of floats, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def least(builder: Any, a: Any, b: Any) -> Any:
    """The smaller of two numbers."""
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def loop(builder: Any, times: Any, values: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Code that is run so many times, once at least: `body` of the index and of values gives the next values."""
    before, inside, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(inside)
    builder.position_at_end(inside)
    index, *carried = (builder.phi(value.type) for value in (LONG(0), *values))
    following = [builder.add(index, LONG(1)), *body(index, carried)]
    for phi, first, later in zip((index, *carried), (LONG(0), *values), following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.cbranch(builder.icmp_signed("<", following[0], times), inside, after)
    builder.position_at_end(after)
    return following[1:]


def switch(builder: Any, value: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Code for each case of a value; nothing is done in others."""
    after = builder.append_basic_block("after")
    chosen = builder.switch(value, after)
    for case, code in cases.items():
        block = builder.append_basic_block(f"case_{case}")
        chosen.add_case(LONG(case), block)
        builder.position_at_end(block)
        code()
        builder.branch(after)
    builder.position_at_end(after)


def exchanged(builder: Any, a: Any, b: Any, apart: int) -> tuple[Any, Any]:
    """Two vectors whose lanes that are so far apart change places between them."""
    lanes = range(a.type.count)
    first = [lane if not lane & apart else a.type.count + lane - apart for lane in lanes]
    second = [lane + apart if not lane & apart else a.type.count + lane for lane in lanes]
    return tuple(builder.shuffle_vector(a, b, lanes_of(picked)) for picked in (first, second))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square of vectors, whose halves, quarters … change places in turn."""
    apart = 1
    while apart < len(rows):
        for i in (i for i in range(len(rows)) if not i & apart):
            rows[i], rows[i + apart] = exchanged(builder, rows[i], rows[i + apart], apart)
        apart *= 2
    return rows


def lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """By lane, the sum of the lanes of one of as many vectors; of fewer ones in turn."""
    vectors = vectors * (vectors[0].type.count // len(vectors))
    while len(vectors) > 1:
        apart = len(vectors) // 2
        halves = (exchanged(builder, *pair, apart) for pair in zip(vectors, vectors[apart:], strict=False))
        vectors = [builder.fadd(*both) for both in halves]
    return vectors[0]
