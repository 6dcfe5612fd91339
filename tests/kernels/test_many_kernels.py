"""What many requests share in one call, against the Python of one request and of the engine."""

from __future__ import annotations

from array import array

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


@given(st.lists(st.tuples(st.booleans(), st.floats(0.05, 8.0), st.integers(0, 8)), max_size=40))
def test_promises_are_those_of_a_calibration(passes):
    calibration, counts = Calibration(), array("d", (0.0, 0.0))
    view = np.frombuffer(counts)
    for is_draft, expected, accepted in passes:
        if is_draft:
            calibration.drafted(expected, accepted, False)
            promise.drafted(view, expected, accepted)
        else:
            calibration.hoped(min(expected, 0.9), accepted > 2, False)
            promise.hoped(view, min(expected, 0.9), int(accepted > 2))
        assert promise.promise(view) == pytest.approx(calibration.promise(False))
    assert list(counts) == pytest.approx(list(calibration.drafts[False]))
