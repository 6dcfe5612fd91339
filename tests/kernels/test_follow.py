"""Following a text through many segments, with gram filters and without, against looking for every suffix."""

import numpy as np
from blend_world import named_all
from doors import ngram, request
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.datastore.indexes import build_grams, suffix_beginnings
from retrieve_spec.datastore.segment import bits_of, suffix_array
from retrieve_spec.kernels import source_table
from retrieve_spec.kernels.ngram import GRAM
from retrieve_spec.kernels.request import MATCH
from retrieve_spec.kernels.suffix_array import sa_top_table
from retrieve_spec.sources.rows import SourceTable, source_row

ALPHABET = 4
DOCUMENTS = st.lists(st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40), min_size=1, max_size=4)
SEGMENTS = st.lists(
    st.tuples(DOCUMENTS, st.integers(1, GRAM + 2), st.booleans(), st.booleans()), min_size=1, max_size=4
)


def index(documents):
    """Local text, ids and suffix array of some documents."""
    to_global = np.array([0, *sorted({token for document in documents for token in document})], np.uint32)
    to_local = np.zeros(ALPHABET, np.int32)
    to_local[to_global[1:]] = np.arange(1, len(to_global))
    text = [part for document in documents for part in (*to_local[document].tolist(), 0)]
    return np.array(text), to_global, to_local


def row_of(documents, least, filtered, wide):
    """Row of a segment; some are of wide ids, some have no filter."""
    text, to_global, to_local = index(documents)
    tokens = text.astype(np.uint32 if wide else np.uint16)
    sa, bits = suffix_array(tokens), bits_of(len(to_global) - 1)
    grams = np.empty(0, np.uint64)
    if filtered:
        grams = build_grams(tokens, to_global, suffix_beginnings(tokens, sa))
    top = sa_top_table(tokens, sa, bits)
    return source_row(
        source_table.KIND_EXACT,
        0,
        "exact",
        tokens=tokens,
        suffixes=sa,
        to_local=to_local,
        to_global=to_global,
        top=top,
        grams=grams,
        length=len(tokens),
        token_bytes=tokens.itemsize,
        num_suffixes=len(sa),
        vocabulary=ALPHABET,
        num_local=len(to_global),
        top_size=len(top),
        top_bits=bits,
        min_depth=least,
        num_grams=len(grams),
    )


def gram(tokens):
    return np.uint64(ngram.newest_gram(np.array(tokens, np.int32)))


def occurrences(documents, part):
    return sum(d[i : i + len(part)] == part for d in documents for i in range(len(d) - len(part) + 1))


@settings(max_examples=150, deadline=None)
@given(SEGMENTS, st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=40), st.lists(st.integers(1, 9)))
def test_every_segment_keeps_its_longest_match(segments, text, steps):
    table = SourceTable([row_of(*segment) for segment in segments])
    cursors = np.zeros((len(segments), source_table.CURSOR), np.int64)
    n = 0
    for fresh in [*steps, MATCH]:
        fresh = min(fresh, len(text) - n)
        n += fresh
        request.follow_all(named_all(table.records), 0, cursors, np.array(text[:n], np.int32), fresh)
        for (documents, least, _, _), (lo, hi, depth, _) in zip(segments, cursors.tolist(), strict=True):
            longest = next((k for k in range(n, least - 1, -1) if occurrences(documents, text[n - k : n])), 0)
            places = occurrences(documents, text[n - longest : n]) if longest else 0
            assert (depth, hi - lo) == (longest, places)


def test_a_filter_leaves_out_nearly_all_other_sequences():
    random = np.random.default_rng(0)
    text = random.integers(1, 1000, 20_001).astype(np.uint16)
    text[-1] = 0
    sa, to_global = suffix_array(text), np.arange(1000, dtype=np.uint32)
    words = build_grams(text, to_global, suffix_beginnings(text, sa))
    others = [gram(random.integers(1, 1000, GRAM)) for _ in range(2000)]
    assert sum(ngram.may_hold(words, h) for h in others) < 2000 * 0.06
    assert words.nbytes < 1.5 * len(text)
