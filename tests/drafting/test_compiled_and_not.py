"""Drafts are the same with kernels compiled and not, and with a filter before many segments and without."""

import json
import os
import subprocess
import sys

import drafted_streams
import numba
import numpy as np
import pytest

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import store as store_module
from retrieve_spec.datastore.indexes import ContextFilter
from retrieve_spec.kernels.ngram import MAX_ORDER, longest_marked, ngram_find, ngram_hash

compiled = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="compared where the compiler is on")


@compiled
def test_compiled_and_plain_python_draft_alike(make_store):
    seed = 0
    rng = np.random.default_rng(seed)
    store = make_store([rng.integers(0, 9, 80).tolist() for _ in range(4)])
    plain = subprocess.run(
        [sys.executable, "-W", "ignore", drafted_streams.__file__, str(seed), str(store.path)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    here, there = drafted_streams.drafted(seed, str(store.path)), json.loads(plain.stdout)
    assert len(here) == len(there) > 100
    assert sum(len(tree["parent"]) for tree in here) > 500
    for a, b in zip(here, there, strict=True):
        for name in ("token_ids", "parent", "source"):
            assert a[name] == b[name]
        np.testing.assert_allclose(a["log_p"], b["log_p"], rtol=1e-4, atol=1e-5)


SEGMENTS = 70
"""More than a word of the filter has bits."""


@pytest.fixture(scope="module")
def many(make_store):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 3 + i % 6, 59).tolist() for i in range(SEGMENTS)]
    store = make_store(documents, StoreConfig(segment_tokens=60))
    assert len(store.segments) >= SEGMENTS
    return store


def hashes_of(context):
    """Hashes of the contexts of 1, 2, … tokens before a place, as the kernels keep them."""
    h, found = np.uint64(0), np.zeros((2, MAX_ORDER), np.uint64)
    for i, token in enumerate(context):
        h = np.uint64(ngram_hash(h, token))
        found[0, i] = h
    return found


def test_no_context_that_a_table_holds_is_passed_over(many):
    rng = np.random.default_rng(1)
    marks, columns = many.contexts.marks, many.contexts.columns
    assert sorted(columns) == list(range(len(many.segments))) and marks.shape[1] == 2
    spared = 0
    for _ in range(200):
        hashes = hashes_of(rng.integers(0, 9, MAX_ORDER))
        for segment, column in zip(many.segments, columns, strict=True):
            found = [o for o in range(1, MAX_ORDER + 1) if ngram_find(segment.ngram.slots, hashes[0, o - 1]) >= 0]
            bound = longest_marked(marks.ctypes.data, *marks.shape, column, hashes, MAX_ORDER)
            assert bound >= max(found, default=0)
            spared += MAX_ORDER - bound
    assert spared > 200 * SEGMENTS  # more than one search in five


@compiled
@pytest.mark.parametrize("seed", range(3))
def test_drafts_are_those_without_the_filter(many, monkeypatch, seed):
    there = drafted_streams.drafted(seed, str(many.path))
    off = ContextFilter(np.zeros((0, 0), np.uint64), (-1,) * len(many.segments))
    monkeypatch.setattr(store_module, "filter_contexts", lambda tables: off)
    assert drafted_streams.drafted(seed, str(many.path)) == there
    assert any(tree["token_ids"] for tree in there)
