"""The Triton kernel, run by Triton's interpreter on the CPU, against the torch backend."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import itertools
import numpy as np, torch
from retrieve_spec.decoding.tree_attention import LayerRule, PassMask, attend_split, attend_triton, row_depths, visible_rows
from retrieve_spec.drafting.tree import DraftTree

torch.manual_seed(0)
tree = DraftTree.from_paths([[1, 2, 3], [1, 4], [5, 6, 7, 8], [9]])
wide = DraftTree.from_paths([[i, i + 1] for i in range(0, 80, 2)])
cases = [
    (None, 37, 2, 3, 64, LayerRule(0.125), 1),
    (tree, 100, 2, 3, 64, LayerRule(0.125), 1),
    (tree, 100, 2, 1, 40, LayerRule(0.2), 3),
    (tree, 0, 1, 4, 16, LayerRule(0.2), 1),
    (tree, 130, 2, 2, 32, LayerRule(0.2, window=9), 2),
    (tree, 70, 2, 2, 32, LayerRule(0.2, window=70), 1),
    (tree, 70, 2, 2, 32, LayerRule(0.2, softcap=5.0), 2),
    (tree, 70, 2, 2, 32, LayerRule(0.2, sinks=torch.randn(4)), 2),
    (wide, 33, 1, 2, 16, LayerRule(0.25), 4),
]
for tree, prefix, kv_heads, groups, width, rule, splits in cases:
    seen, depths = visible_rows(1, tree), row_depths(1, tree)
    rows = len(seen)
    mask = PassMask(groups, torch.float32, torch.device("cpu"))
    mask.set(prefix, seen, depths)
    query = torch.randn(1, kv_heads, groups * rows, width)
    keys, values = (torch.randn(1, kv_heads, prefix + rows + 11, width) for _ in range(2))
    keys, values = keys[:, :, : prefix + rows], values[:, :, : prefix + rows]
    start = mask.first_key(rule.window) if rule.window else 0
    expected = attend_split(query, keys[:, :, start:], values[:, :, start:], mask, rule)
    got = attend_triton(query, keys, values, mask, rule, splits=splits)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
print("same", len(cases))
"""


def test_kernel_agrees_with_torch() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "same 9"
