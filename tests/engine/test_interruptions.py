"""Ctrl-C, as a terminal sends it, and other exceptions: they end promptly what they hit, other sequences go on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from batch_rows import left_padded, script
from interrupting import ctrl_c, python_handles_it
from processes import running
from scripted_drafter import ScriptedDrafter
from waiting import HANG_S

import retrieve_spec as rs
from retrieve_spec.errors import ConfigError

GREEDY = {"do_sample": False, "max_new_tokens": 14}


@pytest.mark.parametrize("recorded_pass", ["off", "always"])
def test_ctrl_c_spares_what_other_threads_read(tiny: Any, prompt: torch.Tensor, recorded_pass: str) -> None:
    """Whoever of them runs the pass."""
    others = [prompt.flip(1), prompt[:, :5]]
    options = GREEDY | {"max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
    expected = [tiny.generate(ids, **options) for ids in others]
    rs.accelerate(tiny, recorded_pass=recorded_pass, nodes=4)
    said: list[Any] = [None, None]

    def ask(i: int) -> None:
        said[i] = tiny.generate(others[i], **options)

    threads = [threading.Thread(target=ask, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for passes in range(1, 8):
        with python_handles_it(), contextlib.suppress(KeyboardInterrupt):
            for n, _ in enumerate(rs.generate_stream(tiny, prompt, **options)):
                if n == passes:
                    ctrl_c()
    for thread in threads:
        thread.join(HANG_S)
    assert [torch.equal(ours, wanted) for ours, wanted in zip(said, expected, strict=True)] == [True, True]
    assert not tiny.speculation.engine._sequences


@contextlib.contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) == handler, "it is in place again"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_somebody_else_is_called_behind_the_pass(tiny: Any, prompt: torch.Tensor) -> None:
    whole = tiny.generate(prompt, **GREEDY)
    rs.accelerate(tiny, nodes=4)
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(len(tiny.speculation.engine._sequences))

    hook = tiny.model.layers[0].register_forward_pre_hook(ctrl_c)
    with handled_by(note):
        assert torch.equal(tiny.generate(prompt, **GREEDY), whole), "it does not raise"
    assert len(heard) > 1
    with handled_by(signal.SIG_IGN):
        assert torch.equal(tiny.generate(prompt, **GREEDY), whole)
    hook.remove()


def test_a_second_ctrl_c_does_not_wait_for_the_pass(tiny: Any, prompt: torch.Tensor) -> None:
    rs.accelerate(tiny, nodes=4)
    whole = tiny.generate(prompt, **GREEDY)
    reached: list[int] = []

    def twice(*_: Any) -> None:
        for n in range(9):
            ctrl_c()
            reached.append(n)

    hook = tiny.model.layers[0].register_forward_pre_hook(twice)
    with python_handles_it(), pytest.raises(KeyboardInterrupt):
        tiny.generate(prompt, **GREEDY)
    hook.remove()
    assert reached == [0]
    assert not tiny.speculation.engine._sequences
    assert torch.equal(tiny.generate(prompt, **GREEDY), whole)


KINDS = ("generate", "batch", "samples", "many", "stream")
DELAYS = (0.0, 0.05, 0.4, 0.9)
PROMPTLY = 8.0
"""Seconds, on a machine that others use: a pass takes some hundredths of one, a whole call more than this."""


def child(recorded_pass: str, memory: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return running(
        [sys.executable, str(Path(__file__).with_name("interrupted_child.py")), recorded_pass, str(memory)],
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

        def said() -> str:
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
                assert line == "interrupted", (kind, delay, line)
                assert time.monotonic() - sent < PROMPTLY, (kind, delay)
                assert json.loads(said()) == {"under_way": 0, "threads": [], "same": True, "delegated": False}
        process.stdin.close()
        assert process.wait() == 0
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


def test_a_call_from_inside_of_what_is_done_alone_is_refused(tiny: Any) -> None:
    rs.accelerate(tiny, nodes=4)
    with tiny.speculation.engine.exclusive(), pytest.raises(ConfigError, match="inside a pass"):
        tiny.speculation.invalidate()
