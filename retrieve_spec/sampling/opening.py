"""Opening sampler: processors that guide only the beginning of a text are not asked any more when it is behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrieve_spec.sampling.acceptance import HostReading, Sampler
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.text import RowText


class OpeningSampler(HostReading):
    """One sampler while guides act, another one for the rest of the text.

    Parameters
    ----------
    guides
        Processors that say in `acts_on`, given (n,) int32 the text, whether they change what may follow it; one that
        does not does not act on anything longer either.
    opening
        Applies the guides and what comes behind them.
    rest
        Applies only what comes behind them.
    """

    def __init__(self, guides: Sequence[Any], opening: Sampler, rest: Sampler) -> None:
        self._guides, self._opening, self._rest = guides, opening, rest
        self._rest_from: int | None = None

    def _chooser(self, text: RowText) -> Sampler:
        if self._rest_from is None and not any(guide.acts_on(text.ids) for guide in self._guides):
            self._rest_from = text.length
        return self._opening if self._rest_from is None or text.length < self._rest_from else self._rest

    def choose(self, logits: PassLogits, row: int, text: RowText) -> int:
        """Return the token that follows the text, given the logits at `row`."""
        return self._chooser(text).choose(logits, row, text)

    def log_prob(self, logits: PassLogits, row: int, text: RowText, token: int) -> torch.Tensor:
        """() float32: log-probability of what `choose` has just returned."""
        return self._chooser(text).log_prob(logits, row, text, token)

    def noise_at(self, text: RowText) -> tuple[int, int, int] | None:
        """Key of the noise of the next token, None without noise."""
        return self._chooser(text).noise_at(text)
