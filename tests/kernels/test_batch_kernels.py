"""What the requests of a batch share, and what drafts teach, against the Python of the engine and by definition."""

import numpy as np
import pytest
from blend_world import named_all
from doors import batch
from doors import calibration as kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.budget import share_out
from retrieve_spec.kernels import request as state
from retrieve_spec.sources.rows import address_of


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 70), st.booleans())
def test_shares_are_those_of_the_engine(seed, rows, measured):
    rng = np.random.default_rng(seed)
    requests = np.zeros(rows, state.REQUEST)
    held = np.zeros((rows, MAX_NODES), np.float32)
    trees = []
    for request, node_p in zip(requests, held, strict=True):
        n = int(rng.integers(0, 12))
        p = np.cumprod(rng.choice([0.5, 0.9, 0.99], n)).astype(np.float32) if n else np.empty(0, np.float32)
        node_p[:n] = p
        request["node_p"], request["num_drafted"] = address_of(node_p), n
        line = np.arange(-1, n, dtype=np.int32)
        zeros = np.zeros(n, np.uint8), np.zeros(n, np.int64)
        trees.append(DraftTree(line[1:], line[:n], line[1:] + 1, np.log(p), *zeros))
    calls = np.zeros(rows, batch.CALL)
    calls["request"] = address_of(requests) + requests.itemsize * np.arange(rows)
    steps = np.concatenate([[rows], rng.choice([0.1, 0.5, 1.0], MAX_NODES)])
    cost = np.cumsum(steps).astype(np.float32) if measured else np.empty(0, np.float32)
    total = sum(map(len, trees))
    wanted = share_out(trees, cost if measured else None, MAX_NODES)
    if total and (measured or total > MAX_NODES):
        batch.share(named_all(calls), cost, total)
    assert requests["num_drafted"].tolist() == [len(tree) for tree in wanted]


PRIOR = kernels.DRAFT_PRIOR


def naive_ratio(counts):
    """Tokens accepted for each one expected, of a prior and of what was counted."""
    ratio = (counts[0] + PRIOR) / (counts[1] + PRIOR)
    return min(max(ratio, kernels.LEAST), kernels.MOST)


def naive_drafted(counts, expected, accepted):
    """Count a draft, then let what is older than the memory fade."""
    counts = counts[0] + accepted, counts[1] + expected / naive_ratio(counts)
    return tuple(count * min(kernels.DRAFT_MEMORY / counts[1], 1) for count in counts)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.05, 8.0), st.integers(0, 8)), max_size=40))
def test_drafts_are_counted(passes):
    calibration, counts = Calibration(), (0.0, 0.0)
    for is_draft, expected, accepted in passes:
        if is_draft:
            counts = naive_drafted(counts, expected, accepted)
            calibration.learn_draft(expected, accepted, False)
        else:
            p, right = min(expected, 0.9), accepted > 2
            faded = tuple(count * (1 - p / naive_ratio(counts) / kernels.FIRST_MEMORY) for count in counts)
            counts = naive_drafted(faded, p, right)
            kernels.learn_first(calibration.drafts[0], p, int(right))
        assert kernels.acceptance_ratio(calibration.drafts[0]) == pytest.approx(naive_ratio(counts))
    assert calibration.drafts[0] == pytest.approx(counts) and not calibration.drafts[1].any()
