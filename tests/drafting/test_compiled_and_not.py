"""Compiled kernels and the same kernels as plain Python draft the same trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import drafted_streams
import numpy as np
import pytest


@pytest.mark.parametrize("seed", [0, 1])
def test_compiled_and_plain_python_draft_alike(seed, make_store):
    rng = np.random.default_rng(seed)
    store = make_store([rng.integers(0, 9, 80).tolist() for _ in range(4)])
    other = "0" if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0" else "1"
    plain = subprocess.run(
        [sys.executable, "-W", "ignore", drafted_streams.__file__, str(seed), str(store.path)],
        env={**os.environ, "NUMBA_DISABLE_JIT": other},
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
