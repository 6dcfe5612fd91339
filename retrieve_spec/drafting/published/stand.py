"""STAND's rule: an n-gram memory of the target's probabilities, sampled without replacement into a learned tree."""

from __future__ import annotations

import heapq
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import FULL, RECYCLING, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.sources.session import SessionMemory

RANK_P = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01, 0.01)
"""Chance of each rank before any tree was measured."""
Path = tuple[int, ...]


class ProbabilityMemory:
    """Contexts of 1 … `orders` tokens → the target's top tokens there with averaged probabilities.

    Parameters
    ----------
    orders
        Longest context.
    k
        Tokens kept per context.
    capacity
        Contexts kept at most; when full, the memory starts afresh.
    """

    def __init__(self, orders: int = 4, k: int = 10, capacity: int = 1 << 18) -> None:
        self.orders, self.k, self.capacity = orders, k, capacity
        self._rows: dict[Path, tuple[dict[int, float], int]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def learn(self, context: list[int], tokens: list[int], probabilities: list[float]) -> None:
        """Average the target's probabilities after a context into the rows of its suffixes."""
        if len(self._rows) > self.capacity:
            self.clear()
        for n in range(1, min(len(context), self.orders) + 1):
            key = tuple(context[-n:])
            old, seen = self._rows.get(key, ({}, 0))
            row = {token: p * seen / (seen + 1) for token, p in old.items()}
            for token, p in zip(tokens, probabilities, strict=True):
                row[token] = row.get(token, 0.0) + p / (seen + 1)
            if len(row) > self.k:
                row = dict(sorted(row.items(), key=lambda item: (-item[1], item[0]))[: self.k])
            self._rows[key] = row, seen + 1

    def after(self, context: list[int]) -> dict[int, float]:
        """Token → probability in the longest known suffix of a context."""
        for n in range(min(len(context), self.orders), 0, -1):
            row = self._rows.get(tuple(context[-n:]))
            if row:
                return row[0]
        return {}


def best_tree(hits: Counter[Path], passes: int, nodes: int, depth: int) -> list[Path]:
    """The rank paths that were right most often, most often first; before any pass, those of the smallest ranks."""

    def score(path: Path, prior: float) -> float:
        return (hits[path] + 10 * prior) / (passes + 10)

    front: list[tuple[float, Path, float]] = [(-score((rank,), p), (rank,), p) for rank, p in enumerate(RANK_P)]
    heapq.heapify(front)
    chosen: list[Path] = []
    while front and len(chosen) < nodes:
        _, path, prior = heapq.heappop(front)
        chosen.append(path)
        if len(path) < depth:
            for rank, p in enumerate(RANK_P):
                heapq.heappush(front, (-score((*path, rank), prior * p), (*path, rank), prior * p))
    return chosen


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

    def __init__(self, session: SessionMemory | None = None) -> None:
        super().__init__(session)
        self._memory = ProbabilityMemory(k=self.top_k)
        self._noise = np.random.default_rng(0).gumbel(size=8192).tolist()
        self._hits: Counter[Path] = Counter()
        self._passes = self._requests = 0
        self._paths = best_tree(self._hits, 0, self.nodes, self.depth)
        self._at = 0
        self._orders: dict[Path, list[tuple[int, float]]] = {}

    def _reset(self) -> None:
        self._at = 0
        self._orders = {}
        if self.session is None:
            self._memory.clear()

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """Remember the target's probabilities at the end of the prompt."""
        before = self.text.ids.tolist()
        first = len(before) - len(token_ids)
        for i, (ids, ps) in enumerate(zip(top_ids.tolist(), _softmax(top_logits), strict=True)):
            end = first + i + 1
            self._memory.learn(before[max(0, end - self._memory.orders) : end], ids, ps)

    def _drawn(self, context: list[int]) -> list[tuple[int, float]]:
        """Tokens after a context in the order drawn, with their probabilities."""
        row = self._memory.after(context)
        if not row:
            return []
        if self._at + len(row) > len(self._noise):
            self._at = 0
        noise = self._noise[self._at : self._at + len(row)]
        self._at += len(row)
        keyed = [(np.log(max(p, 1e-9)) + g, token, p) for (token, p), g in zip(row.items(), noise, strict=True)]
        keyed.sort(reverse=True)
        return [(token, p) for _, token, p in keyed]

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text.last(self._memory.orders)
        contexts: dict[Path, tuple[list[int], int, float]] = {(): (newest, ROOT, 1.0)}
        self._orders = {}
        for path in self._paths:
            above = contexts.get(path[:-1])
            if above is None:
                continue
            context, parent, chance = above
            drawn = self._orders.get(path[:-1])
            if drawn is None:
                drawn = self._orders[path[:-1]] = self._drawn(context)
            if path[-1] >= len(drawn):
                continue
            token, p = drawn[path[-1]]
            node = builder.add(parent, token, chance * p, RECYCLING)
            if node != FULL:
                contexts[path] = [*context, token][-self._memory.orders :], node, chance * p

    def _learn(self, verified: VerifiedPass) -> None:
        emitted = verified.emitted.tolist()
        if self._requests < self.measured_requests and self._orders:
            self._measure(emitted)
        if verified.top_ids is None or verified.top_logits is None:
            return
        rows = [0, *(verified.path + 1).tolist()]
        context = self.text.last(self._memory.orders)
        chances = _softmax(verified.top_logits[rows])
        for row, ps, token in zip(rows, chances, emitted, strict=False):
            self._memory.learn(context, verified.top_ids[row].tolist(), ps)
            context = [*context, token][-self._memory.orders :]

    def _measure(self, emitted: list[int]) -> None:
        """Count the ranks that the emitted tokens had."""
        self._passes += 1
        context = self.text.last(self._memory.orders)
        path: Path = ()
        for token in emitted[: self.depth]:
            drawn = self._orders[path] if path in self._orders else self._drawn(context)
            rank = next((i for i, (t, _) in enumerate(drawn) if t == token), -1)
            if rank < 0:
                return
            path = (*path, rank)
            self._hits[path] += 1
            context = [*context, token][-self._memory.orders :]

    def finish(self) -> None:
        """End the request: choose the tree anew while requests are measured."""
        super().finish()
        if self._requests < self.measured_requests:
            self._requests += 1
            self._paths = best_tree(self._hits, self._passes, self.nodes, self.depth)


def _softmax(logits: NDArray[np.float32]) -> list[list[float]]:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    shares: list[list[float]] = (e / e.sum(-1, keepdims=True)).tolist()
    return shares
