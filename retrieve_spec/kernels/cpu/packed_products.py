"""Products of rows with weights of 4 and 8 bits on a CPU, in integers, and with unpacked ones.

Packed weights have groups of 32 along a row, each with a scale and, with 4 bits, an offset: the numbers of GGUF's
blocks Q4_1 and Q8_0. Rows are also quantised to 8 bits in groups of 32, so a group is a sum of products of bytes, for
which CPUs have instructions (`retrieve_spec.kernels.cpu.vector_code`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inlined, inner, kernel
from retrieve_spec.kernels.cpu.amx_code import MOST_BLOCKS, TILE_BYTES, amx_interleave, amx_product
from retrieve_spec.kernels.cpu.number_formats import bytes_of, is_bfloat16, narrow, wide
from retrieve_spec.kernels.cpu.vector_code import (
    GROUP,
    GROUP_BYTES,
    LANES,
    LEAST_TILE,
    UNPACKED,
    block_product,
    quantising,
    tile_product,
    widening,
)
from retrieve_spec.kernels.cpu.vector_units import unit_here
from retrieve_spec.kernels.views import view_f32, view_i16, view_i32, view_u8, view_u16

_GROUP_BYTES_4, _GROUP_BYTES_8 = GROUP_BYTES[4], GROUP_BYTES[8]
_VECTORS = unit_here()
BLOCKS = _VECTORS.blocks
"""Numbers of rows that products with packed weights compute together."""
_MOST, _WIDTH, _PARTS = BLOCKS[-1], _VECTORS.lanes, LANES // _VECTORS.lanes
_BOTH_TILES = _VECTORS.tiles, _VECTORS.widened_tiles
_TALLEST = max(map(max, _BOTH_TILES))
_TILES = tuple((*tiles, *[max(tiles)] * (_TALLEST - len(tiles))) for tiles in _BOTH_TILES)
"""Numbers of rows that products with unpacked weights compute together, in their format and in float32."""
_WIDTHS = tuple(tuple(tiles.get(rows, 0) for rows in range(_TALLEST + 1)) for tiles in _BOTH_TILES)
"""Numbers of rows of weights of a tile, by its number of rows."""
FLOATS = torch.int8
"""Type of packed weights whose levels are numbers of FP8 (e4m3) or, with 4 bits, places in `NF4`; that of weights whose
levels are integers is uint8. Scales are 256 times as large, so that they are normal numbers of float16."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Numbers of bitsandbytes' format for weights that are distributed normally."""
_AHEAD = 4096
"""Prefetch distance in bytes, as memory latency is the time of several groups."""
_NEAR = 1 << 18
"""Size of rows in bytes that stay in the L2 cache while unpacked weights are read."""
_SHARES = 4
"""Most passes over a panel's weights that share prefetching the next panel."""
_HAS_AMX, _HAS_PAIRS = _VECTORS.has_amx, _VECTORS.add_pairs is not None
_product, _tile, _widen = block_product(_VECTORS), tile_product(_VECTORS), widening(_VECTORS)
_quantise = quantising()
_interleave, _matrix = amx_interleave(_VECTORS), amx_product(_VECTORS)


@inner
def block_of(blocks: tuple[int, ...], rows: int) -> int:
    """Return the number of rows of the next block when `rows` are left."""
    for block in blocks:
        if rows <= block:
            return block
    return blocks[-1]


@inner
def multiplies_pairs(like: Any) -> bool:
    """Whether the unit multiplies pairs of numbers of a format as they are."""
    return _HAS_PAIRS and is_bfloat16(like)


@inner
def quantise_groups(
    x: int, bits: int, rows: int, groups: int, begin: int, end: int, q: int, scales: int, sums: int
) -> None:  # fmt: skip
    """Quantise groups `begin` to `end` of all rows to bytes.

    At addresses: the rows; bytes, scales and sums of all rows, block by block, each (groups, rows). With 4 bits, sums
    are scaled and float32; with 8 bits, where 128 was added to weights, they are int32 and multiplied by -128.
    """
    for row in range(rows):
        first = row // _MOST * _MOST
        block = block_of(BLOCKS, rows - first)
        for group in range(begin, end):
            place = first * groups + group * block + row - first
            top, whole = _quantise(x + 2 * GROUP * (groups * row + group), q + GROUP * place)
            scale = top / np.float32(127.0)
            view_f32(scales + 4 * place, 1)[0] = scale
            if bits == 4:
                view_f32(sums + 4 * place, 1)[0] = scale * np.float32(whole)
            else:
                view_i32(sums + 4 * place, 1)[0] = -128 * whole


@inner
def interleave_block(x: int, block: int, rows: int, chunks: int, out: int, like: Any) -> None:
    """Interleave a block of 16 of the rows at an address for AMX."""
    first = LANES * block
    _interleave(like, x + 64 * chunks * first, rows - first - 1, chunks, out + TILE_BYTES * chunks * block)


