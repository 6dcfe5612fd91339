"""Suffix arrays, n-gram tables and what a search finds by them, against counting in the text."""

from collections import Counter

import naive_index as naive
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.indexes import build_ngrams
from retrieve_spec.datastore.inspection import search_datastore
from retrieve_spec.datastore.segment import suffix_array
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.kernels.induced_sort import sort_suffixes
from retrieve_spec.kernels.ngram import EXTENT, MAX_ORDER
from retrieve_spec.kernels.suffix_array import sa_longest, sa_narrow, sa_search, sa_successors, sa_top_table

TEXTS = st.lists(st.integers(0, 6), max_size=200).map(lambda tokens: [*tokens, 0])


def index(tokens, dtype=np.uint16, bits=3):
    array = np.array(tokens, dtype)
    sa = suffix_array(array)
    return array, sa, sa_top_table(array, sa, bits)


def fibonacci(length):
    """A text that repeats itself at every scale: names of its borders are sorted in turn, many times over."""
    one, two = [1], [1, 2]
    while len(two) < length:
        one, two = two, two + one
    return two[:length]


REPEATED = st.builds(
    lambda part, times, end: part * times + end,
    st.lists(st.integers(0, 3), max_size=9),
    st.integers(1, 9),
    st.lists(st.integers(0, 3), max_size=4),
)


@given(TEXTS | REPEATED | st.integers(0, 200).map(fibonacci), st.sampled_from([np.uint16, np.uint32, np.int32]))
def test_induced_sort_is_the_order_of_suffixes(tokens, dtype):
    expected = sorted(range(len(tokens)), key=lambda at: tokens[at:])
    assert sort_suffixes(np.array(tokens, dtype), max(tokens, default=0) + 1).tolist() == expected


@given(TEXTS, st.sampled_from([1, 255, 256, 60_000, 70_000, 1_000_000]))
def test_sort_is_the_order_of_tokens_for_every_token_width(tokens, scale):
    scaled = [token * scale // 6 if token else 0 for token in tokens]
    dtype = np.uint16 if max(scaled) < 1 << 16 else np.uint32
    assert suffix_array(np.array(scaled, dtype)).tolist() == naive.suffix_array(scaled)


@given(TEXTS, st.lists(st.integers(0, 7), min_size=1, max_size=8), st.sampled_from([np.uint16, np.uint32]))
def test_search_and_narrow_find_every_match(tokens, pattern, dtype):
    array, sa, top = index(tokens, dtype)
    expected = naive.interval(tokens, sa.tolist(), pattern)
    lo, hi = sa_search(array, sa, top, 3, np.array(pattern), 0, len(pattern))
    assert (lo, hi) == expected if expected else lo == hi

    lo, hi = 0, len(sa)
    for depth, token in enumerate(pattern):
        lo, hi = sa_narrow(array, sa, lo, hi, depth, token)
    assert (lo, hi) == expected if expected else lo == hi


@given(TEXTS, st.lists(st.integers(0, 7), min_size=1, max_size=40), st.sampled_from([1, 5, 12, 64]))
def test_the_longest_end_that_occurs(tokens, followed, longest):
    array, sa, top = index(tokens)
    found = sa_longest(array, sa, top, 3, np.array(followed, np.int32), len(followed), longest)
    assert found == naive.longest(tokens, sa.tolist(), followed, longest)


@given(TEXTS, st.lists(st.integers(1, 6), max_size=3), st.sampled_from([1, 2, 8, 64]))
def test_successors_are_the_block_sample(tokens, pattern, max_reads):
    array, sa, _ = index(tokens)
    found = naive.interval(tokens, sa.tolist(), pattern) if pattern else (0, len(sa))
    if found is None:
        return
    out_tokens, out_counts = np.zeros(max_reads, np.int32), np.zeros(max_reads, np.int64)
    n, total = sa_successors(array, sa, *found, len(pattern), max_reads, out_tokens, out_counts)
    assert total == found[1] - found[0]
    expected = naive.successors(tokens, sa.tolist(), *found, len(pattern), max_reads)
    assert list(zip(out_tokens[:n].tolist(), out_counts[:n].tolist(), strict=True)) == expected


def test_a_damaged_array_reads_nothing_outside_the_text():
    array, sa, top = index([1, 2, 1, 2, 0])
    sa[:] = 2**32 - 1
    assert sa_search(array, sa, top, 3, np.array([1, 2]), 0, 2) in [(0, 0), (0, 4), (4, 4)]
    n, _ = sa_successors(array, sa, 0, 4, 1, 4, np.zeros(4, np.int32), np.zeros(4, np.int64))
    assert n == 0


DOCUMENTS = st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=40), min_size=1, max_size=8)


def build(documents, config=StoreConfig(), stride=1):  # noqa: B008 (frozen)
    tokens = np.array([token for document in documents for token in [*document, 0]], np.uint16)
    to_global = np.arange(10, dtype=np.uint32) * stride
    return build_ngrams(tokens, suffix_array(tokens), to_global, config)


def look_up(table, context):
    found = table.look_up(naive.context_hash(context))
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


QUERY = st.lists(st.sampled_from("the cat sat on mat number is 4zß"), min_size=1, max_size=30).map("".join)


@pytest.fixture
def opened(tokenizer, texts, records, tmp_path):
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
def test_the_longest_end_and_what_followed_it(opened, query):
    ids = opened.tokenizer.encode(query).ids
    longest = next((k for k in range(len(ids), 0, -1) if followers(opened, ids[-k:])[1]), 0)
    counts, total = followers(opened, ids[-longest:]) if longest else (Counter(), 0)
    found = search_datastore(opened, query, limit=1000)
    assert (found.matched, found.count) == (longest, total)
    assert dict(found.continuations) == {opened.tokenizer.decode([token]): n for token, n in counts.items()}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUERY)
def test_ngram_tables_of_a_store_add_up(opened, query):
    ids = opened.tokenizer.encode(query).ids
    for order in range(1, min(len(ids), MAX_ORDER) + 1):
        counts, _ = followers(opened, ids[-order:])
        h = naive.context_hash(ids[-order:])
        known = [found for table in opened.ngrams if (found := table.look_up(h)) is not None]
        total = sum(found[0] for found in known)
        assert total == sum(counts.values()) if order == 1 else total <= sum(counts.values())
        kept = Counter()
        for _, _, tokens, often in known:
            kept.update(dict(zip(tokens.tolist(), often.tolist(), strict=True)))
        assert kept <= counts
