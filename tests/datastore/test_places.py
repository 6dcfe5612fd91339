"""Names of models and folders: wrong ones are found before any text is read, right ones serve from every folder."""

from __future__ import annotations

import os

import pytest
from dense_models import save_model

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import ConfigError, ModelNotFoundError, TokenizerMismatchError


def dense(model, **options):
    return StoreConfig(dense=DenseConfig(str(model), **{"dims": 8, "window": 32, "overlap": 8, **options}))


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        ("nothing", {}, ModelNotFoundError),
        ("reference", {}, TokenizerMismatchError),
        ("model", {"dims": 17}, ConfigError),
        ("model", {"layer": 3}, ConfigError),
    ],
)
def test_a_wrong_model_is_found_before_any_text_is_read(texts, tokenizer, tmp_path, model, options, error):
    save_model(tmp_path / "model")
    name = model if model == "reference" else tmp_path / model
    with pytest.raises(error):
        build_datastore(tmp_path / "s", str(texts), tokenizer, config=dense(name, **options))
    assert not (tmp_path / "s").exists()  # nothing to resume, nothing in the way of the next attempt


def test_a_model_that_is_gone_stops_a_change_before_it_begins(texts, records, tokenizer, tmp_path):
    save_model(tmp_path / "model")
    store = tmp_path / "s"
    build_datastore(store, str(texts), tokenizer, config=dense(tmp_path / "model"))
    os.rename(tmp_path / "model", tmp_path / "moved")
    for change in (lambda: add_documents(store, str(records)), lambda: compact_datastore(store)):
        with pytest.raises(ModelNotFoundError):
            change()
        assert not (store / "work").exists()
    add_documents(store, str(texts / "a.txt"), config=dense(tmp_path / "moved"))


def test_a_model_named_by_a_relative_path_serves_from_every_folder(texts, tokenizer, tmp_path, monkeypatch):
    save_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    build_datastore("s", "texts/a.txt", tokenizer, config=dense("model"))
    monkeypatch.chdir(texts)
    add_documents(tmp_path / "s", "b.txt")
    assert len(open_datastore(tmp_path / "s").dense) == 2
