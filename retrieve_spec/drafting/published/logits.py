"""Rules that draft what the target itself thought of: Token Recycling, LogitSpec, lookahead decoding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import (
    FULL,
    Gram,
    NgramIndex,
    PublishedDrafter,
    TreeBuilder,
)
from retrieve_spec.drafting.tree import ROOT, DraftTree
from retrieve_spec.sources import CONTEXT, RECYCLING

RANK_P = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Chance credited to the target's k-th token at an earlier place; Token Recycling itself ranks only."""
CHILDREN = (
    ("", (8,)),
    ("0 1 2 3 4 5 6 7", (8, 4, 3, 2, 1, 1, 1, 1)),
    ("00 01 02 03 04 05 06 07 10 11 20 30 40 50", (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1)),
    ("000 001 002 003 004 010 020 100 200 300", (5, 2, 1, 1, 1, 1, 1, 1, 1, 1)),
    ("0000 0001 0002 0010 0100 1000", (3, 1, 1, 1, 1, 1)),
    ("00000 00010", (2, 1)),
)
"""The published tree by depth: the ranks on the path to a node, and how many children it has (80 nodes, depth 6)."""
WINDOW_P = 1e-3
"""Chance credited to nodes of a lookahead window: they are there to be computed, not to be accepted."""


def _template() -> list[tuple[int, int, float]]:
    """(parent, rank, probability) of every node, most probable first, so that any beginning of it is a tree."""
    parents = [pair for paths, counts in CHILDREN for pair in zip(paths.split() or [""], counts, strict=True)]
    paths = [(*map(int, parent), rank) for parent, n in parents for rank in range(n)]
    chance = {path: float(np.prod([RANK_P[rank] for rank in path])) for path in paths}
    paths.sort(key=lambda path: (-chance[path], len(path), path))
    number = {path: i for i, path in enumerate(paths)}
    return [(number.get(path[:-1], ROOT), path[-1], chance[path]) for path in paths]


TEMPLATE = _template()


class TokenRecycling(PublishedDrafter):
    """Preset `token-recycling`: the fixed tree of 80 nodes over an adjacency matrix of the target's top 8 tokens.

    Follows Token Recycling (Luo et al. 2024): after every pass the target's top 8 at the root and at all nodes,
    rejected ones included, overwrite the rows of their tokens; the next draft fills a fixed tree of depth 6 with them,
    rank by rank. The prompt's own logits are not used.

    Differs: a token that was never seen has no row (published: eight times token 0); equal tokens in one pass are
    resolved in tree order (published: undefined); the matrix starts empty in every request, while the published one
    is kept for the whole run, as this one is when a session is given; a budget below 80 takes the template's nodes of
    the smallest ranks.
    """

    top_k = len(RANK_P)
    nodes = min(len(TEMPLATE), MAX_NODES)

    def _open(self) -> None:
        self._matrix: dict[int, list[int]] = {}

    def _reset(self) -> None:
        if self.session is None:
            self.forget_logits()

    def forget_logits(self) -> None:
        """Forget the matrix."""
        self._matrix.clear()

    def _draft(self, builder: TreeBuilder) -> None:
        numbers: list[int] = []  # places whose parent is unknown stay empty
        for parent, rank, p in TEMPLATE:
            above = numbers[parent] if parent >= 0 else ROOT
            token = self.text[-1] if above == ROOT else builder.tokens[above] if above != FULL else -1
            row = self._matrix.get(token, ())
            numbers.append(builder.add(above, row[rank], p, RECYCLING) if rank < len(row) else FULL)

    def _learn(self, verified: VerifiedPass) -> None:
        if verified.top_ids is not None and self.text:
            keys = [self.text[-1], *verified.tree.token_ids.tolist()]
            self._matrix.update(zip(keys, verified.top_ids[:, : self.top_k].tolist(), strict=True))


