"""Stopping criteria: the exact token at which generation stops, one emitted token after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from retrieve_spec.sampling.text import RowText


class Stopper:
    """Applies stopping criteria to every emitted token in order, as plain decoding does.

    Length and end-of-text tokens are checked without building tensors; every other criterion is called as it is.

    Parameters
    ----------
    criteria
        What `generate` prepared: the library's own and the user's stopping criteria.
    """

    def __init__(self, criteria: Iterable[Any]) -> None:
        self.max_length: int | None = None
        self._eos: set[int] = set()
        self._others: list[Any] = []
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                length = int(criterion.max_length)
                self.max_length = length if self.max_length is None else min(self.max_length, length)
            elif type(criterion) is EosTokenCriteria:
                self._eos.update(int(token) for token in criterion.eos_token_id.flatten())
            else:
                self._others.append(criterion)

    def __call__(self, text: RowText, token_id: int, scores: tuple[Any, ...] | None) -> bool:
        """Whether generation ends with `token_id`, the last token of `text`."""
        stop = token_id in self._eos or (self.max_length is not None and text.length >= self.max_length)
        if self._others:
            input_ids = text.tensor()
            for criterion in self._others:  # all are asked, as in plain decoding: some count their calls
                stop = bool(torch.as_tensor(criterion(input_ids, scores)).all()) or stop
        return stop
