"""Vector code that compilers do not generate by themselves: products of blocks of rows, as LLVM code for Numba.

Weights from memory are unpacked once for several rows, whose sums stay in registers; a `VectorUnit` says how many. A
row's results are bitwise independent of the other rows, since its sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
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
"""Number of rows of unpacked weights that can be multiplied by any number of rows."""
FORMATS = {types.float32: Numbers(FLOAT, 4), types.uint16: Numbers(SHORT, 2), types.int16: Numbers(HALF, 2)}
"""Formats by Numba's type of a number (`retrieve_spec.kernels.cpu.number_formats`)."""
_AHEAD = 16
"""Prefetch distance in keys or values."""


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


def score_block(unit: VectorUnit) -> Any:
    """Return a compiled function that computes float32 scores of a block of rows, for a key per lane.

    Its parameters: a number of the format; rows (one of the unit's attention blocks); the address of the first key, and
    the stride of keys in bytes; the address of the block's rows, (chunks, rows, `query_bytes` of a chunk); the number
    of 64-byte chunks per key; the address of the first row's results, and the stride of results in bytes.
    """
    lanes, sums = unit.lanes, unit.score_sums

    @intrinsic
    def product(
        _context: Any, like: Any, rows: Any, keys: Any, row_bytes: Any, x: Any, chunks: Any, out: Any, stride: Any
    ) -> Any:
        pairs = unit.add_pairs if like == types.uint16 else None
        numbers = FORMATS[like]
        terms = 1 if pairs or numbers.size == 4 else 2
        """Numbers of a row per word of a key."""

        def add(builder: Any, keys: Any, row_bytes: Any, x: Any, totals: list[Any]) -> list[Any]:
            """Add a square of words of keys to the sums of each row."""
            words = []
            for key in range(lanes):
                address = place(builder, keys, key, row_bytes)
                prefetch(builder, place(builder, address, _AHEAD, row_bytes))
                words.append(load(builder, address, 0, vector(WORD, lanes)))
            for i, word in enumerate(transposed(builder, words)):
                for j, term in enumerate([word] if pairs else numbers.in_words(builder, word)):
                    at = terms * i + j
                    for row, first in enumerate(range(0, len(totals), sums)):
                        row_at = builder.add(x, LONG(64 * terms * row))
                        given, mine = unit.word(builder, row_at, at, WORD if pairs else FLOAT), first + at % sums
                        totals[mine] = (pairs or _add_product)(builder, totals[mine], term, given)
            return totals

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, rows, keys, row_bytes, x, chunks, out, stride = args

            def code(count: int) -> None:
                """Emit the scores of a number of rows."""

                def add_chunk(chunk: Any, totals: list[Any]) -> list[Any]:
                    here = builder.add(keys, builder.mul(chunk, LONG(64)))
                    x_here = builder.add(x, builder.mul(chunk, LONG(64 * terms * count)))
                    for first in range(0, LANES, lanes):
                        part = builder.add(x_here, LONG(4 * terms * first))
                        totals = add(builder, builder.add(here, LONG(4 * first)), row_bytes, part, list(totals))
                    return totals

                totals = loop(builder, chunks, [zeros(lanes)] * (count * sums), add_chunk)
                for row in range(count):
                    score = reduce(builder.fadd, totals[sums * row : sums * (row + 1)])
                    store(builder, score, place(builder, out, row, stride), 4)

            switch(builder, rows, {count: partial(code, count) for count in unit.attention_blocks})
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 7), codegen

    return product


def tile_product(unit: VectorUnit) -> Any:
    """Return a compiled function that multiplies a few rows by a few rows of unpacked weights; lanes have partial sums.

    There are `LEAST_TILE` rows of weights without prefetching, else as many as in the unit's tiles. Its parameters: a
    number of the format; rows (one of the tiles), and the index of the last row, which takes the place of missing ones;
    the addresses of the weights and of the first row, and the number of 64-byte chunks per row; the address to
    prefetch, and the bytes between two prefetches, one per chunk and row of weights (0: no prefetching); the
    addresses of 16 numbers, of which the first are added, and of the first row's results, and the stride of results in
    bytes.
    """
    lanes = unit.lanes

    @intrinsic
    def product(
        _context: Any, like: Any, rows: Any, last: Any, weights: Any, x: Any, row_bytes: Any, chunks: Any, ahead: Any,
        step: Any, bias: Any, out: Any, stride: Any,
    ) -> Any:  # fmt: skip
        numbers, tiles = FORMATS[like], tiles_of(unit, like)
        pairs = unit.add_pairs if like == types.uint16 else None

        def parts_of(builder: Any, address: Any, at: int) -> list[Any]:
            """Return a register of a row, or its numbers as floats."""
            if numbers.kind == HALF:
                return [numbers.load(builder, builder.add(address, LONG(at)), lanes)]
            words = load(builder, address, at, vector(WORD, lanes))
            return [words] if pairs else numbers.in_words(builder, words)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, rows, last, weights, x, row_bytes, chunks, ahead, step, bias, out, stride = args

            def code(count: int, asking: bool) -> None:
                """Emit the product for a number of rows, with as many rows of weights as registers allow, or four."""
                width = tiles[count] if asking else LEAST_TILE
                rows_at, outs_at = (
                    [builder.add(start, builder.mul(each, least(builder, LONG(row), last))) for row in range(count)]
                    for start, each in ((x, row_bytes), (out, stride))
                )
                ours = [place(builder, weights, i, row_bytes) for i in range(width)]

                def add(chunk: Any, carried: list[Any]) -> list[Any]:
                    asked, *totals = carried
                    at = builder.mul(chunk, LONG(64))
                    for _ in range(width if asking else 0):
                        prefetch(builder, asked)
                        asked = builder.add(asked, step)
                    here, there = ([builder.add(address, at) for address in each] for each in (ours, rows_at))
                    for first in range(0, 64, 2 * lanes if numbers.kind == HALF else 4 * lanes):
                        given = [parts_of(builder, address, first) for address in there]
                        for i, address in enumerate(here):
                            for j, part in enumerate(parts_of(builder, address, first)):
                                for row in range(count):
                                    total = totals[row * width + i]
                                    total = (pairs or _add_product)(builder, total, part, given[row][j])
                                    totals[row * width + i] = total
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

            silent = builder.select(builder.icmp_signed("==", step, LONG(0)), LONG(LANES), LONG(0))
            cases = {count + LANES * (not ask): partial(code, count, ask) for count in tiles for ask in (True, False)}
            switch(builder, builder.add(rows, silent), cases)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 11), codegen

    return product


def tiles_of(unit: VectorUnit, like: Any) -> Mapping[int, int]:
    """Return how many rows of weights of a format a unit multiplies together, by number of rows."""
    return unit.bfloat16_tiles if like == types.uint16 else unit.tiles


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
