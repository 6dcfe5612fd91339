"""Scripts take the options that pages publish, and what they print says where it comes from."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"python scripts/(bench_\w+|record_terminal)\.py([^`#\n]*)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "scripts").glob("bench_*.py"))]


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("harness")


def published():
    """Commands of pages and of the scripts' own docstrings, without placeholders."""
    found = {match.group(1, 2) for page in PAGES for match in COMMAND.finditer(page.read_text("utf-8"))}
    return sorted((name, words.strip()) for name, words in found if not re.search(r"[\[…]|\.\.\.", words))


def test_commands_are_found():
    assert {"bench_pass", "bench_batches", "bench_typing", "bench_edits"} <= {name for name, _ in published()}
    assert len(published()) > 15


@pytest.mark.parametrize(("name", "words"), published())
def test_a_script_takes_the_options_that_are_published(harness, monkeypatch, name, words):
    if name == "bench_llama_cpp":
        pytest.importorskip("llama_cpp")
    taken = []
    monkeypatch.setattr(
        harness, "run", lambda measure, *names, **named: taken.append(harness.arguments(*names, **named))
    )
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(words)])
    importlib.import_module(name).main()
    assert len(taken) == 1


def test_an_object_carries_the_machine_and_the_command(harness, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench_x.py", "/a/b/trace.jsonl", "--rows", "1", "2", "--fast"])
    asked = {"rows": [4], "tokenizer": "t", "size": 0.5, "fast": False}
    harness.run(lambda options: {"asked": vars(options)}, "About.", "traces+", **asked)
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["asked"] == {
        "traces": ["/a/b/trace.jsonl"],
        "rows": [1, 2],
        "tokenizer": "t",
        "size": 0.5,
        "fast": True,
    }
    assert made["command"] == "python scripts/bench_x.py trace.jsonl --rows 1 2 --fast"
    assert {"processor", "commit", "others"} <= set(made["machine"])


def test_what_must_be_given_is_asked_for(harness, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_x.py"])
    with pytest.raises(SystemExit):
        harness.arguments("About.", text=str)
    assert "--text" in capsys.readouterr().err


def test_every_name_begins_once(harness):
    turns = [harness.in_turn(["a", "b", "c"], number) for number in range(3)]
    assert sorted(turn[0] for turn in turns) == ["a", "b", "c"]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
