"""Windows and FAISS indexes, apart from models."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.datastore import dense
from retrieve_spec.datastore.dense import build_index, nearest, open_index
from retrieve_spec.datastore.dense_build import (
    choose_windows,
    fit_transform,
    windows_of,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(lengths=LENGTHS, size=st.integers(2, 20), data=st.data())
def test_windows_cover_every_position_once_with_context(lengths, size, data):
    overlap = data.draw(st.integers(0, size // 2))
    removed = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    starts = np.cumsum([0, *(n + 1 for n in lengths)]).astype(np.uint32)
    windows = windows_of(starts, sorted(removed), size, overlap)
    covered = np.zeros(int(starts[-1]), np.int64)
    for start, stop, first, end in windows.tolist():
        document = int(np.searchsorted(starts, start, side="right")) - 1
        assert starts[document] <= start <= first < end <= stop <= starts[document + 1] - 1
        assert stop - start <= size
        assert first - start >= overlap or start == starts[document]
        covered[first:end] += 1
    expected = np.zeros_like(covered)
    for number, length in enumerate(lengths):
        if number not in removed:
            expected[starts[number] : starts[number] + length - 1] = 1
    assert np.array_equal(covered, expected)


@given(lengths=LENGTHS, most=st.integers(0, 60))
def test_chosen_positions_are_those_of_windows_up_to_a_limit(lengths, most):
    starts = np.cumsum([0, *(n + 1 for n in lengths)]).astype(np.uint32)
    windows = windows_of(starts, (), 7, 2)
    chosen, taken = choose_windows(windows, int(starts[-1]), most)
    possible = np.zeros(len(taken), np.bool_)
    for _, _, first, end in windows.tolist():
        possible[first:end] = True
    assert not (taken & ~possible).any()
    assert taken.sum() == min(most or possible.sum(), possible.sum())
    assert {tuple(w) for w in chosen.tolist()} <= {tuple(w) for w in windows.tolist()}


def test_transform_is_standardised_principal_components():
    random = np.random.default_rng(0)
    states = (random.normal(size=(500, 6)) @ random.normal(size=(6, 6)) * [1, 5, 1, 1, 9, 1] + 100).astype(np.float32)
    states[:, 3] = 7  # never varies
    transform = fit_transform(iter(np.split(states, 5)), 6, 3)
    assert np.allclose(transform.mean, states.mean(0), atol=1e-3)
    assert np.allclose(transform.components.T @ transform.components, np.eye(3), atol=1e-5)
    scores = (states - states.mean(0)) / np.where(states.std(0) > 1e-6, states.std(0), 1)
    _, _, axes = np.linalg.svd(scores, full_matrices=False)
    assert np.allclose(np.abs(np.sum(axes[:3].T * transform.components, 0)), 1, atol=1e-3)
    keys = transform(states)
    expected = scores @ transform.components
    assert np.allclose(keys, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-3)


@pytest.fixture(scope="module")
def keys():
    """Keys in clusters, as those of hidden states are."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(80, 32))
    found = (centres[random.integers(0, 80, 4000)] + 0.4 * random.normal(size=(4000, 32))).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.parametrize(("flat_below", "least"), [(1 << 20, 1.0), (4000, 0.85)])
def test_indexes_find_what_exact_search_finds(keys, flat_below, least, monkeypatch, capfd):
    import faiss

    monkeypatch.setattr(dense, "FLAT_BELOW", flat_below)
    index = build_index(keys)
    assert capfd.readouterr() == ("", "")  # FAISS prints of few keys to train with
    assert isinstance(index, faiss.IndexFlat) or index.code_size + index.refine_pq.code_size <= 40
    opened = open_index(faiss.serialize_index(index))
    similarity, found = nearest(opened, keys[:50], 10)
    assert similarity.shape == found.shape == (50, 10)
    assert (found[:, 0] == np.arange(50)).mean() > 0.9
    best = np.argsort(-keys[:50] @ keys.T, axis=1)[:, :10]
    assert np.mean([len(np.intersect1d(*rows)) / 10 for rows in zip(best, found, strict=True)]) >= least
    exact = np.einsum("qkd,qd->qk", keys[found], keys[:50])
    assert np.abs(exact - similarity).max() < 0.1
    assert (np.diff(similarity, axis=1) <= 1e-6).all()
