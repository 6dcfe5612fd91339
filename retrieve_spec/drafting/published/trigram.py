"""ADED's rule: tri-gram probabilities of a corpus and of the text, searched with an exploration bonus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import CONTEXT, NGRAM, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.kernels.ngram import ngram_hash
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.indexes import NgramTable
    from retrieve_spec.datastore.store import Datastore

Pair = tuple[int, int]


@dataclass(slots=True)
class _Visit:
    """A node of the search: its children by token, with their probabilities, and how often it was visited."""

    node: int
    pair: Pair
    chance: float
    children: list[tuple[int, float, float]]
    below: dict[int, _Visit] = field(default_factory=dict)
    visits: int = 0
    spent: bool = False


class AdaptiveTrigram(PublishedDrafter):
    """Preset `adaptive-trigram`: a tree search over tri-gram probabilities that adapts to what was accepted.

    Follows ADED (Liu et al. 2025): a tri-gram matrix of a corpus gives the top 12 tokens after two tokens; it is
    updated with the output as it appears; drafts are built by a Monte Carlo tree search that scores a child by
    ``Q + C · P · √(visits of the parent) / (1 + visits of the child)``, where Q is how often it was accepted before.

    Differs: ADED's code was never released and leaves open how Q is kept, and how the update weighs against the
    corpus. Here Q is the share of a tri-gram's drafts that were accepted in this request, P before it was drafted; the
    corpus counts as `corpus_weight` observations; every visit adds one node, at most four deep, until the budget is
    full; ties go to the more probable, then to the smaller token. Without a store the matrix starts empty.
    """

    branching = 12
    exploration = 1.0
    depth = 4
    nodes = 64
    corpus_weight = 4.0

    def __init__(self, datastores: Sequence[Datastore] = (), session: SessionMemory | None = None) -> None:
        super().__init__(session)
        self._tables: list[tuple[NgramTable, int]] = [
            (table, store.manifest.vocabulary) for store in datastores for table in store.ngrams
        ]

    def _reset(self) -> None:
        self._counts: dict[Pair, dict[int, int]] = {}
        self._corpus: dict[Pair, dict[int, float]] = {}
        self._tried: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._rows: dict[Pair, list[tuple[int, float, float]]] = {}

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        tokens = self.text.last(len(token_ids) + 2)
        for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False):
            seen = self._counts.setdefault((a, b), {})
            seen[c] = seen.get(c, 0) + 1

    def _of_corpus(self, pair: Pair) -> dict[int, float]:
        """Shares of the tokens that follow a pair in the stores' tables; read once per request."""
        known = self._corpus.get(pair)
        if known is not None:
            return known
        h = np.uint64(ngram_hash(np.uint64(ngram_hash(np.uint64(0), pair[1])), pair[0]))
        counts: dict[int, float] = {}
        total = 0
        for table, vocabulary in self._tables:
            found = table.look_up(h, vocabulary)
            if found is not None:
                for token, count in zip(found[2].tolist(), found[3].tolist(), strict=True):
                    counts[token] = counts.get(token, 0.0) + count
                total += found[0]
        shares = {token: count / max(total, 1) for token, count in counts.items()}
        self._corpus[pair] = shares
        return shares

    def _row(self, pair: Pair) -> list[tuple[int, float, float]]:
        """(token, probability, Q) of the top tokens after a pair, most probable first; kept while one draft is made."""
        known = self._rows.get(pair)
        if known is None:
            known = self._rows[pair] = self._ranked(pair)
        return known

    def _ranked(self, pair: Pair) -> list[tuple[int, float, float]]:
        """`_row` of a pair, from what followed it in the text and in the corpus."""
        corpus = self._of_corpus(pair) if self._tables else {}
        seen = self._counts.get(pair, {})
        weight = self.corpus_weight if corpus else 0.0
        total = sum(seen.values()) + weight
        if total == 0:
            return []
        p = {token: weight * share / total for token, share in corpus.items()}
        for token, count in seen.items():
            p[token] = p.get(token, 0.0) + count / total
        top = sorted(p.items(), key=lambda item: (-item[1], item[0]))[: self.branching]
        return [(token, share, self._value(pair, token, share)) for token, share in top]

    def _value(self, pair: Pair, token: int, share: float) -> float:
        right, tried = self._tried.get((*pair, token), (0, 0))
        return right / tried if tried else share

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text.last(2)
        if len(newest) < 2:
            return
        pair = (newest[0], newest[1])
        self._rows = {}
        root = _Visit(ROOT, pair, 1.0, self._row(pair))
        depth = min(self.depth, builder.max_depth)
        while len(builder) < builder.max_nodes and not root.spent:
            self._visit(root, builder, depth)

    def _visit(self, at: _Visit, builder: TreeBuilder, depth: int) -> None:
        """Walk down by score and add one node, or find that nothing can be added below."""
        at.visits += 1
        bonus = self.exploration * math.sqrt(at.visits)
        best, best_score = None, -1.0
        for child in at.children:
            token, p, q = child
            seen = at.below.get(token)
            if seen is None:
                score = q + bonus * p
            elif seen.spent:
                continue
            else:
                score = q + bonus * p / (1 + seen.visits)
            if score > best_score:
                best, best_score = child, score
        if best is None:
            at.spent = True
            return
        token, p, _ = best
        below = at.below.get(token)
        if below is not None:
            self._visit(below, builder, depth - 1)
            return
        pair = (at.pair[1], token)
        chance = at.chance * p
        node = builder.add(at.node, token, chance, CONTEXT if token in self._counts.get(at.pair, {}) else NGRAM)
        row = self._row(pair) if depth > 1 else []
        at.below[token] = _Visit(node, pair, chance, row, spent=not row)

    def _learn(self, verified: VerifiedPass) -> None:
        """Count which drafted tri-grams were accepted: children of the root and of accepted nodes."""
        tree = verified.tree
        accepted = set(verified.path.tolist())
        newest = self.text.last(2)
        if len(newest) < 2 or len(tree) == 0:
            return
        tokens, parents = tree.token_ids.tolist(), tree.parent.tolist()
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if parent != ROOT and parent not in accepted:
                continue
            if parent == ROOT:
                a, b = newest
            else:
                b = tokens[parent]
                a = tokens[parents[parent]] if parents[parent] != ROOT else newest[1]
            right, tried = self._tried.get((a, b, token), (0, 0))
            self._tried[a, b, token] = right + (i in accepted), tried + 1
