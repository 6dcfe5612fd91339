"""Products of bfloat16 by Intel's matrix instructions (AMX), generated as LLVM code for Numba.

A tile is a register of 16 rows of 64 bytes. One instruction multiplies 16 rows of weights, in their normal layout, by
16 interleaved rows of a pass, 32 numbers each, and adds the products to 16 · 16 sums. Each sum has its own lane and a
fixed order, so a row's results are bitwise independent of the other rows. Denormal inputs and results
are treated as zeros.

No code is generated for other units and formats.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from retrieve_spec.kernels.cpu.vector_code import FORMATS, LANES
from retrieve_spec.kernels.cpu.vector_ir import (
    BYTE,
    FLOAT,
    LONG,
    SHORT,
    WORD,
    call,
    least,
    load,
    loop,
    place,
    pointer,
    prefetch,
    store,
    switch,
    transposed,
    vector,
)
from retrieve_spec.kernels.cpu.vector_units import VectorUnit

TILE_BYTES = 1024
MOST_BLOCKS = 4
"""Blocks of 16 rows multiplied together: their sums have a tile each, weights one, and rows one."""
_TILES, _WEIGHTS, _ROWS = 8, MOST_BLOCKS, MOST_BLOCKS + 1
_CONFIGURATION = [1, *[0] * 15, *[64, 0] * _TILES, *[0] * (32 - 2 * _TILES), *[LANES] * _TILES, *[0] * (16 - _TILES)]
"""Tile configuration: palette 1, then bytes per row and number of rows of each tile."""


def _has_code(unit: VectorUnit, like: Any) -> bool:
    return unit.has_amx and like == types.uint16


def _amx(builder: Any, name: str, *args: Any) -> None:
    """Emit an instruction; tiles are given by number, addresses as words."""
    given = (BYTE(arg) if isinstance(arg, int) else arg for arg in args)
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *given)


def amx_configure(unit: VectorUnit) -> Any:
    """Return a compiled function that a thread calls before products: earlier code may have configured tiles, too."""

    @intrinsic
    def configure(_context: Any, like: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            if _has_code(unit, like):
                kind = ir.ArrayType(BYTE, len(_CONFIGURATION))
                with builder.goto_entry_block():
                    cell = builder.alloca(kind)
                builder.store(ir.Constant(kind, _CONFIGURATION), cell)
                _amx(builder, "ldtilecfg", builder.bitcast(cell, BYTE.as_pointer()))
            return context.get_dummy_value()

        return types.void(like), codegen

    return configure


def amx_release(unit: VectorUnit) -> Any:
    """Return a compiled function that a thread calls after its last product."""

    @intrinsic
    def release(_context: Any, like: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            if _has_code(unit, like):
                _amx(builder, "tilerelease")
            return context.get_dummy_value()

        return types.void(like), codegen

    return release


def amx_interleave(unit: VectorUnit) -> Any:
    """Return a compiled function that interleaves 16 rows by pairs of numbers.

    Its parameters: a number of the format; the address of the first row; the index of the last row, which is repeated
    for missing ones; the number of 64-byte chunks per row; the address of as many output tiles.
    """

    @intrinsic
    def interleave(_context: Any, like: Any, x: Any, last: Any, chunks: Any, out: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, x, last, chunks, out = args
            row_bytes = builder.mul(chunks, LONG(64))
            rows = [builder.add(x, builder.mul(row_bytes, least(builder, LONG(row), last))) for row in range(LANES)]

            def lay(chunk: Any, _: list[Any]) -> list[Any]:
                at, to = builder.mul(chunk, LONG(64)), builder.add(out, builder.mul(chunk, LONG(TILE_BYTES)))
                words = [load(builder, builder.add(row, at), 0, vector(WORD, LANES)) for row in rows]
                for i, pairs in enumerate(transposed(builder, words)):
                    store(builder, pairs, builder.add(to, LONG(64 * i)), 4)
                return []

            if _has_code(unit, like):
                loop(builder, chunks, [], lay)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 4), codegen

    return interleave


def amx_product(unit: VectorUnit) -> Any:
    """Return a compiled function that computes 16 outputs of up to 64 rows.

    Its parameters: a number of the format; the number of blocks of 16 rows, and the index of the last row, which is
    repeated for missing ones; the addresses of the first of 16 rows of weights (the next 16 are prefetched), and of the
    interleaved blocks; the number of 64-byte chunks per row; the addresses of 16 numbers to add and of the first row's
    results, and the stride of results in bytes.
    """

    @intrinsic
    def product(
        _context: Any, like: Any, blocks: Any, last: Any, weights: Any, x: Any, chunks: Any, bias: Any, out: Any,
        stride: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            _, blocks, last, weights, x, chunks, bias, out, stride = args
            numbers = FORMATS[types.uint16]
            row_bytes, block_bytes = (builder.mul(chunks, LONG(size)) for size in (64, TILE_BYTES))
            if not _has_code(unit, like):
                return context.get_dummy_value()
            with builder.goto_entry_block():
                cell = builder.alloca(ir.ArrayType(FLOAT, MOST_BLOCKS * LANES * LANES))
            sums = builder.ptrtoint(cell, LONG)
            following = builder.add(weights, builder.mul(row_bytes, LONG(LANES)))

            def code(count: int) -> None:
                """Emit the sums of a number of blocks."""
                for block in range(count):
                    _amx(builder, "tilezero", block)

                def add(chunk: Any, _: list[Any]) -> list[Any]:
                    here = builder.add(weights, builder.mul(chunk, LONG(64)))
                    there, ahead = (
                        builder.add(start, builder.mul(chunk, LONG(TILE_BYTES))) for start in (x, following)
                    )
                    _amx(builder, "tileloadd64", _WEIGHTS, pointer(builder, here), row_bytes)
                    for block in range(count):
                        at = place(builder, there, block, block_bytes)
                        _amx(builder, "tileloadd64", _ROWS, pointer(builder, at), LONG(64))
                        for line in range(block * LANES // count, (block + 1) * LANES // count):
                            prefetch(builder, builder.add(ahead, LONG(64 * line)), level=2)
                        _amx(builder, "tdpbf16ps", block, _WEIGHTS, _ROWS)
                    return []

                loop(builder, chunks, [], add)
                for block in range(count):
                    at = builder.add(sums, LONG(TILE_BYTES * block))
                    _amx(builder, "tilestored64", block, pointer(builder, at), LONG(64))

            def finish(block: Any, _: list[Any]) -> list[Any]:
                """Emit code that writes a block's results; sums have a row per row of weights."""
                at, first = builder.add(sums, builder.mul(block, LONG(TILE_BYTES))), builder.mul(block, LONG(LANES))
                by_weight = [load(builder, at, 64 * i, vector(FLOAT, LANES), 4) for i in range(LANES)]
                added = numbers.load(builder, bias, LANES)
                for i, row in enumerate(transposed(builder, by_weight)):
                    to = builder.mul(stride, least(builder, builder.add(first, LONG(i)), last))
                    result = numbers.narrowed(builder, builder.fadd(row, added))
                    store(builder, result, builder.add(out, to), SHORT.width // 8)
                return []

            switch(builder, blocks, {count: partial(code, count) for count in range(1, MOST_BLOCKS + 1)})
            loop(builder, blocks, [], finish)
            return context.get_dummy_value()

        return types.void(like, *[types.int64] * 8), codegen

    return product
