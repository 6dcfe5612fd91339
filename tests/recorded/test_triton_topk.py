"""The Triton kernels that find the most probable tokens, run by Triton's interpreter on the CPU, and compiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import COMPILER, Interpret, compiled_by

pytest.importorskip("triton")

EXACT = """
import itertools
import numpy as np, torch
from retrieve_spec.kernels.triton_topk import pack_largest

rng, cases = np.random.default_rng(0), 0
dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))  # each k meets every one
for vocab in (3, 64, 2047, 2048, 2049, 5000):
    for k in (1, 3, 8, 20):
        if k > vocab:
            continue
        dtype = next(dtypes)
        logits = torch.from_numpy(rng.standard_normal((5, vocab)).astype(np.float32)).to(dtype)
        logits[0, ::2] = -torch.inf
        logits[1] = 0.0
        logits[1, ::2] = -0.0  # which is no less
        logits[2, [1, 2]] = torch.nan  # the first one is the argmax of torch
        logits[3, -1] = torch.inf
        given = torch.cat([logits, logits], 1)[:, :vocab]  # rows of a wider buffer
        chosen = torch.tensor([5, -1, 0, 2, 1]) if k == 3 else None
        packed = pack_largest(given, k, chosen).numpy()
        wide = logits.float().numpy()
        ids = np.argsort(-np.where(np.isnan(wide), np.inf, wide), axis=1, kind="stable")[:, :k]
        assert packed[:, 1 : k + 1].tolist() == ids.tolist()
        assert packed[:, 0].tolist() == logits.argmax(-1).tolist()
        assert packed[:, -1].tolist() == (packed[:, 0] if chosen is None else chosen).tolist()
        values = packed[:, k + 1 : 2 * k + 1].copy().view(np.float32)
        assert np.array_equal(values, np.take_along_axis(wide, ids, 1), equal_nan=True)
        cases += 1
print("exact", cases)
"""

COMPILED = """
from retrieve_spec.kernels import triton_topk as kernels

for architecture, dtype in ((80, "fp32"), (90, "bf16")):
    types = {"scores": "*" + dtype, "orders": "*i64", "chosen": "*i64", "packed": "*i32"}
    compiled(kernels._largest_of_blocks, types, {"K": 8, "BLOCK": kernels._BLOCK}, architecture, 4)
    for count, warps in ((64, 1), (512, 2), (2048, 8)):
        compiled(kernels._largest_of_rows, types, {"K": 8, "COUNT": count, "CHOSEN": True}, architecture, warps)
print("compiled")
"""


def test_tokens_are_those_of_a_sort(interpret: Interpret) -> None:
    """Ties, masks, NaN, vocabularies that are no multiple of a block, rows of a wider buffer."""
    assert interpret(EXACT) == "exact 22"


def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    """By Triton's compiler and assembler, which need no GPU."""
    assert compiled_by(COMPILER + COMPILED, tmp_path) == "compiled"
