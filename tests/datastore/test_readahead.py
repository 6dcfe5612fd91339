"""Reading ahead: which files are asked for, and that a store which went away disturbs nobody."""

from __future__ import annotations

import os
import shutil

import pytest

from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore, read_ahead

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc to tell files by their handles")


def test_smallest_files_are_asked_for_within_the_limit(tokenizer, texts, tmp_path, monkeypatch):
    asked = []

    def advise(handle, start, length, advice):
        assert (start, advice) == (0, os.POSIX_FADV_WILLNEED)
        asked.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    build_datastore(tmp_path / "s", str(texts), tokenizer)
    store = open_datastore(tmp_path / "s")
    (segment,) = store.manifest.segments
    by_size = sorted(segment.files, key=lambda name: (segment.files[name].bytes, name))
    read_ahead([store]).join()
    read_ahead([store], sum(file.bytes for file in segment.files.values()) - 1).join()
    assert asked == [*by_size, *by_size[:-1]]
    assert read_ahead([store], 0) is None and read_ahead([]) is None
    shutil.rmtree(tmp_path / "s")
    read_ahead([store]).join()
