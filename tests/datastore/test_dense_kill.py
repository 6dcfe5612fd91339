"""SIGKILL while hidden states are computed: no store or a whole one, and a resumed build gives the same keys."""

from __future__ import annotations

import shutil
import time
from functools import partial

import numpy as np
import pytest
from dense_models import save_model
from test_kill import run, state

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore import dense_build
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import StoreIncompleteError


def keys_of(store):
    return {
        (segment.name, file.name): file.read_bytes()
        for segment in open_datastore(store).segments
        for file in sorted((store / "segments" / segment.name).glob("dense_*"))
    }


def build_in_small_shards(texts, tokenizer, config, path, resume=False):
    dense_build.SHARD = 16
    build_datastore(path, texts, tokenizer, config=config, resume=resume)


@pytest.fixture
def change(tmp_path, texts, tokenizer, monkeypatch):
    monkeypatch.setattr(dense_build, "SHARD", 16)  # so that it is put back
    dense = DenseConfig(save_model(tmp_path / "model"), dims=4, window=16, overlap=4)
    return partial(build_in_small_shards, str(texts), tokenizer, StoreConfig(segment_tokens=90, dense=dense))


@pytest.mark.parametrize("done", [0, 1, 5])
def test_a_build_stopped_between_checkpoints_goes_on_there(change, tmp_path, monkeypatch, done):
    change(tmp_path / "whole")
    written = []
    replace_file = dense_build.replace_file

    def stop_after(path, content):
        if path.name.startswith("keys-"):
            if len(written) == done:
                raise KeyboardInterrupt
            written.append(path.name)
        replace_file(path, content)

    monkeypatch.setattr(dense_build, "replace_file", stop_after)
    with pytest.raises(KeyboardInterrupt):
        change(tmp_path / "s")
    with pytest.raises(StoreIncompleteError, match="resume"):
        open_datastore(tmp_path / "s")
    again = []
    monkeypatch.setattr(dense_build, "replace_file", lambda p, c: (again.append(p.name), replace_file(p, c)))
    change(tmp_path / "s", resume=True)
    assert not set(written) & set(again)
    assert keys_of(tmp_path / "s") == keys_of(tmp_path / "whole")


@pytest.mark.slow
def test_kill_at_any_moment(change, tmp_path):
    target = tmp_path / "s"
    started = time.perf_counter()
    run(partial(change, target))
    duration = time.perf_counter() - started
    new, keys = state(target), keys_of(target)
    random = np.random.default_rng(0)
    for _ in range(12):
        shutil.rmtree(target)
        target.mkdir()
        killed = run(partial(change, target), float(random.uniform(0.2, 0.95)) * duration)
        assert state(target) in (None, new)
        if killed and (target / "work" / "plan.json").exists():
            change(target, resume=True)
            assert state(target) == new and keys_of(target) == keys
