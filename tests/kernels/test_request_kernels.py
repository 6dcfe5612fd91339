"""Which sources rest, and what is kept of the text: kernels against the same in NumPy."""

import numpy as np
from doors import request
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.kernels.request import MATCH
from retrieve_spec.kernels.source_table import (
    AUTOMATON,
    DENSE,
    EXACT,
    KIND,
    NGRAM,
    PREDICTION,
    RECYCLING,
    RESTING,
    ROW,
    TAIL,
    UNIGRAM,
)
from retrieve_spec.sources.rows import Row

KINDS = [PREDICTION, AUTOMATON, UNIGRAM, AUTOMATON, EXACT, DENSE, RECYCLING, NGRAM, EXACT]
CONTEXT, NEIGHBOURS = 1, 5


def request_of(use, recent=None, newest=None, cursors=None, **numbers):
    rows = len(use)
    arrays = {
        request.USE: use,
        request.RECENT: np.zeros(MATCH, np.int32) if recent is None else recent,
        request.NEWEST: np.zeros((1, TAIL), np.int32) if newest is None else newest,
        request.CURSORS: np.zeros((rows, 4), np.int64) if cursors is None else cursors,
    }
    columns = {getattr(request, name.upper()): value for name, value in numbers.items()}
    return Row.of(request.REQUEST, arrays, columns)


@given(st.integers(0, 10**6), st.integers(0, 40), st.booleans(), st.booleans())
def test_sources_rest_that_are_of_no_use(seed, steps, rests, neighbours):
    rng = np.random.default_rng(seed)
    kinds = np.array(KINDS)
    table = np.zeros((len(KINDS), ROW), np.int64)
    table[:, KIND], table[:, RESTING] = kinds, rng.integers(0, 2, len(KINDS)) if rests else 0
    use = rng.choice([0.0, 0.001, 0.003, 0.005, 0.015, 0.5], len(KINDS))
    held = request_of(use, steps=steps, rests=int(rests), context=CONTEXT, dense_row=NEIGHBOURS if neighbours else -1)
    slow = (kinds == NGRAM) | (kinds == EXACT)

    resting = table[:, RESTING].copy()
    if rests:
        resting[np.ones_like(slow) if (steps + 1) % 8 == 0 else ~slow] = 0
    request.wake(table, held.words)
    assert held.words[request.STEPS] == steps + 1
    assert (table[:, RESTING] == resting).all()

    if rests or (steps + 1) % 8 == 0:
        resting[use < np.where(slow, 0.01, 0.002)] = 1
        resting[use >= np.where(slow, 0.02, 0.004)] = 0
        resting[: CONTEXT + 2] = 0  # the text, with context and without
        if neighbours:
            resting[NEIGHBOURS] = 0
    request.choose_sources(table, held.words)
    assert (table[:, RESTING] == resting).all()
    assert held.words[request.RESTS] == resting.any()


@given(st.lists(st.integers(0, 3 * MATCH), max_size=5), st.integers(0, 10**6))
def test_the_newest_tokens_are_kept(lengths, seed):
    rng = np.random.default_rng(seed)
    recent = np.zeros(MATCH, np.int32)
    held = request_of(np.ones(1), recent=recent)
    table, roots = np.zeros((1, ROW), np.int64), np.zeros((0, 4), np.int64)
    text = np.empty(0, np.int32)
    for length in lengths:
        tokens = rng.integers(0, 1000, length).astype(np.int32)
        text = np.concatenate([text, tokens])
        window = request.follow_stores(table, held.words, tokens, roots, None)
        assert window.tolist() == text[max(len(text) - MATCH - length, 0) :].tolist()
        kept = held.words[request.KEPT]
        assert recent[:kept].tolist() == text[max(len(text) - MATCH, 0) :].tolist()
