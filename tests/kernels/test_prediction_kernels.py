from __future__ import annotations

import numpy as np
import pytest
from doors import Doors
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.kernels import request
from retrieve_spec.kernels.request import LOOKBACK
from retrieve_spec.sources.rows import Prediction

request = Doors(request)


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


TEXT = np.random.default_rng(0).integers(0, 30, 200).astype(np.int32)
"""Tokens recur about every 30 places, pairs hardly ever."""


def misses(prediction, output, steps=1):
    """Follow an output, a few tokens per pass; at which of them no cursor expected the first one."""
    missed, seen = [], []
    for at in range(0, len(output), steps):
        emitted = np.array(output[at : at + steps], np.int32)
        alive = [c for c in prediction.cursors if c[1] >= 0 and c[0] < len(prediction.text)]
        if not any(prediction.text[c[0]] == emitted[0] for c in alive):
            missed.append(at)
        seen += emitted.tolist()
        request.follow_expected(prediction.text, prediction.cursors, emitted, np.array(seen[-8:], np.int32))
    return missed


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("replaced", [0, 1, 2], ids=["inserted", "replaced", "deleted"])
def test_the_place_is_found_again(replaced, n, steps):
    text, other = TEXT.tolist(), [] if replaced == 2 else list(range(1000, 1000 + n))
    output = text[:60] + other + text[60 + (n if replaced else 0) :]
    prediction = Prediction(TEXT)
    lost = [at for at in misses(prediction, output, steps) if at >= 60 + len(other)]
    assert prediction.cursors[0, 0] == 200, "back in step at the end"
    # Right after one replaced token or any insertion at once; otherwise when the newest tokens say where it is.
    at_once = steps == 1 and (replaced == 0 or n <= 1 == replaced)
    assert len(lost) <= (0 if at_once else 3), lost
    assert all(at < 72 + len(other) for at in lost)


def test_a_tie_goes_to_the_nearest_place():
    block = np.arange(20, dtype=np.int32)
    text = np.concatenate([block, [90], block, [91], block, [92]]).astype(np.int32)
    prediction = Prediction(text)
    misses(prediction, [*text[:30].tolist(), 777, 778, 779, *text[33:36].tolist()])
    assert prediction.cursors[0, 0] == 36, "not the same lines in another block"
