"""Base of published rules: the text so far, and nodes that a rule adds to one valid draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Budget, Layer, VerifiedPass
from retrieve_spec.drafting.tree import ROOT, DraftTree
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.session import SessionMemory

CONTEXT, SESSION, RECYCLING, NGRAM, EXACT, DENSE = (
    SOURCE_NAMES.index(name) for name in ("context", "session", "recycling", "ngram", "exact", "dense")
)
COPY_P = 0.7
"""Chance credited to each token of a copied run by rules that estimate none."""
TINY_P = 1e-6
"""Lowest path probability written down."""
FULL = -2
"""What `TreeBuilder.add` returns when the budget holds no further node."""


class Text:
    """Growing text, (L,) int32, with room to append in place."""

    def __init__(self) -> None:
        self._ids: NDArray[np.int32] = np.empty(1024, np.int32)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def ids(self) -> NDArray[np.int32]:
        """The text so far, (L,) int32, a view."""
        return self._ids[: self._n]

    def clear(self) -> None:
        """Forget everything."""
        self._n = 0

    def append(self, token_ids: NDArray[np.int32]) -> None:
        """Add tokens at the end."""
        end = self._n + len(token_ids)
        if end > len(self._ids):
            grown = np.empty(max(end, 2 * len(self._ids)), np.int32)
            grown[: self._n] = self.ids
            self._ids = grown
        self._ids[self._n : end] = token_ids
        self._n = end

    def last(self, n: int) -> list[int]:
        """Up to n newest tokens, oldest first."""
        newest: list[int] = self._ids[max(0, self._n - n) : self._n].tolist()
        return newest


class TreeBuilder:
    """Collects nodes in the order a rule finds them, within a budget, and puts them in the order of a `DraftTree`.

    Parameters
    ----------
    max_nodes, max_depth
        Limits of the tree; what does not fit is left out.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.probabilities: list[float] = []
        self.sources: list[int] = []
        self._children: dict[tuple[int, int], int] = {}
        self.places: list[int] = []
        """After `tree`: where each node, in the order of adding, stands in the tree."""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, p: float, source: int) -> int:
        """Add a child of a node (-1: of the root) and return its number.

        A token that is there already keeps its number and the higher chance. `FULL` is returned, and may be given as a
        parent, where a limit is reached.

        Parameters
        ----------
        p
            Estimated chance that the whole path to the node is accepted.
        """
        if parent == FULL:
            return FULL
        known = self._children.get((parent, token))
        if known is not None:
            self.probabilities[known] = max(self.probabilities[known], p)
            return known
        depth = 1 if parent == ROOT else self.depths[parent] + 1
        n = len(self.tokens)
        if n >= self.max_nodes or depth > self.max_depth:
            return FULL
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.probabilities.append(p)
        self.sources.append(source)
        self._children[parent, token] = n
        return n

    def add_run(self, parent: int, tokens: Sequence[int], source: int, p: float = 1.0, step: float = COPY_P) -> int:
        """Add a chain below a node; the path to its i-th token has probability ``p · step^(i + 1)``. Its last node."""
        for token in tokens:
            p *= step
            parent = self.add(parent, token, p, source)
        return parent

    def tree(self) -> DraftTree:
        """Depth-first order, the most probable child first; of equals, the one that was added first."""
        n = len(self.tokens)
        if n == 0:
            return DraftTree()
        below: list[list[int]] = [[] for _ in range(n + 1)]
        for node in sorted(range(n), key=self.probabilities.__getitem__):  # least probable first: a stack reverses it
            below[self.parents[node]].append(node)
        order: list[int] = []
        stack = _oldest_last(below[ROOT], self.probabilities)
        while stack:
            node = stack.pop()
            order.append(node)
            stack += _oldest_last(below[node], self.probabilities)
        places = [0] * n
        for place, node in enumerate(order):
            places[node] = place
        self.places = places
        at = np.array(order, np.int64)
        parents = np.array([places[p] if p >= 0 else ROOT for p in (self.parents[i] for i in order)], np.int32)
        p = np.maximum(np.array(self.probabilities, np.float64)[at], TINY_P)
        return DraftTree(
            np.array(self.tokens, np.int32)[at],
            parents,
            np.array(self.depths, np.int32)[at],
            np.log(np.minimum(p, 1.0)).astype(np.float32),
            np.array(self.sources, np.uint8)[at],
            np.full(n, -1, np.int64),
        )


