"""LogitSpec's rule: the last logits name the token after next, n-grams of the text continue it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import CONTEXT, COPY_P, RECYCLING, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT


class LogitSpec(PublishedDrafter):
    """Preset `logitspec`: the runners-up of the last choice as candidates for the next one, continued by n-grams.

    Follows LogitSpec (Liu et al. 2025). The logits that chose the last emitted token also rank guesses of the token
    after it: each of their top 64 but the chosen one becomes a child of the root, continued from the text by the
    longest n-gram of 3 … 1 tokens that ends in it, to 4 tokens in all for ranks 0 … 8, 3 up to rank 32, else 1. Before
    them comes the continuation of the text itself, of at most 20 tokens. An n-gram continues from its newest place
    with 20 tokens behind it, else from its first place. 63 nodes in all.

    Differs: drafts that begin alike share nodes, which leaves room for later ranks. Probabilities are constants that
    fall with the rank.
    """

    top_k = 64
    nodes = 63
    longest = 3
    length = 20

    def _reset(self) -> None:
        self._first: dict[tuple[int, ...], int] = {}
        self._full: dict[tuple[int, ...], int] = {}
        self._ranked: list[int] = []

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        end = len(self.text)
        begin = end - len(token_ids)
        lead = max(0, begin - self.length - self.longest)
        tokens = self.text.ids[lead:].tolist()
        for n in range(1, self.longest + 1):
            for at in range(max(begin, n), end):  # the n-gram before `at` goes on at `at`
                self._first.setdefault(tuple(tokens[at - lead - n : at - lead]), at)
            for at in range(max(begin - self.length + 1, n), end - self.length + 1):
                self._full[tuple(tokens[at - lead - n : at - lead])] = at

    def _continuation(self, context: list[int], length: int) -> list[int]:
        """What followed the longest known n-gram at the end of a context, at most `length` tokens."""
        for n in range(min(len(context), self.longest), 0, -1):
            gram = tuple(context[-n:])
            at = self._full.get(gram, self._first.get(gram, -1))
            if at >= 0:
                run: list[int] = self.text.ids[at : at + length].tolist()
                return run
        return []

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text.last(self.longest)
        builder.add_run(ROOT, self._continuation(newest, self.length), CONTEXT)
        for rank, token in enumerate(self._ranked):
            if len(builder) >= builder.max_nodes:
                return
            if token == newest[-1]:
                continue
            node = builder.add(ROOT, token, 0.1 / (rank + 1), RECYCLING)
            more = (4 if rank <= 8 else 3 if rank <= 32 else 1) - 1
            if more:
                run = self._continuation([*newest, token], more)
                builder.add_run(node, run, CONTEXT, 0.1 / (rank + 1), COPY_P)

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """Keep what the target ranked for the first token."""
        self._ranked = top_ids[-1].tolist() if len(top_ids) else []

    def _learn(self, verified: VerifiedPass) -> None:
        if verified.top_ids is not None:
            row = int(verified.path[-1]) + 1 if len(verified.path) else 0
            self._ranked = verified.top_ids[row].tolist()
