"""Triton matrix products: linear layers for a few 16-bit rows; layers of one input share a launch.

The cost of such a product is reading the weights, so programs divide them and read each once. Weights are the first
operand, so that the shape suits tensor cores with any number of rows. Results are rounded once, as in torch. Packed
weights of 4 and 8 bits (`pack` and `pack_floats` of `retrieve_spec.quantized`) are unpacked in registers to the 16-bit
numbers that `retrieve_spec.kernels.cpu.unpack` returns, of NF4 to those within 0.02 % of them before rounding. With
TRITON_INTERPRET=1, the kernel runs on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from retrieve_spec.kernels.cpu import FLOATS, GROUP, bits_of
from retrieve_spec.kernels.triton_rows import add_rms_norm, gate, gated, overlap, rotate_both, take_turn, turned

BLOCKS = (16, 64, 128)
"""Most rows of a program; with more rows, torch's products are faster, and packed weights use several programs."""
LAYERS = 3
"""Most layers per launch."""
STEP = 64
"""A layer's inputs are a multiple of this, or of `GROUP` if its weights are packed."""
_MAX_SPLITS = 4
_TURNED = 32
"""Most sums per thread of a program that rotates them; angles need registers, too."""
_LARGE = 16 << 20
"""Smallest size of weights in bytes that keeps all of a GPU's processors busy with large blocks."""


