from __future__ import annotations

from array import array

import naive_published as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.published.stores import earliest_end
from retrieve_spec.drafting.published.text import SuffixDecoding

texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(deadline=None)
@given(texts, st.integers(1, 6))
def test_earliest_end_is_the_first_match(text, length):
    length = min(length, len(text))
    assert earliest_end(array("i", text), length) == naive.earliest_end(text, length)


@settings(deadline=None)
@given(texts, st.integers(1, 12), st.integers(1, 6))
def test_suffix_tree_scores_as_the_naive_one(text, nodes, depth):
    drafter = SuffixDecoding()
    drafter.start(np.array(text, np.int32))
    tree = drafter.propose(Budget(nodes, depth))
    tree.validate()
    expected = naive.speculate(text, 4.0, nodes, depth, 64, 0.1)
    assert np.sort(np.exp(tree.log_p)) == pytest.approx(sorted(p for _, p in expected), abs=1e-6)


@settings(deadline=None)
@given(texts)
def test_suffix_tree_is_the_naive_one_where_nothing_is_cut(text):
    drafter = SuffixDecoding()
    drafter.factor = 1000.0
    drafter.min_token_probability = 0.01
    drafter.start(np.array(text, np.int32))
    tree = drafter.propose(Budget(256, 4))
    paths = {}
    for i, (parent, token) in enumerate(zip(tree.parent.tolist(), tree.token_ids.tolist(), strict=True)):
        paths[i] = (*paths.get(parent, ()), token)
    found = {path: float(np.exp(tree.log_p[i])) for i, path in paths.items()}
    assert found == pytest.approx(dict(naive.speculate(text, 1000.0, 256, 4, 64, 0.01)), abs=1e-6)
