"""Operations of a decoder layer on a CPU other than products and attention, one call each.

Like `retrieve_spec.kernels.triton_rows`: each kernel rounds to the rows' format where the operations it replaces do, so
results differ at most by the order of a sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import kernel
from retrieve_spec.kernels.cpu.number_formats import LIKE, bytes_of, narrow, view_numbers, wide
from retrieve_spec.kernels.vector_math import REASSOCIATE, exp


@njit(cache=True, nogil=True, fastmath=REASSOCIATE)
def _sum_of_squares(row: NDArray[Any]) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(row)):
        total += wide(row[i]) * wide(row[i])
    return total


@kernel
def normalise_rows(
    x: int, other: int, weight: int, total: int, out: int, rows: int, width: int, eps: np.float32, like: Any
) -> None:
    """Normalise (rows, width) numbers at addresses by RMS; `other`, unless 0, is added first and gives `total`."""
    factors = view_numbers(weight, width, like)
    for r in range(rows):
        at = bytes_of(like) * r * width
        given, normed = view_numbers(x + at, width, like), view_numbers(out + at, width, like)
        if other:
            added, summed = view_numbers(other + at, width, like), view_numbers(total + at, width, like)
            for i in range(width):
                summed[i] = narrow(wide(given[i]) + wide(added[i]), like)
            given = summed
        mean = _sum_of_squares(given) / np.float32(width)
        factor = np.float32(1.0) / np.sqrt(mean + eps)
        for i in range(width):
            normed[i] = narrow(wide(narrow(wide(given[i]) * factor, like)) * wide(factors[i]), like)


@kernel
def rotate_heads(
    x: int, cos: int, sin: int, out: int, heads: int, rows: int, half: int, head_stride: int, row_stride: int,
    like: Any,
) -> None:  # fmt: skip
    """Apply rotary embedding to heads at addresses (strides in elements), with output (rows, heads, 2 · half)."""
    size = bytes_of(like)
    for r in range(rows):
        angle = 2 * size * r * half
        c, s = view_numbers(cos + angle, 2 * half, like), view_numbers(sin + angle, 2 * half, like)
        for h in range(heads):
            given = view_numbers(x + size * (h * head_stride + r * row_stride), 2 * half, like)
            turned = view_numbers(out + 2 * size * (r * heads + h) * half, 2 * half, like)
            for i in range(half):
                low, high = wide(given[i]), wide(given[half + i])
                across, along = narrow(-high * wide(s[i]), like), narrow(low * wide(s[half + i]), like)
                turned[i] = narrow(wide(narrow(low * wide(c[i]), like)) + wide(across), like)
                turned[half + i] = narrow(wide(narrow(high * wide(c[half + i]), like)) + wide(along), like)


@njit(cache=True, nogil=True, error_model="numpy")  # checked divisions are not vectorised
def gate_row(gate: int, up: int, out: int, width: int, like: Any) -> None:
    """Compute `silu(gate) · up` for numbers at addresses."""
    gates, ups, outs = view_numbers(gate, width, like), view_numbers(up, width, like), view_numbers(out, width, like)
    for i in range(width):
        opened = wide(gates[i])
        opened /= np.float32(1.0) + exp(-opened)
        outs[i] = narrow(wide(narrow(opened, like)) * wide(ups[i]), like)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise (…, d) rows by their RMS with weight (d,) (Zhang & Sennrich, 2019)."""
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    normalise_rows(
        x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), x.numel() // width, width, np.float32(eps), LIKE[x.dtype]
    )
    return out


def add_rms_norm(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x + other`, both (…, d), and its RMS normalisation."""
    x, other, width = x.contiguous(), other.contiguous(), x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x)
    normalise_rows(
        x.data_ptr(), other.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr(),
        x.numel() // width, width, np.float32(eps), LIKE[x.dtype],
    )  # fmt: skip
    return total, out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding by halves (Su et al., 2021) to (1, heads, rows, d); cosine and sine are (1, 1, rows, d).

    Each product and the sum are rounded as in torch; the heads of a row are adjacent in the result.
    """
    _, heads, rows, width = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = x.new_empty((1, rows, heads, width))
    rotate_heads(
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        heads,
        rows,
        width // 2,
        x.stride(1),
        x.stride(2),
        LIKE[x.dtype],
    )
    return out.transpose(1, 2)


def rotate_both(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `rotate` to queries and to keys."""
    return rotate(queries, cos, sin), rotate(keys, cos, sin)


def gate(gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gated) · up`, both of one shape (SwiGLU; Shazeer, 2020)."""
    gated, up = gated.contiguous(), up.contiguous()
    out = torch.empty_like(gated)
    gate_row(gated.data_ptr(), up.data_ptr(), out.data_ptr(), gated.numel(), LIKE[gated.dtype])
    return out
