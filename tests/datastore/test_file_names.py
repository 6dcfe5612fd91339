"""File names that are no text: a build reads such files and writes their names down."""

from __future__ import annotations

import os

from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore


def test_names_that_are_not_utf8_are_recorded_escaped(tmp_path, tokenizer):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in [(b"a.py", "alpha = 1\n"), (b"\xffb.py", "beta = 2\n"), (b"\xffc.py", "alpha = 1\n")]:
        with open(os.path.join(os.fsencode(folder), name), "w") as file:
            file.write(text)
    report = build_datastore(tmp_path / "store", Source(str(folder)), tokenizer, workers=1)
    assert [(path, reason) for path, _, reason in report.skipped] == [("\\xffc.py", "duplicate")]
    store = open_datastore(tmp_path / "store")
    paths = [document.path for document in store.documents()]
    assert sorted(paths) == ["\\xffb.py", "a.py"]
