"""Attention of single rows: what a softmax over all that a text sees gives, and rows written where they belong."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.kernels import single_rows
from retrieve_spec.kernels.single_rows import attend_single_rows


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    held=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    softcap=st.sampled_from([0.0, 3.0]),
    window=st.sampled_from([0, 1, 5, 100]),
    common=st.integers(0, 30),
    threads=st.booleans(),
)
def test_rows_attend_to_what_they_hold(
    seed: int,
    kv_heads: int,
    groups: int,
    widths: tuple[int, int],
    held: list[int],
    softcap: float,
    window: int,
    common: int,
    threads: bool,
) -> None:
    """The naive twin, in one thread and in several; all other rows of the pass and of caches stay as they were.

    Most texts begin with the same rows; what their own slabs hold in these places is not looked at.
    """
    draw = np.random.default_rng(seed)
    d, dv = widths
    heads, texts, all_rows = kv_heads * groups, len(held), 2 * len(held) + 1
    slabs = [tuple(draw.standard_normal((kv_heads, n + 3, w), np.float32) for w in widths) for n in held]
    shared = tuple(draw.standard_normal((kv_heads, common, w), np.float32) for w in widths)
    before = [tuple(part.copy() for part in slab) for slab in slabs]
    query = draw.standard_normal((heads, all_rows, d), np.float32)
    keys = draw.standard_normal((kv_heads, all_rows, d), np.float32)
    values = draw.standard_normal((kv_heads, all_rows, dv), np.float32)
    rows = draw.permutation(all_rows)[:texts].astype(np.int64)
    places = np.array([[*(p.ctypes.data for p in slab), n + 3, n] for slab, n in zip(slabs, held, strict=True)])
    out = np.full((all_rows, heads, dv), 7.0, np.float32)
    begins = [common if n >= common and i % 3 else 0 for i, n in enumerate(held)]
    prefixes = np.array([[*(p.ctypes.data for p in shared), n] for n in begins])
    with mock.patch.object(single_rows, "_ALONE", 0 if threads else 1 << 62):
        attend_single_rows(query, keys, values, rows, places, prefixes, 0.6, softcap, window, out)
    for (own_keys, own_values), (old_keys, old_values), n, m, row in zip(
        slabs, before, held, begins, rows, strict=True
    ):
        old_keys[:, n], old_values[:, n] = keys[:, row], values[:, row]
        np.testing.assert_array_equal(own_keys, old_keys)
        np.testing.assert_array_equal(own_values, old_values)
        old_keys[:, :m], old_values[:, :m] = (part[:, :m] for part in shared)
        first = max(n + 1 - window, 0) if window else 0
        for head in range(heads):
            score = 0.6 * (old_keys[head // groups, first : n + 1].astype(np.float64) @ query[head, row])
            score = softcap * np.tanh(score / softcap) if softcap else score
            share = np.exp(score - score.max())
            wanted = share / share.sum() @ old_values[head // groups, first : n + 1]
            np.testing.assert_allclose(out[row, head], wanted, atol=2e-6, rtol=2e-5)
    others = np.setdiff1d(np.arange(all_rows), rows)
    assert (out[others] == 7.0).all()
