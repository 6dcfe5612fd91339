"""Lookahead decoding's rule: a window of parallel Jacobi trajectories fills a pool of n-grams to guess from."""

from __future__ import annotations

import numpy as np

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import RECYCLING, PublishedDrafter, TreeBuilder
from retrieve_spec.drafting.tree import ROOT, DraftTree

WINDOW_P = 1e-3
"""Chance credited to window nodes: they are there to be computed, not to be accepted."""


class Lookahead(PublishedDrafter):
    """Preset `lookahead`: guesses of four tokens from the pool, and the window that feeds it, in one tree.

    Follows lookahead decoding (Fu et al. 2024) with level 5, window 7 and 7 guesses. The first window row is a chain
    below the root, and every further row continues its column by one token, which is a tree; the target's choice at the
    last row completes one n-gram per column. Each pool entry keeps the newest seven n-grams by their first token. The
    window starts from random tokens of the prompt, fills up in three passes and then moves by one token per pass; the
    pool is not filled from the prompt, and starts empty in every request.

    Differs: guesses that begin alike share nodes, also with the window, and the fifth token of a right guess and a
    window token that happens to be right are accepted too; random tokens come from a fixed seed. A pass whose budget
    does not hold the window leaves it out and keeps it as it is. Guesses have constant probabilities.
    """

    top_k = 1
    level = 5
    window = 7
    guesses = 7

    def _reset(self) -> None:
        self._rows: list[list[int]] = []
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}
        self._tails: list[int] = []
        self._drafted: DraftTree | None = None
        self._rng = np.random.default_rng(0)

    def _draft(self, builder: TreeBuilder) -> None:
        if not self._rows:
            n = self.window + self.level - 3
            self._rows = [self._rng.choice(self.text.ids, n).tolist()]
        self._add_window(builder)
        for gram in reversed(self._pool.get(int(self.text.ids[-1]), {})):
            builder.add_run(ROOT, gram, RECYCLING, 0.3)

    def _add_window(self, builder: TreeBuilder) -> None:
        """Add the window where the budget holds all of it; `_tails` are the ends of its columns."""
        self._tails = []
        base, *rows = self._rows
        depth = len(base) + len(rows)
        if builder.max_nodes < len(base) + sum(map(len, rows)) or builder.max_depth < depth:
            return
        chain = [ROOT]
        for token in base:
            chain.append(builder.add(chain[-1], token, WINDOW_P, RECYCLING))
        if not rows:
            self._tails = chain[1:]
            return
        for column in range(len(rows[-1])):
            node = chain[column]
            for row in rows:
                node = builder.add(node, row[column], WINDOW_P, RECYCLING)
            self._tails.append(node)

    def _proposed(self, builder: TreeBuilder, tree: DraftTree) -> None:
        self._drafted = tree
        self._tails = [builder.places[node] for node in self._tails]

    def _learn(self, verified: VerifiedPass) -> None:
        if not self._tails or verified.top_ids is None or verified.tree is not self._drafted:
            return
        found = [int(verified.top_ids[node + 1, 0]) for node in self._tails]
        self._tails = []
        base, *rows = self._rows
        if len(rows) == self.level - 2:
            self._remember([int(self.text.ids[-1]), *base], rows, found)
            self._rows = [rows[0][1:], *rows[1:], found]
        elif rows:
            self._rows = [base[1:], *(row[1:] for row in rows), found[1:]]
        else:
            self._rows = [base[1:], found]

    def _remember(self, keys: list[int], rows: list[list[int]], found: list[int]) -> None:
        """Add the n-gram of every column to the pool."""
        for column, (key, last) in enumerate(zip(keys, found, strict=True)):
            gram = (*(row[column] for row in rows), last)
            known = self._pool.setdefault(key, {})
            known.pop(gram, None)
            known[gram] = None
            if len(known) > self.guesses:
                del known[next(iter(known))]
