from __future__ import annotations

import naive_index as naive
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.indexes import build_automaton
from retrieve_spec.datastore.segment import suffix_array
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.kernels.static_automaton import automaton_extend, automaton_successors

TEXTS = st.lists(st.integers(0, 5), max_size=120).map(lambda tokens: [*tokens, 0])


def walk(automaton, tokens, followed):
    """(state, depth) after each token."""
    a = automaton
    state, depth = 0, 0
    for token in followed:
        state, depth = automaton_extend(
            tokens, a.counts, a.link, a.clone_lengths, a.first, a.edge_tokens, a.edge_targets, state, depth, token
        )
        yield int(state), int(depth)


def successors(automaton, tokens, state):
    a = automaton
    out_tokens, out_counts = np.zeros(16, np.int64), np.zeros(16, np.int64)
    n, total = automaton_successors(
        tokens, a.counts, a.first, a.edge_tokens, a.edge_targets, state, out_tokens, out_counts
    )
    return list(zip(out_tokens[:n].tolist(), out_counts[:n].tolist(), strict=True)), int(total)


@settings(max_examples=100)
@given(TEXTS, st.lists(st.integers(0, 6), min_size=1, max_size=30), st.sampled_from([np.uint16, np.uint32]), st.data())
def test_answers_are_those_of_the_suffix_array(tokens, followed, dtype, data):
    array = np.array(tokens, dtype)
    # Some documents are removed: their positions are not in the array.
    gone = data.draw(st.sets(st.integers(0, tokens.count(0) - 1)))
    document = np.cumsum(array == 0) - (array == 0)
    sa = suffix_array(array)
    sa = sa[~np.isin(document[sa], list(gone))]
    automaton = build_automaton(array, sa)
    for n, (state, depth) in enumerate(walk(automaton, array, followed), 1):
        lo, hi, longest = naive.longest(tokens, sa.tolist(), followed[:n])
        assert depth == longest
        expected = naive.successors(tokens, sa.tolist(), lo, hi, longest, 1 << 20)
        assert successors(automaton, array, state) == (expected, hi - lo)


def test_in_a_store(tokenizer, texts, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer, config=StoreConfig(automaton_tokens=1000))
    verify_datastore(tmp_path / "s")
    remove_documents(tmp_path / "s", ["a.txt"])
    verify_datastore(tmp_path / "s")
    store = open_datastore(tmp_path / "s")
    (segment,) = store.segments
    assert segment.automaton is None  # its counts are those of the whole text; the suffix array is followed instead
    compact_datastore(tmp_path / "s")
    (segment,) = open_datastore(tmp_path / "s").segments
    query = segment.localise(np.array(store.tokenizer.encode("the cat s").ids))
    *_, (_, depth) = walk(segment.automaton, segment.tokens, query.tolist())
    assert depth == len(" s")  # "cat sat" stood in the removed document only


def test_large_segments_have_none(tokenizer, texts, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer, config=StoreConfig(automaton_tokens=100))
    assert open_datastore(tmp_path / "s").segments[0].automaton is None
