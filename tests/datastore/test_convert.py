"""Stores of the format before: opened after one command, with the text and the answers that they had."""

from __future__ import annotations

import pytest
from dense_models import save_model
from format_2 import as_format_2
from test_build import contents, digest

from retrieve_spec.cli import run
from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore import convert
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.convert import convert_datastore
from retrieve_spec.datastore.edit import remove_documents
from retrieve_spec.datastore.search import search_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import StoreCorruptError, StoreVersionError


@pytest.fixture
def store(tokenizer, texts, records, tmp_path):
    build_datastore(tmp_path / "s", Source(str(texts), "MIT"), tokenizer)
    add_documents(tmp_path / "s", Source(str(records), "CC0", field="output"))
    return tmp_path / "s"


def test_nothing_changes_but_the_form(store, capfd):
    before, segments = contents(store), open_datastore(store).manifest.segments
    as_format_2(store)
    with pytest.raises(StoreVersionError, match="retrieve-spec convert"):
        open_datastore(store)
    assert run(["convert", str(store)]) == 0
    assert "convert: 9 documents" in capfd.readouterr().out
    verify_datastore(store)
    opened = open_datastore(store)
    assert contents(store) == before
    assert [entry.name for entry in opened.manifest.segments] == [entry.name for entry in segments]
    assert {document.licence for document in opened.documents()} == {"MIT", "CC0"}
    assert [event["verb"] for event in opened.manifest.history] == ["build", "add", "convert"]
    with pytest.raises(StoreVersionError, match="needs no conversion"):
        convert_datastore(store)


def test_removed_documents_stay_removed(store):
    as_format_2(store, removed={"b.txt", "answers.jsonl#2"})
    convert_datastore(store)
    verify_datastore(store)
    assert {"b.txt", "answers.jsonl#2"}.isdisjoint(contents(store)) and len(contents(store)) == 7
    assert search_datastore(open_datastore(store), "the cat ran").matched < 5
    assert all(not entry.tombstones for entry in open_datastore(store).manifest.segments)


def test_dense_keys_keep_their_places(tokenizer, texts, tmp_path):
    store = tmp_path / "s"
    config = StoreConfig(dense=DenseConfig(save_model(tmp_path / "model"), dims=8, window=32, overlap=8))
    build_datastore(store, str(texts), tokenizer, config=config)
    before = contents(store)
    as_format_2(store, removed={"b.txt"})
    convert_datastore(store)
    verify_datastore(store)
    opened = open_datastore(store)
    assert contents(store) == {path: text for path, text in before.items() if path != "b.txt"}
    assert len(opened.dense) == 1 and opened.segments[0].removed == (1,)


def test_an_interrupted_conversion_leaves_the_old_store(store, monkeypatch):
    as_format_2(store)
    old = digest(store)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert_datastore(store)
    assert old.items() <= digest(store).items()
    convert_datastore(store)
    verify_datastore(store)
    remove_documents(store, ["a.txt"])
    assert not (store / "work").exists()


def test_a_damaged_catalogue_is_told(store):
    as_format_2(store)
    path = store / "catalog.sqlite"
    path.write_bytes(path.read_bytes().replace(b"c.py", b"x.py"))
    with pytest.raises(StoreCorruptError, match="rows of segment"):
        convert_datastore(store)
    path.unlink()
    with pytest.raises(StoreCorruptError, match="a catalogue"):
        convert_datastore(store)
