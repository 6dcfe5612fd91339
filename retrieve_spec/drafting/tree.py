"""Draft tree: token ids, parents, depths, path probabilities and sources as parallel arrays.

::

    root (last emitted token, not a node)          i  token  parent  depth
    ├── 0 "the"                                    0  the      -1      1
    │   ├── 1 "cat"                                1  cat       0      2
    │   └── 2 "dog"                                2  dog       0      2
    └── 3 "a"                                      3  a        -1      1
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.treemask import (
    BLOCK_ROWS,
    DEPTHS,
    LOG_P,
    ORIGINS,
    PARENTS,
    SOURCES,
    TOKENS,
    find_child,
    visible_rows,
)

ROOT = -1
"""Parent of nodes that follow the last emitted token."""


FIELDS = ("token_ids", "parent", "depth", "log_p", "source", "origin")
"""Arrays of a tree, in the order of its constructor."""
_NO_I32, _NO_F32 = np.empty(0, np.int32), np.empty(0, np.float32)
_NO_U8, _NO_I64 = np.empty(0, np.uint8), np.empty(0, np.int64)


def _packed(tree: DraftTree) -> NDArray[np.int32]:
    """Return the arrays of a tree as one block."""
    n = len(tree)
    block = np.zeros((BLOCK_ROWS, n), np.int32)
    block[ORIGINS : ORIGINS + 2].reshape(-1).view(np.int64)[:] = tree.origin
    block[SOURCES].view(np.uint8)[:n] = tree.source
    block[TOKENS], block[PARENTS], block[DEPTHS] = tree.token_ids, tree.parent, tree.depth
    block[LOG_P].view(np.float32)[:] = tree.log_p
    return block


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
    ancestors
        Who may look at whom, as words: (n, ⌈n / 32⌉) int32, bit j of row i set at i and at every ancestor of i.
    block
        (`retrieve_spec.kernels.treemask.BLOCK_ROWS`, n) int32, all of these in one array, as kernels take it.

    Notes
    -----
    `ancestors` is computed when first asked for. The arrays of a tree that a kernel grew are views of its one result,
    made when first asked for: each costs microseconds where a pass of the model has emptied the caches.
    """

    __slots__ = (*FIELDS, "_size", "ancestors", "block")
    token_ids: NDArray[np.int32]
    parent: NDArray[np.int32]
    depth: NDArray[np.int32]
    log_p: NDArray[np.float32]
    source: NDArray[np.uint8]
    origin: NDArray[np.int64]
    ancestors: NDArray[np.int32]
    block: NDArray[np.int32]

    def __init__(
        self,
        token_ids: NDArray[np.int32] = _NO_I32,
        parent: NDArray[np.int32] = _NO_I32,
        depth: NDArray[np.int32] = _NO_I32,
        log_p: NDArray[np.float32] = _NO_F32,
        source: NDArray[np.uint8] = _NO_U8,
        origin: NDArray[np.int64] = _NO_I64,
    ) -> None:
        self.token_ids, self.parent, self.depth = token_ids, parent, depth
        self.log_p, self.source, self.origin = log_p, source, origin
        self._size = len(token_ids)

    @classmethod
    def of_block(cls, block: NDArray[np.int32]) -> DraftTree:
        """Return the tree that a kernel wrote into a (`BLOCK_ROWS`, n) int32 block."""
        tree = cls.__new__(cls)
        tree.block, tree._size = block, block.shape[1]
        return tree

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Compute an array when it is first read."""
        array: NDArray[Any]
        if name == "block":
            array = _packed(self)
        elif name == "ancestors":
            array = self.visible_rows(0)
        elif name not in FIELDS:
            raise AttributeError(f"'DraftTree' object has no attribute '{name}'", name=name, obj=self)
        elif name == "origin":
            array = self.block[ORIGINS : ORIGINS + 2].reshape(-1).view(np.int64)
        elif name == "source":
            array = self.block[SOURCES].view(np.uint8)[: self._size]
        elif name == "log_p":
            array = self.block[LOG_P].view(np.float32)
        else:
            array = self.block[{"token_ids": TOKENS, "parent": PARENTS, "depth": DEPTHS}[name]]
        setattr(self, name, array)
        return array

    def __repr__(self) -> str:
        return f"DraftTree({', '.join(f'{name}={getattr(self, name).tolist()}' for name in FIELDS)})"

    def __len__(self) -> int:
        return self._size

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it."""
        return bool((self.parent == np.arange(-1, len(self) - 1, dtype=np.int32)).all())

    @property
    def expected_accepted(self) -> float:
        """Sum of path probabilities: the expected number of accepted draft tokens."""
        return float(np.exp(self.log_p).sum())

    def visible_rows(self, roots: int) -> NDArray[np.int32]:
        """Return which rows see which in a pass over that many root tokens and then the nodes.

        Returns
        -------
        (m, ⌈m / 32⌉) int32
            Of m = roots + n rows; bit j of row i is set where row i sees row j.
        """
        return visible_rows(self.parent, roots)

    def first_branch(self) -> DraftTree:
        """Return the chain from the root along the first child of every node, for models that verify chains only."""
        keep = []
        at = ROOT
        for i in range(len(self)):
            if self.parent[i] == at:
                keep.append(i)
                at = i
        chain = self.nodes(np.array(keep, np.int64))
        chain.parent = np.arange(-1, len(keep) - 1, dtype=np.int32)
        return chain

    def nodes(self, kept: NDArray[Any] | slice) -> DraftTree:
        """Return some nodes, by index; parents keep their numbers."""
        return DraftTree(*(getattr(self, name)[kept] for name in FIELDS))

    def subtree(self, kept: NDArray[np.int64]) -> DraftTree:
        """Return some nodes, by ascending index and with their ancestors, as a tree."""
        numbers = np.full(len(self) + 1, ROOT, np.int32)  # the last one is the root's
        numbers[kept] = np.arange(len(kept))
        tree = self.nodes(kept)
        tree.parent = numbers[tree.parent]
        return tree

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

    def path_along(self, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the (a,) int32 nodes from the root down that carry the first of some tokens (e,)."""
        path: list[int] = []
        for token in token_ids.tolist():
            child = find_child(self.parent, self.token_ids, path[-1] if path else ROOT, token)
            if child < 0:
                break
            path.append(child)
        return np.array(path, np.int32)

    def first(self, n: int) -> DraftTree:
        """Return the first ``n`` nodes, which are a tree, because parents come first."""
        return self.nodes(slice(n))

    @classmethod
    def from_paths(cls, paths: list[list[int]]) -> DraftTree:
        """Return a tree of token paths, first path first (for tests and scripted drafters)."""
        places: dict[tuple[int, ...], int] = {(): ROOT}
        nodes: list[tuple[int, int, int]] = []
        for path in paths:
            for depth, token in enumerate(path, 1):
                if tuple(path[:depth]) not in places:
                    places[tuple(path[:depth])] = len(nodes)
                    nodes.append((token, places[tuple(path[: depth - 1])], depth))
        tokens, parents, depths = np.array(nodes, np.int32).reshape(-1, 3).T.copy()
        n = len(nodes)
        return cls(tokens, parents, depths, np.zeros(n, np.float32), np.zeros(n, np.uint8), np.full(n, -1, np.int64))


NO_DRAFT = DraftTree()
