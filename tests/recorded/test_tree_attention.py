"""Tree attention backends and the preallocated cache against obvious twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrieve_spec import attention
from retrieve_spec.attention import TreeMask, attend, row_depths, visible_rows
from retrieve_spec.config import PassConfig
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.attention_inputs import LayerRule

TREE = DraftTree.from_paths([[1, 2, 3], [1, 4], [5, 6, 7, 8], [9]])
CPU = torch.device("cpu")


def naive(query: Any, keys: Any, values: Any, seen: Any, depths: Any, prefix: int, rule: LayerRule) -> torch.Tensor:
    """One softmax per head and row over the keys it may see."""
    _, heads, rows, _ = query.shape
    groups = heads // keys.shape[1]
    position = np.concatenate([np.arange(prefix), prefix + depths])
    out = torch.zeros(1, rows, heads, values.shape[-1])
    for head in range(heads):
        for row in range(rows):
            visible = np.concatenate([np.ones(prefix, bool), seen[row]])
            if rule.window:
                visible &= prefix + depths[row] - position < rule.window
            index = torch.from_numpy(np.flatnonzero(visible))
            scores = keys[0, head // groups, index] @ query[0, head, row] * rule.scale
            if rule.softcap:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            if rule.sinks is not None:
                scores = torch.cat([scores, rule.sinks[head : head + 1]])
            weights = torch.softmax(scores, 0)[: len(index)]
            out[0, row, head] = weights @ values[0, head // groups, index]
    return out


RULES = [
    LayerRule(0.3),
    LayerRule(0.3, window=4),
    LayerRule(0.3, window=30),
    LayerRule(0.3, softcap=3.0),
    LayerRule(0.3, window=4, softcap=3.0),
    LayerRule(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"w{rule.window}c{rule.softcap}s{rule.sinks is not None}")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("prefix", "roots", "tree"), [(20, 1, TREE), (0, 3, TREE), (25, 1, None), (7, 2, None)])
def test_attend_is_naive_attention(
    rule: LayerRule, split: bool, prefix: int, roots: int, tree: DraftTree | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        monkeypatch.setattr(attention, "PASS", PassConfig(mask_bytes=0))
    torch.manual_seed(1)
    seen, depths = visible_rows(roots, tree), row_depths(roots, tree)
    rows = len(seen)
    query = torch.randn(1, 4, rows, 8)
    keys, values = torch.randn(1, 2, prefix + rows, 8), torch.randn(1, 2, prefix + rows, 6)
    mask = TreeMask(2, torch.float32, CPU)
    mask.set(prefix, seen, depths)
    got = attend(query, keys, values, mask, rule)
    torch.testing.assert_close(got, naive(query, keys, values, seen, depths, prefix, rule), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"w{rule.window}c{rule.softcap}s{rule.sinks is not None}")
def test_blocks_of_a_long_prefix_are_naive_attention(
    rule: LayerRule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many blocks, the last one short; scores so large that only the running maximum keeps them finite."""
    monkeypatch.setattr(attention, "PASS", PassConfig(mask_bytes=0, score_bytes=0))
    sizes: list[int] = []
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: (sizes.append(b.shape[3]), matmul(a, b))[1])
    torch.manual_seed(2)
    prefix = 1000
    seen, depths = visible_rows(1, TREE), row_depths(1, TREE)
    rows = len(seen)
    query = ((30 if dtype == torch.float32 else 1) * torch.randn(1, 4, rows, 8)).to(dtype)
    keys, values = (torch.randn(1, 2, prefix + rows, 8).to(dtype) for _ in range(2))
    mask = TreeMask(2, dtype, CPU)
    mask.set(prefix, seen, depths)
    got = attend(query, keys, values, mask, rule)
    if not rule.window:
        assert len(sizes) > 16 * 2 and max(sizes) <= max(64, rows)
    expected = naive(query.float(), keys.float(), values.float(), seen, depths, prefix, rule)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)