class LogitSpec(PublishedDrafter):
    """Preset `logitspec`: the runners-up of the last choice as candidates for the next one, continued by n-grams.

    Follows LogitSpec (Liu et al. 2025). The logits that chose the last emitted token also rank guesses of the token
    after it: each of their top 64 but the chosen one becomes a child of the root, continued from the text by the
    longest n-gram of 3 … 1 tokens that ends in it, to 4 tokens in all for ranks 0 … 8, 3 up to rank 32, else 1. Before
    them comes the continuation of the text itself, of at most 20 tokens. An n-gram continues from its newest place
    with 20 tokens after it, else from its first place. 63 nodes in all.

    Differs: drafts that begin alike share nodes, which leaves room for later ranks. Probabilities are constants that
    fall with the rank.
    """

    top_k = 64
    nodes = 63
    longest = 3
    length = 20

    def _reset(self) -> None:
        self._index = NgramIndex(self.longest, self.length)
        self._ranked: list[int] = []

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._index.read(self.text, len(token_ids))

    def _continuation(self, context: list[int], length: int) -> list[int]:
        """What followed the longest known n-gram at the end of a context, at most `length` tokens."""
        for n in range(min(len(context), self.longest), 0, -1):
            gram = tuple(context[-n:])
            at = self._index.newest.get(gram, self._index.first.get(gram, -1))
            if at >= 0:
                return self.text[at : at + length].tolist()
        return []

    def _draft(self, builder: TreeBuilder) -> None:
        newest = self.text[-self.longest :].tolist()
        builder.add_run(ROOT, self._continuation(newest, self.length), CONTEXT)
        for rank, token in enumerate(self._ranked):
            if len(builder) >= builder.max_nodes:
                return
            if token == newest[-1]:
                continue
            p = 0.1 / (rank + 1)
            node = builder.add(ROOT, token, p, RECYCLING)
            more = 3 if rank <= 8 else 2 if rank <= 32 else 0
            if more:
                builder.add_run(node, self._continuation([*newest, token], more), CONTEXT, p)

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """Keep what the target ranked for the first token."""
        self._ranked = top_ids[-1].tolist() if len(top_ids) else []

    def _learn(self, verified: VerifiedPass) -> None:
        if verified.top_ids is not None:
            row = int(verified.path[-1]) + 1 if len(verified.path) else 0
            self._ranked = verified.top_ids[row].tolist()


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
        self._pool: dict[int, dict[Gram, None]] = {}
        self._tails: list[int] = []
        self._drafted: DraftTree | None = None
        self._rng = np.random.default_rng(0)

    def _draft(self, builder: TreeBuilder) -> None:
        if not self._rows:
            n = self.window + self.level - 3
            self._rows = [self._rng.choice(np.array(self.text), n).tolist()]
        self._add_window(builder)
        for gram in reversed(self._pool.get(self.text[-1], {})):
            builder.add_run(ROOT, gram, RECYCLING, 0.3)

    def _add_window(self, builder: TreeBuilder) -> None:
        """Add the window where the budget holds all of it; `_tails` are the ends of its columns."""
        self._tails = []
        base, *rows = self._rows
        nodes, depth = len(base) + sum(map(len, rows)), len(base) + len(rows)
        if builder.max_nodes < nodes or builder.max_depth < depth:
            return
        chain = [ROOT]
        for token in base:
            chain.append(builder.add(chain[-1], token, WINDOW_P, RECYCLING))
        self._tails = [] if rows else chain[1:]
        for column in range(len(rows[-1]) if rows else 0):
            run = [row[column] for row in rows]
            self._tails.append(builder.add_run(chain[column], run, RECYCLING, WINDOW_P, 1.0))

    def _proposed(self, builder: TreeBuilder) -> DraftTree:
        self._drafted = builder.tree()
        self._tails = [builder.places[node] for node in self._tails]
        return self._drafted

    def _learn(self, verified: VerifiedPass) -> None:
        if not self._tails or verified.top_ids is None or verified.tree is not self._drafted:
            return
        found = [int(verified.top_ids[node + 1, 0]) for node in self._tails]
        self._tails = []
        base, *rows = self._rows
        if len(rows) == self.level - 2:
            for key, *gram in zip([self.text[-1], *base], *rows, found, strict=False):
                keep_newest(self._pool.setdefault(key, {}), tuple(gram), self.guesses)
            self._rows = [rows[0][1:], *rows[1:], found]
        elif rows:
            self._rows = [base[1:], *(row[1:] for row in rows), found[1:]]
        else:
            self._rows = [base[1:], found]


def keep_newest(known: dict[Gram, None], gram: Gram, most: int) -> None:
    """Put an n-gram after the others that are known; of more than `most` the oldest goes."""
    known.pop(gram, None)
    known[gram] = None
    if len(known) > most:
        del known[next(iter(known))]
