"""Building blocks of vector code in LLVM IR.

Every function appends instructions to a builder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir


class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite does not know; one instance, as types are compared."""

    def _to_string(self) -> str:
        return "bfloat"


BYTE, SHORT, WORD, LONG = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT, HALF, BFLOAT16 = ir.FloatType(), ir.HalfType(), _BFloat16()


def vector(kind: Any, lanes: int) -> Any:
    """Return the type of a vector."""
    return ir.VectorType(kind, lanes)


def constant(kind: Any, number: float) -> Any:
    """Return a constant with a number in every lane."""
    return ir.Constant(kind, [number] * kind.count)


def lanes_of(numbers: Sequence[int]) -> Any:
    """Return the constant that selects a shuffle's lanes."""
    return ir.Constant(vector(WORD, len(numbers)), list(numbers))


def zeros(lanes: int) -> Any:
    """Return a vector of zeros."""
    return constant(vector(FLOAT, lanes), 0.0)


def splat(builder: Any, scalar: Any, lanes: int) -> Any:
    """Copy a scalar to every lane."""
    nothing = ir.Constant(vector(scalar.type, lanes), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, scalar, WORD(0)), nothing, lanes_of([0] * lanes))


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call an intrinsic of LLVM."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def load(builder: Any, address: Any, at: int, kind: Any, align: int = 1) -> Any:
    """Load a value at a byte offset from an address."""
    return builder.load(builder.inttoptr(builder.add(address, LONG(at)), kind.as_pointer()), align=align)


def store(builder: Any, values: Any, address: Any, align: int) -> None:
    """Store a value at an address."""
    builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=align)


def place(builder: Any, start: Any, index: int, each: Any) -> Any:
    """Return the address of an item by index and stride in bytes."""
    return builder.add(start, builder.mul(each, LONG(index)))


def pointer(builder: Any, address: Any) -> Any:
    """Convert an address to a pointer."""
    return builder.inttoptr(address, BYTE.as_pointer())


def prefetch(builder: Any, address: Any, level: int = 1) -> None:
    """Prefetch the line at an address into a level of the caches."""
    at = pointer(builder, address)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), at, WORD(0), WORD(4 - level), WORD(1))


def keep_order(builder: Any) -> None:
    """Prevent LLVM from keeping earlier loads in registers, of which it would run out."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return `a · b + c` of floats, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def least(builder: Any, a: Any, b: Any) -> Any:
    """Return the smaller of two integers."""
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def loop(builder: Any, times: Any, values: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit a loop with at least one iteration; `body` maps the index and the carried values to the next values."""
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
    """Emit code for each case of a value; other values do nothing."""
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
    """Exchange lanes between two vectors, at a distance, as a step of a transposition."""
    lanes = range(a.type.count)
    first = [lane if not lane & apart else a.type.count + lane - apart for lane in lanes]
    second = [lane + apart if not lane & apart else a.type.count + lane for lane in lanes]
    return tuple(builder.shuffle_vector(a, b, lanes_of(picked)) for picked in (first, second))


def interleaved(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Interleave the first two, and the last two, of every four lanes of two vectors."""
    count = a.type.count
    first = [four + lane // 2 + (lane & 1) * count for four in range(0, count, 4) for lane in range(4)]
    return tuple(builder.shuffle_vector(a, b, lanes_of([lane + more for lane in first])) for more in (0, 2))


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square of vectors.

    First squares of four lanes, in two steps that are an instruction each on x86 and Arm, then larger blocks.
    """
    columns: list[Any] = []
    for i in range(0, len(rows), 4):
        pairs = zip(interleaved(builder, *rows[i : i + 2]), interleaved(builder, *rows[i + 2 : i + 4]), strict=True)
        columns += [column for pair in pairs for column in exchanged(builder, *pair, 2)]
    apart = 4
    while apart < len(columns):
        for i in (i for i in range(len(columns)) if not i & apart):
            columns[i], columns[i + apart] = exchanged(builder, columns[i], columns[i + apart], apart)
        apart *= 2
    return columns


def lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """Return the sums of vectors' lanes, one vector per lane; fewer vectors are repeated."""
    vectors = vectors * (vectors[0].type.count // len(vectors))
    while len(vectors) > 1:
        apart = len(vectors) // 2
        halves = (exchanged(builder, *pair, apart) for pair in zip(vectors, vectors[apart:], strict=False))
        vectors = [builder.fadd(*both) for both in halves]
    return vectors[0]
