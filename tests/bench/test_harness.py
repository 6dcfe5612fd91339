"""Scripts parse the options that they declare, and what they print carries the machine and the command."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("harness")


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


def test_published_commands_name_files_without_their_folders(harness):
    many = [f"/a/{i}.jsonl" for i in range(9)]
    words = [
        "python",
        "x.py",
        *many,
        "--tokenizer",
        "/a/t.json",
        "--native",
        "a*=/a/u.json",
        "--limit",
        "3",
        "--n",
        "3",
    ]
    expected = "python x.py TRACES/*.jsonl --tokenizer t.json --native 'a*=u.json' --limit 3 --n 3"
    assert harness.published(words) == expected


def test_every_name_begins_once(harness):
    turns = [harness.in_turn(["a", "b", "c"], number) for number in range(3)]
    assert sorted(turn[0] for turn in turns) == ["a", "b", "c"]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
