"""Reading ahead: which files are asked for, and that a store which went away disturbs nobody."""

from __future__ import annotations

import os
import shutil

import pytest

from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore, read_ahead

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no posix_fadvise")


@pytest.fixture
def requests(monkeypatch):
    names, steps = [], []

    def advise(handle, start, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        assert start == sum(step for other, step in steps if other == name)
        steps.append((name, length))
        if start == 0:
            names.append(name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return names, steps


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc to tell files by their handles")
def test_smallest_files_are_asked_for_within_the_limit(tokenizer, texts, tmp_path, requests):
    asked, steps = requests
    build_datastore(tmp_path / "s", str(texts), tokenizer)
    store = open_datastore(tmp_path / "s")
    sizes = {name: file.bytes for segment in store.manifest.segments for name, file in segment.files.items()}
    read_ahead([store]).join()
    assert sorted(asked, key=lambda name: (sizes[name], name)) == asked
    assert set(asked) == set(sizes)
    del asked[:], steps[:]
    limit = sum(sizes.values()) - 1
    read_ahead([store], limit).join()
    assert len(asked) == len(sizes) - 1
    assert read_ahead([store], 0) is None
    assert read_ahead([]) is None


def test_a_store_that_went_away_is_no_error(tokenizer, texts, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer)
    store = open_datastore(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    read_ahead([store]).join()
