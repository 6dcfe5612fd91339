"""Ctrl-C as a terminal sends it: the call ends promptly, the model can be used, and nothing goes on behind it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import left_padded, script
from numba import njit
from numpy.typing import NDArray
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


@njit(nogil=True)
def _busy(ids: NDArray[np.int64], rounds: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Arrays, as kernels hand them out: a signal that came meanwhile is raised where Numba makes an object of one."""
    for i in range(rounds):
        ids[0] = (ids[0] * 31 + i) % 1000003
    return ids, ids[:1]


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Ctrl-C in so many seconds of computing."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def hit(verb: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a drafter busy with compiled code at one call of a `verb`, until Ctrl-C comes in the middle of it."""
    method: Callable[..., Any] = getattr(ScriptedDrafter, verb)
    calls = 0
    _busy(np.ones(1, np.int64), 1)  # compiled

    def busy(drafter: ScriptedDrafter, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            with _alarm(0.02):
                _busy(np.ones(1, np.int64), 1 << 26)
        return method(drafter, *given)

    monkeypatch.setattr(ScriptedDrafter, verb, busy)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals there")
@pytest.mark.parametrize(("verb", "call"), [("start", 1), ("propose", 3), ("observe", 3), ("finish", 1)])
@pytest.mark.parametrize("door", ["generate", "batch", "many", "stream"])
def test_ctrl_c_in_compiled_code_is_ctrl_c(
    tiny: Any, prompt: torch.Tensor, door: str, verb: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python makes a SystemError of it, which is no failure of one sequence that the others may go on from."""
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
        with pytest.raises(KeyboardInterrupt):
            calls.get(door, lambda: tiny.generate(**inputs, **options))()
    assert not tiny.speculation.engine._sequences
    assert torch.equal(tiny.generate(**inputs, **options), plain)
