"""Mixture drafter: one calibrated draft tree out of the cursors of all sources; the engine behind `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import AUTO, MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.dense_queries import DenseQueries
from retrieve_spec.drafting.drafter import Budget, Layer, VerifiedPass
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.kernels import blend, levels, request, step
from retrieve_spec.kernels.calibration import LENGTH_CLASSES, NUM_SOURCES, begin_request
from retrieve_spec.kernels.compiled_code import compiles, compiling_logged
from retrieve_spec.kernels.phrases import BOUNDARY
from retrieve_spec.kernels.source_table import CURSOR, TAIL
from retrieve_spec.sources import (
    ALIGNMENT,
    BIGRAMS,
    CONTEXT,
    DENSE,
    EXACT,
    NGRAM,
    PHRASES,
    PREDICTION,
    RECYCLING,
    SESSION,
)
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.dense import DenseIndexes, DenseSource
from retrieve_spec.sources.recycling import Bigrams, RecyclingTable
from retrieve_spec.sources.rows import Alignments, Prediction, Row, SourceTable, store_rows
from retrieve_spec.sources.session import FOLLOWED, SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

_NO_COST = np.empty(0, np.float32)
_NO_TOKENS = np.empty(0, np.int32)
_NO_IDS = np.empty((0, 1), np.int32)
_NO_LOGITS = np.empty((0, 1), np.float32)
_NO_HASHES = np.empty((2, 0), np.uint64)
_NO_BLOCK = NO_DRAFT.block
_BOUNDARY = np.array([BOUNDARY], np.int32)
_LONGEST_REST = 8
"""Passes that are not drafted for at most, where looks for drafts cost more than they save."""
_LOOKS = 16.0
"""Looks for drafts after which what they cost and saved has faded to a third."""
_MOST_SHOWN = 4
"""Passes that wait to be learned from at most."""
_MOST_FRESH = 64
"""Passes at most of which only the text waits: nobody asked for a draft."""


class _Shown(NamedTuple):
    """What is to be learned at once: tokens (e,); nodes of the draft that led to them, how many tokens of it were
    accepted and were expected to be; these nodes and the target's top tokens (n + 1, k), or nothing."""

    emitted: NDArray[np.int32]
    size: int = 0
    accepted: int = 0
    expected: float = 0.0
    verified: NDArray[np.int32] = _NO_BLOCK
    top_ids: NDArray[np.int32] = _NO_IDS
    top_logits: NDArray[np.float32] = _NO_LOGITS

    def followed_by(self, more: NDArray[np.int32]) -> _Shown:
        """The same with more tokens behind."""
        return self._replace(emitted=np.concatenate([self.emitted, more]))


_NOTHING_SHOWN = _Shown(_NO_TOKENS)


def _scratch_of(rows: int) -> dict[int, NDArray[Any]]:
    """Arrays of the expansion kernel for a table of so many rows, reused from pass to pass, by columns of a request."""
    pool = 64 * MAX_NODES
    return {
        request.NODE_CURSORS: np.zeros(((MAX_NODES + 1) * rows, CURSOR), np.int64),
        request.NODE_TAILS: np.zeros((MAX_NODES + 1, TAIL), np.int32),
        request.POOL_P: np.empty(pool, np.float32),
        request.POOL_IDS: np.empty((pool, 3), np.int32),
        request.HEAP: np.empty(pool, np.int32),
        request.SCRATCH: blend.scratch_memory(rows),
        request.NODES: np.empty((MAX_NODES, 4), np.int64),
        request.NODE_P: np.empty(MAX_NODES, np.float32),
    }


