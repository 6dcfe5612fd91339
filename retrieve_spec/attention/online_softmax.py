"""Online softmax: exact attention over blocks of keys, of which only one block's scores exist at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from retrieve_spec.config import PASS


@dataclass(frozen=True, slots=True)
class LayerRule:
    """What one layer's attention does beyond softmax(q·k) v.

    Attributes
    ----------
    scale
        Factor of the scores.
    window
        Keys a query sees at most, itself included; 0 for all.
    softcap
        Scores s become softcap · tanh(s / softcap); 0 for none.
    sinks
        (heads,) logits of a key without a value that every query also attends to, or None.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys, values, and an additive mask or None."""


def keys_per_block(queries: torch.Tensor) -> int:
    """How many keys the scores of (1, kv_heads, height, d) queries have room for in `config.PASS.score_bytes`."""
    return max(PASS.score_bytes // (4 * queries.shape[1] * queries.shape[2]), 64)


def attend_blocks(packed: torch.Tensor, blocks: Iterable[Block], rule: LayerRule) -> torch.Tensor:
    """Attention to all blocks: (1, kv_heads, height, d) in, (1, kv_heads, height, d_v) out.

    A running maximum m and sum of exp(score - m) are kept per query; what was summed is rescaled when m grows, so that
    the result is that of one softmax over all scores, but for rounding.
    """
    lowest = torch.finfo(torch.float32).min  # instead of -inf, of which differences are no numbers
    greatest = total = out = None
    for keys, values, additive in blocks:
        scores = torch.matmul(packed, keys.transpose(2, 3)).float().mul_(rule.scale)
        if rule.softcap:
            scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        if additive is not None:
            scores = scores.add_(additive)
        top = scores.amax(-1, keepdim=True).clamp_min_(lowest)
        if greatest is not None:
            top = torch.maximum(top, greatest)
        weights = scores.sub_(top).exp_()
        part, share = torch.matmul(weights.to(values.dtype), values).float(), weights.sum(-1, keepdim=True)
        if greatest is None or total is None or out is None:
            greatest, total, out = top, share, part
        else:
            kept = torch.exp(greatest - top)
            greatest, total, out = top, total.mul_(kept).add_(share), out.mul_(kept).add_(part)
    assert greatest is not None and total is not None and out is not None, "a query sees itself at least"
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(1, packed.shape[1], -1, 1)
        sinks = sinks.repeat_interleave(packed.shape[2] // sinks.shape[2], dim=2)
        top = torch.maximum(greatest, sinks)
        kept = torch.exp(greatest - top)
        total, out = total * kept + torch.exp(sinks - top), out * kept
    return (out / total).to(packed.dtype)
