"""Replays of recorded samples: what siblings wrote is drafted when it is shared, within a group and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieve_spec.bench.replay import Replay
from retrieve_spec.bench.replay_samples import replay_epochs, replay_siblings, replay_together, samples_of
from retrieve_spec.bench.traces import TraceRow
from retrieve_spec.cli import run
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.errors import TraceError
from retrieve_spec.reference_model import reference_path


def row(group: str, seed: int, length: int = 80) -> TraceRow:
    tokens = np.random.default_rng(seed).integers(0, 500, length).astype(np.int32)
    return TraceRow("", tokens[:4], [(tokens[4:40], True), (tokens[40:44], False), (tokens[44:], True)], group)


def test_one_row_alone_is_a_plain_replay() -> None:
    replay = Replay(MixtureDrafter(SpeculationConfig(phrases="off")), 8)
    plain = replay.run([row("a", 1), row("b", 1)])
    found = replay_together([[row("a", 1)], [row("b", 1)]], 8, share=False)
    assert found["tokens"] == plain["tokens"] == 144
    assert found["passes"] >= plain["passes"]  # that drafter kept its own calibration's rates


def test_samples_draft_what_the_others_wrote() -> None:
    """The second of two equal samples is a pass behind: it has seen all but the newest tokens."""
    one = row("a", 1)
    groups = [[one, TraceRow("", one.prompt, [row("b", 2).segments[0], *one.segments])]]
    off, share = (replay_together(groups, 8, share) for share in (False, True))
    assert off["tokens"] == share["tokens"] == 72 + 108
    assert share["passes"] < off["passes"] - 20
    assert share["accepted_by_source"]["session"] > 20
    apart = [[one] for one in groups[0]]
    assert replay_together(apart, 8, share=True)["passes"] > share["passes"] + 20


def test_groups_that_are_too_small_are_left_out() -> None:
    rows = [row("a", 1), row("b", 2), row("a", 3), row("a", 4)]
    assert [[one.group for one in group] for group in samples_of(rows, 2)] == [["a", "a"]]
    assert samples_of(rows, 4) == []


def test_epochs_draft_what_earlier_ones_answered(tmp_path: Path) -> None:
    """The second epoch gives the same answers again: a memory has them, an epoch alone does not."""
    tokenizer = str(reference_path() / "tokenizer.json")
    lines = ["".join(f"    a{j} = b[{(j + i) * 37 % 89}]\n" for j in range(12)) for i in (0, 50)]
    rows = [{"prompt": "def f(a):\n", "output": lines[i % 2], "group": "f"} for i in range(4)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    found = replay_epochs(tmp_path / "t.jsonl", tokenizer, 2, samples=2)
    assert found["groups"] == 1 and found["samples"] == 2
    alone, memory = found["siblings"], found["memory"]
    assert [epoch["tokens"] for epoch in alone] == [epoch["tokens"] for epoch in memory]
    assert memory[0] == alone[0]
    assert memory[1]["tokens_per_pass"] > 2 * alone[1]["tokens_per_pass"]
    with pytest.raises(TraceError, match="6 single answers"):
        replay_epochs(tmp_path / "t.jsonl", tokenizer, 6)


def trace(path: Path) -> Path:
    rows: list[dict[str, Any]] = [
        {
            "prompt": "def f(a):",
            "output": "\n" * 9 * i + "".join(f"    a{j} = b[{j * j}]\n" for j in range(9)),
            "group": "f",
        }
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = str(reference_path() / "tokenizer.json")
    given = ["bench", "replay", str(trace(tmp_path / "t.jsonl")), "--tokenizer", tokenizer, "--quiet"]
    assert run([*given, "--siblings", "2", "--siblings", "3"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["siblings"]
    assert set(figures) == {"2", "3"}
    assert figures["3"]["groups"] == 1
    assert figures["3"]["share"]["tokens_per_pass"] > figures["3"]["off"]["tokens_per_pass"]
    assert run([*given, "--siblings", "2", "--session"]) == 2
    assert run([*given, "--epochs", "3"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["epochs"]
    assert len(figures["memory"]) == 3
    assert run([*given, "--epochs", "2", "--siblings", "2", "--siblings", "3"]) == 2
    with pytest.raises(TraceError, match="4 rows"):
        replay_siblings(tmp_path / "t.jsonl", tokenizer, [4])
