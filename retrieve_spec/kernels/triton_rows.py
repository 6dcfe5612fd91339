"""Triton kernels of row work: what a decoder layer does besides products and attention, one launch each.

Each kernel rounds to the 16-bit type where the operations it stands for do, so results differ at most where a sum or an
exponential is added up in another order. With TRITON_INTERPRET=1 the kernels run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 1024


@triton.jit(do_not_specialize=["x_stride"])
def _rms_norm(x, weight, out, x_stride, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    given = tl.load(x + row * x_stride + d, d < D, 0.0)
    wide = given.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * factor).to(given.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + d, d < D, 0.0).to(tl.float32)
    tl.store(out + row * D + d, scaled.to(given.dtype), d < D)


@triton.jit(do_not_specialize=["rows"])
def _rotate(  # type: ignore[no-untyped-def]
    x,  # (heads, rows, 2 * HALF), strides given
    cos,  # (rows, 2 * HALF)
    sin,
    out,  # (heads, rows, 2 * HALF) in the layout of (rows, heads, 2 * HALF)
    rows,
    head_stride,
    row_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    d = tl.arange(0, BLOCK_HALF)
    inside = d < HALF
    at = x + head.to(tl.int64) * head_stride + row * row_stride
    low, high = tl.load(at + d, inside, 0.0), tl.load(at + HALF + d, inside, 0.0)
    angle = row * 2 * HALF + d
    dtype = low.dtype
    low_cos = (low.to(tl.float32) * tl.load(cos + angle, inside, 0.0).to(tl.float32)).to(dtype)
    high_cos = (high.to(tl.float32) * tl.load(cos + angle + HALF, inside, 0.0).to(tl.float32)).to(dtype)
    low_sin = (-high.to(tl.float32) * tl.load(sin + angle, inside, 0.0).to(tl.float32)).to(dtype)
    high_sin = (low.to(tl.float32) * tl.load(sin + angle + HALF, inside, 0.0).to(tl.float32)).to(dtype)
    target = out + (row * tl.num_programs(0) + head) * 2 * HALF + d
    tl.store(target, (low_cos.to(tl.float32) + low_sin.to(tl.float32)).to(dtype), inside)
    tl.store(target + HALF, (high_cos.to(tl.float32) + high_sin.to(tl.float32)).to(dtype), inside)


@triton.jit(do_not_specialize=["size"])
def _gate(gate, up, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(gate + i, i < size, 0.0)
    wide = given.to(tl.float32)
    open_ = (wide / (1.0 + tl.exp(-wide))).to(given.dtype).to(tl.float32)
    tl.store(out + i, (open_ * tl.load(up + i, i < size, 0.0).to(tl.float32)).to(given.dtype), i < size)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalisation of (…, d) rows with weight (d,) in one launch (Zhang & Sennrich, 2019)."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _rms_norm[(len(flat),)](
        flat, weight, out, flat.stride(0), eps, D=width, BLOCK_D=block, num_warps=min(16, max(1, block // 512))
    )
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by halves (Su et al., 2021) in one launch.

    Parameters
    ----------
    x
        (1, heads, rows, d).
    cos, sin
        (1, 1, rows, d).

    Returns
    -------
    Tensor
        (1, heads, rows, d), the heads of a row side by side in memory.
    """
    _, heads, rows, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty((1, rows, heads, width), dtype=x.dtype, device=x.device)
    _rotate[(heads, rows)](
        x, cos.contiguous(), sin.contiguous(), out, rows, x.stride(1), x.stride(2),
        HALF=width // 2, BLOCK_HALF=triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip
    return out.transpose(1, 2)


def gate(gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gated) · up` of one shape in one launch (SwiGLU; Shazeer, 2020)."""
    gated, up = gated.contiguous(), up.contiguous()
    out = torch.empty_like(gated)
    _gate[(triton.cdiv(out.numel(), _ELEMENTS),)](gated, up, out, out.numel(), BLOCK=_ELEMENTS)
    return out
