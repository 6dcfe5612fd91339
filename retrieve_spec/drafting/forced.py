"""Forced tokens: drafts where a grammar, or a list of allowed tokens, leaves one choice.

What a text must go on with needs no source: it stands in front of the draft with probability one. After a branch of
the draft, which may end where something else is forced, it is as probable as the branch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import FIELDS, ROOT, DraftTree
from retrieve_spec.kernels.calibration import FORCED

_WORTH = np.log(0.1)
"""Log-probability of a branch below which forced tokens after it are not computed."""


class Guide(Protocol):
    """Knows where the next token is determined.

    Attributes
    ----------
    judges_drafts
        Whether it may be asked about texts that will perhaps never be.
    """

    judges_drafts: bool

    def forced(self, ids: NDArray[np.int64]) -> tuple[int, float] | None:
        """Return the next token of a text (n,) and its probability: 1 if no other token is allowed.

        Less where others may spell the same; None where there is a choice, or the text itself may not be.
        """


def forced_run(guide: Guide, ids: NDArray[np.int64], most: int, log_p: float = 0.0) -> DraftTree:
    """Return the forced tokens after a text (n,) of that probability: a chain of at most `most` tokens."""
    run: list[int] = []
    log_ps: list[float] = []
    while len(run) < most and (found := guide.forced(np.concatenate([ids, np.array(run, np.int64)]))) is not None:
        log_p += float(np.log(found[1]))
        run.append(found[0])
        log_ps.append(log_p)
    places = np.arange(len(run), dtype=np.int32)
    source, unknown = np.full(len(run), FORCED, np.uint8), np.full(len(run), -1, np.int64)
    return DraftTree(np.array(run, np.int32), places - 1, places + 1, np.array(log_ps, np.float32), source, unknown)


def with_forced(tree: DraftTree, guide: Guide, ids: NDArray[np.int64], ahead: DraftTree, max_depth: int) -> DraftTree:
    """Return a draft that begins with the tokens `ahead` of a text (n,), with forced tokens added to its branches.

    It is at most `max_depth` deep. Where a guide leaves one token nothing else is drafted.
    """
    if tree.token_ids[: len(ahead)].tolist() != ahead.token_ids.tolist():  # this drafter ignores forced tokens
        tree = ahead
    if not guide.judges_drafts:
        return tree
    grown = _Grown(tree, guide, max_depth)
    place = ROOT
    for node in range(len(ahead)):
        place = grown.add(tree, node, place)
    grown.follow(len(ahead) - 1, place, np.concatenate([ids, ahead.token_ids]))
    columns = zip(FIELDS, zip(*grown.nodes, strict=True), strict=True) if grown.nodes else ()
    return DraftTree(*(np.array(column, getattr(tree, name).dtype) for name, column in columns))


class _Grown:
    """The nodes of a draft and the forced tokens after them, in depth-first order."""

    def __init__(self, tree: DraftTree, guide: Guide, max_depth: int) -> None:
        self._tree, self._guide, self._max_depth = tree, guide, max_depth
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parent.tolist()):
            self._children.setdefault(parent, []).append(node)
        self.nodes: list[tuple[Any, ...]] = []

    def add(self, tree: DraftTree, node: int, parent: int, above: int = 0) -> int:
        """Add a node of a tree; return its index."""
        depth = above + int(tree.depth[node])
        rest = tree.log_p[node], tree.source[node], tree.origin[node]
        self.nodes.append((tree.token_ids[node], parent, depth, *rest))
        return len(self.nodes) - 1

    def follow(self, node: int, place: int, text: NDArray[np.int64]) -> None:
        """Add all nodes after a node, which ends a text and has been added."""
        log_p, depth = (0.0, 0) if node == ROOT else (float(self._tree.log_p[node]), int(self._tree.depth[node]))
        children, tokens = self._children.get(node, []), self._tree.token_ids
        found = self._guide.forced(text) if log_p >= _WORTH else None
        if found is not None:
            if found[1] == 1.0:
                children = [child for child in children if tokens[child] == found[0]]
            if all(tokens[child] != found[0] for child in children):
                run, at = forced_run(self._guide, text, self._max_depth - depth, log_p), place
                for number in range(len(run)):
                    at = self.add(run, number, at, depth)
        for child in children:
            self.follow(child, self.add(self._tree, child, place), np.append(text, tokens[child]))