@triton.jit
def _unpacked(  # type: ignore[no-untyped-def]
    low_weight, low_panel, high_weight, high_panel, panels, group, groups, BITS: tl.constexpr, FLOATS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Unpack (BLOCK_N, BLOCK_K) of packed weights, each half from a panel of 16 outputs on, and a group of 32 inputs.

    A thread reads 16 bytes: the weights of four outputs and of four inputs (4 bits: two times four). Outputs and inputs
    are permuted so that these are the thread's part of a tensor core's operand, and threads exchange nothing.
    `_ordered_inputs` and `_ordered_outputs` permute the rest of the product.
    """
    HALVES: tl.constexpr = BITS // 4  # 64 words each, of a group
    GROUPS: tl.constexpr = BLOCK_K // 32
    PAIRS: tl.constexpr = BLOCK_N // 32  # of panels, one for each warp
    OFFSETS: tl.constexpr = BITS == 4 and not FLOATS
    WORDS: tl.constexpr = 16 * BITS + (16 if OFFSETS else 8)  # of a group: levels, scales, offsets
    half = tl.arange(0, GROUPS * HALVES)[:, None, None, None, None]
    pair = tl.arange(0, PAIRS)[None, :, None, None, None]
    row = tl.arange(0, 8)[None, None, :, None, None]  # of an operand's eight, by four threads
    thread = tl.arange(0, 4)[None, None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, None, :]
    is_low = pair < PAIRS // 2
    panel = tl.where(is_low, low_panel, high_panel - PAIRS) + 2 * pair + row // 4
    pairs = tl.where(is_low, low_weight, high_weight) + tl.minimum(panel, panels - 1) * (groups * WORDS)
    words = tl.load(pairs + (group + half // HALVES) * WORDS + half % HALVES * 64 + thread * 16 + row % 4 * 4 + word)
    scales = pairs + (group + tl.arange(0, GROUPS)[:, None, None, None, None]) * WORDS + 16 * BITS
    scales += row % 4 * 2 + tl.arange(0, 2)[None, None, None, None, :] + 0 * thread  # the same in four threads
    scale = _float16_pairs(tl.load(scales))
    offset = _float16_pairs(tl.load(scales + 8)) if OFFSETS else -128 * scale
    scale = tl.reshape(scale, (GROUPS, 1, PAIRS, 8, 4, 2, 2, 1, 1, 1))
    offset = tl.reshape(offset, (GROUPS, 1, PAIRS, 8, 4, 2, 2, 1, 1, 1))
    words = tl.reshape(words, (GROUPS, HALVES, PAIRS, 8, 4, 2, 2, 1, 1, 1))
    if FLOATS and BITS == 8:
        floats = _float8_fours(words) * scale
    else:
        by_byte = (16 * tl.arange(0, 2))[:, None] + (8 * tl.arange(0, 2))[None, :]
        shift = (4 * tl.arange(0, 2 // HALVES))[:, None, None] + by_byte[None, :, :]
        levels = (words >> shift[None, None, None, None, None, None, None, :, :, :]) & ((1 << BITS) - 1)
        floats = _normal_floats(levels) * scale if FLOATS else levels.to(tl.float32) * scale + offset
    return tl.reshape(tl.permute(floats.to(KIND), (5, 2, 6, 3, 0, 1, 7, 8, 4, 9)), (BLOCK_N, BLOCK_K))


@triton.jit
def _float16_pairs(words):  # type: ignore[no-untyped-def]
    """Return the two float16 numbers in each word along a new last axis."""
    halves = words[:, :, :, :, :, None] >> (16 * tl.arange(0, 2))[None, None, None, None, None, :]
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _float8_fours(words):  # type: ignore[no-untyped-def]
    """Return a 256th of the four numbers of FP8 in each word, along the last two axes.

    Their bits, at the places of those of float16, mean this.
    """
    of_pair = tl.arange(0, 2)[None, None, None, None, None, None, None, None, None, :]
    pairs = words >> (8 * of_pair)
    pairs = ((pairs & 0x00800080) << 8) | ((pairs & 0x007F007F) << 7)
    halves = pairs >> (16 * tl.arange(0, 2))[None, None, None, None, None, None, None, None, :, None]
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _normal_floats(levels):  # type: ignore[no-untyped-def]
    """Return a 256th of the numbers of NF4 at some places in its table, off by 0.02 % at most.

    They are quantiles of the normal distribution at equal steps, 7 below zero and 8 above: an odd function, which a
    polynomial approximates. To look them up would take the levels through shared memory.
    """
    steps = (levels - 7).to(tl.float32)
    x = steps * tl.where(steps > 0, 1 / 8, 1 / 7)
    square = x * x
    factor = tl.fma(square, 0.0021750370, -0.0033591038)  # the same bits, whether sums and products are fused or not
    factor = tl.fma(factor, square, 0.0022504238)
    factor = tl.fma(factor, square, -0.0002554475)
    factor = tl.fma(factor, square, 0.0006178008)
    return x * tl.fma(factor, square, 0.0024768391)


@triton.jit
def _ordered_inputs(x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Permute and transpose rows (BLOCK_M, BLOCK_K) to (BLOCK_K, BLOCK_M), for a product with `_unpacked`."""
    by_thread = tl.reshape(x, (BLOCK_M, BLOCK_K // 16, 4, 2, 2))
    return tl.reshape(tl.permute(by_thread, (1, 3, 2, 4, 0)), (BLOCK_K, BLOCK_M))


@triton.jit
def _ordered_outputs(total, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a product with `_unpacked` with its outputs in their original order."""
    by_thread = tl.reshape(total, (2, BLOCK_N // 32, 2, 8, BLOCK_M))
    return tl.reshape(tl.permute(by_thread, (1, 3, 0, 2, 4)), (BLOCK_N, BLOCK_M))


@triton.jit(do_not_specialize=["rows"])
def _linears(  # type: ignore[no-untyped-def]
    x,  # (rows, inputs)
    weight_0,  # (outputs_0, inputs), or the words of a packed weight
    weight_1,
    weight_2,
    bias_0,  # (outputs_0,), read where BIASED
    bias_1,
    bias_2,
    out_0,  # (splits, rows, outputs_0)
    out_1,
    out_2,
    outputs_0,
    outputs_1,
    outputs_2,
    rows,
    inputs,
    share,  # inputs that one of the splits adds up
    cos,  # (rows, 2 * HALF), read where HALF > 0
    sin,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    GATED: tl.constexpr,  # the first layer's outputs, gated, times the second's are written to out_0
    HALF: tl.constexpr,  # half the width of heads, which are rotated in the first two layers; 0: not
    OVERLAP: tl.constexpr = False,
):
    PART: tl.constexpr = BLOCK_N // 2  # outputs of each half of a block; an epilogue combines the halves
    take_turn(OVERLAP)
    block = tl.program_id(0)
    split = tl.program_id(1)
    first = tl.program_id(2).to(tl.int64) * BLOCK_M
    second = tl.cdiv(outputs_0, PART if GATED else BLOCK_N)
    third = second + tl.cdiv(outputs_1, BLOCK_N)
    weight = weight_0
    bias = bias_0
    out = out_0
    outputs = outputs_0
    turns = HALF > 0
    if not GATED:
        if block >= third:
            block -= third
            weight = weight_2
            bias = bias_2
            out = out_2
            outputs = outputs_2
            turns = False
        elif block >= second:
            block -= second
            weight = weight_1
            bias = bias_1
            out = out_1
            outputs = outputs_1
    low = block * BLOCK_N  # first output of each half
    high = low + PART
    high_weight = weight
    high_bias = bias
    if GATED:
        low = block * PART
        high = low
        high_weight = weight_1
        high_bias = bias_1
    elif HALF > 0:
        in_head = low % (2 * HALF) // 2
        low -= in_head
        high = low + HALF
    i = tl.arange(0, BLOCK_N)
    is_low = i < PART
    n = low + i
    if GATED or HALF > 0:
        n = tl.where(is_low, low, high - PART) + i
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    given = x + first * inputs + m[:, None] * inputs + k[None, :]
    there = m < rows - first
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if BITS == 16:
        weights = tl.where(is_low, weight, high_weight)[:, None] if GATED else weight
        weights += tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * inputs + k[None, :]
    for at in range(split * share, tl.minimum((split + 1) * share, inputs), BLOCK_K):
        some = tl.load(given + at, there[:, None], 0.0)  # masked, so that programs do not all read the same row
        if BITS == 16:
            total = tl.dot(tl.load(weights + at, eviction_policy="evict_first"), tl.trans(some), total)
        else:
            unpacked = _unpacked(
                weight, low // 16, high_weight, high // 16, outputs // 16, at // 32, inputs // 32, BITS, FLOATS,
                BLOCK_N, BLOCK_K, x.dtype.element_ty,
            )  # fmt: skip
            total = tl.dot(unpacked, _ordered_inputs(some, BLOCK_M, BLOCK_K), total)
    if BITS < 16:
        total = _ordered_outputs(total, BLOCK_N, BLOCK_M)
    if BIASED:
        biases = tl.where(is_low, bias, high_bias) if GATED else bias
        total += tl.load(biases + n, n < outputs, 0.0).to(tl.float32)[:, None]
    rounded = total.to(out.dtype.element_ty)
    to = out + (split * rows + first) * outputs + m[None, :] * outputs
    if GATED or HALF > 0:
        lows, highs = tl.split(tl.permute(tl.reshape(rounded, (2, PART, BLOCK_M)), (1, 2, 0)))
        part = tl.arange(0, PART)
        inside = (low + part < outputs)[:, None] & there[None, :]
        to += (low + part)[:, None]
        if GATED:
            tl.store(to, gated(lows, highs), inside)
        else:
            if turns:
                angle = (first + m)[None, :] * 2 * HALF + (low % (2 * HALF) + part)[:, None]
                lows, highs = turned(
                    lows, highs, tl.load(cos + angle, inside, 0.0), tl.load(cos + angle + HALF, inside, 0.0),
                    tl.load(sin + angle, inside, 0.0), tl.load(sin + angle + HALF, inside, 0.0),
                )  # fmt: skip
            tl.store(to, lows, inside)
            tl.store(to + HALF, highs, inside)
    else:
        tl.store(to + n[:, None], rounded, (n < outputs)[:, None] & there[None, :])


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    is_gated: bool = False,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute up to `LAYERS` linear layers of one input, in one launch if there are few rows.

    Parameters
    ----------
    x
        (1, rows, inputs) 16-bit numbers; inputs are a multiple of `STEP`.
    weights
        By layer, (outputs, inputs), contiguous; or all of them packed in the same format.
    biases
        By layer, (outputs,): all of them or none.
    is_gated
        Return only `gate` of the results of two layers.
    angles
        (1, 1, rows, d) cosines and sines, by which heads, d wide, of the first two layers are rotated (`rotate_both`).

    Returns
    -------
    tuple
        By layer, (1, rows, outputs).
    """
    rows, sizes = x.shape[1], [len(weight) for weight in weights]
    half = 0 if angles is None else angles[0].shape[-1] // 2
    if rows > BLOCKS[-1] and not _is_packed(weights[0]):
        return _combined([linear(x, *layer) for layer in zip(weights, biases, strict=True)], is_gated, angles)
    if half:
        tiles = _tiles(rows, x.shape[2], weights, _limits(x.device)[1])
        sums = tiles["BLOCK_M"] * tiles["BLOCK_N"] // (32 * tiles["num_warps"])
        if half % (tiles["BLOCK_N"] // 2) or sums > _TURNED:
            return _combined(linears(x, weights, biases), is_gated, angles)
    outs = [torch.empty((1, rows, n), dtype=x.dtype, device=x.device) for n in sizes[: 1 if is_gated else None]]
    _multiply(x, weights, biases, outs, is_gated, angles)
    return tuple(outs)


def _combined(
    outs: Sequence[torch.Tensor], is_gated: bool, angles: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, ...]:
    """Gate or rotate results of linear layers in a launch of its own."""
    if is_gated:
        return (gate(*outs),)
    if angles is None:
        return tuple(outs)
    queries, keys = (out.view(1, out.shape[1], -1, angles[0].shape[-1]).transpose(1, 2) for out in outs[:2])
    return (*(each.transpose(1, 2).flatten(2) for each in rotate_both(queries, keys, *angles)), *outs[2:])


def linear_add_rms_norm(
    x: torch.Tensor, layer: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `add_rms_norm` of `other` and a linear layer without bias.

    A layer with few outputs is also divided by inputs: the normalising launch adds up partial sums.
    """
    rows, outputs = x.shape[1], len(layer)
    if rows > BLOCKS[-1] and not _is_packed(layer):
        return add_rms_norm(other, linear(x, layer), weight, eps)
    splits = min(_MAX_SPLITS, max(1, _limits(x.device)[0] // triton.cdiv(outputs, _block([layer]))))
    kind = x.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, rows, outputs), dtype=kind, device=x.device)
    _multiply(x, [layer], [None], [parts])
    return add_rms_norm(other, parts, weight, eps)


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Return a GPU's number of multiprocessors, and the most bytes of shared memory per program."""
    if device.type == "cpu":
        return 8, 99 << 10
    known = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return known["multiprocessor_count"], known["max_shared_mem"]


def _is_packed(weight: torch.Tensor) -> bool:
    return weight.dtype in (torch.uint8, FLOATS)


def _block(weights: Sequence[torch.Tensor]) -> int:
    """Return the number of outputs per program."""
    if _is_packed(weights[0]):
        return 64
    return 64 if sum(weight.nbytes for weight in weights) >= _LARGE else 16


def _multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
    is_gated: bool = False,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Launch the product, which writes (splits, rows, outputs) for each layer to `outs`."""
    rows, inputs = x.shape[-2:]
    splits, packed = len(outs[0]), _is_packed(weights[0])
    cos, sin = (x, x) if angles is None else (each.contiguous() for each in angles)
    added = [bias.contiguous() for bias in biases if bias is not None]
    tiles, step = _tiles(rows, inputs, weights, _limits(x.device)[1]), _step(inputs, packed)
    outputs = [len(weight) for weight in weights] + [0] * (LAYERS - len(weights))
    read = [weight.view(-1).view(torch.int32) for weight in weights] if packed else weights
    blocks = sum(triton.cdiv(n, tiles["BLOCK_N"]) for n in outputs)
    if is_gated:
        blocks = triton.cdiv(outputs[0], tiles["BLOCK_N"] // 2)
    _linears[(blocks, splits, triton.cdiv(rows, tiles["BLOCK_M"]))](
        x.contiguous(), *_all(read), *_all(added or weights), *_all(outs), *outputs, rows, inputs,
        triton.cdiv(inputs // step, splits) * step, cos, sin, BIASED=bool(added), GATED=is_gated,
        HALF=0 if angles is None else cos.shape[-1] // 2, enable_fp_fusion=angles is None, **tiles,
        **overlap(x.device, rows),
    )  # fmt: skip


def _step(inputs: int, packed: bool) -> int:
    """Return the number of inputs per step of a program."""
    return next(size for size in ((STEP, GROUP) if packed else (128, STEP)) if inputs % size == 0)


def _tiles(rows: int, inputs: int, weights: Sequence[torch.Tensor], shared: int) -> dict[str, int]:
    """Return a program's tile sizes and number of warps, for a size of shared memory in bytes.

    With packed weights, a warp multiplies 32 or 64 outputs by all rows, so that every weight is unpacked once.
    """
    packed = _is_packed(weights[0])
    block_n, block_k, bits, warps, stages = _block(weights), _step(inputs, packed), 16, 4, 4
    block_m = next((size for size in BLOCKS if rows <= size), BLOCKS[-1])
    if packed:
        bits, warps = bits_of(weights[0].shape[1], inputs // GROUP), 2
        if block_m > BLOCKS[0]:  # avoids spilling sums when there are few inputs
            block_m, block_n, block_k = BLOCKS[1], 2 * block_n, GROUP
    else:
        stages = min(5 if block_m == BLOCKS[0] else stages, shared // (2 * block_k * (block_m + block_n)))
    return {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "BITS": bits,
        "FLOATS": weights[0].dtype == FLOATS, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _all(given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Pad arguments to the number of layers that a launch has; padding is never read."""
    return [*given, *[given[0]] * (LAYERS - len(given))]
