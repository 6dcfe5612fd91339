"""The sources of one request in, rows of one table with a cursor each out: what kernels walk, and which rows rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.kernels import blend, levels, order, weights
from retrieve_spec.kernels.source_table import CURSOR, NUMBER, RESTING, TAIL
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.dense import DenseIndexes, DenseSource
from retrieve_spec.sources.prediction import HYPOTHESES, Prediction
from retrieve_spec.sources.recycling import RecyclingTable
from retrieve_spec.sources.rows import SourceRow, SourceTable
from retrieve_spec.sources.session import FOLLOWED, SessionMemory
from retrieve_spec.sources.stores import StoreRows

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

CONTEXT, SESSION, PREDICTION, RECYCLING, NGRAM, EXACT, DENSE = (
    SOURCE_NAMES.index(name) for name in ("context", "session", "prediction", "recycling", "ngram", "exact", "dense")
)
_REST_BELOW, _WAKE_AT = 0.002, 0.004
"""Shares of the emitted tokens that a source explained, below which it rests and above which it is asked again."""
_SLOW_REST_BELOW, _SLOW_WAKE_AT = 0.01, 0.02
"""The same for stores, which are read from memory that no cache holds."""
_LOOK_IN = 8
"""Stores that rest are learned about in one of so many passes."""
_FIRST_TOKENS, _LATER_EVERY = 2000, 4
"""Learning reads stores at all of the first tokens, then at one of so many."""
_NO_HASHES = np.empty((2, 0), np.uint64)


@dataclass(slots=True)
class Scratch:
    """Arrays of the expansion kernel for a table of so many rows, reused from pass to pass."""

    rows: int
    cursors: NDArray[np.int64] = field(init=False)
    tails: NDArray[np.int32] = field(init=False)
    pool_p: NDArray[np.float32] = field(init=False)
    pool_ids: NDArray[np.int64] = field(init=False)
    heap: NDArray[np.int64] = field(init=False)
    memory: NDArray[np.int64] = field(init=False)
    nodes: NDArray[np.int64] = field(init=False)
    node_p: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        pool = 64 * MAX_NODES
        self.cursors = np.zeros(((MAX_NODES + 1) * self.rows, CURSOR), np.int64)
        self.tails = np.zeros((MAX_NODES + 1, TAIL), np.int32)
        self.pool_p = np.empty(pool, np.float32)
        self.pool_ids = np.empty((pool, 3), np.int64)
        self.heap = np.empty(pool, np.int64)
        self.memory = blend.scratch_memory(self.rows)
        self.nodes = np.empty((MAX_NODES, 4), np.int64)
        self.node_p = np.empty(MAX_NODES, np.float32)


class OpenSources:
    """Every source of a request as a row of one table, and where the text so far stands in each.

    The base of `MixtureDrafter`, which reads these arrays at every pass: they are its own attributes.

    Parameters
    ----------
    session
        Memory of earlier generations, or None.
    datastores
        Open stores.
    recycling, dense
        Use the target's own top tokens; use the stores' dense indexes.
    """

    def __init__(
        self, session: SessionMemory | None, datastores: Sequence[Datastore], recycling: bool, dense: bool
    ) -> None:
        self.context = SuffixAutomaton(4096)
        self.session = session
        self._at_rest = nullcontext() if session is None else session
        """Entered while kernels read the table: drafters of other threads may add to the session."""
        self.stores = StoreRows.of(list(datastores), NGRAM, EXACT)
        self.recycling = RecyclingTable() if recycling else None
        self.prediction: Prediction | None = None
        indexes = DenseIndexes(datastores if dense else ())
        self.wants_hidden: Layer | None = indexes.layer
        self.dense = None if indexes.layer is None else DenseSource(indexes)
        self._scratch = Scratch(1)
        self._catches = self._learned = 0
        self._rests = False
        self._trust: NDArray[np.float64] = np.empty((weights.NUM_SOURCES, 1 + weights.LENGTH_CLASSES, 2))
        self._use: NDArray[np.float64] = np.empty(0)
        self._tail: NDArray[np.int32]
        self._window: NDArray[np.int32]
        self._open()

    def _open(self) -> None:
        """Build the source table for this request; earlier rows win ties in match length."""
        table: list[SourceRow] = []
        if self.prediction:
            table += [self.prediction.row(PREDICTION)] * HYPOTHESES
        self._context_row = len(table)
        table.append(self.context.row(CONTEXT))
        self._session_row = len(table)
        self._earlier: list[SuffixAutomaton] = []
        if self.session is not None:
            with self.session:
                self._earlier = list(self.session.automata)
                table += [automaton.row(SESSION) for automaton in self._earlier]
        self._exact_row = len(table)
        table += self.stores.exact
        self._dense_row = len(table)
        if self.dense is not None:
            table.append(self.dense.row(DENSE))
        if self.recycling:
            table.append(self.recycling.row(RECYCLING))
        table += self.stores.ngram
        self._table = SourceTable(table)
        if len(self._use) != len(table):
            self._use = np.full(len(table), _SLOW_WAKE_AT)
        self._numbers = self._table.words[:, NUMBER].astype(np.uint8)
        self._slow = (self._numbers == NGRAM) | (self._numbers == EXACT)
        self._cursors = np.zeros((len(table), CURSOR), np.int64)
        if self._scratch.rows != len(table):
            self._scratch = Scratch(len(table))
        self._tail = np.zeros((1, TAIL), np.int32)
        self._tail_len = 0
        weights.begin_request(self._trust)
        self._window = np.empty(0, np.int32)

    def _sync(self) -> None:
        """Bring table and cursors up to date with sources that changed under them; the session must be at rest."""
        self._table.put(self._context_row, self.context.row(CONTEXT))
        for i, automaton in enumerate(self._earlier):
            self._table.put(self._session_row + i, automaton.row(SESSION))
        self._cursors[self._context_row, :2] = self.context.root()
        if self.prediction:
            self._cursors[:HYPOTHESES] = self.prediction.cursors

    def _place_session(self, token_ids: NDArray[np.int32]) -> None:
        with self._at_rest:
            for i, automaton in enumerate(self._earlier):
                self._cursors[self._session_row + i, :2] = automaton.follow(token_ids[-FOLLOWED:])

    def _exact_cursors(self) -> NDArray[np.int64]:
        return self._cursors[self._exact_row : self._exact_row + len(self.stores.exact)].copy()

    def _follow_stores(self, token_ids: NDArray[np.int32], roots: NDArray[np.int64]) -> None:
        """Move the stores' longest-match cursors from where they were before the tokens to after them."""
        if not len(roots) and self.prediction is None:
            return
        self._window = np.concatenate([self._window, token_ids])[-order.MATCH - len(token_ids) :]
        for i in range(len(roots)):
            order.follow_exact(self._table.words, self._exact_row + i, roots, i, self._window, len(token_ids))
        self._cursors[self._exact_row : self._exact_row + len(roots)] = roots

    def _longest_match(self) -> int:
        """Longest match of the text with anything but neighbours."""
        asked = range(self._exact_row + len(self.stores.exact))
        return max(int(levels.open_row(self._table.words, s, self._cursors, s, _NO_HASHES, 0)[1]) for s in asked)

    def _wake(self) -> None:
        """Let learning see every source, but stores that rest only now and then: looking into them is what costs."""
        self._catches += 1
        if not self._rests:
            return
        resting = self._table.words[:, RESTING]
        if self._catches % _LOOK_IN == 0:
            resting[:] = 0
        else:
            resting[~self._slow] = 0

    def _learn_every(self) -> int:
        """At one token of how many learning reads stores: they are slow, and in time there is less to be learned."""
        if not self.stores.stores:
            return 1
        return 1 if self._learned < _FIRST_TOKENS else _LATER_EVERY

    def _choose_sources(self) -> None:
        """Let sources rest that have explained next to nothing lately; learning still sees them, and wakes them.

        While none rests, looking now and then is enough.
        """
        if not self._rests and self._catches % _LOOK_IN:
            return
        resting = self._table.words[:, RESTING]
        resting[self._use < np.where(self._slow, _SLOW_REST_BELOW, _REST_BELOW)] = 1
        resting[self._use >= np.where(self._slow, _SLOW_WAKE_AT, _WAKE_AT)] = 0
        resting[: self._context_row + 1] = 0
        if self.dense is not None:
            resting[self._dense_row] = 0  # it is asked when that pays, and has nothing to say until then
        self._rests = bool(resting.any())
