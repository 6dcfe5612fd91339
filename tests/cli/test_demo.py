"""The demo: its screen at two widths, its table, and one short race from end to end."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from retrieve_spec import demo
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore

pytestmark = pytest.mark.threads


def test_what_is_completed_is_not_in_the_store(monkeypatch):
    kept = {}

    def build(path, recipe, tokenizer, **_):
        kept["exclude"] = set(recipe.sources[0].exclude)
        raise demo.StoreError("space", "none", "Make some.")

    monkeypatch.setattr("retrieve_spec.datastore.recipes.open_or_build", build)
    console = Console(record=True, file=io.StringIO())
    assert demo.stdlib_store(None, console) is None
    assert "Make some." in console.export_text()
    completed = [prompt.name for prompt in demo.choose(1000) if prompt.task == "seen"]
    assert completed
    assert {name.removesuffix(" (seen in training)") for name in completed} <= kept["exclude"]


@pytest.mark.slow
def test_race_with_a_store(monkeypatch, texts_store):
    monkeypatch.setattr(demo, "stdlib_store", lambda tokenizer, console: open_datastore(texts_store))
    result = CliRunner().invoke(demo.main, ["--files", "1", "--max-new-tokens", "8"])
    assert result.exit_code == 0, result.output
    assert "with stdlib store: accepted by source:" in result.output


@pytest.fixture
def texts_store(tmp_path):
    (tmp_path / "a.py").write_text("def function(argument):\n    return argument\n" * 20)
    build_datastore(tmp_path / "s", str(tmp_path / "a.py"), "reference")
    return tmp_path / "s"
