"""A draft as parallel arrays: token ids, parents, depths, path probabilities and sources.

::

    root (last emitted token, not a node)          i  token  parent  depth
    ├── 0 "the"                                    0  the      -1      1
    │   ├── 1 "cat"                                1  cat       0      2
    │   └── 2 "dog"                                2  dog       0      2
    └── 3 "a"                                      3  a        -1      1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ROOT = -1
"""Parent of the nodes that follow the last emitted token."""


def _empty(dtype: type) -> NDArray:  # type: ignore[type-arg]
    return np.empty(0, dtype)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One draft: ``n`` nodes below the last emitted token.

    Parents come before children, siblings carry distinct tokens, and nodes are in depth-first order with the most
    probable child first, so that the usual commit (the first branch) is a contiguous prefix.

    Attributes
    ----------
    token_ids
        (n,) int32, the drafted token of each node.
    parent
        (n,) int32, index of the parent node, -1 below the root.
    depth
        (n,) int32, 1 for children of the root; the node's position is the root's position + depth.
    log_p
        (n,) float32, natural log of the estimated probability that the whole path to the node is accepted.
    source
        (n,) uint8, index of the source credited with the node (`retrieve_spec.sources.SOURCE_NAMES`).
    origin
        (n,) int64, where the source read the node's token (store: segment << 40 | token position), -1 unknown.
    """

    token_ids: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    parent: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    depth: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    log_p: NDArray[np.float32] = field(default_factory=lambda: _empty(np.float32))
    source: NDArray[np.uint8] = field(default_factory=lambda: _empty(np.uint8))
    origin: NDArray[np.int64] = field(default_factory=lambda: _empty(np.int64))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return bool((self.parent == np.arange(-1, len(self) - 1, dtype=np.int32)).all())

    @property
    def expected_accepted(self) -> float:
        """Sum of path probabilities: how many draft tokens a pass is expected to accept."""
        return float(np.exp(self.log_p).sum())

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """Who may look at whom: (n, n) bool, row i true at i and at every ancestor of i."""
        n = len(self)
        mask = np.eye(n, dtype=np.bool_)
        for i in range(n):
            if self.parent[i] >= 0:
                mask[i] |= mask[self.parent[i]]
        return mask

    def first_branch(self) -> DraftTree:
        """The chain from the root along the first child at every node, for models that can only verify chains."""
        keep = []
        at = ROOT
        for i in range(len(self)):
            if self.parent[i] == at:
                keep.append(i)
                at = i
        kept = np.array(keep, np.int64)
        return DraftTree(
            self.token_ids[kept],
            np.arange(-1, len(kept) - 1, dtype=np.int32),
            self.depth[kept],
            self.log_p[kept],
            self.source[kept],
            self.origin[kept],
        )

    def validate(self) -> None:
        """Check the invariants of the class.

        Raises
        ------
        AssertionError
            Naming the first invariant that does not hold (a drafter's bug, never a user's).
        """
        n = len(self)
        for name in ("parent", "depth", "log_p", "source", "origin"):
            assert len(getattr(self, name)) == n, f"{name} has {len(getattr(self, name))} entries for {n} nodes"
        assert (self.parent < np.arange(n)).all() and (self.parent >= ROOT).all(), "a parent does not come first"
        above = np.where(self.parent < 0, 0, self.depth[np.maximum(self.parent, 0)]) if n else self.depth
        assert (self.depth == above + 1).all(), "a depth is not its parent's plus one"
        pairs = set(zip(self.parent.tolist(), self.token_ids.tolist(), strict=True))
        assert len(pairs) == n, "two siblings carry the same token"

    @classmethod
    def unfilled(cls, n: int) -> DraftTree:
        """``n`` nodes for a kernel to fill in: what they hold is undefined."""
        return cls(
            np.empty(n, np.int32),
            np.empty(n, np.int32),
            np.empty(n, np.int32),
            np.empty(n, np.float32),
            np.empty(n, np.uint8),
            np.empty(n, np.int64),
        )

    @classmethod
    def from_paths(cls, paths: list[list[int]]) -> DraftTree:
        """Merge token paths into one tree, first path first (tests and scripted drafters)."""
        children: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []

        for path in paths:
            at = ROOT
            for level, token in enumerate(path, 1):
                if (at, token) not in children:
                    children[at, token] = len(tokens)
                    tokens.append(token)
                    parents.append(at)
                    depths.append(level)
                at = children[at, token]
        n = len(tokens)
        return cls(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(depths, np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.uint8),
            np.full(n, -1, np.int64),
        )
