"""Ctrl-C as a terminal sends it: the call ends promptly, the model can be used, and nothing goes on behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_rows import left_padded, script
from interrupting import ctrl_c, python_handles_it
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs

KINDS = ("generate", "batch", "samples", "many", "stream")
DELAYS = (0.0, 0.05, 0.4, 0.9)
PROMPTLY = 8.0
"""Seconds, on a machine that others use: a pass takes some hundredths of one, a whole call more than this."""


def child(recorded_pass: str, memory: Path) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("interrupted_child.py"))
    return subprocess.Popen(
        [sys.executable, script, recorded_pass, str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are sent otherwise there")
@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_sigint_ends_a_call_promptly_and_leaves_the_model_usable(recorded_pass: str, tmp_path: Path) -> None:
    memory = tmp_path / "rollouts.bin"
    with child(recorded_pass, memory) as process:
        assert process.stdin is not None and process.stdout is not None

        def said() -> str:
            assert process.stdout is not None
            return process.stdout.readline().strip()

        assert said() == "ready"
        for kind in KINDS:
            for delay in DELAYS:
                print(kind, file=process.stdin, flush=True)
                assert said() == "begun"
                time.sleep(delay)
                sent = time.monotonic()
                process.send_signal(signal.SIGINT)
                line = said()
                took = time.monotonic() - sent
                assert line == "interrupted", (kind, delay, line)
                assert took < PROMPTLY, (kind, delay)
                told: dict[str, Any] = json.loads(said())
                assert told["interrupted"] and told["same"], told
                assert told["threads"] == [], told
                assert told["under_way"] == 0, told
                assert told["last"] != "delegated", told
        process.stdin.close()
        assert process.wait(60) == 0
    assert len(rs.RolloutMemory(memory)) == 1, "what the whole calls said"


def hit(verb: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come in the middle of one call of a `verb` of a drafter."""
    method: Callable[..., Any] = getattr(ScriptedDrafter, verb)
    calls = 0

    def interrupted(drafter: ScriptedDrafter, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            ctrl_c()
        return method(drafter, *given)

    monkeypatch.setattr(ScriptedDrafter, verb, interrupted)


@pytest.mark.parametrize(("verb", "call"), [("start", 1), ("propose", 3), ("observe", 3), ("finish", 1)])
@pytest.mark.parametrize("door", ["generate", "batch", "many", "stream"])
def test_ctrl_c_while_a_drafter_works_comes_behind_the_pass(
    tiny: Any, prompt: torch.Tensor, door: str, verb: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    inputs = left_padded((9, 4, 12)) if door == "batch" else {"input_ids": prompt, "attention_mask": prompt * 0 + 1}
    plain = tiny.generate(**inputs, **options)
    script(tiny, monkeypatch, plain, "half", recorded_pass="off")
    calls: dict[str, Callable[[], Any]] = {
        "many": lambda: list(rs.generate_many(tiny, [prompt[0]] * 3, **options)),
        "stream": lambda: list(rs.generate_stream(tiny, prompt, **options)),
    }
    with monkeypatch.context() as patch:
        hit(verb, call, patch)
        with python_handles_it(), pytest.raises(KeyboardInterrupt):
            calls.get(door, lambda: tiny.generate(**inputs, **options))()
    assert not tiny.speculation.engine._sequences
    assert torch.equal(tiny.generate(**inputs, **options), plain)
