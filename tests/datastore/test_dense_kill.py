"""Dense builds that are killed, or have no room: no store or a whole one; run again, a build gives the same keys."""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import partial

import children
import numpy as np
import pytest
from children import exit_code, limit_files, start
from dense_models import save_model
from test_kill import run, state

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import BuildError

FULL = 7


@pytest.fixture
def build(tmp_path, texts, tokenizer):
    dense = DenseConfig(save_model(tmp_path / "model"), dims=4, window=16, overlap=4)
    config = StoreConfig(segment_tokens=90, dense=dense)
    return partial(build_datastore, tmp_path / "s", str(texts), tokenizer, config=config)


def told(store):
    """Documents of a store, and its keys; None where there is none."""
    found = state(store)
    return found and (
        found,
        {
            (segment.name, file.name): file.read_bytes()
            for segment in open_datastore(store).segments
            for file in sorted((store / "segments" / segment.name).glob("dense_*"))
        },
    )


@pytest.mark.slow
def test_kill_at_any_moment(build, tmp_path):
    children.run(os.getpid)  # the server that starts children is slow once
    started = time.perf_counter()
    run(build)
    duration = time.perf_counter() - started
    whole = told(tmp_path / "s")
    random = np.random.default_rng(0)
    for _ in range(12):
        shutil.rmtree(tmp_path / "s")
        run(build, float(random.uniform(0.2, 0.95)) * duration)
        assert told(tmp_path / "s") in (None, whole)
        if told(tmp_path / "s") is None:
            build()
        assert told(tmp_path / "s") == whole


def with_limit(limit, build):
    """Build on a full disk; exits with FULL after a `BuildError`."""
    limit_files(limit)
    try:
        build(workers=1)
    except BuildError as error:
        sys.exit(FULL if error.expected.startswith("to write to") else 98)


@pytest.mark.slow
def test_no_room_at_any_point(build, tmp_path):
    build()
    whole = told(tmp_path / "s")
    sizes = sorted({path.stat().st_size for path in (tmp_path / "s").rglob("*") if path.is_file()})
    outcomes = set()
    for limit in [0, *(size - 1 for size in sizes if size), sizes[-1]]:
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        outcomes.add(outcome := exit_code(start(with_limit, limit, build)))
        assert told(tmp_path / "s") == (None if outcome else whole), limit
        if outcome:
            build()
            assert told(tmp_path / "s") == whole
    assert outcomes == {FULL, 0}
