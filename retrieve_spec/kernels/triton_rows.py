"""Triton kernels of a decoder layer's operations other than products and attention, one launch each.

Each kernel rounds to the 16-bit type where the operations it replaces do, so results differ at most by the order of a
sum or by an exponential. With TRITON_INTERPRET=1, the kernels run on the CPU.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

_ELEMENTS = 1024
_FEW = 32
"""Most rows of a short launch; wider ones need the room that an overlapping next launch would take."""


def overlap(device: torch.device, rows: int) -> dict[str, bool]:
    """Return the options of a launch that may start while the previous one ends."""
    return {"OVERLAP": True, "launch_pdl": True} if rows <= _FEW and _overlaps(device) else {}


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether launches can overlap on a GPU (Hopper and later)."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def take_turn(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the previous launch, and let the next one start; called before a kernel reads or writes."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def gated(gate, up):  # type: ignore[no-untyped-def]
    """Return `silu(gate) · up`, rounded after each of the two."""
    wide = gate.to(tl.float32)
    open_ = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (open_ * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def turned(low, high, low_cos, high_cos, low_sin, high_sin):  # type: ignore[no-untyped-def]
    """Return the rotated halves of a head, whose products and sum are rounded.

    A kernel that calls this is compiled without fused multiply-add, which would omit a rounding.
    """
    dtype = low.dtype
    low_side = (low.to(tl.float32) * low_cos.to(tl.float32)).to(dtype)
    high_side = (high.to(tl.float32) * high_cos.to(tl.float32)).to(dtype)
    from_high = (-high.to(tl.float32) * low_sin.to(tl.float32)).to(dtype)
    from_low = (low.to(tl.float32) * high_sin.to(tl.float32)).to(dtype)
    low = (low_side.to(tl.float32) + from_high.to(tl.float32)).to(dtype)
    return low, (high_side.to(tl.float32) + from_low.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["x_stride", "other_stride"])
def _rms_norm(  # type: ignore[no-untyped-def]
    x,  # (rows, D), stride given
    other,  # SUM: (PARTS, rows, D), whose sum is rounded, then added to x; stride of a row given
    weight,
    total,  # SUM: (rows, D), x + other
    out,  # (rows, D)
    x_stride,
    other_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SUM: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    given = tl.load(x + row * x_stride + d, d < D, 0.0)
    if SUM:
        added = tl.load(other + row * other_stride + d, d < D, 0.0)
        for part in tl.static_range(1, PARTS):
            added += tl.load(other + (part * tl.num_programs(0) + row) * other_stride + d, d < D, 0.0)
        given = (given.to(tl.float32) + added.to(given.dtype).to(tl.float32)).to(given.dtype)
        tl.store(total + row * D + d, given, d < D)
    wide = given.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    normed = (wide * factor).to(given.dtype).to(tl.float32)
    scaled = normed * tl.load(weight + d, d < D, 0.0).to(tl.float32)
    tl.store(out + row * D + d, scaled.to(given.dtype), d < D)


@triton.jit(do_not_specialize=["rows", "heads", "keys_heads"])
def _rotate(  # type: ignore[no-untyped-def]
    x,  # (heads, rows, 2 * HALF), strides given
    keys,  # (keys_heads, rows, 2 * HALF), strides given
    cos,  # (rows, 2 * HALF)
    sin,
    out,  # (heads, rows, 2 * HALF) in the layout of (rows, heads, 2 * HALF)
    keys_out,
    rows,
    heads,
    keys_heads,
    head_stride,
    row_stride,
    keys_head_stride,
    keys_row_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    take_turn(OVERLAP)
    head = tl.program_id(0)
    row = tl.program_id(1)
    if head >= heads:
        head -= heads
        x = keys
        out = keys_out
        heads = keys_heads
        head_stride = keys_head_stride
        row_stride = keys_row_stride
    d = tl.arange(0, BLOCK_HALF)
    inside = d < HALF
    at = x + head.to(tl.int64) * head_stride + row * row_stride
    low, high = tl.load(at + d, inside, 0.0), tl.load(at + HALF + d, inside, 0.0)
    angle = row * 2 * HALF + d
    low, high = turned(
        low, high, tl.load(cos + angle, inside, 0.0), tl.load(cos + angle + HALF, inside, 0.0),
        tl.load(sin + angle, inside, 0.0), tl.load(sin + angle + HALF, inside, 0.0),
    )  # fmt: skip
    target = out + (row * heads + head) * 2 * HALF + d
    tl.store(target, low, inside)
    tl.store(target + HALF, high, inside)


@triton.jit(do_not_specialize=["size"])
def _gate(gate, up, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr = False):  # type: ignore[no-untyped-def]
    take_turn(OVERLAP)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, gated(tl.load(gate + i, i < size, 0.0), tl.load(up + i, i < size, 0.0)), i < size)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise (…, d) rows by their RMS with weight (d,), in one launch (Zhang & Sennrich, 2019)."""
    return _normalised(x, None, weight, eps)[1]


