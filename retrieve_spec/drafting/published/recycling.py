"""Token Recycling's rule: the target's own top tokens after every token it has seen, laid out in a fixed tree."""

from __future__ import annotations

import numpy as np

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.published.base import FULL, RECYCLING, PublishedDrafter, Text, TreeBuilder
from retrieve_spec.drafting.tree import ROOT
from retrieve_spec.sources.session import SessionMemory

RANK_P = (0.5, 0.12, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01)
"""Chance credited to the target's k-th token at an earlier place; the rule itself ranks only."""
CHILDREN = {
    (): 8,
    (0,): 8,
    (1,): 4,
    (2,): 3,
    (3,): 2,
    (4,): 1,
    (5,): 1,
    (6,): 1,
    (7,): 1,
    (0, 0): 8,
    (0, 1): 3,
    (0, 2): 2,
    (0, 3): 1,
    (0, 4): 1,
    (0, 5): 1,
    (0, 6): 1,
    (0, 7): 1,
    (1, 0): 2,
    (1, 1): 1,
    (2, 0): 1,
    (3, 0): 1,
    (4, 0): 1,
    (5, 0): 1,
    (0, 0, 0): 5,
    (0, 0, 1): 2,
    (0, 0, 2): 1,
    (0, 0, 3): 1,
    (0, 0, 4): 1,
    (0, 1, 0): 1,
    (0, 2, 0): 1,
    (1, 0, 0): 1,
    (2, 0, 0): 1,
    (3, 0, 0): 1,
    (0, 0, 0, 0): 3,
    (0, 0, 0, 1): 1,
    (0, 0, 0, 2): 1,
    (0, 0, 1, 0): 1,
    (0, 1, 0, 0): 1,
    (1, 0, 0, 0): 1,
    (0, 0, 0, 0, 0): 2,
    (0, 0, 0, 1, 0): 1,
}
"""The published tree by the ranks on the path to a node: how many children it has (80 nodes, depth 6)."""


def _template() -> list[tuple[int, int, float]]:
    """(parent, rank, probability) of every node, most probable first, so that any beginning of it is a tree."""
    paths = [(*path, rank) for path, n in CHILDREN.items() for rank in range(n)]
    chance = {path: float(np.prod([RANK_P[rank] for rank in path])) for path in paths}
    paths.sort(key=lambda path: (-chance[path], len(path), path))
    number = {path: i for i, path in enumerate(paths)}
    return [(number.get(path[:-1], ROOT), path[-1], chance[path]) for path in paths]


TEMPLATE = _template()


class AdjacencyMatrix:
    """Token → the target's top k tokens the last time it came up; unseen tokens have none."""

    k = 8

    def __init__(self) -> None:
        self._rows: dict[int, list[int]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()

    def after(self, token: int) -> list[int]:
        """Top tokens after a token, most probable first; empty when it is unknown."""
        return self._rows.get(token, [])

    def learn(self, text: Text, verified: VerifiedPass) -> None:
        """Overwrite the rows of the root and all nodes, rejected ones included; the last of equal tokens stays."""
        if verified.top_ids is None or len(text) == 0:
            return
        keys = [int(text.ids[-1]), *verified.tree.token_ids.tolist()]
        for key, row in zip(keys, verified.top_ids[:, : self.k].tolist(), strict=True):
            self._rows[key] = row


def add_recycled(builder: TreeBuilder, matrix: AdjacencyMatrix, root: int) -> None:
    """Fill the template below a token; places whose parent is unknown stay empty."""
    numbers: list[int] = []
    for parent, rank, p in TEMPLATE:
        above = numbers[parent] if parent >= 0 else ROOT
        if above == FULL:
            numbers.append(FULL)
            continue
        row = matrix.after(builder.tokens[above] if above >= 0 else root)
        numbers.append(builder.add(above, row[rank], p, RECYCLING) if rank < len(row) else FULL)


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

    top_k = AdjacencyMatrix.k
    nodes = min(len(TEMPLATE), MAX_NODES)

    def __init__(self, session: SessionMemory | None = None) -> None:
        super().__init__(session)
        self._matrix = AdjacencyMatrix()

    def _reset(self) -> None:
        if self.session is None:
            self._matrix.clear()

    def _draft(self, builder: TreeBuilder) -> None:
        add_recycled(builder, self._matrix, int(self.text.ids[-1]))

    def _learn(self, verified: VerifiedPass) -> None:
        self._matrix.learn(self.text, verified)
