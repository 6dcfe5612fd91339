"""Retrieved spans as a trie: against the spans themselves, token by token."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from blend_world import named
from doors import learn, levels
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.kernels import source_table, trie
from retrieve_spec.kernels.source_table import ORIGIN_BITS
from retrieve_spec.sources.dense import DenseIndexes, DenseSource
from retrieve_spec.sources.rows import source_row

WIDTH = 5
spans_of = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH), st.floats(-1, 1, width=32)),
    min_size=1,
    max_size=9,
)


def table_of(found):
    """The spans as the kernels hold them, sorted, with room for one more; similarities and weights."""
    found = sorted(found, key=lambda pair: (pair[0], -pair[1]))
    k = len(found) + 1
    spans = np.full((k, WIDTH), trie.END, np.int32)
    for row, (span, _) in zip(spans, found, strict=False):
        row[: len(span)] = span
    similarity = np.array([*(s for _, s in found), 0], np.float32)
    return spans, similarity, np.exp((similarity - similarity[:-1].max()) / 0.1)


def row_of(spans, similarity, weight):
    num_spans, width = spans.shape
    arrays = {"spans": spans, "similarity": similarity, "weights": weight}
    return source_row(source_table.KIND_DENSE, 6, "dense", **arrays, num_spans=num_spans, width=width)


@settings(deadline=None)
@given(spans_of, st.lists(st.integers(0, 4), max_size=WIDTH + 1))
def test_nodes_are_what_the_spans_say(found, path):
    """Every node on a path: what follows, how often, with which share; off the trie there is nothing."""
    spans, similarity, weight = table_of(found)
    source = named(row_of(spans, similarity, weight).record)
    cursors = np.zeros((1, source_table.CURSOR), np.int64)
    cursors[0] = 0, len(found), 0, trie.dense_length(similarity, spans, 0, len(found), 0)
    top = max(s for _, s in found)
    hashes = np.zeros((2, source_table.TAIL), np.uint64)
    for depth in range(len(path) + 1):
        through = [(span, s) for span, s in found if span[:depth] == path[:depth] and len(span) >= depth]
        on = [(span[depth], s) for span, s in through if len(span) > depth]
        handle, length = levels.open_row(source, cursors, 0, hashes, 0, 1)
        if not on:
            assert length == -1
        else:
            near = max(s for _, s in on)
            assert length == max(int(-np.log2(max(1 - near, 2**-7))), 0) + depth - 1
            count, distinct = levels.evidence(source, cursors, 0, handle, 1)
            assert (count, distinct) == (len(on), len({t for t, _ in on}))
            weights = {t: sum(np.exp((s - top) / 0.1) for u, s in on if u == t) for t, _ in on}
            total = sum(weights.values())
            tokens, counts = np.empty(source_table.READ_LIMIT, np.int32), np.empty(source_table.READ_LIMIT, np.int32)
            p = np.empty(source_table.READ_LIMIT, np.float32)
            n = levels.read_level(source, cursors, 0, handle, count, 0.0, 0.0, tokens, counts, p, 1)
            assert tokens[:n].tolist() == sorted(weights)
            if total > 1e-30:  # single precision holds no smaller weights
                assert p[:n].tolist() == pytest.approx(
                    [weights[t] / total for t in sorted(weights)], rel=1e-3, abs=1e-6
                )
                for token in range(5):
                    share, recent = learn._share_of(source, cursors, 0, handle, count, token, 1)
                    assert recent == 0
                    assert share == pytest.approx(weights.get(token, 0.0) / total, rel=1e-3)
        if depth < len(path):
            levels.advance_row(source, cursors, 0, path[depth], cursors, 0, 1)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=40), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(-1, 60), st.sampled_from([0.2, 0.5, 1.0])), max_size=12, unique=True),
    st.integers(10, 14),
)
def test_spans_are_what_follows_the_neighbours_in_their_documents_sorted(documents, places, anchor):
    tokens = np.array([t for document in documents for t in (*document, 0)], np.uint16)
    segment = SimpleNamespace(tokens=tokens, to_global=np.array([0, 10, 11, 12, 13], np.uint32))
    places = [(min(position, len(tokens) - 1), s) for position, s in places]
    found = np.array([[s for _, s in places]], np.float32), np.array([[p for p, _ in places]], np.int64)
    index = SimpleNamespace(layer="last", search=lambda hidden, k: found)
    stores = [SimpleNamespace(segments=[segment, segment], dense=[(1, index)])]
    source = DenseSource(DenseIndexes(stores))
    source.search(np.zeros(4, np.float32), anchor)
    wanted = []
    for position, s in sorted(places, key=lambda place: (-place[1], place[0])):
        run = list(itertools.takewhile(bool, tokens[position + 1 : position + 1 + source.spans.shape[1]].tolist()))
        if position >= 0 and run and run[0] + 9 == anchor:
            wanted.append(([token + 9 for token in run], np.float32(s), (1 << ORIGIN_BITS) + position + 1))
    wanted.sort(key=lambda span: (span[0], -span[1]))
    n = source.count
    rows = [[t for t in row.tolist() if t != trie.END] for row in source.spans[:n]]
    assert list(zip(rows, source.similarity[:n].tolist(), source.origins[:n].tolist(), strict=True)) == wanted
    top = max((s for _, s, _ in wanted), default=0)
    assert source.weight[:n].tolist() == pytest.approx([np.exp((s - top) / 0.1) for _, s, _ in wanted])
