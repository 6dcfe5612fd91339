"""Rules that search their drafts by learned chances: ADED's adaptive tri-grams, STAND."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import FULL, Gram, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.kernels.ngram import ngram_hash
from retrieve_spec.sources import CONTEXT, NGRAM, RECYCLING
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

RANK_P = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.01)
"""Chance of each rank before any of STAND's trees was measured."""
Pair = tuple[int, int]


@dataclass(slots=True)
class _Visit:
    """A node of a tree search: its children by token, with their probabilities, and how often it was visited."""

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

    def _reset(self) -> None:
        self._tables = [(table, store.manifest.vocabulary) for store in self.datastores for table in store.ngrams]
        self._counts: dict[Pair, dict[int, int]] = {}
        self._corpus: dict[Pair, dict[int, float]] = {}
        self._tried: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._rows: dict[Pair, list[tuple[int, float, float]]] = {}

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        tokens = self.text[-len(token_ids) - 2 :].tolist()
        for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False):
            seen = self._counts.setdefault((a, b), {})
            seen[c] = seen.get(c, 0) + 1

    def _of_corpus(self, pair: Pair) -> dict[int, float]:
        """Shares of the tokens that follow a pair in the stores' tables; read once per request."""
        if pair not in self._corpus:
            h = np.uint64(ngram_hash(np.uint64(ngram_hash(np.uint64(0), pair[1])), pair[0]))
            counts: Counter[int] = Counter()
            total = 0
            for table, vocabulary in self._tables:
                found = table.look_up(h, vocabulary)
                if found is not None:
                    counts.update(dict(zip(found[2].tolist(), found[3].tolist(), strict=True)))
                    total += found[0]
            self._corpus[pair] = {token: count / max(total, 1) for token, count in counts.items()}
        return self._corpus[pair]

    def _row(self, pair: Pair) -> list[tuple[int, float, float]]:
        """(token, probability, Q) of the top tokens after a pair, most probable first; kept while one draft is made."""
        if pair not in self._rows:
            corpus, seen = self._of_corpus(pair) if self._tables else {}, self._counts.get(pair, {})
            weight = self.corpus_weight if corpus else 0.0
            total = sum(seen.values()) + weight
            p = {token: weight * share / total for token, share in corpus.items()}
            for token, count in seen.items():
                p[token] = p.get(token, 0.0) + count / total
            top = sorted(p.items(), key=lambda item: (-item[1], item[0]))[: self.branching]
            seen_of = [self._tried.get((*pair, token), (share, 1)) for token, share in top]
            self._rows[pair] = [(*of, right / tried) for of, (right, tried) in zip(top, seen_of, strict=True)]
        return self._rows[pair]

    def _draft(self, builder: TreeBuilder) -> None:
        if len(self.text) < 2:
            return
        pair = (self.text[-2], self.text[-1])
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
            score = q + bonus * p / (1 + (seen.visits if seen else 0))
            if score > best_score and not (seen and seen.spent):
                best, best_score = child, score
        if best is None:
            at.spent = True
            return
        token, p, _ = best
        if token in at.below:
            self._visit(at.below[token], builder, depth - 1)
            return
        pair = (at.pair[1], token)
        chance = at.chance * p
        node = builder.add(at.node, token, chance, CONTEXT if token in self._counts.get(at.pair, {}) else NGRAM)
        row = self._row(pair) if depth > 1 else []
        at.below[token] = _Visit(node, pair, chance, row, spent=not row)

    def _learn(self, verified: VerifiedPass) -> None:
        """Count which drafted tri-grams were accepted: children of the root and of accepted nodes."""
        if len(self.text) < 2:
            return
        accepted = {ROOT, *verified.path.tolist()}
        tokens = [*self.text[-2:], *verified.tree.token_ids.tolist()]  # node i stands at i + 2, the root at 1
        above = [0, 0, *(verified.tree.parent + 2).tolist()]
        for i in range(2, len(tokens)):
            if above[i] - 2 in accepted:
                key = (tokens[above[above[i]]], tokens[above[i]], tokens[i])
                right, tried = self._tried.get(key, (0, 0))
                self._tried[key] = right + (i - 2 in accepted), tried + 1


class ProbabilityMemory:
    """Contexts of 1 … `orders` tokens → the target's top `k` tokens there with averaged probabilities.

    When it is full (`capacity` contexts), the memory starts afresh.
    """

    orders, k, capacity = 4, 10, 1 << 18

    def __init__(self) -> None:
        self.rows: dict[Gram, tuple[dict[int, float], int]] = {}

    def learn(self, context: Sequence[int], tokens: list[int], logits: NDArray[np.float32]) -> None:
        """Average the target's probabilities after a context into the rows of its suffixes."""
        e = np.exp(logits - logits.max())
        probabilities = (e / e.sum()).tolist()
        if len(self.rows) > self.capacity:
            self.rows.clear()
        for n in range(1, min(len(context), self.orders) + 1):
            key = tuple(context[-n:])
            old, seen = self.rows.get(key, ({}, 0))
            row = {token: p * seen / (seen + 1) for token, p in old.items()}
            for token, p in zip(tokens, probabilities, strict=True):
                row[token] = row.get(token, 0.0) + p / (seen + 1)
            if len(row) > self.k:
                row = dict(sorted(row.items(), key=lambda item: (-item[1], item[0]))[: self.k])
            self.rows[key] = row, seen + 1

    def after(self, context: Sequence[int]) -> dict[int, float]:
        """Token → probability in the longest known suffix of a context."""
        known = (self.rows.get(tuple(context[-n:])) for n in range(min(len(context), self.orders), 0, -1))
        return next((row for row, _ in filter(None, known) if row), {})


