from __future__ import annotations

import naive_index as naive
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.indexes import build_ngrams
from retrieve_spec.datastore.segment import suffix_array
from retrieve_spec.kernels.ngram import EXTENT, ngram_hash

DOCUMENTS = st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=40), min_size=1, max_size=8)


def build(documents, config=StoreConfig(), stride=1):  # noqa: B008 (frozen)
    tokens = np.array([token for document in documents for token in [*document, 0]], np.uint16)
    to_global = np.arange(10, dtype=np.uint32) * stride
    return build_ngrams(tokens, suffix_array(tokens), to_global, config)


def look_up(table, context):
    h = np.uint64(0)
    for token in reversed(context):
        h = np.uint64(ngram_hash(h, token))
    found = table.look_up(h)
    if found is None:
        return None
    total, distinct, tokens, counts = found
    return total, distinct, list(zip(tokens.tolist(), counts.tolist(), strict=True))


@settings(max_examples=50)
@given(DOCUMENTS, st.sampled_from([1, 10_000]), st.integers(1, 5), st.integers(1, 4))
def test_table_holds_the_counts(documents, stride, orders, top):
    table = build(documents, StoreConfig(ngram_orders=orders, ngram_successors=top), stride)
    expected = naive.contexts([[token * stride for token in document] for document in documents], orders)
    kept = 0
    for context, counts in expected.items():
        total = sum(counts.values())
        found = look_up(table, context)
        if len(context) > 1 and total < 2:
            assert found is None
            continue
        kept += 1
        best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:top]
        assert found == (total, len(counts), best)
    assert table.contexts == kept
    assert len(table.succ_tokens) == int((table.slots[:, EXTENT] >> 16).sum())


def test_pruning_keeps_order_one_and_the_most_frequent():
    rng = np.random.default_rng(3)
    documents = [rng.zipf(1.5, 4000).clip(1, 9).tolist() for _ in range(3)]
    whole = build(documents)
    share = 0.05
    small = build(documents, StoreConfig(ngram_share=share, ngram_floor=0))
    exact = sum(len(document) + 1 for document in documents) * 2 + sum(map(len, documents)) * 4
    assert small.contexts < whole.contexts
    arrays = (small.slots, small.succ_tokens, small.succ_counts)
    assert sum(array.nbytes for array in arrays) <= share * exact
    expected = naive.contexts(documents, 5)
    missing = [sum(counts.values()) for c, counts in expected.items() if look_up(small, c) is None]
    present = [sum(counts.values()) for c, counts in expected.items() if len(c) > 1 and look_up(small, c)]
    assert min(present) > max(missing)
    assert all(look_up(small, c) for c in expected if len(c) == 1)