def add_rms_norm(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x + other`, both (…, d), and its RMS normalisation, in one launch.

    `other` can also be (parts, …, d) partial sums, which are added before rounding.
    """
    return _normalised(x, other, weight, eps)


def _normalised(
    x: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width = x.shape[-1]
    flat = _rows(x)
    added = flat if other is None else _rows(other)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if other is None else torch.empty_like(out)
    block = triton.next_power_of_2(width)
    _rms_norm[(len(flat),)](
        flat, added, weight, total, out, flat.stride(0), added.stride(0), eps,
        D=width, BLOCK_D=block, SUM=other is not None, PARTS=len(added) // len(flat),
        num_warps=min(16, max(1, block // 512)), **overlap(x.device, len(flat)),
    )  # fmt: skip
    return total, out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape (…, d) to (rows, d) with contiguous rows."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding by halves (Su et al., 2021) to (1, heads, rows, d), in one launch (`rotate_both`)."""
    return _rotated(x, x[:, :0], cos, sin)[0]


def rotate_both(
    queries: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary embedding by halves (Su et al., 2021) to queries and keys, in one launch.

    Each product and the sum are rounded as in torch.

    Parameters
    ----------
    queries, keys
        (1, heads, rows, d); their numbers of heads may differ.
    cos, sin
        (1, 1, rows, d).

    Returns
    -------
    tuple
        The same two shapes, with the heads of a row adjacent in memory.
    """
    return _rotated(queries, keys, cos, sin)


def _rotated(
    x: torch.Tensor, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _, heads, rows, width = x.shape
    x, keys = (given if given.stride(-1) == 1 else given.contiguous() for given in (x, keys))
    out, keys_out = (torch.empty((1, rows, y.shape[1], width), dtype=x.dtype, device=x.device) for y in (x, keys))
    _rotate[(heads + keys.shape[1], rows)](
        x, keys, cos.contiguous(), sin.contiguous(), out, keys_out, rows, heads, keys.shape[1],
        x.stride(1), x.stride(2), keys.stride(1), keys.stride(2),
        HALF=width // 2, BLOCK_HALF=triton.next_power_of_2(width // 2), num_warps=1, enable_fp_fusion=False,
        **overlap(x.device, rows),
    )  # fmt: skip
    return out.transpose(1, 2), keys_out.transpose(1, 2)


def gate(gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gated) · up`, both of one shape, in one launch (SwiGLU; Shazeer, 2020)."""
    gated, up = gated.contiguous(), up.contiguous()
    out = torch.empty_like(gated)
    _gate[(triton.cdiv(out.numel(), _ELEMENTS),)](
        gated, up, out, out.numel(), BLOCK=_ELEMENTS, **overlap(out.device, out.shape[-2])
    )
    return out
