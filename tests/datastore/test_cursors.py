"""The cursor machines over a store, against counting in the text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_cursors import CorpusSource, NgramSource

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore


@pytest.fixture
def store(tokenizer, texts, records, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer, config=StoreConfig(segment_tokens=100))
    add_documents(tmp_path / "s", Source(str(records), field="output"))
    return open_datastore(tmp_path / "s")


def documents(store):
    return [segment.text_ids(i).tolist() for segment in store.segments for i in range(len(segment.document_starts) - 1)]


def followers(texts, context):
    """Next-token counts and occurrences of a context."""
    counts, total = Counter(), 0
    for text in texts:
        for i in range(len(text) - len(context) + 1):
            if text[i : i + len(context)] == context:
                total += 1
                counts.update(text[i + len(context) : i + len(context) + 1])
    return counts, total


QUERY = st.lists(st.sampled_from("the cat sat on mat number is 4zß"), min_size=1, max_size=30).map("".join)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUERY)
def test_corpus_cursor(store, query):
    texts, source = documents(store), CorpusSource(store)
    ids = store.tokenizer.encode(query).ids
    state = source.root(np.empty(0, np.int32))
    for n, token in enumerate(ids, 1):
        state = source.advance(state, token)
        longest = next((k for k in range(n, 0, -1) if followers(texts, ids[n - k : n])[1]), 0)
        assert state.match_len == longest
        found = source.successors(state)
        counts, total = followers(texts, ids[n - longest : n]) if longest else (Counter(), 0)
        assert found.total == total
        if total <= 64:
            assert dict(zip(found.token_ids.tolist(), found.counts.tolist(), strict=True)) == counts
    assert (source.root(np.array(ids, np.int32)).intervals == state.intervals).all()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUERY)
def test_ngram_cursor(store, query):
    texts, source = documents(store), NgramSource(store)
    ids = store.tokenizer.encode(query).ids
    state = source.root(np.array(ids[:-1], np.int32))
    state = source.advance(state, ids[-1])
    for found in source.orders(state):
        counts, _ = followers(texts, ids[len(ids) - found.match_len :])
        assert found.total <= sum(counts.values())
        if found.match_len == 1:
            assert found.total == sum(counts.values())
        for token, count in zip(found.token_ids.tolist(), found.counts.tolist(), strict=True):
            assert count <= counts[token]
    assert source.successors(state).match_len == len(source.orders(state)) or not source.orders(state)


def test_unknown_text_matches_nothing(store):
    source = CorpusSource(store)
    state = source.root(np.array([250, 251, 99_999], np.int32))
    assert (state.match_len, source.successors(state).total) == (0, 0)
    assert NgramSource(store).successors(np.array([250, 251])).total == 0
