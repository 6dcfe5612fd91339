"""Turns queries of a draft tree into attention on a GPU: prefix and tree block in one launch, a merge in another.

Queries that share a key head are stacked, so a key is read once per group; the tree block's mask is one bit per pair of
rows; a long context is split over programs whose partial results are merged by log-sum-exp. Lengths are read from
device memory, so that a captured CUDA graph can be replayed as the cache grows, and numbers that change from pass to
pass are no reason to compile again. With TRITON_INTERPRET=1 the kernels run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SPLITS = 32
_KEYS_PER_SPLIT = 256


@triton.jit(
    do_not_specialize=["rows", "height", "num_words", "splits"],
    do_not_specialize_on_alignment=["words", "depths", "prefix"],
)
def _attend_split(  # type: ignore[no-untyped-def]  # Triton reads the annotations
    query,  # (heads, rows, d), strides given; the heads of a group stand together
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
    splits,
    query_head_stride,
    query_row_stride,
    key_head_stride,
    key_row_stride,
    value_head_stride,
    value_row_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)  # a long cache of many heads has more elements than 32 bits count
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = m % rows
    query_head = head * (height // rows) + m // rows
    q = tl.load(
        query + query_head[:, None] * query_head_stride + row[:, None] * query_row_stride + d[None, :],
        (m[:, None] < height) & (d[None, :] < D),
        0.0,
    )
    depth = tl.load(depths + row)
    past = tl.load(prefix)
    total = past + rows
    share = tl.cdiv(tl.cdiv(total, splits), BLOCK_N) * BLOCK_N
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


@triton.jit(do_not_specialize=["rows", "height", "splits"])
def _merge_splits(  # type: ignore[no-untyped-def]
    parts,  # (splits, kv_heads, groups * rows, d) float32
    lse,  # (splits, kv_heads, groups * rows) float32
    sinks,  # (heads,) logits of a key without a value, any float type; not read unless SINKS
    out,  # (rows, heads, d)
    rows,
    height,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    m = tl.program_id(1)
    kv_heads = tl.num_programs(0)
    groups = height // rows
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    at = (s * kv_heads + head) * height + m
    share = tl.load(lse + at, s < splits, float("-inf"))
    best = tl.max(share, 0)
    if SINKS:
        sink = tl.load(sinks + head * groups + m // rows).to(tl.float32)
        best = tl.maximum(best, sink)
    weight = tl.exp(share - best)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(sink - best)
    part = tl.load(parts + at[:, None] * D + d[None, :], (s[:, None] < splits) & (d[None, :] < D), 0.0)
    merged = tl.sum(part * weight[:, None], 0) / total
    tl.store(out + ((m % rows) * kv_heads * groups + head * groups + m // rows) * D + d, merged, d < D)


def num_splits(kv_heads: int, height: int, capacity: int, processors: int) -> int:
    """How many programs share one context: enough to fill the GPU, none with less than a few key blocks."""
    wanted = -(-2 * processors // max(1, kv_heads * -(-height // 64)))
    return max(1, min(MAX_SPLITS, -(-capacity // _KEYS_PER_SPLIT), wanted))


def launch_options(height: int, width: int, itemsize: int) -> dict[str, int]:
    """Block sizes and pipeline depth that fit the shared memory of GPUs since 2020 (99 KiB a program).

    Float32 products run without tensor cores, fully unrolled: small blocks keep their compilation short.
    """
    block_d = max(16, triton.next_power_of_2(width))
    if itemsize > 2:
        return {"BLOCK_D": block_d, "BLOCK_M": 16, "BLOCK_N": 32 if block_d <= 128 else 16, "num_stages": 2}
    block_m = min(64, max(16, triton.next_power_of_2(height)))
    return {"BLOCK_D": block_d, "BLOCK_M": block_m, "BLOCK_N": 64 if block_d <= 128 else 32, "num_stages": 2}


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    words: torch.Tensor,
    depths: torch.Tensor,
    prefix: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Attention of one pass.

    Parameters
    ----------
    query
        (heads, rows, d), last axis contiguous; the heads that share a key head stand together.
    keys, values
        (kv_heads, capacity, d), last axis contiguous; the pass's own rows stand behind the prefix.
    words
        (rows, ceil(rows / 32)) int32, bit j of row i: row i sees row j of the pass.
    depths
        (rows,) int32, position of a row minus the position of the pass's first row.
    prefix
        (1,) int32, cached rows before the pass, on the device.
    sinks
        (heads,) logits of a key without a value that every query also attends to.
    splits
        Programs that share one context, at most `MAX_SPLITS`.

    Returns
    -------
    Tensor
        (rows, heads, d) of the query's type.
    """
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    height = heads // kv_heads * rows
    parts = torch.empty((splits, kv_heads, height, width), dtype=torch.float32, device=query.device)
    lse = torch.empty((splits, kv_heads, height), dtype=torch.float32, device=query.device)
    out = torch.empty((rows, heads, width), dtype=query.dtype, device=query.device)
    options = launch_options(height, width, query.element_size())
    _attend_split[(kv_heads, triton.cdiv(height, options["BLOCK_M"]), splits)](
        query, keys, values, words, depths, prefix, parts, lse,
        scale, softcap, rows, height, words.shape[1], splits,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        D=width, WINDOW=window, CAPPED=softcap > 0.0, **options,
    )  # fmt: skip
    _merge_splits[(kv_heads, height)](
        parts, lse, out if sinks is None else sinks, out, rows, height, splits,
        D=width, BLOCK_D=options["BLOCK_D"], BLOCK_S=max(2, triton.next_power_of_2(splits)), SINKS=sinks is not None,
    )  # fmt: skip
    return out
