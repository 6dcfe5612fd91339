"""Scripts parse the options that they declare, and what they print carries the machine and the command."""

from __future__ import annotations

import json
import sys

import harness


def test_an_object_carries_the_machine_and_the_command(monkeypatch, capsys):
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
