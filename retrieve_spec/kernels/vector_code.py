"""Vector code that no compiler finds by itself: products of blocks of rows, built as LLVM code for Numba.

Sixteen results stand side by side in a vector, for up to 16 rows at once: what comes from memory is unpacked once for
all of them. A row's results are the same bit for bit whatever other rows stand beside it: its sums have one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

LANES = 16
GROUP = 32
"""Weights of a row that are multiplied by before the next: those of bytes share a scale."""
GROUP_BYTES = {4: 64 * 4 + 2 * 2 * LANES, 8: 64 * 8 + 2 * LANES}
"""Bytes of a group of 16 rows of weights, by bits: the weights, then scales and offsets in float16.

Weights lie by fours along a row, 16 rows side by side: [four, row, weight] in 8 bits, 128 too high. In 4 bits the first
four fours are the lower halves of bytes, the others the upper halves.
"""
LYING = 16
"""In place of 4 and 8 bits: weights that lie as rows do, in their format."""
BLOCKS = (1, 2, 4, 8, 12, 16)
"""Rows that are computed at once."""
TILES = (1, 2, 4)
"""The same of products by weights that lie."""
_AHEAD = 4096
"""Bytes that are asked for before they are needed: memory answers in the time of some groups."""

_BYTE, _SHORT, _WORD, _LONG = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()
_BYTES, _SHORTS, _WORDS = ir.VectorType(_BYTE, 64), ir.VectorType(_SHORT, 32), ir.VectorType(_WORD, LANES)
_FLOATS, _HALVES = ir.VectorType(_FLOAT, LANES), ir.VectorType(ir.HalfType(), LANES)
_BFLOATS = ir.VectorType(_SHORT, LANES)


def _all(kind: Any, number: float) -> Any:
    """A number in every lane."""
    return ir.Constant(kind, [number] * kind.count)


_ZEROS = _all(_FLOATS, 0.0)


def _every(builder: Any, scalar: Any) -> Any:
    """A scalar in every lane of 16."""
    nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(nothing, scalar, _WORD(0)), nothing, _all(_WORDS, 0))


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """A call of an instruction that LLVM has a name for."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), args)


def _load(builder: Any, address: Any, at: int, kind: Any, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(builder.add(address, _LONG(at)), kind.as_pointer()), align=align)


def _store(builder: Any, values: Any, address: Any, align: int) -> None:
    builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=align)


def _place(builder: Any, start: Any, index: int, each: Any) -> Any:
    """Address of one of many that are so many bytes apart."""
    return builder.add(start, builder.mul(each, _LONG(index)))


def _prefetch(builder: Any, address: Any, at: int) -> None:
    """Ask memory for the line at an address, to read it once."""
    pointer = builder.inttoptr(builder.add(address, _LONG(at)), _BYTE.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _WORD(0), _WORD(3), _WORD(1))


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, f"llvm.fma.v{LANES}f32", _FLOATS, a, b, c)


def _wide(builder: Any, shorts: Any) -> Any:
    """16 bfloat16 as floats."""
    return builder.bitcast(builder.shl(builder.zext(shorts, _WORDS), _all(_WORDS, 16)), _FLOATS)


def _load_numbers(builder: Any, address: Any, single: bool) -> Any:
    """16 numbers as floats, float32 or bfloat16 ones."""
    return _load(builder, address, 0, _FLOATS) if single else _wide(builder, _load(builder, address, 0, _BFLOATS))


