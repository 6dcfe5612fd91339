"""Retrieved spans as a trie: against the spans themselves, token by token."""

import numpy as np
import pytest
from doors import learn, levels
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.kernels import source_table, trie
from retrieve_spec.sources.rows import source_row

WIDTH = 5
spans_of = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH), st.floats(-1, 1, width=32)),
    min_size=1,
    max_size=9,
)


def table_of(found):
    """The spans as the kernels hold them, sorted, with room for one more; similarities and weights."""
    k = len(found) + 1
    spans = np.full((k, WIDTH), trie.END, np.int32)
    similarity, weight, origins = np.zeros(k, np.float32), np.zeros(k, np.float32), np.arange(k, dtype=np.int64)
    for i, (span, s) in enumerate(found):
        spans[i, : len(span)] = span
        similarity[i] = s
    trie.sort_spans(spans, similarity, origins, len(found))
    trie.weigh(similarity, len(found), 0.1, weight)
    return spans, similarity, weight, origins


def row_of(spans, similarity, weight):
    arrays = {
        source_table.DENSE_SPANS: spans,
        source_table.DENSE_SIMILARITY: similarity,
        source_table.DENSE_WEIGHTS: weight,
    }
    sizes = {source_table.DENSE_NUM_SPANS: spans.shape[0], source_table.DENSE_WIDTH: spans.shape[1]}
    return source_row(source_table.DENSE, 6, arrays, sizes).words[None]


@settings(deadline=None)
@given(spans_of)
def test_spans_are_sorted_and_keep_what_belongs_to_them(found):
    spans, similarity, _, origins = table_of(found)
    n = len(found)
    wanted = sorted(range(n), key=lambda i: (found[i][0], -found[i][1]))
    rows = [[t for t in row.tolist() if t != trie.END] for row in spans[:n]]
    assert rows == [found[i][0] for i in wanted]
    assert [found[i] for i in origins[:n].tolist()] == [
        (row, s) for row, s in zip(rows, similarity[:n].tolist(), strict=True)
    ]
    assert origins[n] == n, "rows behind the last are left alone"


@settings(deadline=None)
@given(spans_of, st.lists(st.integers(0, 4), max_size=WIDTH + 1))
def test_nodes_are_what_the_spans_say(found, path):
    """Every node on a path: what follows, how often, with which share; off the trie there is nothing."""
    spans, similarity, weight, _ = table_of(found)
    table = row_of(spans, similarity, weight)
    cursors = np.zeros((1, source_table.CURSOR), np.int64)
    cursors[0] = 0, len(found), 0, trie.dense_length(similarity, spans, 0, len(found), 0)
    top = max(s for _, s in found)
    hashes = np.zeros((2, source_table.TAIL), np.uint64)
    for depth in range(len(path) + 1):
        through = [(span, s) for span, s in found if span[:depth] == path[:depth] and len(span) >= depth]
        on = [(span[depth], s) for span, s in through if len(span) > depth]
        handle, length = levels.open_row(table, 0, cursors, 0, hashes, 0, 1)
        if not on:
            assert length == -1
        else:
            near = max(s for _, s in on)
            assert length == max(int(-np.log2(max(1 - near, 2**-7))), 0) + depth - 1
            count, distinct = levels.evidence(table, 0, cursors, 0, handle, 1)
            assert (count, distinct) == (len(on), len({t for t, _ in on}))
            weights = {t: sum(np.exp((s - top) / 0.1) for u, s in on if u == t) for t, _ in on}
            total = sum(weights.values())
            tokens, counts = np.empty(source_table.READ_LIMIT, np.int32), np.empty(source_table.READ_LIMIT, np.int32)
            p = np.empty(source_table.READ_LIMIT, np.float32)
            n = levels.read_level(table, 0, cursors, 0, handle, count, 0.0, 0.0, tokens, counts, p, 1)
            assert tokens[:n].tolist() == sorted(weights)
            if total > 1e-30:  # single precision holds no smaller weights
                assert p[:n].tolist() == pytest.approx(
                    [weights[t] / total for t in sorted(weights)], rel=1e-3, abs=1e-6
                )
                for token in range(5):
                    share, recent = learn._share_of(table, 0, cursors, 0, handle, count, token, 1)
                    assert recent == 0
                    assert share == pytest.approx(weights.get(token, 0.0) / total, rel=1e-3)
        if depth < len(path):
            levels.advance_row(table, 0, cursors, 0, path[depth], cursors, 0, 1)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=8), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(-1, 40), st.floats(0, 1, width=32)), max_size=12),
    st.integers(10, 14),
)
def test_gathering_reads_what_follows_in_the_document(documents, places, anchor):
    tokens = np.array([t for document in documents for t in (*document, 0)], np.uint16)
    to_global = np.array([0, 10, 11, 12, 13], np.uint32)
    positions, similarity = np.array([p for p, _ in places], np.int64), np.array([s for _, s in places], np.float32)
    spans = np.full((8, WIDTH), 99, np.int32)
    kept, origins = np.zeros(8, np.float32), np.zeros(8, np.int64)
    n = trie.gather(tokens, to_global, positions, similarity, anchor, 1 << 40, spans, kept, origins, 0)
    wanted = []
    for position, s in places:
        run = []
        for token in tokens[position + 1 : position + 1 + WIDTH].tolist():
            if token == 0:
                break
            run.append(token + 9)
        if position >= 0 and run[:1] == [anchor]:
            wanted.append((run, s, (1 << 40) + position + 1))
    rows = [[t for t in row.tolist() if t != trie.END] for row in spans[:n]]
    assert list(zip(rows, kept[:n].tolist(), origins[:n].tolist(), strict=True)) == wanted[:8]
