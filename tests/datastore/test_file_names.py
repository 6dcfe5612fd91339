"""File names that are no text: a build reads such files and writes their names down."""

from __future__ import annotations

import os

from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.catalog import write_catalog
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.verify import verify_datastore


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


def test_a_source_whose_own_name_is_not_utf8(tmp_path, tokenizer):
    source = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(source)
    for name, text in (("a.py", "alpha = 1\n"), ("b.py", " ")):
        with open(os.path.join(source, name), "w") as file:
            file.write(text)
    build_datastore(tmp_path / "store", source, tokenizer, workers=1)
    (tmp_path / "more.py").write_text("more = 1\n")
    add_documents(tmp_path / "store", [source, str(tmp_path / "more.py")], workers=1)
    store = open_datastore(tmp_path / "store")
    assert [(d.path, d.source) for d in store.documents()] == [("a.py", source), ("more.py", str(tmp_path / "more.py"))]
    write_catalog(tmp_path / "store")
    verify_datastore(tmp_path / "store")