class MixtureDrafter:
    """Drafts from every open source at once, most probable nodes first, and learns from every verified token.

    What a pass showed is learned in one compiled call with the next draft (`kernels/step.py`), which finds in the
    caches what learning has read. So passes that are not drafted for cost next to nothing.

    Parameters
    ----------
    config
        Limits of the tree.
    recycling
        Use the target's own top tokens.
    session
        Memory of earlier generations to draft from and to add to, or None.
    datastores
        Open stores to draft from.
    calibration
        Learned weights and phrases to start from and to go on learning; fresh ones when None.
    bigrams
        Of the target, if they are known.

    Attributes
    ----------
    requester_id
        Who asks, until the request ends: phrases that one requester alone was given are not drafted. None: every
        request has one of its own.
    learns_phrases
        Whether requests are counted when they end.
    """

    _as_with_stores = False
    """Whether kernels that read stores are called where there is none: they are compiled anyway."""

    def __init__(
        self,
        config: SpeculationConfig | None = None,
        *,
        recycling: bool = True,
        session: SessionMemory | None = None,
        datastores: Sequence[Datastore] = (),
        calibration: Calibration | None = None,
        bigrams: Bigrams | None = None,
    ) -> None:
        self.config = config or SpeculationConfig()
        self.calibration = calibration or Calibration()
        self.context = SuffixAutomaton(4096, shortest=1)
        self.unigrams = self.calibration.unigrams()
        self.alignments: Alignments | None = Alignments()
        self.phrases = self.calibration.phrases if self.config.phrases == AUTO else None
        self.session = session
        self.datastores = list(datastores)
        self.ngram_rows, self.exact_rows = store_rows(self.datastores, NGRAM, EXACT)
        self.recycling = RecyclingTable() if recycling else None
        self.bigrams = bigrams
        self.prediction: Prediction | None = None
        indexes = DenseIndexes(datastores if self.config.dense == AUTO else ())
        self.wants_hidden: Layer | None = indexes.layer
        self.dense = None if indexes.layer is None else DenseSource(indexes)
        self._scratch: dict[int, NDArray[Any]] = {}
        self._trust: NDArray[np.float64] = np.empty((NUM_SOURCES, 1 + LENGTH_CLASSES, 2))
        self._use: NDArray[np.float64] = np.empty(0)
        self._noise: NDArray[np.int64] = np.zeros(4, np.int64)
        self._tail: NDArray[np.int32] = np.zeros((1, TAIL), np.int32)
        self._recent: NDArray[np.int32] = np.zeros(request.MATCH, np.int32)
        self._first_p: NDArray[np.float64] = np.zeros(1)
        self._learned: dict[int, int] = dict.fromkeys((request.STEPS, request.LEARNED, request.RESTS), 0)
        self._request = Row.of(request.REQUEST, {}, {})  # until one begins
        self.top_k = self.recycling.k if self.recycling else 0
        self._says_where = self.config.provenance and bool(self.exact_rows or self.dense)
        self._queries = None if self.dense is None else DenseQueries(self.dense)
        self._pace: float | None = None
        self._proposed = 0, 0.0
        self._ahead = 0  # nodes that the last draft began with
        self._sampled = False
        self._key = 0, 0, 0
        self._history: list[NDArray[np.int32]] = []
        self._text: object = None  # what a session calls it
        self._fresh: list[NDArray[np.int32]] = []  # given while nobody drafted, learned without trees
        self._shown: list[_Shown] = []  # before that
        self._rest = self._misses = 0
        self._looks: tuple[float, float] | None = None  # seconds that one saves and takes, running means
        self._asked = False  # for a draft since the last pass
        self.requester_id: str | None = None
        self.learns_phrases = True
        self._forgotten = False

    @compiles
    @compiling_logged()
    def prepare(self) -> None:
        """Compile the kernels, or load them from Numba's cache, before the first token depends on it."""
        if self.dense is not None:
            self.dense.prepare()
        SuffixAutomaton(16).extend(np.arange(99, dtype=np.int32))  # grows, as no short trial does
        trial = MixtureDrafter(self.config, session=SessionMemory(), datastores=self.datastores)
        text = np.arange(12, dtype=np.int32) % 4
        trial.start(text, text)
        trial.observe_prompt(text[:1], text[None, : trial.top_k], np.zeros((1, trial.top_k), np.float32))
        tree = trial.propose(Budget(4, 4, np.array([1.0, 1.1, 1.2, 1.3, 1.4], np.float32)))
        top = np.zeros((len(tree) + 1, trial.top_k))
        trial.observe(VerifiedPass(tree, text[:0], text[:1], top.astype(np.int32), top.astype(np.float32)))
        trial.propose(Budget(4, 4))
        trial.observe(VerifiedPass(DraftTree(), text[:0], text[:1] + 9))
        trial.finish()

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: forget the last one's text, read the prompt and the expected text."""
        self.context.reset()
        self.unigrams.reset()
        if self.alignments is not None:
            self.alignments.reset()
        self.prediction = Prediction(prediction_ids) if prediction_ids is not None and len(prediction_ids) else None
        if self.recycling is not None and self.session is None:
            self.recycling.reset()
        self._history = []
        self._text = object()
        self._fresh = []
        self._shown = []
        self._rest = self._misses = 0
        self._asked = False  # the last pass over another text may not have ended
        self._forgotten = False
        self._noise[0] = 0
        self._sampled = False
        self._learned = {column: int(self._request.words[column]) for column in self._learned}  # what goes on
        if self._queries is not None:
            self._queries.leave()
        self._open()
        self._read(np.ascontiguousarray(prompt_ids, np.int32))

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
        self._at_rest: SessionMemory | nullcontext[None] = nullcontext() if self.session is None else self.session
        if self.session is not None:
            with self.session:
                self._earlier = list(self.session.automata)
                table += [automaton.row(SESSION) for automaton in self._earlier]
        self._exact_row = len(table)
        table += self.exact_rows
        self._dense_row = len(table)
        if self.dense is not None:
            table.append(self.dense.row(DENSE))
        if self.recycling:
            table.append(self.recycling.row(RECYCLING))
            if self.bigrams is not None:
                table.append(self.bigrams.row(BIGRAMS))
        if self.phrases is not None and self.phrases.requests > 1:  # what one alone was given is not known
            table.append(self.phrases.row(PHRASES))
        aligned_row = len(table) if self.alignments is not None else -1
        if self.alignments is not None:
            table.append(self.alignments.row(ALIGNMENT))
        table += self.ngram_rows
        self._table = SourceTable(table)
        has_stores = bool(self.exact_rows or self.ngram_rows or self.dense is not None)
        self._reads_stores = 1 if has_stores or self._as_with_stores else None
        if len(self._use) != len(table):
            self._use = np.full(len(table), request.OF_USE)
            self._scratch = _scratch_of(len(table))
        self._cursors: NDArray[np.int64] = np.zeros((len(table), CURSOR), np.int64)
        self._tail[:] = 0
        self._first_p[:] = 0
        begin_request(self._trust)
        self._request = Row.of(  # what was learned over all requests goes on
            request.REQUEST,
            {
                request.CURSORS: self._cursors,
                request.NEWEST: self._tail,
                request.RECENT: self._recent,
                request.NOISE: self._noise,
                request.USE: self._use,
                request.TRUST: self._trust,
                **self._scratch,
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
                request.NUM_STORED: len(self.exact_rows),
                request.DENSE_ROW: -1 if self.dense is None else self._dense_row,
                request.ALIGNED: aligned_row,
                request.PREDICTED: int(self.prediction is not None),
                request.SLOW: int(bool(self.datastores)),
                request.POOL: len(self._scratch[request.HEAP]),
                request.WORDS: len(self._scratch[request.SCRATCH]),
                **self._learned,
            },
        )

    def feed(self, token_ids: NDArray[np.int32]) -> None:
        """Append text that was neither drafted nor generated (a later turn's context)."""
        self._catch_up()
        self.drop_first()
        if self._queries is not None:
            self._queries.leave()
            self._cursors[self._dense_row] = 0
        self._read(np.ascontiguousarray(token_ids, np.int32))
        self._history.append(_BOUNDARY)

    def _read(self, ids: NDArray[np.int32]) -> None:
        """Take text (n,) that was not generated into the text so far."""
        with self._at_rest:
            self._sync()
            appended = request.read(self._table.words, self._request.words, ids, FOLLOWED, self._reads_stores)
        if appended < len(ids):  # for more the text's automaton had no room
            self._extend(ids[appended:])

    def _extend(self, ids: NDArray[np.int32]) -> None:
        """Append tokens to the text's automaton, for which it makes room, and read it where it is then."""
        self.context.extend(ids)
        self._table.put(self._context_row, self.context.row(CONTEXT))

    def _sync(self) -> None:
        """Read a session whose arrays were replaced where they are now.

        It must be at rest from here until the kernels return (`SessionMemory.__enter__`): drafters of other threads add
        to it.
        """
        for i, automaton in enumerate(self._earlier):
            self._table.put(self._session_row + i, automaton.row(SESSION))

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """Fill the recycling table from the prompt's own logits."""
        if self.recycling is not None:
            self.recycling.learn_text(token_ids, top_ids, top_logits)

    def propose(self, budget: Budget) -> DraftTree:
        """Draft within the budget; with a cost curve, only as many nodes as pay.

        While looks for drafts take longer than these save, more and more passes go by without one (at most eight in a
        row), so that text with nothing to look up costs next to nothing; drafts that pay end that.
        """
        began = perf_counter()
        self._begin_with(budget.ahead)
        if budget.cost is None:
            return self.look(budget)
        self._asked = True
        if min(budget.max_nodes, budget.max_depth) <= 0:
            return NO_DRAFT
        if self._rest > 0:
            self._rest -= 1
            return NO_DRAFT
        tree = self.look(budget)
        self._weigh(budget.cost, perf_counter() - began)
        return tree

    def look(self, budget: Budget, chain: bool = False) -> DraftTree:
        """Draft within the budget, whatever that takes; with `chain` one branch."""
        self._asked = True
        limit = min(budget.max_nodes, MAX_NODES)
        depth = self._ahead + min(budget.max_depth, self.config.max_depth)
        if limit <= 0 or depth <= 0:
            return NO_DRAFT
        if self._sampled or budget.noise is not None:
            self._hear(budget.noise)
        cost = _NO_COST if budget.cost is None else budget.cost[: limit + 1]
        with self._at_rest:
            return self._grow(cost, limit, depth, chain)

    def _begin_with(self, chain: DraftTree) -> None:
        """Let the next draft begin with tokens that no source has to say."""
        count = self._ahead = self._request.words[request.AHEAD] = len(chain)
        if count:
            places = chain.token_ids, chain.parent, chain.depth, np.full(count, len(self._table))
            self._scratch[request.NODES][:count] = np.stack(places, axis=1)
            self._scratch[request.NODE_P][:count] = np.exp(chain.log_p)

    def _weigh(self, cost: NDArray[np.float32], spent: float) -> None:
        """Learn what looks for drafts save and take from one that took `spent` seconds; rest if they take more."""
        n, expected = self._proposed
        anyway = 1.0 + self._ahead
        plain, drafted = float(cost[self._ahead]), float(cost[n])
        self._pace = drafted / (anyway + expected)
        saved = plain * (anyway + expected) / anyway - drafted
        saves, takes = self._looks or (plain, spent)  # a new drafter is believed in
        saves, takes = saves + (saved - saves) / _LOOKS, takes + (min(spent, 4.0 * takes) - takes) / _LOOKS
        self._looks = saves, takes
        self._misses = 0 if saved > takes else self._misses + 1
        self._rest = 0 if saves > takes else min(self._misses // 2, _LONGEST_REST)
        if self._queries is not None and self._queries.comparison is not None:
            self._queries.comparison.weigh(n, cost, self._pace)

    def _grow(self, cost: NDArray[np.float32], limit: int, depth: int, chain: bool) -> DraftTree:
        """Learn what was shown, look up neighbours if that pays, and grow the tree."""
        shown = self._take_shown()
        last = shown.pop() if shown and self._queries is None else _NOTHING_SHOWN
        for one in shown:
            self._learn(one)
        self._sync()
        if self._queries is not None:
            self._ask(self._queries, cost, limit, depth)
        room, expected, block = self._kernel(cost, limit, depth, last, chain)
        if last is not _NOTHING_SHOWN and self._took(last, room):
            _, expected, block = self._kernel(cost, limit, depth, chain=chain)
        tree = DraftTree.of_block(block)
        self._proposed = len(tree), expected
        return tree

    def _kernel(
        self,
        cost: NDArray[np.float32],
        limit: int,
        depth: int,
        shown: _Shown = _NOTHING_SHOWN,
        chain: bool = False,
    ) -> tuple[int, float, NDArray[np.int32]]:
        """What `step.propose` returns."""
        found: tuple[int, float, NDArray[np.int32]] = step.propose(
            self._request.words,
            cost,
            limit,
            depth,
            self.config.min_path_probability,
            int(self._says_where),
            int(chain),
            0.0,
            *shown,
            self._reads_stores,
        )
        return found

    def _ask(self, queries: DenseQueries, cost: NDArray[np.float32], limit: int, depth: int) -> None:
        """Look up neighbours of the last hidden state if none are followed any more and it pays."""
        request.catch_up(self._table.words, self._request.words)
        cursor = self._cursors[self._dense_row]
        followed = cursor[0] < cursor[1] and cursor[3] >= 0
        if not followed:
            words, asked = self._table.words, range(self._exact_row + len(self.exact_rows))  # all but neighbours
            longest = max(int(levels.open_row(words, s, self._cursors, s, _NO_HASHES, 0, 1)[1]) for s in asked)
            queries.ask(cursor, longest, int(self._tail[0, 0]), self._pace if len(cost) else None)
        if queries.comparison is not None:
            found = cursor.copy()
            cursor[:] = 0
            n = self._kernel(cost, limit, depth)[-1].shape[1]
            queries.comparison.without = self._scratch[request.NODES][:n, :2].copy()
            cursor[:] = found

    @property
    def first_token(self) -> int:
        """The token that the last draft began with, or would have if it had paid."""
        return int(self._request.words[request.FIRST])

    def drop_first(self) -> None:
        """Judge no draft by the token that it would have begun with: the text goes on with something else."""
        self._first_p[0] = 0.0

    def _hear(self, noise: tuple[int, int, int] | None) -> None:
        """Take over the key of the sampling noise; positions are kept relative to the text so far.

        What was shown before is learned with the key of its time.
        """
        if noise is None:
            self._catch_up()
            self._noise[0], self._sampled = 0, False
            return
        seed, row, position = noise
        key = seed, row, position - self.length
        if self._sampled and key == self._key:
            return
        self._catch_up()
        self._sampled, self._key = True, key
        self._noise[:] = 1, (seed + (1 << 63)) % (1 << 64) - (1 << 63), row, position  # the seed's 64 bits, signed
        self._request.words[request.OFFSET] = key[2]

    def _accepted(self, verified: VerifiedPass) -> int:
        """How many tokens of a draft count as accepted."""
        return len(verified.emitted) - 1

    def observe(self, verified: VerifiedPass) -> None:
        """Take the emitted tokens into the text so far, and learn from the pass; both when the next draft is due."""
        emitted = np.ascontiguousarray(verified.emitted, np.int32)
        if self._queries is not None:
            self._queries.see(verified.emitted, verified.hidden)
        tree = verified.tree
        proposed, expected = self._proposed
        ahead = min(self._ahead, len(tree))  # says nothing of the estimates
        size, accepted = len(tree) - ahead, max(self._accepted(verified) - ahead, 0)
        if size and len(tree) != proposed:  # a verifier of chains takes one branch: the others could not be accepted
            expected = tree.expected_accepted - ahead
        asked, self._asked = self._asked, False
        if self._rest > 0 or self._fresh or not asked:
            if size:
                self.calibration.learn_draft(expected, accepted, self._sampled)
                self.drop_first()
            self._fresh.append(emitted)
            if (self._rest == 0 and asked) or len(self._fresh) > _MOST_FRESH:
                self._shown = self._take_shown()
        elif self.recycling is None or verified.top_ids is None or verified.top_logits is None:
            self._shown.append(_Shown(emitted, size, accepted, expected))
        else:
            top = verified.top_ids, verified.top_logits
            self._shown.append(_Shown(emitted, size, accepted, expected, tree.block, *top))
        if len(self._shown) > _MOST_SHOWN:
            self._catch_up()

    @property
    def length(self) -> int:
        """Tokens of the text, those that wait to be learned included."""
        waiting = [*self._fresh, *(shown.emitted for shown in self._shown)]
        return int(self._request.words[request.LENGTH]) + sum(map(len, waiting))

    def _take_shown(self) -> list[_Shown]:
        """All that is to be learned, which then no longer waits."""
        shown, self._shown = self._shown, []
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            shown.append(_Shown(fresh[0] if len(fresh) == 1 else np.concatenate(fresh)))
        return shown

    def _catch_up(self) -> None:
        """Learn all that was shown."""
        shown = self._take_shown()
        if not shown:
            return
        with self._at_rest:
            for one in shown:
                self._learn(one)

    def _learn(self, shown: _Shown) -> None:
        """Follow emitted tokens with every source, and learn at each."""
        self._sync()
        self._took(shown, self._kernel(_NO_COST, 0, 0, shown)[0])

    def _took(self, shown: _Shown, room: int) -> bool:
        """Note that tokens were learned; whether there was no room for all of them until now."""
        self._history.append(shown.emitted)
        if self._shared is not None:
            self._shared.hear(self._text, shown.emitted)
        if room == len(shown.emitted):
            return False
        self._extend(shown.emitted[room:])
        return True

    def forget_request(self) -> None:
        """Learn no phrases from the request under way."""
        self._forgotten = True

    def finish(self) -> None:
        """End the request: phrases and session, if there is one, learn what was generated; calibration is kept."""
        self._catch_up()
        if self._queries is not None:
            self._queries.leave()
        history, self._history = self._history, []
        self._remember(np.concatenate(history) if history else _NO_TOKENS)

    def remember(self, generated: NDArray[np.int32]) -> None:
        """Let phrases and session learn from a text (n,) that was generated, as at the end of a request."""
        if self.session is not None:
            self.session.hear(object(), generated)
        self._remember(generated)

    def _remember(self, generated: NDArray[np.int32]) -> None:
        if (generated >= 0).any():
            if self.phrases is not None and self.learns_phrases and not self._forgotten:
                self.phrases.learn(generated, self.requester_id)
            if self.session is not None:
                self.session.remember(generated[generated >= 0])
        self.requester_id, self._forgotten = None, False
        self.calibration.keep()
