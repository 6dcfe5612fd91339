"""Stores in a cache: built on first use, opened after that, mended where they cannot be used."""

from __future__ import annotations

import pytest
from byte_tokenizers import byte_tokenizer

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import open_or_build
from retrieve_spec.datastore.change import writer
from retrieve_spec.datastore.sources import Recipe, Source
from retrieve_spec.errors import StoreLockedError


@pytest.fixture
def recipe(texts):
    return Recipe("mine", "", (Source(str(texts), "MIT"),), StoreConfig())


@pytest.fixture
def opened(recipe, tokenizer, tmp_path):
    """Opens the store; says whether it had to be built."""

    def call(with_tokenizer=tokenizer):
        told = []
        store = open_or_build(
            tmp_path / "cache" / "s",
            recipe,
            with_tokenizer,
            before=lambda: told.append("before"),
            after=lambda report: told.append(report.documents),
        )
        assert store.manifest.documents == 4
        return told

    return call


def test_built_once(opened):
    assert opened() == ["before", 4]
    assert opened() == []


def test_damage_and_other_tokenizers_are_built_anew(opened, tmp_path):
    opened()
    next((tmp_path / "cache" / "s").glob("segments/*/tokens.bin")).unlink()
    assert opened() == ["before", 4]
    assert opened(byte_tokenizer(offset=9)) == ["before", 4]


def test_a_build_under_way_is_left_alone(opened, tmp_path):
    with writer(tmp_path / "cache" / "s") as work:
        work.begin({"verb": "build"})
        with pytest.raises(StoreLockedError):
            opened()
        assert work.plan() == {"verb": "build"}
