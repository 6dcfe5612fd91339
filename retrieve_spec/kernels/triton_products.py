"""Triton products: linear layers of a few 16-bit rows, those of one input in one launch.

Reading the weights is what such a product costs, so programs share them out and read each once. They stand first in a
program's product: its shape is that of tensor cores with any number of rows. Results are rounded once, as torch does.
With TRITON_INTERPRET=1 the kernel runs on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from retrieve_spec.kernels.triton_rows import add_rms_norm, overlap, take_turn

BLOCKS = (16, 64, 128)
"""Rows of a program's product; with more, torch's products are faster."""
LAYERS = 3
"""Layers of one launch at most."""
STEP = 64
"""Inputs of a layer are a multiple of this."""
_MAX_SPLITS = 4
_LARGE = 16 << 20
"""Bytes of weights that large blocks of them share out to all of a GPU's processors."""


@triton.jit(do_not_specialize=["rows"])
def _linears(  # type: ignore[no-untyped-def]
    x,  # (rows, inputs)
    weight_0,  # (outputs_0, inputs)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    take_turn(OVERLAP)
    block = tl.program_id(0)
    split = tl.program_id(1)
    second = tl.cdiv(outputs_0, BLOCK_N)
    third = second + tl.cdiv(outputs_1, BLOCK_N)
    weight = weight_0
    bias = bias_0
    out = out_0
    outputs = outputs_0
    if block >= third:
        block -= third
        weight = weight_2
        bias = bias_2
        out = out_2
        outputs = outputs_2
    elif block >= second:
        block -= second
        weight = weight_1
        bias = bias_1
        out = out_1
        outputs = outputs_1
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    weights = weight + tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * inputs + k[None, :]
    given = x + m[:, None] * inputs + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(split * share, tl.minimum((split + 1) * share, inputs), BLOCK_K):
        some = tl.load(given + at, m[:, None] < rows, 0.0)  # no row is read twice: all programs would at once
        total = tl.dot(tl.load(weights + at, eviction_policy="evict_first"), tl.trans(some), total)
    inside = (n < outputs)[:, None] & (m < rows)[None, :]
    if BIASED:
        total += tl.load(bias + n, n < outputs, 0.0).to(tl.float32)[:, None]
    at_out = (split * rows + m)[None, :] * outputs + n[:, None]
    tl.store(out + at_out, total.to(out.dtype.element_ty), inside)


def linears(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """The results of up to `LAYERS` linear layers of one input, in one launch if there are few rows.

    Parameters
    ----------
    x
        (1, rows, inputs) of 16-bit numbers; inputs are a multiple of `STEP`.
    weights
        By layer, (outputs, inputs), contiguous.
    biases
        By layer, (outputs,): all of them or none.

    Returns
    -------
    tuple
        By layer, (1, rows, outputs).
    """
    rows = x.shape[1]
    if rows > BLOCKS[-1]:
        return tuple(linear(x, *layer) for layer in zip(weights, biases, strict=True))
    outs = [torch.empty((1, rows, len(weight)), dtype=x.dtype, device=x.device) for weight in weights]
    _multiply(x, weights, biases, outs)
    return tuple(outs)


def linear_add_rms_norm(
    x: torch.Tensor, layer: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of `other` and the result of a linear layer without a bias.

    A layer with few outputs is shared out over its inputs, too: the launch that normalises adds up partial sums.
    """
    rows, outputs = x.shape[1], len(layer)
    if rows > BLOCKS[-1]:
        return add_rms_norm(other, linear(x, layer), weight, eps)
    splits = min(_MAX_SPLITS, max(1, _limits(x.device)[0] // triton.cdiv(outputs, _block([layer]))))
    kind = x.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, rows, outputs), dtype=kind, device=x.device)
    _multiply(x, [layer], [None], [parts])
    return add_rms_norm(other, parts, weight, eps)


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and the bytes of shared memory that a program can have."""
    if device.type == "cpu":
        return 8, 99 << 10
    known = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return known["multiprocessor_count"], known["max_shared_mem"]


def _block(weights: Sequence[torch.Tensor]) -> int:
    """Outputs of one program."""
    return 64 if sum(weight.nbytes for weight in weights) >= _LARGE else 16


def _multiply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outs: Sequence[torch.Tensor],
) -> None:
    """Write (splits, rows, outputs) by layer."""
    rows, inputs = x.shape[-2:]
    splits = len(outs[0])
    block_m = next(size for size in BLOCKS if rows <= size)
    block_n, block_k = _block(weights), 128 if inputs % 128 == 0 else STEP
    stages = min(5 if block_m == 16 else 4, _limits(x.device)[1] // (2 * block_k * (block_m + block_n)))
    biased = biases[0] is not None
    outputs = [len(weight) for weight in weights] + [0] * (LAYERS - len(weights))
    _linears[(sum(triton.cdiv(n, block_n) for n in outputs), splits)](
        x.contiguous(), *_all(weights), *_all(biases if biased else weights), *_all(outs), *outputs, rows, inputs,
        triton.cdiv(inputs // block_k, splits) * block_k,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BIASED=biased, num_warps=4, num_stages=stages,
        **overlap(x.device, rows),
    )  # fmt: skip


def _all(given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Arguments for as many layers as a launch can have; nothing is read of those that are not there."""
    return [*given, *[given[0]] * (LAYERS - len(given))]
