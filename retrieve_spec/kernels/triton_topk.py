"""Triton kernels that find the most probable tokens of every row: per block of the vocabulary, then per row.

Only comparisons are computed, so results are exact. With TRITON_INTERPRET=1, the kernels run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def level_of(values):  # type: ignore[no-untyped-def]
    """Map float32 values to 32-bit integers of the same order, with -0 as 0 and NaN above all."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    level = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return tl.where(values == values, level, 4294967295)


@triton.jit
def order_of(level, ids):  # type: ignore[no-untyped-def]
    """Combine levels and token ids to 63-bit integers: ordered by level, then by descending id."""
    return (level << 31) | (0x7FFFFFFF - ids)


@triton.jit
def _largest_of_blocks(scores, orders, stride, vocab, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the orders of a block's K largest entries to (rows, blocks · K); -1 if there are fewer."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    values = tl.load(scores + row * stride + ids, inside, 0.0).to(tl.float32)
    left = tl.where(inside, order_of(level_of(values), ids), -1)
    at = orders + (row * tl.num_programs(1) + block) * K
    for place in range(K):
        largest = tl.max(left, 0)
        tl.store(at + place, largest)
        left = tl.where(left == largest, -1, left)


@triton.jit
def _largest_of_rows(  # type: ignore[no-untyped-def]
    orders,  # (rows, count) int64
    scores,  # (rows, vocab), stride given
    chosen,  # CHOSEN: (rows,) int64
    packed,  # (rows, 2 * K + 2) int32
    count,
    stride,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Write a row's largest token, its K largest, the bits of their float32 values, and the chosen token."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, COUNT)
    left = tl.load(orders + row * count + i, i < count, -1)
    at = packed + row * (2 * K + 2)
    for place in range(K):
        largest = tl.max(left, 0)
        token = 0x7FFFFFFF - (largest & 0x7FFFFFFF)
        value = tl.load(scores + row * stride + token).to(tl.float32)
        if place == 0:
            tl.store(at, token.to(tl.int32))
            if not CHOSEN:
                tl.store(at + 2 * K + 1, token.to(tl.int32))
        tl.store(at + 1 + place, token.to(tl.int32))
        tl.store(at + 1 + K + place, value.to(tl.int32, bitcast=True))
        left = tl.where(left == largest, -1, left)
    if CHOSEN:
        tl.store(at + 2 * K + 1, tl.load(chosen + row).to(tl.int32))


def pack_largest(logits: torch.Tensor, k: int, chosen: torch.Tensor | None) -> torch.Tensor:
    """Return the most probable tokens of every row in one tensor, for one copy to the host.

    Parameters
    ----------
    logits
        (rows, vocab), last axis contiguous.
    k
        Number of tokens per row, at most vocab.
    chosen
        (rows,) int64 chosen tokens, or None.

    Returns
    -------
    Tensor
        (rows, 2 + 2 · k) int32: a row's most probable token, its k most probable by descending logit (ties by id), the
        bits of their logits as float32, and the chosen token, by default the first.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    orders = torch.empty((rows, blocks * k), dtype=torch.long, device=logits.device)
    packed = torch.empty((rows, 2 * k + 2), dtype=torch.int32, device=logits.device)
    _largest_of_blocks[(rows, blocks)](logits, orders, logits.stride(0), vocab, K=k, BLOCK=_BLOCK)
    count = triton.next_power_of_2(blocks * k)
    _largest_of_rows[(rows,)](
        orders, logits, packed if chosen is None else chosen, packed, blocks * k, logits.stride(0),
        K=k, COUNT=count, CHOSEN=chosen is not None, num_warps=max(1, min(8, count // 256)),
    )  # fmt: skip
    return packed
