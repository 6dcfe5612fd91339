"""The demo: its screen at two widths, its table, and one short race from end to end."""

from __future__ import annotations

import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from retrieve_spec import demo
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.demo import Pane

pytestmark = pytest.mark.threads


@pytest.fixture
def panes():
    return [
        Pane("plain", [0] * 40, 2.0, 40),
        Pane("accelerated", [0] * 40, 1.0, 20, {"context": 15, "recycling": 5}),
        Pane("with stdlib store", [0] * 40, 0.5, 10, {"ngram": 30}),
    ]


def test_table_compares_with_and_without_the_store(panes):
    console = Console(width=120, record=True, quiet=False, file=io.StringIO())
    console.print(demo.table([demo.Result("a.py", panes, False), demo.Result("b.py", panes, True)]))
    lines = console.export_text().splitlines()
    assert (
        "a.py" in lines[3] and "20 (1.00 ×), 1.00" in lines[3] and "80 (4.00 ×), 4.00" in lines[3] and "yes" in lines[3]
    )
    assert "b.py (loops)" in lines[4]
    assert demo.credits([demo.Result("a.py", panes, False)] * 2)[0].endswith(
        "context 30, recycling 10 (of 80 generated)"
    )
    panes[2].token_ids = [1]
    assert not demo.Result("a.py", panes, False).identical


def test_what_is_completed_is_not_in_the_store(monkeypatch):
    kept = {}

    def build(path, recipe, tokenizer, **_):
        kept["exclude"] = set(recipe.sources[0].exclude)
        raise demo.StoreError("space", "none", "Make some.")

    monkeypatch.setattr("retrieve_spec.datastore.cached.open_or_build", build)
    console = Console(record=True, file=io.StringIO())
    assert demo.stdlib_store(None, console) is None
    assert "Make some." in console.export_text()
    completed = [prompt.name for prompt in demo.choose(1000) if prompt.task == "seen"]
    assert completed
    assert {name.removesuffix(" (seen in training)") for name in completed} <= kept["exclude"]


@pytest.mark.slow
def test_race_with_a_store(monkeypatch, texts_store):
    monkeypatch.setattr(demo, "stdlib_store", lambda tokenizer, console: open_datastore(texts_store))
    result = CliRunner().invoke(demo.main, ["--files", "1", "--max-new-tokens", "8", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert figures["identical"]
    assert figures["files"][0]["with_store"]["tokens_per_pass"] >= 1


@pytest.fixture
def texts_store(tmp_path):
    (tmp_path / "a.py").write_text("def function(argument):\n    return argument\n" * 20)
    build_datastore(tmp_path / "s", str(tmp_path / "a.py"), "reference")
    return tmp_path / "s"