def _loop(builder: Any, times: Any, values: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Code that is run so many times, once at least: `body` of the index and of values gives the next values."""
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    index, *carried = (builder.phi(value.type) for value in (_LONG(0), *values))
    following = [builder.add(index, _LONG(1)), *body(index, carried)]
    for phi, first, later in zip((index, *carried), (_LONG(0), *values), following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.cbranch(builder.icmp_signed("<", following[0], times), loop, after)
    builder.position_at_end(after)
    return following[1:]


def add_bytes_vnni(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """16 sums, each with 4 products of unsigned with signed bytes added (AVX-512 VNNI)."""
    return _call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, sums, builder.bitcast(weights, _WORDS), activations)


def add_bytes(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """The same in operations that every CPU has; x86 multiplies and adds pairs of 16 bits in one."""
    wide, eight = ir.VectorType(_WORD, 32), _all(_SHORTS, 8)
    weights, activations = builder.bitcast(weights, _SHORTS), builder.bitcast(activations, _SHORTS)
    evens = builder.and_(weights, _all(_SHORTS, 255)), builder.shl(activations, eight)
    odds = builder.lshr(weights, eight), activations
    for ours, theirs in (evens, odds):
        products = builder.mul(builder.sext(ours, wide), builder.sext(builder.ashr(theirs, eight), wide))
        for first in (0, 1):
            places = ir.Constant(_WORDS, list(range(first, 32, 2)))
            sums = builder.add(sums, builder.shuffle_vector(products, products, places))
    return sums


def add_pairs_bf16(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """16 sums, each with 2 products of bfloat16 added (AVX-512 BF16)."""
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, sums, weights, activations)


def add_pairs(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """Nearly the same in operations that every CPU has: here the sum of the first product is rounded, too."""
    sixteen, upper = _all(_WORDS, 16), _all(_WORDS, 0xFFFF0000)
    firsts = (builder.shl(pair, sixteen) for pair in (weights, activations))
    seconds = (builder.and_(pair, upper) for pair in (weights, activations))
    for ours, theirs in (firsts, seconds):
        sums = _multiply_add(builder, builder.bitcast(ours, _FLOATS), builder.bitcast(theirs, _FLOATS), sums)
    return sums


def _compiles(feature: str) -> bool:
    """Whether Numba compiles for CPUs with a feature: it may be told to leave out what this one has."""
    *_, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


def reads_halves() -> bool:
    """Whether there is an instruction that reads float16, as of all CPUs but old x86 ones."""
    machine, *_ = cpu_target.target_context.codegen().magic_tuple()
    return not machine.startswith(("x86", "i")) or _compiles("f16c")


def has_bfloat16_products() -> bool:
    """Whether there is an instruction for products of bfloat16."""
    return _compiles("avx512bf16")


def here() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What adds products of bytes, and of pairs of bfloat16, on this CPU."""
    vnni = _compiles("avx512vnni")
    return add_bytes_vnni if vnni else add_bytes, add_pairs_bf16 if has_bfloat16_products() else add_pairs


def block_product(add_bytes: Callable[..., Any]) -> Any:
    """Compiled function of 16 results of a block of bfloat16 rows that were rounded to bytes, by packed weights.

    Its parameters: a number of the rows' format (`retrieve_spec.kernels.number_formats`), without code for any other;
    bits, rows (of `BLOCKS`); the address of 16 rows of weights, (groups, `GROUP_BYTES`); addresses of the block's
    (groups, rows, 32) bytes, and of their scales and sums (groups, rows); groups; addresses of 16 numbers to add and of
    the first row's results, and how many bytes the next row's lie behind.
    """

    @intrinsic
    def product(
        _context: Any, like: Any, bits: Any, rows: Any, weights: Any, x: Any, scales: Any, sums: Any, groups: Any,
        bias: Any, out: Any, stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, bits, rows, weights, x, scales, sums, groups, bias, out, stride = args

            def code(of_bits: int, count: int) -> None:
                """The product with weights of so many bits of so many rows."""

                def add(group: Any, totals: list[Any]) -> list[Any]:
                    return _add_group(builder, add_bytes, of_bits, group, totals, weights, x, scales, sums)

                first = _load_numbers(builder, bias, single=False)
                for row, total in enumerate(_loop(builder, groups, [first] * count, add)):
                    _store(builder, _narrow(builder, total), _place(builder, out, row, stride), 2)

            served = GROUP_BYTES if like == types.uint16 else ()
            cases = {count + (each << 8): partial(code, each, count) for each in served for count in BLOCKS}
            _switch(builder, builder.add(rows, builder.shl(bits, _LONG(8))), cases)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 10), codegen

    return product


def score_block(add_pairs: Callable[..., Any]) -> Any:
    """Compiled function of the float32 products of a block of rows with 16 keys.

    Its parameters: a number of the format; rows (of `BLOCKS`); the address of the first key, and how many bytes the
    next one lies behind; the address of the block's (chunks, rows, 64) bytes; chunks; the address of the first row's
    results, and how many bytes the next row's lie behind.
    """

    @intrinsic
    def product(
        _context: Any, like: Any, rows: Any, keys: Any, row_bytes: Any, x: Any, chunks: Any, out: Any, stride: Any
    ) -> Any:
        add_words = _add_float32 if like == types.float32 else add_pairs

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, rows, keys, row_bytes, x, chunks, out, stride = args

            def code(count: int) -> None:
                """The products of so many rows."""

                def add(chunk: Any, totals: list[Any]) -> list[Any]:
                    return _add_square(builder, add_words, chunk, totals, keys, row_bytes, x)

                for row, total in enumerate(_loop(builder, chunks, [_ZEROS] * count, add)):
                    _store(builder, total, _place(builder, out, row, stride), 4)

            _switch(builder, rows, {count: partial(code, count) for count in BLOCKS})
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 7), codegen

    return product


