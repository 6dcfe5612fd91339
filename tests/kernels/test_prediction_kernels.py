from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.kernels.prediction import LOOKBACK, anchor


def naive_anchor(text, recent, near):
    """Longest common ending of text[:i] and recent; then nearest; then first."""
    best = (0, 0, 0)
    for i in range(1, len(text) + 1):
        length = 0
        while length < min(i, len(recent), LOOKBACK) and text[i - 1 - length] == recent[len(recent) - 1 - length]:
            length += 1
        key = (length, -abs(i - near))
        if length and (best[0] == 0 or key > best[:2]):
            best = (*key, i)
    return (best[2], best[0])


TOKENS = st.lists(st.integers(0, 3), max_size=60)


@given(TOKENS, TOKENS, st.integers(0, 60))
def test_anchor_is_the_longest_then_nearest_match(text, recent, near):
    found = anchor(np.array(text, np.int32), np.array(recent, np.int32), near)
    assert tuple(map(int, found)) == naive_anchor(text, recent, near)


def test_anchor_looks_back_no_further_than_it_says():
    text = np.arange(100, dtype=np.int32)
    assert tuple(map(int, anchor(text, text[:50], 0))) == (50, LOOKBACK)
