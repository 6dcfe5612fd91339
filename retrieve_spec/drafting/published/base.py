"""Base of published rules: the text so far, and nodes that a rule adds to one valid draft tree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Budget, Layer, VerifiedPass
from retrieve_spec.drafting.scoped import ScopedDrafter
from retrieve_spec.drafting.tree import NO_DRAFT, ROOT, DraftTree
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

COPY_P = 0.7
"""Chance credited to each token of a copied run by rules that estimate none."""
TINY_P = 1e-6
"""Lowest path probability written down."""
FULL = -2
"""What `TreeBuilder.add` returns when the budget holds no further node."""
Gram = tuple[int, ...]


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
        self._nodes: list[tuple[int, int, int]] = []  # parent, depth, source
        self._p: list[float] = []
        self._children: dict[int, dict[int, int]] = {}
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
        children = self._children.setdefault(parent, {})
        if token in children:
            known = children[token]
            self._p[known] = max(self._p[known], p)
            return known
        depth = 1 if parent == ROOT else self._nodes[parent][1] + 1
        if len(self.tokens) >= self.max_nodes or depth > self.max_depth:
            return FULL
        children[token] = len(self.tokens)
        self.tokens.append(token)
        self._nodes.append((parent, depth, source))
        self._p.append(p)
        return children[token]

    def add_run(self, parent: int, tokens: Sequence[int], source: int, p: float = 1.0, step: float = COPY_P) -> int:
        """Add a chain below a node; the path to its i-th token has probability ``p · step^(i + 1)``. Its last node."""
        for token in tokens:
            p *= step
            parent = self.add(parent, token, p, source)
        return parent

    def tree(self) -> DraftTree:
        """Depth-first order, the most probable child first; of equals, the one that was added first."""
        if not self.tokens:
            return NO_DRAFT
        order: list[int] = []
        waiting = [ROOT]
        while waiting:
            node = waiting.pop()
            order.append(node)
            below = self._children.get(node, {}).values()
            waiting += sorted(below, key=lambda child: (self._p[child], -child))
        del order[0]
        places = dict(zip([ROOT, *order], range(ROOT, len(order)), strict=True))
        self.places = [places[node] for node in range(len(order))]
        parents, depths, sources = zip(*(self._nodes[node] for node in order), strict=True)
        p = np.array([self._p[node] for node in order])
        return DraftTree(
            np.array([self.tokens[node] for node in order], np.int32),
            np.array([places[parent] for parent in parents], np.int32),
            np.array(depths, np.int32),
            np.log(np.clip(p, TINY_P, 1.0)).astype(np.float32),
            np.array(sources, np.uint8),
            np.full(len(order), -1, np.int64),
        )


class PublishedDrafter(ScopedDrafter):
    """Base of the presets: keeps the text so far and asks the rule (`_draft`) for nodes.

    Published rules know neither what a pass costs (`Budget.cost` is ignored) nor a predicted output (ignored too).
    Nothing of one request reaches the next, unless a session is given and the rule says what it keeps there.

    Parameters
    ----------
    datastores
        Open stores; rules of the text alone read none.
    session
        Memory of earlier generations, or None.
    """

    top_k = 0
    wants_hidden: Layer | None = None
    nodes = MAX_NODES
    """Nodes of the published rule at most."""

    def __init__(self, datastores: Sequence[Datastore] = (), session: SessionMemory | None = None) -> None:
        super().__init__(session)
        self.datastores = datastores
        self._at_rest: SessionMemory | nullcontext[None] = nullcontext()
        self.text: array[int] = array("i")
        self._generated: list[NDArray[np.int32]] = []
        self._open()

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: forget the last one's text, read the prompt."""
        self.text = array("i")
        self._generated = []
        self._at_rest = nullcontext() if self.session is None else self.session
        with self._at_rest:
            self._reset()
        self.feed(prompt_ids)

    def feed(self, token_ids: NDArray[np.int32]) -> None:
        """Append text that was neither drafted nor generated (a later turn's context)."""
        ids = np.ascontiguousarray(token_ids, np.int32)
        self.text.frombytes(ids.tobytes())
        with self._at_rest:
            self._read(ids)

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """See the target's top tokens after the last prompt tokens; most rules do not look."""

    def propose(self, budget: Budget) -> DraftTree:
        """Draft by the rule, cut to the budget's nodes and depth."""
        builder = TreeBuilder(min(budget.max_nodes, self.nodes, MAX_NODES), budget.max_depth)
        if builder.max_nodes <= 0 or builder.max_depth <= 0 or not self.text:
            return NO_DRAFT
        with self._at_rest:
            self._draft(builder)
        return self._proposed(builder)

    def observe(self, verified: VerifiedPass) -> None:
        """Let the rule learn from the pass, then append the emitted tokens."""
        self._learn(verified)
        if self.session is not None:
            self._generated.append(np.ascontiguousarray(verified.emitted, np.int32))
        self.feed(verified.emitted)

    def finish(self) -> None:
        """End the request: the session, if there is one, remembers what was generated."""
        if self.session is not None and self._generated:
            self.session.remember(np.concatenate(self._generated))
        self._generated = []

    def _open(self) -> None:
        """Make what outlives a request."""

    def _reset(self) -> None:
        """Forget what the last request taught."""

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        """Index tokens that were just appended to `text`."""

    def _draft(self, builder: TreeBuilder) -> None:
        """Add nodes."""
        raise NotImplementedError

    def _proposed(self, builder: TreeBuilder) -> DraftTree:
        """The tree of the nodes that were added."""
        return builder.tree()

    def _learn(self, verified: VerifiedPass) -> None:
        """Learn from a pass; `text` does not hold its tokens yet."""


class ContextDrafter(PublishedDrafter):
    """Base of the presets that search the text so far in a suffix automaton, `_context`."""

    def _reset(self) -> None:
        super()._reset()
        self._context = SuffixAutomaton(4096, exact=True)

    def _read(self, token_ids: NDArray[np.int32]) -> None:
        self._context.extend(token_ids)


class NgramIndex:
    """Places of the n-grams of a growing text.

    Parameters
    ----------
    longest
        Longest n-gram.
    length
        How many tokens a place has after it to be one of the `newest`.

    Attributes
    ----------
    first, newest
        n-gram → where its first occurrence goes on, and its newest one that has so many tokens after it.
    """

    def __init__(self, longest: int, length: int) -> None:
        self._longest, self._length = longest, length
        self.first: dict[Gram, int] = {}
        self.newest: dict[Gram, int] = {}

    def read(self, text: array[int], new: int) -> None:
        """Index what the newest `new` tokens add: n-grams that go on now, or have `length` tokens after them now."""
        end = len(text)
        begin = end - new
        lead = max(0, begin - self._length - self._longest)
        tokens = text[lead:].tolist()
        for n in range(1, self._longest + 1):
            for at in range(max(begin, n), end):  # the n-gram before `at` continues with `at`
                self.first.setdefault(tuple(tokens[at - lead - n : at - lead]), at)
            for at in range(max(begin - self._length + 1, n), end - self._length + 1):
                self.newest[tuple(tokens[at - lead - n : at - lead])] = at