def _oldest_last(nodes: list[int], probabilities: list[float]) -> list[int]:
    if len(nodes) < 2:
        return nodes
    return sorted(nodes, key=lambda node: (probabilities[node], -node))


class PublishedDrafter:
    """Base of the presets: keeps the text so far and asks the rule (`_draft`) for nodes.

    Published rules know neither what a pass costs (`Budget.cost` is ignored) nor a predicted output (ignored too).
    Nothing of one request reaches the next, unless a session is given and the rule says what it keeps there.

    Parameters
    ----------
    session
        Memory of earlier generations, or None.
    """

    top_k = 0
    wants_hidden: Layer | None = None
    nodes = MAX_NODES
    """Nodes of the published rule at most."""

    def __init__(self, session: SessionMemory | None = None) -> None:
        self.session = session
        self._at_rest: SessionMemory | nullcontext[None] = nullcontext()
        self.text = Text()
        self._generated: list[NDArray[np.int32]] = []

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: forget the last one's text, read the prompt."""
        self.text.clear()
        self._generated = []
        self._at_rest = nullcontext() if self.session is None else self.session
        with self._at_rest:
            self._reset()
        self.feed(prompt_ids)

    def feed(self, token_ids: NDArray[np.int32]) -> None:
        """Append text that was neither drafted nor generated (a later turn's context)."""
        ids = np.ascontiguousarray(token_ids, np.int32)
        self.text.append(ids)
        with self._at_rest:
            self._read(ids)

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """See the target's top tokens after the last prompt tokens; most rules do not look."""

    def propose(self, budget: Budget) -> DraftTree:
        """Draft by the rule, cut to the budget's nodes and depth."""
        limit = min(budget.max_nodes, self.nodes, MAX_NODES)
        if limit <= 0 or budget.max_depth <= 0 or len(self.text) == 0:
            return DraftTree()
        builder = TreeBuilder(limit, budget.max_depth)
        with self._at_rest:
            self._draft(builder)
        tree = builder.tree()
        self._proposed(builder, tree)
        return tree

    def observe(self, verified: VerifiedPass) -> None:
        """Let the rule learn from the pass, then append the emitted tokens."""
        self._learn(verified)
        emitted = np.ascontiguousarray(verified.emitted, np.int32)
        if self.session is not None:
            self._generated.append(emitted)
        self.text.append(emitted)
        with self._at_rest:
            self._read(emitted)

    def finish(self) -> None:
        """End the request: the session, if there is one, remembers what was generated."""
        if self.session is not None and self._generated:
            self.session.remember(np.concatenate(self._generated))
        self._generated = []

    def _reset(self) -> None:
        """Forget what the last request taught."""

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        """Index tokens that were just appended to `text`."""

    def _draft(self, builder: TreeBuilder) -> None:
        """Add nodes."""
        raise NotImplementedError

    def _proposed(self, builder: TreeBuilder, tree: DraftTree) -> None:
        """See where the nodes added stand in the tree."""

    def _learn(self, verified: VerifiedPass) -> None:
        """Learn from a pass; `text` does not hold its tokens yet."""


class NgramIndex:
    """First places of the n-grams of a growing text.

    Parameters
    ----------
    longest
        Longest n-gram.
    """

    def __init__(self, longest: int) -> None:
        self.first: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def clear(self) -> None:
        """Forget everything."""
        for table in self.first:
            table.clear()

    def read(self, text: Text, new: int) -> None:
        """Index the n-grams that end in the newest `new` tokens: n-gram → where its first occurrence goes on."""
        begin = len(text) - new
        lead = max(0, begin - len(self.first) + 1)
        tokens = text.ids[lead:].tolist()
        for n, table in enumerate(self.first, 1):
            for end in range(max(begin - lead + 1, n), len(tokens) + 1):
                table.setdefault(tuple(tokens[end - n : end]), lead + end)
