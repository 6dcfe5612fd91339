"""Prompt attention: many rows of a text attend by oneDNN's products, block by block to no more keys than they see.

One fused call scores every row of a piece against every key and masks what lies behind it, with the products of
whatever BLAS torch was built with. Blocks of rows leave out most of what is masked, and oneDNN's products take half the
time where that BLAS does not know the processor. It prepares a product for each shape anew: blocks end where the text
is a multiple of `ROWS` tokens long, so that prompts have few shapes and share them.
"""

from __future__ import annotations

import functools
from time import perf_counter

import torch
from torch.nn import functional

ROWS = 64
"""Rows of a block."""
_TRIAL_KEYS, _REPEATS = 512, 5
_WINS = 0.9


def attend_prompt(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the last rows of a text, each of which sees all keys up to its own.

    Parameters
    ----------
    query
        (1, heads, rows, d) float32 on a CPU.
    keys, values
        (1, kv_heads, held + rows, d) and (…, d_v), the rows' own last.
    scale
        Factor of the scores.

    Returns
    -------
    Tensor
        (1, rows, heads, d_v).
    """
    heads, rows = query.shape[1:3]
    held, start = keys.shape[2] - rows, 0
    out = query.new_empty((1, rows, heads, values.shape[3]))
    while start < rows:
        end = min((held + start) // ROWS * ROWS + ROWS - held, rows)
        seen = slice(held + end)
        attend = _by_products if end - start == ROWS else _at_once
        attend(query[:, :, start:end], keys[:, :, seen], values[:, :, seen], scale, out[:, start:end])
        start = end
    return out


def _by_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """Write the attention of one block, key head by key head."""
    kv_heads, rows = keys.shape[1], query.shape[2]
    groups = query.shape[1] // kv_heads
    asked = (query * scale).reshape(kv_heads, groups * rows, -1)
    hidden = _hidden(groups, rows)
    for head in range(kv_heads):
        scores = _product(asked[head], keys[0, head])
        scores[:, -rows:].add_(hidden)
        part = _product(torch.softmax(scores, -1), values[0, head].t())
        out[0, :, head * groups : (head + 1) * groups] = part.view(groups, rows, -1).transpose(0, 1)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(m, n) product of (m, d) with the transpose of (n, d)."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")  # type: ignore[no-any-return]


def _at_once(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write the attention of a part that is no whole block, by one fused call."""
    kv_heads, rows = keys.shape[1], query.shape[2]
    groups = query.shape[1] // kv_heads
    mask = torch.zeros((groups * rows, keys.shape[2]))
    mask[:, -rows:] = _hidden(groups, rows)
    packed = query.reshape(1, kv_heads, groups * rows, -1)
    part = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask[None, None], scale=scale)
    out.copy_(part.reshape(1, kv_heads * groups, rows, -1).transpose(1, 2))


@functools.lru_cache(256)
def _hidden(groups: int, rows: int) -> torch.Tensor:
    """(groups · rows, rows) additive mask of rows that do not see those behind them, once per group."""
    with torch.inference_mode(False):
        return torch.full((rows, rows), float("-inf")).triu_(1).repeat(groups, 1)


@functools.cache
def products_pay(kv_heads: int, groups: int, width: int, value_width: int, threads: int) -> bool:
    """Whether products attend faster than one fused call, and to the same, with so many threads; tried once."""
    held = _TRIAL_KEYS - 2 * ROWS
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        query = torch.randn(1, kv_heads * groups, 2 * ROWS, width)
        keys, values = (torch.randn(1, kv_heads, held + 2 * ROWS, size) for size in (width, value_width))
        fused = torch.empty(1, 2 * ROWS, kv_heads * groups, value_width)
        took: tuple[list[float], list[float]] = [], []
        try:
            for _ in range(_REPEATS):
                began = perf_counter()
                ours = attend_prompt(query, keys, values, width**-0.5)
                between = perf_counter()
                _at_once(query, keys, values, width**-0.5, fused)
                took[0].append(between - began)
                took[1].append(perf_counter() - between)
        except (AttributeError, RuntimeError):  # another build of torch: the operation is inductor's, not promised
            return False
    return min(took[0]) < _WINS * min(took[1]) and torch.allclose(ours, fused, rtol=1e-4, atol=1e-5)
