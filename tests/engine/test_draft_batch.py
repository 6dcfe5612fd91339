"""Drafts for a batch: what each text is told that nodes cost, which nodes stay, and when nobody is asked."""

import numpy as np
import pytest

from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.engine.budget import Backoff, Seconds
from retrieve_spec.engine.draft_batch import BatchBudget, draft_batch

SECONDS = (1.0 + 0.1 * np.arange(9)).astype(np.float32)
"""Of a pass with 0 … 8 nodes."""


def chain(*probabilities: float) -> DraftTree:
    tree = DraftTree.from_paths([range(5, 5 + len(probabilities))])
    tree.log_p[:] = np.log(np.cumprod(probabilities))
    return tree


def test_nodes_go_to_the_texts_where_they_are_most_probable() -> None:
    told = []

    def draft(tree: DraftTree, most: int, cost: Seconds | None) -> DraftTree:
        told.append((most, None if cost is None else cost.tolist()))
        return tree

    texts = [chain(0.9, 0.9, 0.9), chain(0.05), chain(0.9, 0.01)]
    drafted = draft_batch(texts, BatchBudget(None, 4), draft)
    assert list(map(len, drafted)) == [3, 0, 1] and told == [(4, None)] * 3
    drafted = draft_batch(texts, BatchBudget(SECONDS, 8), draft)
    assert list(map(len, drafted)) == [3, 0, 1]
    assert told[-1][1] == pytest.approx(SECONDS - 1.0 + 1.0 / 3.0), "its share of what the pass costs anyway"
    drafted = draft_batch(texts, BatchBudget(SECONDS, 2, is_padded=True), draft)
    assert max(map(len, drafted)) <= 2


def test_after_drafts_that_did_not_pay_passes_go_without_and_drafting_comes_back() -> None:
    asked = []

    def draft(text: int, _most: int, _cost: Seconds | None) -> DraftTree:
        asked.append(text)
        return NO_DRAFT

    backoff, budget = Backoff(), BatchBudget(SECONDS * 1e6, 8)
    per_pass = []
    for _ in range(40):
        before = len(asked)
        assert draft_batch(range(20), budget, draft, backoff) == [NO_DRAFT] * 20
        per_pass.append(len(asked) - before)
    assert set(per_pass) == {0, 8}, "a few of many are asked, or none"
    assert per_pass.count(0) > 20 and len(set(asked)) > 8
