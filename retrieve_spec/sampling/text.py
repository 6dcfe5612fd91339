"""The row so far, as one growing buffer that NumPy and torch both see."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class RowText:
    """Prompt and emitted tokens of one row.

    Parameters
    ----------
    input_ids
        (1, L) long, the prompt as `generate` got it.
    capacity
        Tokens to make room for; the buffer doubles when it is full.
    """

    def __init__(self, input_ids: torch.Tensor, capacity: int = 0) -> None:
        self.prompt_length = input_ids.shape[1]
        self.length = self.prompt_length
        self._device = input_ids.device
        self._tensor = torch.empty((1, max(capacity, self.length + 256)), dtype=torch.long)
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
