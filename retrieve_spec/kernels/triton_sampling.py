"""Triton kernels of the sampler: draw a token for every row of a pass, the same tokens as `kernels.sampling`.

The noise has the same 53 bits. Tokens that cannot win are excluded by rational bounds of a logarithm, the others are
compared in float64, and rows that the last digits of a logarithm or sum could decide are left to the host (-1). No
result depends on a rounding that fused multiply-add would omit. With TRITON_INTERPRET=1, the kernels run on the CPU.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from retrieve_spec.kernels.triton_topk import level_of, order_of

_FIELDS: tl.constexpr = tl.constexpr(5)
"""Parameters of a row, 64 bits each: key of the noise, temperature, top-k, top-p, logarithm of min-p."""
_MARGIN: tl.constexpr = tl.constexpr(1e-9)
"""Difference below which two devices may order two float64 results differently."""
_BLOCK = 1024
_SLOTS = 4
"""Most contenders of a block; even for rows with few likely tokens, one in 10,000 blocks has more."""
_CANDIDATES = 1024
"""Most tokens of a row that top-p and min-p consider; rows that need more are left to the host."""
_TIES = 64
"""Number of tokens considered beyond `top_k`, since all that equal the last one remain."""
_MOST = 2048
"""Fewest tokens of a row that are considered."""


@triton.jit
def _noise(key, ids):  # type: ignore[no-untyped-def]
    """Return 53 bits of noise, those of `kernels.sampling.noise_bits`."""
    x = key.to(tl.uint64) + (ids.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)) >> 11


@triton.jit
def _scaled_block(scores, rules, stride, vocab, row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the token ids of a program's block, their logits, and the scaled logits; -inf after the last token."""
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(scores + row * stride + ids, ids < vocab, -float("inf")).to(tl.float32)
    heat = tl.load(rules + row * _FIELDS + 1).to(tl.float64, bitcast=True).to(tl.float32)
    return ids, values, tl.div_rn(values, heat)


