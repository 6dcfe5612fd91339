"""Trace-driven verifier and calls: a model of random weights gives recorded answers.

It does all the work of a real pass, then the recorded token is made the most probable one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs, VerifierOutput

SURE = 1e4
"""Logit of the recorded token."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A recorded answer, cut to the length that is measured."""

    task: str
    prompt: torch.Tensor  # (1, n)
    trace: torch.Tensor  # (n + new,) prompt and answer

    @property
    def new(self) -> int:
        """Tokens of the answer."""
        return len(self.trace) - self.prompt.shape[1]

    def cut(self, new: int) -> Answer:
        """The beginning of the answer."""
        return replace(self, trace=self.trace[: self.prompt.shape[1] + new])


@dataclass(frozen=True, slots=True)
class Told:
    """What giving one answer took."""

    seconds: float
    first: float  # seconds until the prompt was read
    same: bool
    report: GenerationReport | None = None  # of this library


class TraceDriven:
    """A verifier whose target is made to say the recorded text, after all its work is done.

    `read_at` is what the clock said when the prompt had been read; with `chains` no trees are verified.
    """

    def __init__(
        self, inner: Verifier, trace: torch.Tensor, clock: Clock = time.perf_counter, chains: bool = False
    ) -> None:
        self._inner, self._trace, self._past = inner, trace, 0
        self._clock, self._chains, self.read_at = clock, chains, 0.0

    @property
    def mode(self) -> Mode:
        """What drafts may be."""
        return "chain" if self._chains and self._inner.mode == "tree" else self._inner.mode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, inputs: VerifierInputs) -> None:
        """Begin at the prompt."""
        self._past, self._prompt, self.read_at = 0, inputs.input_ids.shape[1], 0.0
        self._inner.start(inputs)

    def forward(self, root_ids: Any, tree: Any = None, *, keep: int = 1, want_hidden: Any = None) -> VerifierOutput:
        """Run the pass, then make the recorded token of every row's position the most probable one."""
        out = self._inner.forward(root_ids, tree, keep=keep, want_hidden=want_hidden)
        self._roots = len(root_ids)
        last = self._past + self._roots
        after = np.arange(last - keep + 1, last + 1)
        if tree is not None and len(tree):
            after = np.concatenate([after, last + tree.depth])
        at = torch.from_numpy(after).clamp(max=len(self._trace) - 1).to(out.logits.device, non_blocking=True)
        with torch.inference_mode():
            return VerifierOutput(out.logits.scatter(1, self._trace[at][:, None], SURE), out.hidden, out.ran)

    def commit(self, path: Any) -> None:
        """Go on behind the accepted nodes."""
        self._past += self._roots + len(path)
        self._inner.commit(path)
        if not self.read_at and self._past >= self._prompt:
            self.read_at = self._clock()


def told(trace: torch.Tensor) -> Callable[..., Any]:
    """A logits processor that makes the recorded token the most probable one."""

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        at = min(input_ids.shape[1], len(trace) - 1)
        return scores.index_fill(1, trace[at : at + 1], SURE)

    return process


def by_transformers(model: Any, answer: Answer, clock: Clock, **extra: Any) -> Told:
    """Let transformers' own `generate` give an answer."""
    calls: list[float] = []
    say = told(answer.trace)

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not calls:  # a clock that waits for a device is asked once
            calls.append(clock())
        return say(ids, scores)

    began = clock()
    out = type(model).generate(
        model, answer.prompt, max_new_tokens=answer.new, do_sample=False, logits_processor=[process], **extra
    )
    ended = clock()
    return Told(ended - began, calls[0] - began, torch.equal(out[0], answer.trace))


def by_us(model: Any, answer: Answer, clock: Clock, make: Callable[[], Any], draft: str, chains: bool = False) -> Told:
    """Let the accelerated model give an answer."""
    model.speculation.forget()
    driven: list[TraceDriven] = []

    def drive() -> TraceDriven:
        driven.append(TraceDriven(make(), answer.trace, clock, chains))
        return driven[-1]

    model.speculation._make_verifier = drive
    began = clock()
    out = model.generate(answer.prompt, max_new_tokens=answer.new, do_sample=False, draft=draft)
    ended = clock()
    same = torch.equal(out[0], answer.trace)
    return Told(ended - began, driven[-1].read_at - began, same, model.speculation.last)


def clock_of(processor: bool) -> Clock:
    """The clock, or the seconds of one `processor`, which other work on the machine moves less: torch then uses one."""
    if processor:
        torch.set_num_threads(1)
    return time.process_time if processor else time.perf_counter
