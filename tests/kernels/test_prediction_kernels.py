import numpy as np
from doors import request
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.kernels.request import LOOKBACK


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
    found = request.anchor(np.array(text, np.int32), np.array(recent, np.int32), near)
    assert tuple(map(int, found)) == naive_anchor(text, recent, near)


def test_anchor_looks_back_no_further_than_it_says():
    text = np.arange(100, dtype=np.int32)
    assert tuple(map(int, request.anchor(text, text[:50], 0))) == (50, LOOKBACK)


def naive_follow(text, cursors, emitted, recent):
    """Cursors as [position, matched]: found again, one token replaced, tokens inserted."""
    for token in emitted:
        hits = [c for c in cursors if c[1] >= 0 and c[0] < len(text) and text[c[0]] == token]
        (at, matched), gone = cursors[0], [[position, -1] for position, _ in cursors[1:]]
        if hits:
            cursors = [[hits[0][0] + 1, hits[0][1] + 1], *gone]
        elif matched > 0:
            cursors = [[at, -1], [at + 1, 0], [at, 0]]
        else:
            cursors = [[at, -1], *cursors[1:]]
    if cursors[0][1] <= 0 and emitted:
        at, matched = naive_anchor(text, recent, cursors[0][0])
        if matched:
            others = [[position, -1 if position == at else m] for position, m in cursors[1:]]
            cursors = [[at, matched], *others]
    return cursors


CURSOR = st.tuples(st.integers(0, 20), st.integers(-1, 5)).map(list)


FEW = st.lists(st.integers(0, 3), max_size=20)


@given(FEW, st.tuples(CURSOR, CURSOR, CURSOR), TOKENS, FEW)
def test_cursors_follow_what_is_emitted(text, cursors, before, emitted):
    table = np.zeros((3, 4), np.int64)
    table[:, :2] = cursors
    recent = before + emitted
    arrays = (np.array(tokens, np.int32) for tokens in (emitted, recent))
    request.follow_expected(np.array(text, np.int32), table, *arrays)
    assert table[:, :2].tolist() == naive_follow(text, list(cursors), emitted, recent)
