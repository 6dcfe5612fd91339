"""Vector code that compilers do not generate by themselves: products of blocks of rows, as LLVM code for Numba.

Weights from memory are unpacked once for several rows, whose sums stay in registers; a `VectorUnit` says how many. A
row's results are bitwise independent of the other rows, since its sums have a fixed order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from numba import types
from numba.extending import intrinsic

from retrieve_spec.kernels.cpu.vector_ir import (
    BYTE,
    FLOAT,
    HALF,
    LONG,
    SHORT,
    WORD,
    call,
    constant,
    lane_sums,
    lanes_of,
    least,
    load,
    loop,
    multiply_add,
    place,
    prefetch,
    splat,
    store,
    switch,
    transposed,
    vector,
    zeros,
)
from retrieve_spec.kernels.cpu.vector_units import Numbers, VectorUnit

LANES = 16
"""Number of interleaved rows of packed weights: a panel."""
GROUP = 32
"""Number of consecutive weights of a row; packed ones share a scale."""
GROUP_BYTES = {4: 64 * 4 + 2 * 2 * LANES, 8: 64 * 8 + 2 * LANES}
"""Bytes of a group of 16 rows of weights by number of bits: the weights, then scales and offsets in float16.

The layout is [quad, row, weight]: four weights of a row, then four of the next row, and so on. With 8 bits, 128 is
added to each. With 4 bits, the first four quads are the lower halves of bytes, the others the upper halves.
"""
UNPACKED = 16
"""Number of bits that stands for unpacked weights in the rows' format."""
LEAST_TILE = 4
"""Number of rows of unpacked weights that blocks of any number of rows are multiplied by in turn."""
FORMATS = {types.float32: Numbers(FLOAT, 4), types.uint16: Numbers(SHORT, 2), types.int16: Numbers(HALF, 2)}
"""Formats by Numba's type of a number (`retrieve_spec.kernels.cpu.number_formats`)."""
_AHEAD = 16
"""Prefetch distance in keys or values."""


