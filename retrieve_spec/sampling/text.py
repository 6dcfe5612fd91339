"""The row so far, as one growing buffer that NumPy and torch both see, and the token at which it ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


class RowText:
    """Prompt and emitted tokens of one row.

    Parameters
    ----------
    input_ids
        (1, L) long, the prompt as `generate` got it. The buffer doubles when it is full.
    """

    def __init__(self, input_ids: torch.Tensor) -> None:
        self.prompt_length = input_ids.shape[1]
        self.length = self.prompt_length
        self._device = input_ids.device
        self._tensor = torch.empty((1, self.length + 256), dtype=torch.long)
        self._tensor[:, : self.length] = input_ids
        self._ids: NDArray[np.int64] = self._tensor.numpy()[0]

    def append(self, token_id: int) -> None:
        """Add one token."""
        if self.length == len(self._ids):
            self._tensor = torch.cat([self._tensor, torch.empty_like(self._tensor)], dim=-1)
            self._ids = self._tensor.numpy()[0]
        self._ids[self.length] = token_id
        self.length += 1

    def tensor(self) -> torch.Tensor:
        """(1, length) long on the prompt's device: a view on the CPU, a copy elsewhere; read only."""
        return self._tensor[:, : self.length].to(self._device)

    @property
    def ids(self) -> NDArray[np.int64]:
        """(length,) view of all tokens; read only."""
        row: NDArray[np.int64] = self._ids[: self.length]
        return row

    @property
    def last(self) -> int:
        """The last token."""
        return int(self._ids[self.length - 1])

    @property
    def last_ids(self) -> NDArray[np.int32]:
        """(1,) copy of the last token: the root of the next pass."""
        last: NDArray[np.int32] = self._ids[self.length - 1 : self.length].astype(np.int32)
        return last

    @property
    def new_ids(self) -> NDArray[np.int64]:
        """(emitted,) view of the tokens after the prompt."""
        emitted: NDArray[np.int64] = self._ids[self.prompt_length : self.length]
        return emitted


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
                length = math.ceil(criterion.max_length)
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