def tile_product(add_pairs: Callable[..., Any]) -> Any:
    """Compiled function of the results of a few rows by a few rows of weights that lie: sums along rows, of which lanes
    have parts.

    There are four rows of weights where nothing is asked for, else as many as there are sums for, 16. Its parameters: a
    number of the format; rows (of `TILES`), and the last one that there is, which stands for those behind it; the
    addresses of the weights and of the first row, and how many bytes the next ones lie behind, in chunks of 64; where
    memory is asked for what is read later, and how many bytes further on each time, of as many times as there are rows
    of weights for every chunk (0: it is not asked); addresses of 16 numbers, of which the first are added, and of the
    first row's results, and how many bytes the next row's lie behind.
    """

    @intrinsic
    def product(
        _context: Any, like: Any, rows: Any, last: Any, weights: Any, x: Any, row_bytes: Any, chunks: Any, ahead: Any,
        step: Any, bias: Any, out: Any, stride: Any,
    ) -> Any:  # fmt: skip
        single = like == types.float32
        add_words, size = (_add_float32, 4) if single else (add_pairs, 2)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, rows, last, weights, x, row_bytes, chunks, ahead, step, bias, out, stride = args

            def code(count: int, asking: bool) -> None:
                """The product of so many rows: with as many rows of weights as there are sums for, or with four."""
                width = LANES // count if asking else 4
                rows_at = [
                    builder.add(x, builder.mul(row_bytes, _least(builder, _LONG(row), last))) for row in range(count)
                ]
                added = _load_numbers(builder, bias, single)
                ours = [_place(builder, weights, i, row_bytes) for i in range(width)]

                def add(chunk: Any, carried: list[Any]) -> list[Any]:
                    asked, *totals = carried
                    at = builder.mul(chunk, _LONG(64))
                    for _ in range(width if asking else 0):
                        _prefetch(builder, asked, 0)
                        asked = builder.add(asked, step)
                    loaded = [_load(builder, builder.add(address, at), 0, _WORDS) for address in ours]
                    given = [_load(builder, builder.add(address, at), 0, _WORDS) for address in rows_at]
                    pairs = [(weight, row) for row in given for weight in loaded]
                    return [asked, *(add_words(builder, t, *pair) for t, pair in zip(totals, pairs, strict=True))]

                sums = _sums(builder, _loop(builder, chunks, [ahead, *[_ZEROS] * (count * width)], add)[1:])
                lanes = ir.Constant(_WORDS, [lane % width for lane in range(LANES)])
                result = builder.fadd(sums, builder.shuffle_vector(added, added, lanes))
                result = result if single else _narrow(builder, result)
                for row in range(count):
                    part = [row * width + lane for lane in range(width)]
                    lanes = ir.Constant(ir.VectorType(_WORD, width), part)
                    _store(
                        builder, builder.shuffle_vector(result, result, lanes), _place(builder, out, row, stride), size
                    )

            silent = builder.select(builder.icmp_signed("==", step, _LONG(0)), _LONG(LANES), _LONG(0))
            cases = {count + LANES * (not ask): partial(code, count, ask) for count in TILES for ask in (True, False)}
            _switch(builder, builder.add(rows, silent), cases)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 11), codegen

    return product


