"""Open sources of one request: the rows of its source table, a cursor for each, and which of them rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.kernels import blend, levels, request
from retrieve_spec.kernels.calibration import LENGTH_CLASSES, NUM_SOURCES, begin_request
from retrieve_spec.kernels.source_table import CURSOR, TAIL
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.dense import DenseIndexes, DenseSource
from retrieve_spec.sources.phrases import PhraseMemory
from retrieve_spec.sources.recycling import RecyclingTable
from retrieve_spec.sources.rows import Alignments, Prediction, Row, SourceTable, store_rows
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

CONTEXT, SESSION, PREDICTION, RECYCLING, NGRAM, EXACT, DENSE, PHRASES, ALIGNMENT = (
    SOURCE_NAMES.index(name)
    for name in ("context", "session", "prediction", "recycling", "ngram", "exact", "dense", "phrases", "alignment")
)


_NO_HASHES = np.empty((2, 0), np.uint64)


@dataclass(slots=True)
class Scratch:
    """Arrays of the expansion kernel for a table of so many rows, reused from pass to pass."""

    rows: int
    cursors: NDArray[np.int64] = field(init=False)
    tails: NDArray[np.int32] = field(init=False)
    pool_p: NDArray[np.float32] = field(init=False)
    pool_ids: NDArray[np.int32] = field(init=False)
    heap: NDArray[np.int32] = field(init=False)
    memory: NDArray[np.int64] = field(init=False)
    nodes: NDArray[np.int64] = field(init=False)
    node_p: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        pool = 64 * MAX_NODES
        self.cursors = np.zeros(((MAX_NODES + 1) * self.rows, CURSOR), np.int64)
        self.tails = np.zeros((MAX_NODES + 1, TAIL), np.int32)
        self.pool_p = np.empty(pool, np.float32)
        self.pool_ids = np.empty((pool, 3), np.int32)
        self.heap = np.empty(pool, np.int32)
        self.memory = blend.scratch_memory(self.rows)
        self.nodes = np.empty((MAX_NODES, 4), np.int64)
        self.node_p = np.empty(MAX_NODES, np.float32)


class OpenSources:
    """Every source of a request as a row of one table, and where the text so far stands in each.

    The base of `MixtureDrafter`, which reads these arrays at every pass: they are its own attributes. `_table` and
    `_request` are what the kernels get; both hold the arrays that they point to.

    Parameters
    ----------
    session
        Memory of earlier generations, or None.
    datastores
        Open stores.
    recycling, dense
        Use the target's own top tokens; use the stores' dense indexes.
    phrases
        What earlier requests had in common, or None.
    calibration
        What was learned over all requests.
    """

    _as_with_stores = False
    """Whether kernels that read stores are called where there is none: they are compiled anyway."""

    def __init__(
        self,
        session: SessionMemory | None,
        datastores: Sequence[Datastore],
        recycling: bool,
        dense: bool,
        phrases: PhraseMemory | None,
        calibration: Calibration,
    ) -> None:
        self.calibration = calibration
        self.context = SuffixAutomaton(4096, shortest=1)
        self.unigrams = calibration.unigrams()
        self.alignments: Alignments | None = Alignments()
        self.phrases = phrases
        self.session = session
        self.datastores = list(datastores)
        self._ngram, self._exact = store_rows(self.datastores, NGRAM, EXACT)
        self.recycling = RecyclingTable() if recycling else None
        self.prediction: Prediction | None = None
        indexes = DenseIndexes(datastores if dense else ())
        self.wants_hidden: Layer | None = indexes.layer
        self.dense = None if indexes.layer is None else DenseSource(indexes)
        self._scratch = Scratch(1)
        self._trust: NDArray[np.float64] = np.empty((NUM_SOURCES, 1 + LENGTH_CLASSES, 2))
        self._use: NDArray[np.float64] = np.empty(0)
        self._noise: NDArray[np.int64] = np.zeros(4, np.int64)
        self._tail: NDArray[np.int32] = np.zeros((1, TAIL), np.int32)
        self._recent: NDArray[np.int32] = np.zeros(request.MATCH, np.int32)
        self._first_p: NDArray[np.float64] = np.zeros(1)
        self._learned: dict[int, int] = dict.fromkeys((request.STEPS, request.LEARNED, request.RESTS), 0)
        self._request = Row.of(request.REQUEST, {}, {})  # until one begins

    def _open(self) -> None:
        """Build the source table for this request; earlier rows win ties in match length."""
        table: list[Row] = []
        if self.prediction:
            table += [self.prediction.row(PREDICTION)] * request.HYPOTHESES
        self._context_row = len(table)
        table += [self.context.row(CONTEXT), self.unigrams.row(CONTEXT)]
        self._session_row = len(table)
        self._earlier: list[SuffixAutomaton] = []
        self._shared = self.session  # `session` may be exchanged before the next request
        if self.session is not None:
            with self.session:
                self._earlier = list(self.session.automata)
                table += [automaton.row(SESSION) for automaton in self._earlier]
        self._exact_row = len(table)
        table += self._exact
        self._dense_row = len(table)
        if self.dense is not None:
            table.append(self.dense.row(DENSE))
        if self.recycling:
            table.append(self.recycling.row(RECYCLING))
        if self.phrases is not None and self.phrases.requests > 1:  # what one alone was given is not known
            table.append(self.phrases.row(PHRASES))
        self._aligned_row = len(table) if self.alignments is not None else -1
        if self.alignments is not None:
            table.append(self.alignments.row(ALIGNMENT))
        table += self._ngram
        self._table = SourceTable(table)
        has_stores = bool(self._exact or self._ngram or self.dense is not None)
        self._reads_stores = 1 if has_stores or self._as_with_stores else None
        if len(self._use) != len(table):
            self._use = np.full(len(table), request.OF_USE)
        self._cursors: NDArray[np.int64] = np.zeros((len(table), CURSOR), np.int64)
        if self._scratch.rows != len(table):
            self._scratch = Scratch(len(table))
        self._tail[:] = 0
        self._first_p[:] = 0
        begin_request(self._trust)
        self._request = self._describe()

    def _describe(self) -> Row:
        """The request for the kernels, at its beginning; what was learned over all requests goes on."""
        s = self._scratch
        return Row.of(
            request.REQUEST,
            {
                request.CURSORS: self._cursors,
                request.NEWEST: self._tail,
                request.RECENT: self._recent,
                request.NOISE: self._noise,
                request.USE: self._use,
                request.TRUST: self._trust,
                request.NODE_CURSORS: s.cursors,
                request.NODE_TAILS: s.tails,
                request.POOL_P: s.pool_p,
                request.POOL_IDS: s.pool_ids,
                request.HEAP: s.heap,
                request.SCRATCH: s.memory,
                request.NODES: s.nodes,
                request.NODE_P: s.node_p,
                request.TABLE: self._table.words,
                request.CELL_COUNTS: self.calibration.cells,
                request.SCALE: self.calibration.scale,
                request.DRAFTS: self.calibration.drafts,
                request.FIRST_P: self._first_p,
            },
            {
                request.SOURCES: len(self._table),
                request.CONTEXT: self._context_row,
                request.EARLIER: self._session_row,
                request.NUM_EARLIER: len(self._earlier),
                request.STORED: self._exact_row,
                request.NUM_STORED: len(self._exact),
                request.DENSE_ROW: -1 if self.dense is None else self._dense_row,
                request.ALIGNED: self._aligned_row,
                request.PREDICTED: int(self.prediction is not None),
                request.SLOW: int(bool(self.datastores)),
                request.POOL: len(s.heap),
                request.WORDS: len(s.memory),
                **self._learned,
            },
        )

    def _sync(self) -> None:
        """Read sources whose arrays were replaced where they are now.

        A session must be at rest from here until the kernels return (`SessionMemory.__enter__`): drafters of other
        threads add to it.
        """
        self._table.put(self._context_row, self.context.row(CONTEXT))
        for i, automaton in enumerate(self._earlier):
            self._table.put(self._session_row + i, automaton.row(SESSION))

    def _longest_match(self) -> int:
        """Longest match of the text with anything but neighbours."""
        asked = range(self._exact_row + len(self._exact))
        words = self._table.words
        return max(int(levels.open_row(words, s, self._cursors, s, _NO_HASHES, 0, 1)[1]) for s in asked)
