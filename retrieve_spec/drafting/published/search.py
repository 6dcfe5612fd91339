"""A rule that draws its drafts by remembered chances: STAND."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import FULL, Gram, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.sources import RECYCLING

RANK_P = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.01)
"""Chance of each rank before any of STAND's trees was measured."""


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

    def _open(self) -> None:
        self._memory = ProbabilityMemory()
        self._noise = np.random.default_rng(0).gumbel(size=8192).tolist()
        self._hits: Counter[Gram] = Counter()
        self._passes = self._requests = 0
        self._paths = best_tree(self._hits, 0, self.nodes, self.depth)

    def _reset(self) -> None:
        self._at = 0
        self._drawn: dict[Gram, list[tuple[int, float]]] = {}
        if self.session is None:
            self.forget_logits()

    def forget_logits(self) -> None:
        """Forget the target's probabilities."""
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
