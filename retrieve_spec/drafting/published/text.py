"""Rules that copy from the text so far and from earlier answers: prompt lookup, ANPD, SuffixDecoding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.published.base import Gram, NgramIndex, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.kernels.suffix_decoding import speculate
from retrieve_spec.sources import CONTEXT, SESSION
from retrieve_spec.sources.automaton import SuffixAutomaton


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
        self._index = NgramIndex(self.longest, self.length)

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._index.read(self.text, len(token_ids))

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text[-self.longest :].tolist()
        for n in range(len(newest), 0, -1):
            begin = self._index.first.get(tuple(newest[-n:]), len(self.text))
            if begin + self.length <= len(self.text):
                builder.add_run(ROOT, self.text[begin : begin + self.length], CONTEXT)
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
        self._counts: dict[Gram, dict[int, int]] = {}

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        begin = len(self.text) - len(token_ids)
        lead = max(0, begin - self.order + 1)
        tokens = self.text[lead:].tolist()
        for i in range(begin - lead, len(tokens)):
            for n in range(1, min(self.order - 1, i) + 1):
                seen = self._counts.setdefault(tuple(tokens[i - n : i]), {})
                seen[tokens[i]] = seen.get(tokens[i], 0) + 1

    def _draft(self, builder: TreeBuilder) -> None:
        context = self.text[1 - self.order :].tolist()
        parent, p = ROOT, 1.0
        for _ in range(self.length):
            known = (self._counts.get(tuple(context[-n:])) for n in range(len(context), 0, -1))
            seen = next(filter(None, known), None)
            if seen is None:
                return
            most = max(seen.values())
            token = next(t for t in reversed(seen) if seen[t] == most)
            p *= most / sum(seen.values())
            parent = builder.add(parent, token, p, CONTEXT)
            context = [*context, token][-(self.order - 1) :]


class SuffixDecoding(PublishedDrafter):
    """Preset `suffix`: the best-scored count tree below any suffix of the text.

    Follows SuffixDecoding (Oliaro et al. 2024) in tree mode: for every match length m the continuations are taken by
    path probability (product of child count / parent count, the text's own end counted among the occurrences), at
    most ``factor · m`` of them, none below `min_token_probability`, match and draft together at most `depth` deep. The
    tree with the largest sum of probabilities is drafted; the longer match wins ties, and the text so far wins
    against earlier answers.

    Differs: `factor` is 4, the upper end of the published range and the best in tree mode (engines default to 1 and
    chains); automata replace the suffix trees (the same counts, except that contexts of more than 32 tokens count each
    continuation once); earlier answers are in two automata, an old and a young one, each a tree of its own, and the
    answer at hand joins them when it is finished (until then only its end is counted among the occurrences).
    """

    factor = 4.0
    min_token_probability = 0.1
    depth = 64

    def _reset(self) -> None:
        self._context = SuffixAutomaton(4096, exact=True)
        self._earlier: list[SuffixAutomaton] = [] if self.session is None else list(self.session.automata)
        self._cursors = [(0, 0)] * len(self._earlier)

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._context.extend(token_ids)
        newest = token_ids[-self.depth :]
        self._cursors = [a.follow(newest, *at) for a, at in zip(self._earlier, self._cursors, strict=True)]

    def _draft(self, builder: TreeBuilder) -> None:
        score, found, source = *self._speculate(self._context, *self._context.earlier(), builder), CONTEXT
        for automaton, cursor in zip(self._earlier, self._cursors, strict=True):
            other, nodes = self._speculate(automaton, *cursor, builder)
            if other > score:
                score, found, source = other, nodes, SESSION
        numbers: list[int] = []
        for token, parent, p in found:
            numbers.append(builder.add(numbers[parent] if parent >= 0 else ROOT, token, p, source))

    def _speculate(
        self, automaton: SuffixAutomaton, state: int, matched: int, builder: TreeBuilder
    ) -> tuple[float, list[tuple[int, int, float]]]:
        """Score of one automaton's tree, and its nodes: token, parent, path probability."""
        if matched <= 0:
            return 0.0, []
        nodes, p = np.empty((MAX_NODES, 2), np.int32), np.empty(MAX_NODES, np.float64)
        n, score = speculate(
            automaton.states,
            automaton.edges,
            automaton.slots,
            state,
            matched,
            self.factor,
            builder.max_nodes,
            builder.max_depth,
            self.depth,
            self.min_token_probability,
            nodes,
            p,
        )
        return float(score), list(zip(*nodes[:n].T.tolist(), p[:n].tolist(), strict=True))
