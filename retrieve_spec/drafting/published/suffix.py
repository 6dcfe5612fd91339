"""SuffixDecoding's rule over the suffix automata of the text so far and of earlier generations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.published.base import CONTEXT, SESSION, PublishedDrafter, TreeBuilder
from retrieve_spec.kernels import automaton as kernels
from retrieve_spec.kernels.published_suffix import speculate
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.session import SessionMemory


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
    offset = 0.0
    min_token_probability = 0.1
    depth = 64

    def __init__(self, session: SessionMemory | None = None) -> None:
        super().__init__(session)
        self._context = SuffixAutomaton(4096, exact=True)
        self._nodes = np.empty((2, MAX_NODES, 2), np.int32)
        self._node_p = np.empty((2, MAX_NODES), np.float64)

    def _reset(self) -> None:
        self._context.reset()
        self._earlier: list[SuffixAutomaton] = [] if self.session is None else list(self.session.automata)
        self._cursors = np.zeros((2, 2), np.int64)

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._context.extend(token_ids)
        for i, automaton in enumerate(self._earlier):
            self._cursors[i] = automaton.follow(token_ids[-self.depth :], *self._cursors[i].tolist())

    def _draft(self, builder: TreeBuilder) -> None:
        context = self._context
        link = int(context.states[context.meta[kernels.M_LAST], kernels.LINK])
        matched = int(context.states[link, kernels.LENGTH]) if link > 0 else 0
        n, score = self._speculate(context, link, matched, 1, builder, 0)
        source, room = CONTEXT, 1  # the other buffer is free
        for i, automaton in enumerate(self._earlier):
            state, matched = self._cursors[i].tolist()
            found = self._speculate(automaton, state, matched, 1, builder, room)
            if found[1] > score:
                (n, score), source, room = found, SESSION, 1 - room
        at = 1 - room
        numbers: list[int] = []
        for (token, parent), p in zip(self._nodes[at, :n].tolist(), self._node_p[at, :n].tolist(), strict=True):
            numbers.append(builder.add(numbers[parent] if parent >= 0 else -1, token, p, source))

    def _speculate(
        self, automaton: SuffixAutomaton, state: int, matched: int, ends: int, builder: TreeBuilder, room: int
    ) -> tuple[int, float]:
        """Nodes and score of one automaton's tree, which is left in the `room`-th buffer."""
        if matched <= 0:
            return 0, 0.0
        n, score = speculate(
            automaton.states,
            automaton.edges,
            state,
            matched,
            ends,
            self.factor,
            self.offset,
            builder.max_nodes,
            builder.max_depth,
            self.depth,
            self.min_token_probability,
            self._nodes[room],
            self._node_p[room],
        )
        return int(n), float(score)
