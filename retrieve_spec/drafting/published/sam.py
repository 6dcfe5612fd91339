"""SAM-Decoding's rules: copy from the longest match in the text so far or in a store, else recycle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import CONTEXT, EXACT, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.published.corpus import Corpus, Places
from retrieve_spec.drafting.published.recycling import AdjacencyMatrix, add_recycled
from retrieve_spec.drafting.published.static import static_automata
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.kernels import automaton as kernels
from retrieve_spec.kernels.published_match import earliest_end
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

LONGEST = 64
"""Longest match looked up in a store."""


class Sam(PublishedDrafter):
    """Preset `sam`: the longest match in the text so far, or in a store where that is clearly longer.

    Follows SAM-Decoding (Hu et al. 2024) without an auxiliary drafter (`samd_sam_only`): the longest suffix of the text
    that occurred before, of m tokens, is continued from its *earliest* occurrence with ``min(59, 4 m)`` tokens. With a
    store, its match counts m − 5, and where that is longer a tree of ``min(59, 4 (m − 5))`` nodes is drafted: best
    first by relative counts, at most 8 children per node and 8 nodes per depth.

    A store whose segments have static automata is followed in these, as published; of any other the suffix arrays are
    searched for the last 64 tokens, which draft the same (`tests/drafting/test_static_corpus.py`).

    Differs: chains are not padded with token 0; documents of a store end a draft. Chains have constant probabilities
    (`COPY_P` per token).
    """

    bias = 5
    factor = 4
    longest_chain = 59
    branching = 8

    def __init__(self, datastores: Sequence[Datastore] = (), session: SessionMemory | None = None) -> None:
        super().__init__(session)
        self._context = SuffixAutomaton(4096, exact=True)
        self._static = static_automata(datastores)
        self._corpus = self._static or Corpus(datastores)

    def _reset(self) -> None:
        self._context.reset()
        if self._static is not None:
            self._static.reset()

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._context.extend(token_ids)
        if self._static is not None:
            self._static.extend(token_ids)

    def _matches(self) -> tuple[int, Places, int]:
        """Length of the match in the text, places and length of the match in the store."""
        states, meta = self._context.states, self._context.meta
        link = int(states[meta[kernels.M_LAST], kernels.LINK])
        static = self._static
        places, depth = static.matches() if static else self._corpus.longest(self.text.ids, LONGEST)
        return int(states[link, kernels.LENGTH]) if link > 0 else 0, places, depth

    def _chain(self, builder: TreeBuilder, matched: int, length: int) -> None:
        begin = int(earliest_end(self.text.ids, matched))
        builder.add_run(ROOT, self.text.ids[begin : begin + length].tolist(), CONTEXT)

    def _draft(self, builder: TreeBuilder) -> None:
        matched, places, depth = self._matches()
        static = depth - self.bias
        if matched >= static:
            if matched > 0:
                self._chain(builder, matched, min(self.longest_chain, self.factor * matched))
            return
        nodes = min(self.longest_chain, self.factor * static)
        self._corpus.add_tree(
            places,
            depth,
            builder,
            nodes=nodes,
            max_depth=min(nodes, builder.max_depth),
            children=self.branching,
            per_level=self.branching,
        )


class SamRecycling(Sam):
    """Preset `sam+recycling`: a long copy where the match is long, else the Token Recycling tree.

    Follows SAM-Decoding with Token Recycling (`samd`): with m the longer of the match in the text and the match in a
    store less 5, m ≥ 5 drafts a chain of 40 tokens from the *earliest* occurrence (the text wins ties), anything
    shorter drafts the tree of the target's own top tokens. The two are never merged.

    Differs: as `sam` and `token-recycling` do; the tree is Token Recycling's own (80 nodes), which SAM-Decoding used
    too before it cut it to 60; the matrix starts empty in every request unless a session is given.
    """

    top_k = AdjacencyMatrix.k
    threshold = 5
    length = 40

    def __init__(self, datastores: Sequence[Datastore] = (), session: SessionMemory | None = None) -> None:
        super().__init__(datastores, session)
        self._static, self._corpus = None, Corpus(datastores)  # copies from places, which an automaton does not keep
        self._matrix = AdjacencyMatrix()

    def _reset(self) -> None:
        super()._reset()
        if self.session is None:
            self._matrix.clear()

    def _draft(self, builder: TreeBuilder) -> None:
        matched, places, depth = self._matches()
        static = depth - self.bias
        if max(matched, static) < self.threshold:
            add_recycled(builder, self._matrix, int(self.text.ids[-1]))
        elif matched >= static:
            self._chain(builder, matched, self.length)
        else:
            builder.add_run(ROOT, self._corpus.earliest(places, depth, self.length), EXACT)

    def _learn(self, verified: VerifiedPass) -> None:
        self._matrix.learn(self.text, verified)