def quantising() -> Any:
    """Return a compiled function that quantises 32 bfloat16 numbers at an address to bytes at another.

    It returns the largest magnitude, and the sum of the bytes. The compiler would unroll a loop over so few numbers,
    and not vectorise its maximum.
    """

    @intrinsic
    def quantise(_context: Any, x: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = load(builder, args[0], 0, vector(SHORT, GROUP), 2)
            magnitudes = builder.and_(given, constant(given.type, 0x7FFF))  # of which NaN's are the largest
            largest = call(builder, f"llvm.vector.reduce.umax.v{GROUP}i16", SHORT, magnitudes)
            top = builder.bitcast(builder.shl(builder.zext(largest, WORD), WORD(16)), FLOAT)
            is_zero = builder.icmp_unsigned("==", largest, SHORT(0))
            factor = builder.select(is_zero, FLOAT(0.0), builder.fdiv(FLOAT(127.0), top))
            scaled = builder.fmul(FORMATS[types.uint16].widened(builder, given), splat(builder, factor, GROUP))
            rounded = call(builder, f"llvm.rint.v{GROUP}f32", scaled.type, scaled)
            whole = builder.fptosi(rounded, vector(WORD, GROUP))
            store(builder, builder.trunc(whole, vector(BYTE, GROUP)), args[1], 1)
            total = call(builder, f"llvm.vector.reduce.add.v{GROUP}i32", WORD, whole)
            return context.make_tuple(builder, signature.return_type, (top, total))

        return types.Tuple((types.float32, types.int32))(x, out), codegen  # type: ignore[no-untyped-call]

    return quantise


def block_product(unit: VectorUnit) -> Any:
    """Return a compiled function that multiplies a block of quantised rows by packed weights, for an output per lane.

    Its parameters: a number of the rows' format; bits, and rows (one of the unit's blocks); the addresses of the first
    output's weights and scales in a panel, (groups, `GROUP_BYTES`); the addresses of the block's (groups, rows, 32)
    bytes, and of their scales and sums (groups, rows); the number of groups; the address to prefetch, and the bytes
    between two prefetches, one for each 64-byte line of a group; the addresses of numbers to add and of the first row's
    results, and the stride of results in bytes.
    """
    lanes = unit.lanes
    floats, numbers = vector(FLOAT, lanes), FORMATS[types.uint16]

    @intrinsic
    def product(
        _context: Any, like: Any, bits: Any, rows: Any, weights: Any, factors: Any, x: Any, scales: Any, sums: Any,
        groups: Any, ahead: Any, step: Any, bias: Any, out: Any, stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, bits, rows, weights, factors, x, scales, sums, groups, ahead, step, bias, out, stride = args

            def code(of_bits: int, count: int) -> None:
                """Emit the product for a number of bits and of rows."""
                size = GROUP_BYTES[of_bits]

                def add(group: Any, carried: list[Any]) -> list[Any]:
                    asked, *totals = carried
                    for _ in range(0, size, 64):
                        prefetch(builder, asked)
                        asked = builder.add(asked, step)
                    here = [
                        builder.add(address, builder.mul(group, LONG(each)))
                        for address, each in zip(
                            (weights, factors, x, scales, sums),
                            (size, size, GROUP * count, 4 * count, 4 * count),
                            strict=True,
                        )
                    ]
                    return [asked, *_add_group(builder, unit, of_bits, totals, *here)]

                first = numbers.load(builder, bias, lanes)
                for row, total in enumerate(loop(builder, groups, [ahead, *[first] * count], add)[1:]):
                    store(builder, numbers.narrowed(builder, total), place(builder, out, row, stride), 2)

            served = GROUP_BYTES if like == types.uint16 else ()
            cases = {count + (each << 8): partial(code, each, count) for each in served for count in unit.blocks}
            switch(builder, builder.add(rows, builder.shl(bits, LONG(8))), cases)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 13), codegen

    def _add_group(
        builder: Any, unit: VectorUnit, bits: int, totals: list[Any], weights: Any, factors: Any, x: Any, scales: Any,
        sums: Any,
    ) -> list[Any]:  # fmt: skip
        """Add a group of packed weights to the totals of each row."""

        def weights_at(i: int) -> Any:
            part = load(builder, weights, 64 * i, vector(BYTE, 4 * lanes))
            return builder.xor(part, constant(part.type, 128)) if bits == 8 and unit.is_signed else part

        words = vector(WORD, lanes)
        starts = [constant(words, 0)] * len(totals)
        if bits == 8 and not unit.is_signed:  # 128 was added to each weight
            starts = [splat(builder, load(builder, sums, 4 * row, WORD, 4), lanes) for row in range(len(totals))]

        def word(row: int, i: int) -> Any:
            return unit.word(builder, builder.add(x, LONG(GROUP * row)), i, WORD)

        dots = unit.add_group(builder, bits, weights_at, starts, word)
        scale = builder.fpext(load(builder, factors, 0, vector(HALF, lanes)), floats)
        offset = builder.fpext(load(builder, factors, 2 * LANES, vector(HALF, lanes)), floats) if bits == 4 else None
        results = []
        for row, (dot, total) in enumerate(zip(dots, totals, strict=True)):
            row_scale = splat(builder, load(builder, scales, 4 * row, FLOAT, 4), lanes)
            result = multiply_add(builder, builder.fmul(builder.sitofp(dot, floats), row_scale), scale, total)
            if bits == 4:
                row_sum = splat(builder, load(builder, sums, 4 * row, FLOAT, 4), lanes)
                result = multiply_add(builder, offset, row_sum, result)
            results.append(result)
        return results

    return product


def transposing(unit: VectorUnit) -> Any:
    """Return a compiled function that transposes 16 keys, for scores with a key per lane.

    Its parameters: a number of the format; the address of the first key, and the stride of keys in bytes; the number of
    64-byte chunks per key; the address of the result: (numbers, 16) float32, or words where pairs are multiplied.
    """
    lanes = unit.lanes

    @intrinsic
    def transpose(_context: Any, like: Any, keys: Any, row_bytes: Any, chunks: Any, out: Any) -> Any:
        terms = 2 if is_widened(unit, like) else 1  # numbers of a word that are multiplied one at a time

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, keys, row_bytes, chunks, out = args

            def lay_out(chunk: Any, _: list[Any]) -> list[Any]:
                here = builder.add(keys, builder.mul(chunk, LONG(64)))
                to = builder.add(out, builder.mul(chunk, LONG(64 * LANES * terms)))
                for key in range(LANES):
                    prefetch(builder, place(builder, here, key + _AHEAD, row_bytes))
                for first, part in itertools.product(range(0, LANES, lanes), range(0, LANES, lanes)):
                    rows = [place(builder, here, first + key, row_bytes) for key in range(lanes)]
                    words = [load(builder, row, 4 * part, vector(WORD, lanes)) for row in rows]
                    for i, word in enumerate(transposed(builder, words)):
                        for j, term in enumerate([word] if terms == 1 else FORMATS[like].in_words(builder, word)):
                            at = 4 * LANES * (terms * (part + i) + j) + 4 * first
                            store(builder, term, builder.add(to, LONG(at)), 4)
                return []

            loop(builder, chunks, [], lay_out)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 4), codegen

    return transpose