@inlined
def multiply_panel(
    weight: int, begin: int, bits: int, rows: int, groups: int, q: int, scales: int, sums: int, bias: int, out: int,
    stride: int, like: Any,
) -> None:  # fmt: skip
    """Compute sixteen outputs of all rows; rows of `out` are `stride` bytes apart, and as many as blocks have.

    With unpacked weights, `q` holds the rows themselves, in float32, or interleaved blocks, and groups are 64 bytes.
    """
    if bits == UNPACKED and _HAS_AMX and is_bfloat16(like):
        _multiply_by_amx(weight + 64 * begin * groups, rows, groups, q, bias, out, stride, like)
        return
    if bits == UNPACKED:
        _multiply_unpacked(weight + 64 * begin * groups, rows, groups, q, bias, out, stride, like)
        return
    panel_bytes = groups * (_GROUP_BYTES_4 if bits == 4 else _GROUP_BYTES_8)
    weight += begin // LANES * panel_bytes
    shares = min(-(-rows // _MOST) * _PARTS, _SHARES)
    ahead, number = weight + (panel_bytes if shares > 1 else _AHEAD), 0
    first = 0
    while first < rows:
        block, at = block_of(BLOCKS, rows - first), first * groups
        for some in range(0, LANES, _WIDTH):
            asked = ahead + number * panel_bytes // shares if number < shares else weight
            _product(
                like, bits, block, weight + 4 * some, weight + 64 * bits + 2 * some, q + GROUP * at, scales + 4 * at,
                sums + 4 * at, groups, asked, 64 // shares if number < shares else 0, bias + 2 * some,
                out + first * stride + 2 * some, stride,
            )  # fmt: skip
            number += 1
        first += block


@inner
def _multiply_by_amx(weight: int, rows: int, chunks: int, x: int, bias: int, out: int, stride: int, like: Any) -> None:
    """Multiply interleaved rows by unpacked weights, and prefetch the next weights."""
    most = MOST_BLOCKS * LANES
    for first in range(0, rows, most):
        count = min(rows - first, most)
        x_here, out_here = x + 64 * chunks * first, out + first * stride
        _matrix(like, -(-count // LANES), count - 1, weight, x_here, chunks, bias, out_here, stride)


@inner
def _multiply_unpacked(
    weight: int, rows: int, chunks: int, x: int, bias: int, out: int, stride: int, like: Any
) -> None:
    """Multiply rows by unpacked weights: a few of these by as many rows as stay in the L2 cache, then the next few.

    Up to four blocks of rows share prefetching the next weights.
    """
    row_bytes, size = 64 * chunks, bytes_of(like)
    kind = 0 if size == 4 or multiplies_pairs(like) else 1
    x_bytes, tiles, widths = row_bytes << kind, _TILES[kind], _WIDTHS[kind]
    blocks = -(-rows // tiles[-1])
    block = block_of(tiles, -(-rows // blocks))
    span = LEAST_TILE if blocks > 1 else max(LEAST_TILE, widths[block])
    near = max(_NEAR // x_bytes // block, 1) * block
    shares = min(blocks, near // block)
    shares = 4 if shares > 3 else 2 if shares > 1 else 1
    for begin in range(0, rows, near):
        for first in range(0, LANES, span):
            for row in range(begin, min(begin + near, rows), block):
                count, share = block_of(tiles, min(rows - row, block)), row // block
                width = min(widths[count], span)
                for i in range(first, first + span, width):
                    ours = weight + i * row_bytes
                    ahead = ours + span * row_bytes + share * width * row_bytes // shares
                    _tile(
                        like, count, min(rows - row, count) - 1, width, ours, x + row * x_bytes, chunks,
                        ahead if share < shares else ours, 64 // shares if share < shares else 0, bias + i * size,
                        out + row * stride + i * size, stride,
                    )  # fmt: skip


@inner
def widen_row(x: int, row: int, chunks: int, out: int, like: Any) -> None:
    """Convert one of the rows of 64-byte chunks at an address to float32, for products with unpacked weights."""
    _widen(like, x + 64 * chunks * row, chunks, out + 128 * chunks * row)


def bits_of(row_bytes: int, groups: int) -> int:
    """Return the bits of a weight by the bytes and groups of its packed rows."""
    return 8 if row_bytes * LANES == groups * GROUP_BYTES[8] else 4


@inner
def unpack_row(number: int, weight: int, groups: int, out: int) -> None:
    """Unpack one row of a weight of 8 bits to bfloat16; both are at addresses."""
    place, numbers = number % LANES, view_u16(out, GROUP * groups)
    panel = weight + number // LANES * groups * _GROUP_BYTES_8
    for group in range(groups):
        at = panel + group * _GROUP_BYTES_8
        levels, scale = view_u8(at, GROUP * LANES), wide(view_i16(at + GROUP * LANES + 2 * place, 1)[0])
        for i in range(GROUP):
            level = np.float32(levels[4 * (i // 4 * LANES + place) + i % 4])
            numbers[GROUP * group + i] = narrow((level - np.float32(128.0)) * scale, np.uint16(0))


@kernel
def unpack_rows(numbers: NDArray[np.int64], weight: int, groups: int, out: int) -> None:
    """Unpack some rows of a weight of 8 bits at an address to (rows, 32 · groups) bfloat16 at another."""
    for row in range(len(numbers)):
        unpack_row(numbers[row], weight, groups, out + 2 * GROUP * groups * row)


def unpack(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack a weight to (n, columns) float32."""
    groups = columns // GROUP
    bits = bits_of(weight.shape[1], groups)
    packed = weight.view(len(weight) // LANES, groups, -1)
    levels, numbers = packed[..., : 64 * bits], packed[..., 64 * bits :]
    if bits == 4:
        levels = torch.cat([levels & 15, levels >> 4], -1)
    levels = levels.view(-1, groups, GROUP // 4, LANES, 4).permute(0, 3, 1, 2, 4).flatten(-2)
    halves = numbers.contiguous().view(torch.float16).float()
    scales, *offsets = halves.view(*halves.shape[:2], -1, LANES).permute(2, 0, 3, 1).unsqueeze(-1)
    if weight.dtype == FLOATS:
        table = torch.tensor(NF4, device=weight.device)
        numbers = table[levels.int()] if bits == 4 else levels.view(torch.float8_e4m3fn).float()
        floats = numbers * (scales / 256)
    else:
        floats = levels.float() * scales + offsets[0] if offsets else (levels.float() - 128) * scales
    return floats.flatten(2).flatten(0, 1)
