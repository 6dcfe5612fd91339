"""Turns queries of a draft tree into attention outputs with torch's flex attention, where that compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

from retrieve_spec.attention.tree_attention import LayerRule, merge_parts
from retrieve_spec.attention.tree_mask import TreeMask
from retrieve_spec.errors import in_a_line


@functools.cache
def compile_flex(device: str) -> tuple[Callable[..., Any] | None, str]:
    """Compiled flex attention on a kind of device, or None and why there is none; tried once on a small input."""
    compiled = torch.compile(flex_attention, dynamic=True)
    query, keys = torch.ones((1, 1, 2, 16), device=device), torch.ones((1, 1, 3, 16), device=device)
    try:
        compiled(query, keys, keys, score_mod=lambda score, _b, _h, q, k: torch.where(k <= q, score, -float("inf")))
    except Exception as error:  # whatever the compiler raises: other backends compute the same
        return None, f"flex attention does not compile here ({in_a_line(error)})"
    return compiled, ""


def attend_flex(
    packed: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: TreeMask, rule: LayerRule, flex: Any
) -> torch.Tensor:
    """`flex` over prefix and tree block: (1, kv_heads, groups · rows, d) in and out."""
    rows, prefix = mask.rows, keys.shape[2] - mask.rows
    seen = mask.seen_on_device()
    depths = mask.on_device(prefix)[1]
    softcap, window = rule.softcap, rule.window

    def modify(score: Any, _batch: Any, _head: Any, q: Any, k: Any) -> Any:
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        row, column = q % rows, k - prefix
        at = torch.clamp(column, min=0)
        visible = (column < 0) | seen[row, at]
        if window:
            position = torch.where(column < 0, column, depths[at])
            visible = visible & (depths[row] - position < window)
        return torch.where(visible, score, -float("inf"))

    out, lse = flex(packed, keys, values, score_mod=modify, scale=rule.scale, return_lse=True)
    if rule.sinks is None:
        result: torch.Tensor = out
        return result
    return merge_parts([out.float()], [lse[..., None]], rule).to(packed.dtype)