def score_block(unit: VectorUnit) -> Any:
    """Return a compiled function that computes float32 scores of a block of rows and 16 transposed keys.

    Its parameters: a number of the format; rows (one of the unit's attention blocks); the address of the keys; the
    address of the rows, of float32 or of pairs, and their number of 64-byte chunks; the address of the first row's
    results, and the stride of results in bytes.
    """
    lanes = unit.lanes

    @intrinsic
    def product(_context: Any, like: Any, rows: Any, keys: Any, x: Any, chunks: Any, out: Any, stride: Any) -> Any:
        pairs = unit.add_pairs if like == types.uint16 else None
        kind = vector(WORD if pairs else FLOAT, lanes)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, rows, keys, x, chunks, out, stride = args
            x_bytes = builder.mul(chunks, LONG(64))

            def code(count: int) -> None:
                """Emit the scores of a number of rows."""
                starts = [place(builder, x, row, x_bytes) for row in range(count)]
                parts = range(0, LANES, lanes)

                def add(chunk: Any, totals: list[Any]) -> list[Any]:
                    totals = list(totals)
                    here = [builder.add(start, builder.mul(chunk, LONG(64))) for start in starts]
                    keys_here = builder.add(keys, builder.mul(chunk, LONG(64 * LANES)))
                    for i in range(16):  # words of a chunk
                        terms = [load(builder, keys_here, 4 * (LANES * i + part), kind) for part in parts]
                        for row, address in enumerate(here):
                            given = unit.word(builder, address, i, kind.element)
                            for j, term in enumerate(terms):
                                at = row * len(terms) + j
                                totals[at] = (pairs or _add_product)(builder, totals[at], term, given)
                    return totals

                totals = loop(builder, chunks, [zeros(lanes)] * (count * len(parts)), add)
                for i, total in enumerate(totals):
                    row, part = divmod(i, len(parts))
                    store(builder, total, builder.add(place(builder, out, row, stride), LONG(4 * parts[part])), 4)

            switch(builder, rows, {count: partial(code, count) for count in unit.attention_blocks})
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 6), codegen

    return product


def is_widened(unit: VectorUnit, like: Any) -> bool:
    """Whether products with unpacked weights of a format take rows that `widening` has converted to float32."""
    return FORMATS[like].size == 2 and not (like == types.uint16 and unit.add_pairs)


def tiles_of(unit: VectorUnit, like: Any) -> Mapping[int, int]:
    """Return how many rows of weights of a format a unit multiplies together, by number of rows."""
    return unit.widened_tiles if is_widened(unit, like) else unit.tiles


def _part_bytes(unit: VectorUnit, like: Any) -> int:
    """Return the bytes of unpacked weights that are loaded together: a register of words, or of converted float16."""
    return (2 if FORMATS[like].kind == HALF else 4) * unit.lanes