def best_tree(hits: Counter[Gram], passes: int, nodes: int, depth: int) -> list[Gram]:
    """The rank paths that were right most often, most often first; before any pass, those of the smallest ranks."""
    front: list[tuple[float, Gram, float]] = [(0.0, (), 1.0)]
    chosen: list[Gram] = []
    while front and len(chosen) <= nodes:
        _, path, prior = heapq.heappop(front)
        chosen.append(path)
        for rank, p in enumerate(RANK_P if len(path) < depth else ()):
            score = (hits[(*path, rank)] + 10 * prior * p) / (passes + 10)
            heapq.heappush(front, (-score, (*path, rank), prior * p))
    return chosen[1:]


class Stand(PublishedDrafter):
    """Preset `stand`: children drawn from remembered probabilities by Gumbel-top-k, in a tree fitted to what was right.

    Follows STAND (Song et al. 2025): contexts of 4 … 1 tokens remember the target's top 10 tokens with running averages
    of their probabilities, for the prompt's end and everything generated; a node's children are drawn without
    replacement by adding precomputed Gumbel noise to the log probabilities; the tree has the 80 places that were right
    most often over the first 30 requests, depth at most 20.

    Differs: STAND's code is not public. It measures 30 requests with trees of 625 nodes; here each request is measured
    with the tree at hand, one level beyond what was accepted, and the tree is chosen anew after it. Noise is the same
    in every request, so drafts are deterministic. Text is forgotten between requests unless a session is given (then
    trajectories share the memory, as published); the tree's shape, which holds no text, is kept.
    """

    top_k = 10
    nodes = 80
    depth = 20
    measured_requests = 30

    def __init__(self, datastores: Sequence[Datastore] = (), session: SessionMemory | None = None) -> None:
        super().__init__(datastores, session)
        self._memory = ProbabilityMemory()
        self._noise = np.random.default_rng(0).gumbel(size=8192).tolist()
        self._hits: Counter[Gram] = Counter()
        self._passes = self._requests = 0
        self._paths = best_tree(self._hits, 0, self.nodes, self.depth)

    def _reset(self) -> None:
        self._at = 0
        self._drawn: dict[Gram, list[tuple[int, float]]] = {}
        if self.session is None:
            self._memory.rows.clear()

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """Remember the target's probabilities at the end of the prompt."""
        first = len(self.text) - len(token_ids) + 1
        for end, (ids, logits) in enumerate(zip(top_ids.tolist(), top_logits, strict=True), first):
            self._memory.learn(self.text[max(0, end - self._memory.orders) : end], ids, logits)

    def _draw(self, context: Sequence[int]) -> list[tuple[int, float]]:
        """Tokens after a context in the order drawn, with their probabilities."""
        row = self._memory.after(context)
        if self._at + len(row) > len(self._noise):
            self._at = 0
        noise = self._noise[self._at : self._at + len(row)]
        self._at += len(row)
        keyed = [(np.log(max(p, 1e-9)) + g, token, p) for (token, p), g in zip(row.items(), noise, strict=True)]
        return [(token, p) for _, token, p in sorted(keyed, reverse=True)]

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text[-self._memory.orders :].tolist()
        contexts: dict[Gram, tuple[list[int], int, float]] = {(): (newest, ROOT, 1.0)}
        self._drawn = {}
        for *above, rank in self._paths:
            path = tuple(above)
            if path not in contexts:
                continue
            context, parent, chance = contexts[path]
            if path not in self._drawn:
                self._drawn[path] = self._draw(context)
            if rank < len(self._drawn[path]):
                token, p = self._drawn[path][rank]
                node = builder.add(parent, token, chance * p, RECYCLING)
                if node != FULL:
                    contexts[*path, rank] = [*context, token], node, chance * p

    def _learn(self, verified: VerifiedPass) -> None:
        emitted = verified.emitted.tolist()
        context = self.text[-self._memory.orders :].tolist()
        if self._requests < self.measured_requests and self._drawn:
            self._measure(context, emitted[: self.depth])
        if verified.top_ids is None or verified.top_logits is None:
            return
        for i, row in enumerate([0, *(verified.path + 1).tolist()][: len(emitted)]):
            known = [*context, *emitted[:i]]
            self._memory.learn(known, verified.top_ids[row].tolist(), verified.top_logits[row])

    def _measure(self, context: list[int], emitted: list[int]) -> None:
        """Count the ranks that the emitted tokens had."""
        self._passes += 1
        path: Gram = ()
        for i, token in enumerate(emitted):
            drawn = self._drawn[path] if path in self._drawn else self._draw([*context, *emitted[:i]])
            rank = next((rank for rank, (known, _) in enumerate(drawn) if known == token), -1)
            if rank < 0:
                return
            path = (*path, rank)
            self._hits[path] += 1

    def finish(self) -> None:
        """End the request: choose the tree anew while requests are measured."""
        super().finish()
        if self._requests < self.measured_requests:
            self._requests += 1
            self._paths = best_tree(self._hits, self._passes, self.nodes, self.depth)
