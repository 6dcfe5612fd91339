"""Logits of several texts that one pass left side by side are read at once, and each text sees its own."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieve_spec.sampling.pass_logits import read_logits, read_side_by_side


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