def _load_part(builder: Any, unit: VectorUnit, like: Any, address: Any, at: int) -> list[Any]:
    """Load a part of a row of unpacked weights: one register, or the first and the second number of each word."""
    numbers, lanes = FORMATS[like], unit.lanes
    if numbers.kind == HALF:
        return [numbers.load(builder, builder.add(address, LONG(at)), lanes)]
    words = load(builder, address, at, vector(WORD, lanes))
    return numbers.in_words(builder, words) if numbers.kind == FLOAT or is_widened(unit, like) else [words]


def widening(unit: VectorUnit) -> Any:
    """Return a compiled function that converts a row to float32, in the order in which registers hold weights.

    Its parameters: a number of the format; the address of the row; the number of its 64-byte chunks; the address of the
    result. It does nothing for formats that products take as they are (`is_widened`).
    """

    @intrinsic
    def widen(_context: Any, like: Any, x: Any, chunks: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, x, chunks, out = args

            def convert(chunk: Any, _: list[Any]) -> list[Any]:
                here, to = (builder.add(start, builder.mul(chunk, LONG(size))) for start, size in ((x, 64), (out, 128)))
                for first in range(0, 64, _part_bytes(unit, like)):
                    for i, floats in enumerate(_load_part(builder, unit, like, here, first)):
                        store(builder, floats, builder.add(to, LONG(2 * first + 4 * unit.lanes * i)), 4)
                return []

            if is_widened(unit, like):
                loop(builder, chunks, [], convert)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 3), codegen

    return widen


def tile_product(unit: VectorUnit) -> Any:
    """Return a compiled function that multiplies a few rows by a few rows of unpacked weights; lanes have partial sums.

    Its parameters: a number of the format; rows (one of the unit's tiles), and the index of the last row, which takes
    the place of missing ones; the number of rows of weights, that of the tile or at most `LEAST_TILE`; the addresses of
    the weights and of the first row (in float32 where `is_widened`); the number of 64-byte chunks per row of weights;
    the address to prefetch, and the bytes between two prefetches, one per chunk and row of weights; the addresses of 16
    numbers, of which the first are added, and of the first row's results, and the stride of results in bytes.
    """
    lanes = unit.lanes

    @intrinsic
    def product(
        _context: Any, like: Any, rows: Any, last: Any, width: Any, weights: Any, x: Any, chunks: Any, ahead: Any,
        step: Any, bias: Any, out: Any, stride: Any,
    ) -> Any:  # fmt: skip
        numbers, times = FORMATS[like], 2 if is_widened(unit, like) else 1
        pairs = unit.add_pairs if like == types.uint16 else None

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, rows, last, wanted, weights, x, chunks, ahead, step, bias, out, stride = args
            row_bytes = builder.mul(chunks, LONG(64))

            def code(count: int, width: int) -> None:
                """Emit the product for a number of rows and of rows of weights."""
                rows_at, outs_at = (
                    [builder.add(start, builder.mul(each, least(builder, LONG(row), last))) for row in range(count)]
                    for start, each in ((x, builder.mul(row_bytes, LONG(times))), (out, stride))
                )
                ours = [place(builder, weights, i, row_bytes) for i in range(width)]

                def add_part(chunk: Any, first: int, totals: list[Any]) -> None:
                    """Add the products of a part of a chunk; of rows and of weights, the fewer stay in registers."""

                    @functools.cache
                    def part(i: int) -> list[Any]:
                        return _load_part(
                            builder, unit, like, builder.add(ours[i], builder.mul(chunk, LONG(64))), first
                        )

                    @functools.cache
                    def given(row: int, j: int, kind: Any) -> Any:
                        here = builder.add(rows_at[row], builder.mul(chunk, LONG(64 * times)))
                        return load(builder, here, times * first + 4 * lanes * j, kind)

                    terms = range(len(part(0)))
                    if count > width:
                        order = itertools.product(terms, range(count), range(width))
                    else:
                        order = ((j, row, i) for i, j, row in itertools.product(range(width), terms, range(count)))
                    for j, row, i in order:
                        total, term = totals[row * width + i], part(i)[j]
                        total = (pairs or _add_product)(builder, total, term, given(row, j, term.type))
                        totals[row * width + i] = total

                def add(chunk: Any, carried: list[Any]) -> list[Any]:
                    asked, *totals = carried
                    for _ in range(width):
                        prefetch(builder, asked)
                        asked = builder.add(asked, step)
                    for first in range(0, 64, _part_bytes(unit, like)):
                        add_part(chunk, first, totals)
                    return [asked, *totals]

                totals = loop(builder, chunks, [ahead, *[zeros(lanes)] * (count * width)], add)[1:]
                added, results = numbers.load(builder, bias, width), []
                for first in range(0, count * width, lanes):  # side by side, row by row
                    picked = lanes_of([(first + lane) % width for lane in range(lanes)])
                    sums = lane_sums(builder, totals[first : first + lanes])
                    sums = builder.fadd(sums, builder.shuffle_vector(added, added, picked))
                    results.append(numbers.narrowed(builder, sums))
                each = min(width, lanes)
                for first in range(0, count * width, each):
                    result, lane = results[first // lanes], first % lanes
                    part = builder.shuffle_vector(result, result, lanes_of(range(lane, lane + each)))
                    row, column = divmod(first, width)
                    store(builder, part, builder.add(outs_at[row], LONG(numbers.size * column)), numbers.size)

            tiles = tiles_of(unit, like)
            cases = {(count, each) for count, most in tiles.items() for each in (most, min(most, LEAST_TILE))}
            chosen = builder.add(rows, builder.mul(wanted, LONG(LANES)))
            switch(builder, chosen, {count + LANES * each: partial(code, count, each) for count, each in sorted(cases)})
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 11), codegen

    return product


