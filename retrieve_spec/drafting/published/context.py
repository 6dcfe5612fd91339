"""Rules that copy from the text so far by n-grams: prompt lookup and adaptive n-gram decoding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.published.base import CONTEXT, NgramIndex, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT


class PromptLookup(PublishedDrafter):
    """Preset `prompt-lookup`: what followed the last three, two or one tokens the first time.

    Follows prompt lookup decoding (Saxena 2023) and its copy in Spec-Bench: n-grams from 3 down to 1, the *earliest*
    match, `length` = 10 tokens, and a match counts only when all ten exist; the first n that has one wins.

    Differs: where nothing matches, nothing is drafted (Spec-Bench verifies a dummy token); matches are looked up in an
    index instead of by scanning. Probabilities are constants (`COPY_P` per token), the rule has none.
    """

    longest = 3
    length = 10

    def _reset(self) -> None:
        self._index = NgramIndex(self.longest)

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._index.read(self.text, len(token_ids))

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text.last(self.longest)
        for n in range(len(newest), 0, -1):
            begin = self._index.first[n - 1][tuple(newest[-n:])]
            if begin + self.length <= len(self.text):
                builder.add_run(ROOT, self.text.ids[begin : begin + self.length].tolist(), CONTEXT)
                return


class AdaptiveNgram(PublishedDrafter):
    """Preset `anpd`: the most frequent continuation of the longest known n-gram, token by token.

    Follows ANPD (Ou, Chen and Tian 2024): n-gram counts of the prompt and the output for n = `order` … 2, the highest
    order that knows the context decides, greedily, for each of `length` tokens. Of equally frequent tokens the one
    that came up last for the first time is taken, as in the published code.

    Differs: only accepted tokens are counted (the text itself), and probabilities are the relative counts. The
    paper's code is incomplete; order 5 and 6 tokens are the settings its evaluation names as best.
    """

    order = 5
    length = 6

    def _reset(self) -> None:
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        begin = len(self.text) - len(token_ids)
        lead = max(0, begin - self.order + 1)
        tokens = self.text.ids[lead:].tolist()
        for i in range(begin - lead, len(tokens)):
            for n in range(1, min(self.order - 1, i) + 1):
                seen = self._counts.setdefault(tuple(tokens[i - n : i]), {})
                seen[tokens[i]] = seen.get(tokens[i], 0) + 1

    def _draft(self, builder: TreeBuilder) -> None:
        context = self.text.last(self.order - 1)
        parent, p = ROOT, 1.0
        for _ in range(self.length):
            seen = self._longest(context)
            if not seen:
                return
            most = max(seen.values())
            token = next(t for t in reversed(seen) if seen[t] == most)
            p *= most / sum(seen.values())
            parent = builder.add(parent, token, p, CONTEXT)
            context = [*context, token][-(self.order - 1) :]

    def _longest(self, context: list[int]) -> dict[int, int] | None:
        for n in range(len(context), 0, -1):
            seen = self._counts.get(tuple(context[-n:]))
            if seen:
                return seen
        return None
