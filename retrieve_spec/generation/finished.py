"""Finished requests: what `generate_many` hands out of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.engine.report import GenerationReport


@dataclass(frozen=True, slots=True)
class Completion:
    """One text that the model wrote.

    Attributes
    ----------
    token_ids
        (n,) int32, behind the prompt.
    text
        The same as text; empty without a tokenizer.
    report
        How it was decoded.
    logprobs, raw_logprobs
        (n,) float32 with `return_logprobs=True`, as in the output of `generate`; else None.
    """

    token_ids: NDArray[np.int32]
    text: str
    report: GenerationReport
    logprobs: NDArray[np.float32] | None = None
    raw_logprobs: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is over.

    Attributes
    ----------
    index
        Its place among the requests.
    request
        What was given.
    outputs
        One for each of `num_return_sequences`; as far as they got where it failed or was cancelled.
    error
        What it failed with, else None.
    cancelled
        Whether `Requests.cancel` ended it.
    """

    index: int
    request: Any
    outputs: tuple[Completion, ...] = ()
    error: Exception | None = None
    cancelled: bool = False

    @property
    def text(self) -> str:
        """Text of the first output; empty where there is none."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """(n,) int32 tokens of the first output."""
        return self.outputs[0].token_ids if self.outputs else np.empty(0, np.int32)