@triton.jit
def _contenders(  # type: ignore[no-untyped-def]
    scores,  # (rows, vocab), stride given
    rules,  # (rows, _FIELDS) int64
    values_out,  # (rows, blocks · SLOTS) float32, -inf where there is no token
    ids_out,  # the same, int64
    stride,
    vocab,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Write the tokens of a block that may win, or infinities if there are too many of them or a NaN.

    Token i wins if E_i · w_i is least, where E = -log u for its noise u, and w is e to the power of its distance from
    the highest score. With t = 1 - u, 2 t / (2 - t) <= E <= t / √u.
    """
    row = tl.program_id(0).to(tl.int64)
    ids, values, scaled = _scaled_block(scores, rules, stride, vocab, row, BLOCK)
    bits = _noise(tl.load(rules + row * _FIELDS), ids)
    u = (bits.to(tl.float32) + 0.5) * (1.0 / 9007199254740992.0)
    t = ((9007199254740991 - bits).to(tl.float32) + 0.5) * (1.0 / 9007199254740992.0)
    weight = tl.exp(tl.max(scaled, 0) - scaled)
    most = tl.min(weight * t * tl.rsqrt(u), 0)
    able = weight * (2.0 * t / (2.0 - t)) <= most * 1.001  # far above float32's rounding
    wrong = (tl.sum((values < float("inf")).to(tl.int32), 0) < BLOCK) | (tl.sum(able.to(tl.int32), 0) > SLOTS)
    able |= wrong
    place = tl.cumsum(able.to(tl.int32), 0) - 1
    at = (row * tl.num_programs(1) + tl.program_id(1)) * SLOTS
    slot = tl.arange(0, SLOTS)
    tl.store(values_out + at + slot, -float("inf"), slot >= tl.sum(able.to(tl.int32), 0))
    tl.store(values_out + at + place, tl.where(wrong, float("inf"), values), able & (place < SLOTS))
    tl.store(ids_out + at + place, ids.to(tl.int64), able & (place < SLOTS))


@triton.jit
def _masses(scores, rules, masses, stride, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a block's highest scaled score, and its sum of exponentials relative to that, to (rows, blocks, 2)."""
    row = tl.program_id(0).to(tl.int64)
    _, _, scaled = _scaled_block(scores, rules, stride, vocab, row, BLOCK)
    wide = scaled.to(tl.float64)
    top = tl.max(wide, 0)
    at = masses + (row * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(at, top)
    tl.store(at + 1, tl.where(top > -float("inf"), tl.sum(tl.exp(wide - top), 0), 0.0))


@triton.jit
def _least_key(keys, weights, wanted, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest key such that weights at and above it add up to a sum; 0 if all together do not."""
    found = tl.full((), 0, tl.int64)
    step = tl.full((), 1 << (BITS - 1), tl.int64)
    for _ in range(BITS):
        above = tl.sum(tl.where(keys >= found + step, weights, 0.0), 0)
        found = tl.where(above >= wanted, found + step, found)
        step = step >> 1
    return found


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    given,  # (rows, count): candidates' logits
    given_ids,  # (rows, count) int64
    rules,  # (rows, _FIELDS) int64
    masses,  # (rows, blocks, 2) float64, of all tokens; read if there are BLOCKS
    drawn,  # (rows,) int64
    count,
    blocks,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,  # whether no other token can be drawn
):
    """Draw one of a row's candidates that its rules leave; -1 if that is uncertain."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(rules + row * _FIELDS)
    temperature = tl.load(rules + row * _FIELDS + 1).to(tl.float64, bitcast=True)
    top_k = tl.load(rules + row * _FIELDS + 2)
    top_p = tl.load(rules + row * _FIELDS + 3).to(tl.float64, bitcast=True)
    log_min_p = tl.load(rules + row * _FIELDS + 4).to(tl.float64, bitcast=True)
    i = tl.arange(0, COUNT)
    values = tl.load(given + row * count + i, i < count, -float("inf")).to(tl.float32)
    ids = tl.load(given_ids + row * count + i, i < count, 0)
    level = level_of(values)
    order = order_of(level, ids)
    last = tl.min(tl.where(i < count, level, 1 << 32), 0)  # upper bound of tokens that are not candidates
    scaled = tl.div_rn(values, temperature.to(tl.float32)).to(tl.float64)
    top = tl.max(scaled, 0)
    keep = values > -float("inf")
    sure = tl.sum((values < float("inf")).to(tl.int32), 0) == COUNT
    if top_k > 0:
        keep &= level >= _least_key(level, tl.where(i < count, 1.0, 0.0).to(tl.float64), top_k.to(tl.float64), 32)
        if not WHOLE:
            sure &= tl.min(tl.where(keep, level, 1 << 32), 0) > last
    if top_p < 1.0:
        mass = tl.where(keep, tl.exp(scaled - top), 0.0)
        total = tl.sum(mass, 0)
        if BLOCKS > 0:
            block = tl.arange(0, BLOCKS)
            at = masses + (row * blocks + block) * 2
            tops = tl.load(at, block < blocks, -float("inf"))
            whole = tl.sum(tl.load(at + 1, block < blocks, 0.0) * tl.exp(tops - top), 0)
            total = tl.where(top_k > 0, total, whole)
        least = tl.maximum(top_p, 2.0 * _MARGIN)  # the first token always remains
        end = _least_key(order, mass, least * total, 63)
        keep &= order >= end
        reached = tl.sum(tl.where(order >= end, mass, 0.0), 0) / total
        before = tl.sum(tl.where(order > end, mass, 0.0), 0) / total
        sure &= (tl.abs(reached - least) > _MARGIN) & (tl.abs(before - least) > _MARGIN)
    elif top_k <= 0:
        keep &= values >= ((top + log_min_p) * temperature).to(tl.float32)  # in the host's order
    distance = scaled - top - log_min_p
    keep &= distance >= 0.0
    sure &= tl.sum((tl.abs(distance) <= _MARGIN).to(tl.int32), 0) == 0
    if not WHOLE:
        sure &= tl.min(tl.where(keep, level, 1 << 32), 0) > last
    u = (_noise(key, ids).to(tl.float64) + 0.5) * (1.0 / 9007199254740992.0)
    noisy = tl.where(keep, scaled - tl.log(-tl.log(u)), -float("inf"))
    best = tl.max(noisy, 0)
    sure &= (best > -float("inf")) & (tl.sum((noisy >= best - _MARGIN).to(tl.int32), 0) == 1)
    tl.store(drawn + row, tl.where(sure, tl.sum(tl.where(noisy == best, ids, 0), 0), -1))


def sample_rows(scores: torch.Tensor, rules: NDArray[np.void]) -> torch.Tensor:
    """Draw one token per row (Gumbel-max with counted noise).

    Parameters
    ----------
    scores
        (rows, vocab), last axis contiguous; the penalty has been applied.
    rules
        (rows,) on the host: `key` uint64, `temperature` float64, `top_k` int64, `top_p` and `log_min_p` float64; the
        last three truncate nothing at 0, 1 and -inf. Truncated and other rows are better drawn separately.

    Returns
    -------
    Tensor
        (rows,) int64; -1 where the host must decide.
    """
    (rows, vocab), device = scores.shape, scores.device
    limit = np.where(rules["top_k"] < vocab, rules["top_k"], 0)
    rules = rules.copy()
    rules["top_k"] = limit
    open_ended = (limit == 0) & ((rules["top_p"] < 1.0) | (rules["log_min_p"] > -np.inf))
    described = torch.from_numpy(rules.view(np.int64)).to(device, non_blocking=True)
    blocks = triton.cdiv(vocab, _BLOCK)
    block = {"BLOCK": _BLOCK, "num_warps": 4}
    masses = described
    if limit.any() or open_ended.any():
        least = max(int(limit.max()) + _TIES, _CANDIDATES if open_ended.any() else 0)
        count = min(vocab, _MOST, triton.next_power_of_2(least))
        values, ids = torch.topk(scores, count, dim=1, sorted=False)
        whole = count == vocab
        if with_masses := not whole and bool(open_ended.any()):
            masses = torch.empty((rows, blocks, 2), dtype=torch.float64, device=device)
            _masses[(rows, blocks)](scores, described, masses, scores.stride(0), vocab, **block)
    else:
        count, whole, with_masses = blocks * _SLOTS, True, False
        values = torch.empty((rows, count), dtype=torch.float32, device=device)
        ids = torch.empty((rows, count), dtype=torch.long, device=device)
        _contenders[(rows, blocks)](scores, described, values, ids, scores.stride(0), vocab, SLOTS=_SLOTS, **block)
    drawn = torch.empty(rows, dtype=torch.long, device=device)
    size = triton.next_power_of_2(count)
    _draw[(rows,)](
        values, ids, described, masses, drawn, count, blocks, COUNT=size,
        BLOCKS=triton.next_power_of_2(blocks) if with_masses else 0, WHOLE=whole, num_warps=max(1, min(8, size // 256)),
    )  # fmt: skip
    return drawn
