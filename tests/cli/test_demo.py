"""The demo: its screen at two widths, its table, and one short race from end to end."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from retrieve_spec import demo
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.demo_screen import ROWS, Pane, Screen

pytestmark = pytest.mark.threads


class Letters:
    """Stands for a tokenizer: token i is the i-th letter."""

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture
def panes():
    return [
        Pane("plain", [0] * 40, 2.0, 40),
        Pane("accelerated", [0] * 40, 1.0, 20, {"context": 15, "exact": 0, "recycling": 5}),
        Pane("with stdlib store", [0] * 40, 0.5, 10, {"ngram": 30}),
    ]


@pytest.mark.parametrize(
    ("columns", "shown"),
    [(80, ["plain", "with stdlib store"]), (130, ["plain", "accelerated", "with stdlib store"])],
)
def test_as_many_panes_as_fit(panes, columns, shown, capsys, monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    screen = Screen(Letters(), "live")
    screen.draw(panes, 2)
    lines = capsys.readouterr().out.splitlines()  # click leaves escapes out where there is no terminal
    assert len(lines) == ROWS + 1
    assert [title for title in ("plain", "accelerated", "with stdlib store") if title in lines[0]] == shown
    assert all(len(line) <= columns for line in lines[1:])


def test_table_compares_with_and_without_the_store(panes):
    shown = demo.table([demo.Result("a.py", panes, False), demo.Result("b.py", panes, True)])
    lines = shown.splitlines()
    assert lines[2].split() == ["a.py", "20", "40", "(2.00x)", "2.00", "80", "(4.00x)", "4.00", "yes"]
    assert lines[3].startswith("b.py (loops)")
    assert "accelerated: accepted by source: context 30, recycling 10 (of 80 generated)" in lines
    assert "with stdlib store: accepted by source: ngram 60 (of 80 generated)" in lines
    panes[2].token_ids = [1]
    assert demo.table([demo.Result("a.py", panes, False)]).splitlines()[2].endswith("NO")


def test_what_is_completed_is_not_in_the_store(monkeypatch):
    kept = {}

    def build(path, recipe, tokenizer, **_):
        kept["exclude"] = set(recipe.sources[0].exclude)
        raise demo.StoreError("space", "none", "Make some.")

    monkeypatch.setattr("retrieve_spec.datastore.recipes.open_or_build", build)
    said = []
    assert demo.stdlib_store(None, said.append, False) is None
    assert "Make some." in said[-1]
    completed = [prompt.name for prompt in demo.choose(1000) if prompt.task == "seen"]
    assert completed
    assert {name.removesuffix(" (seen in training)") for name in completed} <= kept["exclude"]


@pytest.mark.slow
def test_race_with_a_store(monkeypatch, texts_store):
    monkeypatch.setattr(demo, "stdlib_store", lambda tokenizer, say, progress: open_datastore(texts_store))
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
