"""What many requests share in one call, against the Python of one request and of the engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.budget import share_out
from retrieve_spec.kernels import many, promise


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 70), st.booleans())
def test_shares_are_those_of_the_engine(seed, rows, measured):
    rng = np.random.default_rng(seed)
    records = np.zeros((rows, many.RECORD), np.int64)
    trees = []
    for record in records:
        n = int(rng.integers(0, 12))
        p = np.cumprod(rng.choice([0.5, 0.9, 0.99], n)) if n else np.empty(0)
        log_p = np.log(p).astype(np.float32)
        record[many.LOG_P : many.SOURCE].view(np.float32)[:n] = log_p
        record[many.DRAFTED] = n
        line = np.arange(-1, n, dtype=np.int32)
        trees.append(DraftTree(line[1:], line[:n], line[1:] + 1, log_p, np.zeros(n, np.uint8), np.zeros(n, np.int64)))
    calls = np.zeros((rows, many.CALL), np.int64)
    calls[:, many.ADDRESS] = [record.__array_interface__["data"][0] for record in records]
    steps = np.concatenate([[rows], rng.choice([0.1, 0.5, 1.0], MAX_NODES)])
    cost = np.cumsum(steps).astype(np.float32) if measured else np.empty(0, np.float32)
    total = sum(map(len, trees))
    wanted = share_out(trees, cost if measured else None, MAX_NODES, np.ones(rows))
    if total and (measured or total > MAX_NODES):
        many.share(calls, cost, total)
    assert records[:, many.DRAFTED].tolist() == [len(tree) for tree in wanted]


def naive_promise(counts):
    """Tokens accepted for each one promised, of a prior and of what was counted."""
    return min(max((counts[0] + promise.DRAFT_PRIOR) / (counts[1] + promise.DRAFT_PRIOR), promise.LEAST), promise.MOST)


def naive_drafted(counts, expected, accepted):
    """Count a draft, then let what is older than the memory fade."""
    counts = counts[0] + accepted, counts[1] + expected / naive_promise(counts)
    return tuple(count * min(promise.DRAFT_MEMORY / counts[1], 1) for count in counts)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.05, 8.0), st.integers(0, 8)), max_size=40))
def test_promises_are_counted(passes):
    calibration, counts = Calibration(), (0.0, 0.0)
    for is_draft, expected, accepted in passes:
        if is_draft:
            counts = naive_drafted(counts, expected, accepted)
            calibration.drafted(expected, accepted, False)
        else:
            p, right = min(expected, 0.9), accepted > 2
            faded = tuple(count * (1 - p / naive_promise(counts) / promise.HOPE_MEMORY) for count in counts)
            counts = naive_drafted(faded, p, right)
            calibration.hoped(p, right, False)
        assert calibration.promise(False) == pytest.approx(naive_promise(counts))
    assert calibration.drafts[0] == pytest.approx(counts) and not calibration.drafts[1].any()
