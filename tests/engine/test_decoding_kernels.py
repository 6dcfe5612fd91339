"""Every kernel against its obvious twin."""

from typing import Any

import naive_decoding as naive
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.kernels import sampling, topk, treemask
from retrieve_spec.sampling.acceptance import read_logits, read_side_by_side

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=40, deadline=None)


def random_tree(rng: np.random.Generator, n: int) -> tuple[Any, Any, Any]:
    parent = np.array([rng.integers(-1, i) for i in range(n)], np.int32)
    depth = np.zeros(n, np.int32)
    for i in range(n):
        depth[i] = 1 if parent[i] < 0 else depth[parent[i]] + 1
    return parent, depth, rng.integers(0, 5, n).astype(np.int32)


@FEW
@given(SEEDS, st.integers(1, 5), st.sampled_from([1, 3, 127, 128, 129, 300]), st.integers(1, 9))
def test_row_topk_takes_the_largest_and_the_first_of_equals(seed: int, rows: int, vocab: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    k = min(k, vocab)
    logits = rng.integers(-4, 4, (rows, vocab)).astype(np.float32)  # many ties
    if seed % 3 == 0:
        logits[:, rng.random(vocab) < 0.3] = -np.inf
    got = read_logits(torch.from_numpy(logits), k)
    ids, values = naive.row_topk(logits, k)
    np.testing.assert_array_equal(got.top_logits, values)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(got.top_ids[finite], ids[finite])


@FEW
@given(SEEDS, st.integers(1, 300), st.integers(-3, 3))
def test_collect_at_least(seed: int, size: int, floor: int) -> None:
    row = np.random.default_rng(seed).integers(-4, 4, size).astype(np.float32)
    ids = np.empty(size, np.int32)
    count = topk.collect_at_least(row, float(floor), ids)
    assert ids[:count].tolist() == np.flatnonzero(row >= floor).tolist()
    np.testing.assert_array_equal(topk.block_maxima(row), row[: size // 128 * 128].reshape(-1, 128).max(axis=1))


@FEW
@given(SEEDS, st.integers(0, 12), st.integers(1, 4), st.integers(0, 20), st.integers(0, 7), st.integers(0, 7))
def test_tree_mask(seed: int, n: int, roots: int, past: int, window: int, chunk: int) -> None:
    rng = np.random.default_rng(seed)
    parent, depth, _ = random_tree(rng, n)
    left = int(rng.integers(0, 3)) if past > 3 else 0
    padded = np.arange(past) < left
    offset = max(0, past - window + 1) if window else 0
    kv = past - offset + roots + n
    mask = np.empty((roots + n, kv), bool)
    treemask.fill_tree_mask(mask, parent, depth, roots, past, offset, window, chunk, left, padded)
    wanted = naive.tree_mask(parent, depth, roots, past, offset, kv, window, chunk, left, padded)
    np.testing.assert_array_equal(mask, wanted)


@FEW
@given(SEEDS, st.integers(0, 20), st.integers(-1, 10), st.integers(0, 4))
def test_find_child(seed: int, n: int, node: int, token: int) -> None:
    parent, _, token_ids = random_tree(np.random.default_rng(seed), n)
    assert treemask.find_child(parent, token_ids, node, token) == naive.find_child(parent, token_ids, node, token)


RULES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 5, 1.0, 0.0),
    (0.8, 20, 0.8, 0.05),
    (1.0, 0, 1.0, 0.1),
    (0.5, 3, 0.5, 0.2),
    (0.7, 0, 1.0, 1.0),
]


@FEW
@given(SEEDS, st.sampled_from(RULES), st.sampled_from([4, 50, 400, 3000]))
def test_truncation_is_that_of_the_warpers(seed: int, rules: tuple[float, int, float, float], vocab: int) -> None:
    row = (np.random.default_rng(seed).standard_normal(vocab) * 2).astype(np.float32)
    if rules[2] == 1.0 and seed % 2:
        row = row.round()  # of equal scores top-k keeps all
    ids, scores = np.empty(vocab, np.int32), np.empty(vocab, np.float64)
    count = sampling.truncate_row(row, *rules, ids, scores)
    wanted = naive.processed(row, *rules)
    assert sorted(ids[:count].tolist()) == np.flatnonzero(np.isfinite(wanted)).tolist()
    np.testing.assert_allclose(scores[:count], wanted[ids[:count]], rtol=1e-6)


@FEW
@given(SEEDS, st.integers(2, 400), st.tuples(st.integers(0, 9), st.integers(0, 10_000)), st.floats(0.3, 2.0),
       st.sampled_from([-np.inf, np.nan]))  # fmt: skip
def test_gumbel_argmax(seed: int, vocab: int, at: tuple[int, int], temperature: float, never: float) -> None:
    """The noise of each token is that of the seed, the row and the position."""
    row = (np.random.default_rng(seed).standard_normal(vocab) * 4).astype(np.float32)
    row[0] = never
    scores = {i: float(np.float64(row[i] / np.float32(temperature))) for i in range(1, vocab)}
    wanted = naive.gumbel_argmax(scores, seed, *at)
    assert sampling.gumbel_argmax_row(row, temperature, seed, *at) == wanted
    ids = np.arange(1, vocab, dtype=np.int32)
    listed = np.array([scores[i] for i in ids.tolist()])
    assert sampling.gumbel_argmax(ids, listed, vocab - 1, seed, *at) == wanted


@FEW
@given(SEEDS, st.integers(1, 400), st.lists(st.sampled_from([np.nan, np.inf, -np.inf, 1.0]), max_size=3))
def test_rows_that_are_no_distribution_are_not_drawn_from(seed: int, vocab: int, odd: list[float]) -> None:
    random = np.random.default_rng(seed)
    row = random.standard_normal(vocab).astype(np.float32)
    for value in odd:
        row[random.integers(vocab)] = value
    wanted = sampling.gumbel_argmax_row(row, 0.7, seed, 0, 3) if np.isfinite(row.max()) else -1
    assert sampling.draw_row(row, 0.7, seed, 0, 3) == wanted
    ids, scores = np.empty(vocab, np.int32), np.empty(vocab, np.float64)
    for rules in RULES:
        assert (sampling.truncate_row(row, *rules, ids, scores) > 0) == (wanted >= 0)


def test_infinite_logits_are_refused_where_others_become_infinite():
    """Divided by so small a temperature 1e30 is infinite, too, and stands first."""
    assert sampling.draw_row(np.array([1e30, np.inf], np.float32), 1e-9, 0, 0, 0) == -1


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), vocab=st.sampled_from([3, 40, 700]),
    top_k=st.integers(0, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 2**31),
    layout=st.sampled_from(["side by side", "gaps", "backwards", "apart", "every other", "columns"]), nan=st.booleans(),
)  # fmt: skip
def test_every_text_sees_its_own_rows(
    sizes: list[int], vocab: int, top_k: int, dtype: torch.dtype, seed: int, layout: str, nan: bool
) -> None:
    ends = np.cumsum(sizes).tolist()
    spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal((ends[-1], vocab))).to(dtype)
    if nan:
        logits[seed % ends[-1], seed % vocab] = torch.nan
    if layout == "every other":
        logits = torch.stack([logits, logits + 1], 1).flatten(0, 1)[::2]
    if layout == "columns":
        logits = logits.T.contiguous().T
    parts = [logits[span] for span in spans]
    if layout == "gaps":
        parts = parts[::2]
    if layout == "backwards":
        parts = parts[::-1]
    if layout == "apart":
        parts = [part.clone() for part in parts]
    for part, got in zip(parts, read_side_by_side(parts, top_k), strict=True):
        expected = read_logits(part, top_k)
        np.testing.assert_array_equal(got.top_ids, expected.top_ids)
        np.testing.assert_array_equal(got.top_logits, expected.top_logits)
        for i in range(len(part)):
            np.testing.assert_array_equal(got.row(i), expected.row(i))
        assert got.logits is part