def _least(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """By lane, the sum of the lanes of one of 16 vectors; of fewer ones in turn."""
    vectors = vectors * (LANES // len(vectors))
    for apart in (8, 4, 2, 1):
        halves = (_exchanged(builder, *pair, apart) for pair in zip(vectors, vectors[apart:], strict=False))
        vectors = [builder.fadd(*both) for both in halves]
    return vectors[0]


def _exchanged(builder: Any, a: Any, b: Any, apart: int) -> tuple[Any, Any]:
    """Two vectors whose lanes that are so far apart change places between them."""
    first = [lane if not lane & apart else LANES + lane - apart for lane in range(LANES)]
    second = [lane + apart if not lane & apart else LANES + lane for lane in range(LANES)]
    return tuple(builder.shuffle_vector(a, b, ir.Constant(_WORDS, lanes)) for lanes in (first, second))


def _switch(builder: Any, value: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Code for each case of a value; nothing is done in others."""
    after = builder.append_basic_block("after")
    chosen = builder.switch(value, after)
    for case, code in cases.items():
        block = builder.append_basic_block(f"case_{case}")
        chosen.add_case(_LONG(case), block)
        builder.position_at_end(block)
        code()
        builder.branch(after)
    builder.position_at_end(after)


def _add_group(
    builder: Any, add_bytes: Callable[..., Any], bits: int, group: Any, totals: list[Any], weights: Any, x: Any,
    scales: Any, sums: Any,
) -> list[Any]:  # fmt: skip
    """Totals of each row with a group of packed weights added."""
    rows, size = len(totals), GROUP_BYTES[bits]
    here, x_here, scales_here, sums_here = (
        builder.add(address, builder.mul(group, _LONG(each)))
        for address, each in ((weights, size), (x, GROUP * rows), (scales, 4 * rows), (sums, 4 * rows))
    )
    for line in range(0, size, 64):
        _prefetch(builder, here, _AHEAD + line)
    unpacked = _unpack(builder, [_load(builder, here, 64 * i, _BYTES) for i in range(bits)])
    scale = builder.fpext(_load(builder, here, 64 * bits, _HALVES), _FLOATS)
    offset = builder.fpext(_load(builder, here, 64 * bits + 2 * LANES, _HALVES), _FLOATS) if bits == 4 else None
    results = []
    for row, total in enumerate(totals):
        row_scale = _every(builder, _load(builder, scales_here, 4 * row, _FLOAT, 4))
        row_sum = _every(builder, _load(builder, sums_here, 4 * row, _FLOAT if bits == 4 else _WORD, 4))
        dots = row_sum if bits == 8 else _all(_WORDS, 0)
        for i, four in enumerate(unpacked):
            activations = _every(builder, _load(builder, x_here, GROUP * row + 4 * i, _WORD, 4))
            dots = add_bytes(builder, dots, four, activations)
        scaled = builder.fmul(builder.sitofp(dots, _FLOATS), row_scale)
        result = _multiply_add(builder, scaled, scale, total)
        results.append(_multiply_add(builder, offset, row_sum, result) if bits == 4 else result)
    return results


def _unpack(builder: Any, loaded: list[Any]) -> list[Any]:
    """The weights of a group: eight times four along a row, for 16 rows each, as unsigned bytes."""
    if len(loaded) == 8:
        return loaded
    low, four = _all(_BYTES, 15), _all(_SHORTS, 4)
    upper = [builder.bitcast(builder.lshr(builder.bitcast(part, _SHORTS), four), _BYTES) for part in loaded]
    return [builder.and_(part, low) for part in loaded + upper]


def _add_float32(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    """16 sums, each with a product of float32 added."""
    return _multiply_add(builder, builder.bitcast(weights, _FLOATS), builder.bitcast(activations, _FLOATS), sums)


def _add_square(
    builder: Any, add_words: Callable[..., Any], chunk: Any, totals: list[Any], keys: Any, row_bytes: Any, x: Any
) -> list[Any]:
    """Totals of each row with a chunk of 16 keys' numbers added: a square, of 16 words of each key."""
    totals, rows, lying = list(totals), len(totals), []
    here, x_here = (builder.add(a, builder.mul(chunk, _LONG(n))) for a, n in ((keys, 64), (x, 64 * rows)))
    for lane in range(LANES):
        address = _place(builder, here, lane, row_bytes)
        _prefetch(builder, address, _AHEAD // LANES)
        lying.append(_load(builder, address, 0, _WORDS))
    words = _transposed(builder, lying)
    for row in range(rows):
        for i, word in enumerate(words):
            activation = _every(builder, _load(builder, x_here, 64 * row + 4 * i, _WORD, 4))
            totals[row] = add_words(builder, totals[row], word, activation)
    return totals


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square of 16 vectors, whose halves, quarters … change places in turn."""
    for apart in (1, 2, 4, 8):
        for i in (i for i in range(LANES) if not i & apart):
            rows[i], rows[i + apart] = _exchanged(builder, rows[i], rows[i + apart], apart)
    return rows


def _narrow(builder: Any, floats: Any) -> Any:
    """Floats as the nearest bfloat16, of two as near the even one."""
    bits = builder.bitcast(floats, _WORDS)
    even = builder.and_(builder.lshr(bits, _all(_WORDS, 16)), _all(_WORDS, 1))
    rounded = builder.add(builder.add(bits, even), _all(_WORDS, 0x7FFF))
    return builder.trunc(builder.lshr(rounded, _all(_WORDS, 16)), _BFLOATS)


@intrinsic
def mix_block(
    _context: Any, like: Any, rows: Any, shares: Any, stride: Any, values: Any, row_bytes: Any, held: Any, count: Any,
    out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Add up 16 numbers of values by shares.

    Its parameters: a number of the values' format; rows (of `BLOCKS`); the address of the first row's float32 shares,
    and how many bytes the next row's lie behind; the same of values; how many all rows see, and how many there are
    behind these, one at least; and of float32 results.
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, rows, shares, stride, values, row_bytes, held, times, out, out_stride = args

        def code(count: int) -> None:
            starts = [_place(builder, shares, row, stride) for row in range(count)]

            def add(index: Any, totals: list[Any], hidden: bool = False) -> list[Any]:
                address = builder.add(values, builder.mul(row_bytes, index))
                value, at = _load_numbers(builder, address, like == types.float32), builder.mul(index, _LONG(4))
                mine = [_every(builder, _load(builder, builder.add(start, at), 0, _FLOAT, 4)) for start in starts]
                added = [_multiply_add(builder, share, value, total) for share, total in zip(mine, totals, strict=True)]
                if not hidden:
                    return added
                seen = [builder.fcmp_unordered("!=", share, _ZEROS) for share in mine]  # 0 · inf is no number
                return list(map(builder.select, seen, added, totals))

            def add_seen(index: Any, totals: list[Any]) -> list[Any]:
                return add(builder.add(held, index), totals, hidden=True)

            before = builder.block
            with builder.if_then(builder.icmp_signed("<", _LONG(0), held)):
                sums, end = _loop(builder, held, [_ZEROS] * count, add), builder.block
            totals = [builder.phi(_FLOATS) for _ in range(count)]
            for total, held_sum in zip(totals, sums, strict=True):
                total.add_incoming(_ZEROS, before)
                total.add_incoming(held_sum, end)
            for row, total in enumerate(_loop(builder, times, totals, add_seen)):
                _store(builder, total, _place(builder, out, row, out_stride), 4)

        _switch(builder, rows, {count: partial(code, count) for count in BLOCKS})
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * 9), codegen
