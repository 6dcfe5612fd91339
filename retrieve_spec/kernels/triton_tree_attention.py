"""Turns queries of a draft tree into attention outputs on a GPU: prefix and tree block in one launch.

Queries that share a key head are stacked, so a key is read once per group; the tree block's mask is one bit per pair of
rows; a long context is split over programs whose partial results are merged by log-sum-exp. Lengths are read from
device memory, so that a captured CUDA graph can be replayed as the cache grows. With TRITON_INTERPRET=1 the kernel runs
on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_KEYS = 64
MAX_SPLITS = 32


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    query,  # (kv_heads, groups * rows, d)
    keys,  # (kv_heads, capacity, d), strides given
    values,
    words,  # (rows, num_words) int32: bit j of row i: row i sees row j of the pass
    depths,  # (rows,) int32: position of a row minus the position of the pass's first row
    prefix,  # (1,) int32: cached rows before the pass
    out,  # (splits, kv_heads, groups * rows, d) float32
    lse,  # (splits, kv_heads, groups * rows) float32
    scale,
    softcap,
    rows,
    height,  # groups * rows
    num_words,
    key_head_stride,
    key_row_stride,
    value_head_stride,
    value_row_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m % rows
    q = tl.load(query + (head * height + m[:, None]) * D + d[None, :], (m[:, None] < height) & (d[None, :] < D), 0.0)
    depth = tl.load(depths + row)
    past = tl.load(prefix)
    total = past + rows
    share = tl.cdiv(tl.cdiv(total, SPLITS), BLOCK_N) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, total)
    if WINDOW > 0:  # no row sees further back than the first one
        start = tl.maximum(start, tl.maximum(past - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)

    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for first in range(start, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n[:, None] < stop
        k = tl.load(
            keys + head * key_head_stride + n[:, None] * key_row_stride + d[None, :], inside & (d[None, :] < D), 0.0
        )
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            s = softcap * (2.0 / (1.0 + tl.exp(-2.0 * s / softcap)) - 1.0)
        column = n - past  # row of the pass, negative in the prefix
        at = tl.maximum(column, 0)
        drafted = (column >= 0) & (column < rows)
        bits = tl.load(words + row[:, None] * num_words + (at // 32)[None, :], drafted[None, :], 0)
        seen = (column < 0)[None, :] | (((bits >> (at % 32)[None, :]) & 1) == 1)
        if WINDOW > 0:
            position = tl.where(column < 0, column, tl.load(depths + at, drafted, 0))
            seen = seen & (depth[:, None] - position[None, :] < WINDOW)
        s = tl.where(seen & (n < stop)[None, :], s, float("-inf"))
        top = tl.maximum(best, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp(s - base[:, None])
        shrink = tl.exp(best - base)
        v = tl.load(
            values + head * value_head_stride + n[:, None] * value_row_stride + d[None, :],
            inside & (d[None, :] < D),
            0.0,
        )
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        weight = weight * shrink + tl.sum(p, 1)
        best = top
    at_out = (split * tl.num_programs(0) + head) * height + m
    share_of_row = tl.where(weight > 0.0, weight, 1.0)
    tl.store(
        out + at_out[:, None] * D + d[None, :], acc / share_of_row[:, None], (m[:, None] < height) & (d[None, :] < D)
    )
    tl.store(lse + at_out, tl.where(weight > 0.0, best + tl.log(share_of_row), float("-inf")), m < height)


def num_splits(kv_heads: int, height: int, capacity: int, processors: int) -> int:
    """How many programs share one context: enough to fill the GPU, none with less than a few key blocks."""
    blocks = -(-capacity // (4 * BLOCK_KEYS))
    wanted = -(-2 * processors // max(1, kv_heads * -(-height // 64)))
    return max(1, min(MAX_SPLITS, blocks, wanted))


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    depths: torch.Tensor,
    prefix: torch.Tensor,
    *,
    rows: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every split of the context.

    Parameters
    ----------
    query
        (kv_heads, groups · rows, d), contiguous; group-major within a head.
    keys, values
        (kv_heads, capacity, d), last axis contiguous; the pass's own rows stand behind the prefix.
    words
        (rows, ceil(rows / 32)) int32, bit j of row i: row i sees row j of the pass.
    depths
        (rows,) int32, position of a row minus the position of the pass's first row.
    prefix
        (1,) int32, cached rows before the pass, on the device.
    rows
        Rows of the pass.
    splits
        Programs that share one context.

    Returns
    -------
    out
        (splits, kv_heads, groups · rows, d) float32, normalised within each split.
    lse
        (splits, kv_heads, groups · rows) float32, log of each split's share of the softmax denominator.
    """
    kv_heads, height, width = query.shape
    out = torch.empty((splits, kv_heads, height, width), dtype=torch.float32, device=query.device)
    lse = torch.empty((splits, kv_heads, height), dtype=torch.float32, device=query.device)
    block_rows = min(64, max(16, triton.next_power_of_2(height)))
    _attend_split[(kv_heads, triton.cdiv(height, block_rows), splits)](
        query, keys, values, words, depths, prefix, out, lse,
        scale, softcap, rows, height, words.shape[1],
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        D=width, BLOCK_D=max(16, triton.next_power_of_2(width)), BLOCK_M=block_rows, BLOCK_N=BLOCK_KEYS, SPLITS=splits,
        WINDOW=window, CAPPED=softcap > 0.0,
    )  # fmt: skip
    return out, lse
