"""Which sources rest, and what is kept of the text: kernels against the same in NumPy."""

import numpy as np
from blend_world import named, request_of
from doors import request
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.kernels.request import MATCH
from retrieve_spec.kernels.source_table import (
    KIND_AUTOMATON,
    KIND_DENSE,
    KIND_EXACT,
    KIND_NGRAM,
    KIND_PREDICTION,
    KIND_RECYCLING,
    KIND_UNIGRAM,
    SOURCE,
)

KINDS = [
    KIND_PREDICTION, KIND_AUTOMATON, KIND_UNIGRAM, KIND_AUTOMATON, KIND_EXACT, KIND_DENSE, KIND_RECYCLING, KIND_NGRAM,
    KIND_EXACT,
]  # fmt: skip
TEXT, NEIGHBOURS = 1, 5


@given(st.integers(0, 10**6), st.integers(0, 40), st.booleans(), st.booleans())
def test_sources_are_disabled_that_are_of_no_use(seed, steps, some, neighbours):
    rng = np.random.default_rng(seed)
    kinds = np.array(KINDS)
    table = np.zeros(len(KINDS), SOURCE)
    table["kind"], table["disabled"] = kinds, rng.integers(0, 2, len(KINDS)) if some else 0
    use = rng.choice([0.0, 0.001, 0.003, 0.005, 0.015, 0.5], len(KINDS))
    record = request_of(
        table=table,
        num_sources=len(table),
        use=use,
        steps=steps,
        any_disabled=some,
        text_source=TEXT,
        dense_source=NEIGHBOURS if neighbours else -1,
    )
    slow = (kinds == KIND_NGRAM) | (kinds == KIND_EXACT)

    disabled = table["disabled"].copy()
    if some:
        disabled[np.ones_like(slow) if (steps + 1) % 8 == 0 else ~slow] = 0
    request.enable_sources(named(record))
    assert record["steps"] == steps + 1
    assert (table["disabled"] == disabled).all()

    if some or (steps + 1) % 8 == 0:
        disabled[use < np.where(slow, 0.01, 0.002)] = 1
        disabled[use >= np.where(slow, 0.02, 0.004)] = 0
        disabled[: TEXT + 2] = 0  # the text, with context and without
        if neighbours:
            disabled[NEIGHBOURS] = 0
    request.disable_sources(named(record))
    assert (table["disabled"] == disabled).all()
    assert record["any_disabled"] == disabled.any()


@given(st.lists(st.integers(0, 3 * MATCH), max_size=5), st.integers(0, 10**6))
def test_the_newest_tokens_are_kept(lengths, seed):
    rng = np.random.default_rng(seed)
    recent = np.zeros(MATCH, np.int32)
    record, roots = request_of(recent=recent), np.zeros((0, 4), np.int64)
    text = np.empty(0, np.int32)
    for length in lengths:
        tokens = rng.integers(0, 1000, length).astype(np.int32)
        text = np.concatenate([text, tokens])
        window = request.follow_stores(named(record), tokens, roots, None)
        assert window.tolist() == text[max(len(text) - MATCH - length, 0) :].tolist()
        kept = int(record["num_recent"][0])
        assert recent[:kept].tolist() == text[max(len(text) - MATCH, 0) :].tolist()
