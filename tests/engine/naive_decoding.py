"""Obvious twins of the decoding kernels."""

import math
from typing import Any

import numpy as np


def row_topk(logits: Any, k: int) -> tuple[Any, Any]:
    order = np.array([sorted(range(logits.shape[1]), key=lambda i, row=row: (-row[i], i))[:k] for row in logits])
    return order, np.take_along_axis(logits, order, axis=1)


def find_child(parent: Any, token_ids: Any, node: int, token_id: int) -> int:
    matches = [i for i in range(len(parent)) if parent[i] == node and token_ids[i] == token_id]
    return matches[0] if matches else -1


def ancestors(parent: Any, node: int) -> set[int]:
    seen = set()
    while node >= 0:
        seen.add(node)
        node = parent[node]
    return seen


def tree_mask(
    parent: Any,
    depth: Any,
    roots: int,
    past: int,
    offset: int,
    kv: int,
    window: int,
    chunk: int,
    left: int,
    padded: Any,
) -> Any:
    """Visibility by the definition: earlier on the same path, within the window, in the same chunk, not padding."""
    n = len(parent)
    slots = [past + r for r in range(roots)] + [past + roots - 1 + int(d) for d in depth]
    mask = np.zeros((roots + n, kv), bool)
    cached = kv - roots - n
    for q, q_slot in enumerate(slots):
        for c in range(kv):
            if c < cached:
                slot, seen = offset + c, not (offset + c < len(padded) and padded[offset + c])
            elif c < cached + roots:
                slot, seen = slots[c - cached], c - cached <= q
            else:
                slot = slots[c - cached]
                seen = q >= roots and (c - cached - roots) in ancestors(parent, q - roots)
            if window:
                seen = seen and slot > q_slot - window
            if chunk:
                seen = seen and (slot - left) // chunk == (q_slot - left) // chunk
            mask[q, c] = seen
    return mask


def processed(row: Any, temperature: float, top_k: int, top_p: float, min_p: float) -> Any:
    """Scores after transformers' own warpers, -inf where a token is out."""
    import torch
    from transformers.generation import logits_process as hf

    warpers = []
    if temperature != 1.0:
        warpers.append(hf.TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(hf.MinPLogitsWarper(min_p))
    scores = torch.from_numpy(row)[None].clone()
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0].numpy()


_BITS = (1 << 64) - 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)


def uniform(seed: int, row: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    key = mix((seed + golden) & _BITS)
    key = mix((key + (row + 1) * golden) & _BITS)
    key = mix((key + (position + 1) * golden) & _BITS)
    return ((mix((key + (token + 1) * golden) & _BITS) >> 11) + 0.5) / 2**53


def gumbel_argmax(scores: dict[int, float], seed: int, row: int, position: int) -> int:
    noisy = {token: score - math.log(-math.log(uniform(seed, row, position, token))) for token, score in scores.items()}
    return max(noisy, key=lambda token: noisy[token])
