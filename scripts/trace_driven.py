"""Trace-driven verifier: a model of random weights says a recorded text.

It does all the work of a real pass, then the recorded token is made the most probable one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from retrieve_spec.verify.verifier import Mode, Verifier, VerifierInputs, VerifierOutput

SURE = 1e4
"""Logit of the recorded token."""


class TraceDriven:
    """A verifier whose target is made to say the recorded text, after all its work is done.

    `read_at` is what the clock said when the prompt had been read; with `chains` no trees are verified.
    """

    def __init__(
        self, inner: Verifier, trace: torch.Tensor, clock: Callable[[], float] = time.perf_counter, chains: bool = False
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
            return VerifierOutput(out.logits.scatter(1, self._trace[at][:, None], SURE), out.hidden)

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


def clock_of(processor: bool) -> Callable[[], float]:
    """The clock, or the seconds of one `processor`, which other work on the machine moves less: torch then uses one."""
    if processor:
        torch.set_num_threads(1)
    return time.process_time if processor else time.perf_counter
