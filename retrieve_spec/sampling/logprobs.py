"""Log-probabilities of chosen tokens, two numbers each, taken from the rows of logits that they were chosen by."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.sampling.acceptance import Sampler, log_softmax_at
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.text import RowText


class LogProbSampler:
    """Chooses what another sampler chooses, and notes how probable that was; no row of logits is kept."""

    def __init__(self, chooser: Sampler) -> None:
        self.chooser = chooser
        self.reads_plainly, self.scores, self.raw = chooser.reads_plainly, chooser.scores, chooser.raw
        self.read, self.log_prob, self.noise_at = chooser.read, chooser.log_prob, chooser.noise_at
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the logits' device: nothing waits for them

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the other sampler's choice."""
        token = self.chooser.choose(logits, row, text)
        raw = log_softmax_at(logits.logits[row], token)
        self._noted.append((self.chooser.log_prob(logits, row, text, token), raw))
        return token

    def log_probs(self, first: int = 0, count: int | None = None) -> NDArray[np.float32]:
        """(2, n) float32 of the new tokens from `first` on: by the processed scores, and by the raw logits."""
        noted = self._noted[first : None if count is None else first + count]
        if not noted:
            return np.empty((2, 0), np.float32)
        both = [torch.stack([pair[i].to(noted[0][1].device) for pair in noted]).cpu().numpy() for i in (0, 1)]
        return np.stack(both)