def _add_product(builder: Any, sums: Any, weights: Any, activations: Any) -> Any:
    return multiply_add(builder, weights, activations, sums)


def mix_block(unit: VectorUnit) -> Any:
    """Return a compiled function that adds up 16 numbers of values, weighted by shares.

    Its parameters: a number of the values' format; rows (one of the unit's attention blocks); address and stride of the
    rows' float32 shares; address and stride of values; the number of values that all rows see, and the number after
    these, at least one; address and stride of float32 results.
    """
    nothing = zeros(LANES)

    @intrinsic
    def product(
        _context: Any, like: Any, rows: Any, shares: Any, stride: Any, values: Any, row_bytes: Any, held: Any,
        count: Any, out: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, rows, shares, stride, values, row_bytes, held, times, out, out_stride = args

            def code(count: int) -> None:
                starts = [place(builder, shares, row, stride) for row in range(count)]

                def add(index: Any, totals: list[Any], hidden: bool = False) -> list[Any]:
                    address = builder.add(values, builder.mul(row_bytes, index))
                    prefetch(builder, place(builder, address, _AHEAD, row_bytes))
                    value, at = FORMATS[like].load(builder, address, LANES), builder.mul(index, LONG(4))
                    mine = [
                        splat(builder, load(builder, builder.add(start, at), 0, FLOAT, 4), LANES) for start in starts
                    ]
                    added = [
                        multiply_add(builder, share, value, total) for share, total in zip(mine, totals, strict=True)
                    ]
                    if not hidden:
                        return added
                    seen = [builder.fcmp_unordered("!=", share, nothing) for share in mine]  # 0 · inf is no number
                    return list(map(builder.select, seen, added, totals))

                def add_seen(index: Any, totals: list[Any]) -> list[Any]:
                    return add(builder.add(held, index), totals, hidden=True)

                before = builder.block
                with builder.if_then(builder.icmp_signed("<", LONG(0), held)):
                    sums, end = loop(builder, held, [nothing] * count, add), builder.block
                totals = [builder.phi(nothing.type) for _ in range(count)]
                for total, held_sum in zip(totals, sums, strict=True):
                    total.add_incoming(nothing, before)
                    total.add_incoming(held_sum, end)
                for row, total in enumerate(loop(builder, times, totals, add_seen)):
                    store(builder, total, place(builder, out, row, out_stride), 4)

            switch(builder, rows, {count: partial(code, count) for count in unit.attention_blocks})
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 9), codegen

    return product
