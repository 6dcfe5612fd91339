"""The longest match of a text, what followed it, and the n-gram tables, against counting in the text."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.inspection import search_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.kernels.ngram import MAX_ORDER, ngram_hash

QUERY = st.lists(st.sampled_from("the cat sat on mat number is 4zß"), min_size=1, max_size=30).map("".join)


@pytest.fixture
def store(tokenizer, texts, records, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer, config=StoreConfig(segment_tokens=100))
    add_documents(tmp_path / "s", Source(str(records), field="output"))
    return open_datastore(tmp_path / "s")


def followers(store, context):
    """Next-token counts and occurrences of a context."""
    counts, total = Counter(), 0
    for segment in store.segments:
        for number in range(len(segment.documents)):
            text = segment.text_ids(number).tolist()
            for i in range(len(text) - len(context) + 1):
                if text[i : i + len(context)] == context:
                    total += 1
                    counts.update(text[i + len(context) : i + len(context) + 1])
    return counts, total


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUERY)
def test_the_longest_end_and_what_followed_it(store, query):
    ids = store.tokenizer.encode(query).ids
    longest = next((k for k in range(len(ids), 0, -1) if followers(store, ids[-k:])[1]), 0)
    counts, total = followers(store, ids[-longest:]) if longest else (Counter(), 0)
    found = search_datastore(store, query, limit=1000)
    assert (found.matched, found.count) == (longest, total)
    assert dict(found.continuations) == {store.tokenizer.decode([token]): n for token, n in counts.items()}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUERY)
def test_ngram_tables_of_a_store_add_up(store, query):
    ids, h = store.tokenizer.encode(query).ids, np.uint64(0)
    for order, token in enumerate(ids[: -MAX_ORDER - 1 : -1], 1):
        h = np.uint64(ngram_hash(h, token))
        counts, _ = followers(store, ids[-order:])
        known = [found for table in store.ngrams if (found := table.look_up(h)) is not None]
        total = sum(found[0] for found in known)
        assert total == sum(counts.values()) if order == 1 else total <= sum(counts.values())
        kept = Counter()
        for _, _, tokens, often in known:
            kept.update(dict(zip(tokens.tolist(), often.tolist(), strict=True)))
        assert kept <= counts
