"""Prompt attention against plain softmax, whatever stands before the rows and however many they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from retrieve_spec import attention
from retrieve_spec.attention import LayerRule, TreeMask, attend, attend_prompt, products_pay, row_depths, visible_rows
from retrieve_spec.drafting.tree import DraftTree

needs_products = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no such products"
)


def states(rows: int, held: int, kv_heads: int, groups: int, width: int = 16, value_width: int = 16):
    torch.manual_seed(rows + held)
    slab = torch.randn(2, kv_heads, held + rows + 30, width), torch.randn(2, kv_heads, held + rows + 30, value_width)
    query = torch.randn(1, rows, kv_heads * groups, width).transpose(1, 2)
    return query, *(part[1:, :, : held + rows] for part in slab)


def naive(query, keys, values, scale):
    groups, rows = query.shape[1] // keys.shape[1], query.shape[2]
    keys, values = (part.double().repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * scale
    seen = torch.ones(rows, keys.shape[2]).tril(keys.shape[2] - rows).bool()
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(1, 2)


@needs_products
@pytest.mark.parametrize("held", [0, 1, 63, 64, 200])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 191])
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 3)])
def test_every_row_sees_what_is_before_it(rows, held, kv_heads, groups):
    query, keys, values = states(rows, held, kv_heads, groups, value_width=24)
    with torch.inference_mode():
        ours = attend_prompt(query, keys, values, 0.3)
    assert ours.shape == (1, rows, kv_heads * groups, 24)
    torch.testing.assert_close(ours.double(), naive(query, keys, values, 0.3), atol=1e-5, rtol=1e-5)


def mask_of(roots: int, tree: DraftTree | None, held: int, groups: int = 2) -> TreeMask:
    mask = TreeMask(groups, torch.float32, torch.device("cpu"))
    mask.set(held, visible_rows(roots, tree), row_depths(roots, tree))
    return mask


@pytest.fixture
def served(monkeypatch):
    """Rows of every call that goes by products, which are taken to pay."""
    calls = []

    def watched(query, keys, values, scale):
        calls.append(query.shape[2])
        return attend_prompt(query, keys, values, scale)

    monkeypatch.setattr(attention, "products_pay", lambda *_: True)
    monkeypatch.setattr(attention, "attend_prompt", watched)
    return calls


@needs_products
@pytest.mark.parametrize(("rows", "by_products"), [(127, []), (128, [128]), (150, [150])])
def test_pieces_of_prompts_go_by_products_where_these_pay(served, rows, by_products):
    query, keys, values = states(rows, 70, 2, 2)
    ours = attend(query, keys, values, mask_of(rows, None, 70), LayerRule(0.3))
    torch.testing.assert_close(ours.double(), naive(query, keys, values, 0.3), atol=1e-5, rtol=1e-5)
    assert served == by_products


@needs_products
@pytest.mark.parametrize("rule", [LayerRule(0.3, window=60), LayerRule(0.3, softcap=5.0)])
def test_other_rules_are_not_served(served, rule):
    attend(*states(150, 70, 2, 2), mask_of(150, None, 70), rule)
    assert not served


@needs_products
def test_trees_are_not_served_and_chains_are(served):
    chain = DraftTree.from_paths([list(range(149))])
    branches = DraftTree.from_paths([list(range(100)), [*range(50), *range(200, 249)]])
    for tree in (branches, chain):
        query, keys, values = states(1 + len(tree), 70, 2, 2)
        mask = mask_of(1, tree, 70)
        assert mask.is_text == tree.is_chain
        attend(query, keys, values, mask, LayerRule(0.3))
    assert served == [150]


@needs_products
def test_a_faster_one_pays_if_it_computes_the_same(monkeypatch):
    sizes = 1, 2, 16, 16, 1
    ticks = iter(np.cumsum([1.0, 1.0, 5.0] * 100))
    monkeypatch.setattr(attention, "perf_counter", lambda: next(ticks))
    before = torch.random.get_rng_state()
    assert products_pay.__wrapped__(*sizes)
    assert torch.equal(before, torch.random.get_rng_state())
    monkeypatch.setattr(attention, "_product", lambda x, w: 1.01 * (x @ w.t()))
    assert not products_pay.__wrapped__(*sizes)
