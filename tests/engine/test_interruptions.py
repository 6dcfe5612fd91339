"""Ctrl-C and other exceptions: they end what they hit, other sequences go on."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from interrupting import ctrl_c, python_handles_it

import retrieve_spec as rs
from retrieve_spec.errors import ConfigError

GREEDY = {"do_sample": False, "max_new_tokens": 14}


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_sequence_fails_alone(tiny: Any, prompt: torch.Tensor, error: type[BaseException]) -> None:
    def fails(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 16:
            raise error("this one only")
        return scores

    expected = tiny.generate(prompt, **GREEDY)[0, 12:].tolist()
    rs.accelerate(tiny, recorded_pass="always", draft="off")
    good = rs.generate_stream(tiny, prompt, **GREEDY)
    bad = rs.generate_stream(tiny, prompt.flip(1), logits_processor=[fails], **GREEDY)
    shown, _ = next(good).token_ids.tolist(), next(bad)
    for piece in good:
        shown += piece.token_ids.tolist()
        with contextlib.suppress(error):
            next(bad, None)
    assert shown == expected
    assert bad.report is not None and bad.report.new_tokens == 4


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
        thread.join(300)
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


def test_a_call_from_inside_of_what_is_done_alone_is_refused(tiny: Any) -> None:
    rs.accelerate(tiny, nodes=4)
    with tiny.speculation.engine.alone(), pytest.raises(ConfigError, match="inside a pass"):
        tiny.speculation.invalidate()
