"""SIGKILL while hidden states are computed: no store or a whole one; run again, a build gives the same keys."""

from __future__ import annotations

import shutil
import time
from functools import partial

import numpy as np
import pytest
from dense_models import save_model
from test_kill import run, state

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore


def keys_of(store):
    return {
        (segment.name, file.name): file.read_bytes()
        for segment in open_datastore(store).segments
        for file in sorted((store / "segments" / segment.name).glob("dense_*"))
    }


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path, texts, tokenizer):
    target = tmp_path / "s"
    dense = DenseConfig(save_model(tmp_path / "model"), dims=4, window=16, overlap=4)
    config = StoreConfig(segment_tokens=90, dense=dense)
    change = partial(build_datastore, target, str(texts), tokenizer, config=config)
    started = time.perf_counter()
    run(change)
    duration = time.perf_counter() - started
    new, keys = state(target), keys_of(target)
    random = np.random.default_rng(0)
    for _ in range(12):
        shutil.rmtree(target)
        run(change, float(random.uniform(0.2, 0.95)) * duration)
        assert state(target) in (None, new)
        if state(target) is None:
            change()
        assert state(target) == new and keys_of(target) == keys
