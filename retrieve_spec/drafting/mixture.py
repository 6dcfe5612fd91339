"""Mixture drafter: one calibrated draft tree from the cursors of all sources; used by `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import AUTO, MAX_NODES, SpeculationConfig
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.dense_queries import DenseQueries
from retrieve_spec.drafting.draft_policy import DraftPolicy
from retrieve_spec.drafting.drafter import Budget, Layer, VerifiedPass
from retrieve_spec.drafting.request_state import MOST_PASSES, ObservedPass, PendingPasses, RequestState
from retrieve_spec.drafting.scoped import ScopedDrafter
from retrieve_spec.drafting.text_sources import TextSources
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.kernels.compiled_code import compiles, log_compiling
from retrieve_spec.kernels.phrases import BOUNDARY
from retrieve_spec.sources import EXACT, NGRAM
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.dense import DenseIndexes, DenseSource
from retrieve_spec.sources.distilled import ModelTables
from retrieve_spec.sources.hidden_states import SimilarStates
from retrieve_spec.sources.recycling import MANY_CONTEXTS, Bigrams, RecyclingTable
from retrieve_spec.sources.rows import Alignments, Prediction, store_rows
from retrieve_spec.sources.session import SessionMemory

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

_BOUNDARY = np.array([BOUNDARY], np.int32)


class Transcript:
    """Tokens generated in one request, from which phrases and session learn at its end.

    Parameters
    ----------
    session
        That hears of the tokens as they come.
    """

    def __init__(self, session: SessionMemory | None = None) -> None:
        self._session, self._text = session, object()
        self._parts: list[NDArray[np.int32]] = []
        self.is_forgotten = False

    def append(self, token_ids: NDArray[np.int32]) -> None:
        """Append generated tokens (n,), from which the drafter has learned."""
        self._parts.append(token_ids)
        if self._session is not None:
            self._session.append(self._text, token_ids)

    def break_off(self) -> None:
        """Mark that text follows which was not generated, so that no phrase spans it."""
        self._parts.append(_BOUNDARY)

    def take(self) -> NDArray[np.int32]:
        """Return all of it, (n,) with boundaries, and clear it."""
        parts, self._parts = self._parts, []
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(slots=True)
class _LastDraft:
    """The last draft: its nodes, their expected accepted tokens without forced ones, the number of forced ones."""

    size: int = 0
    expected: float = 0.0
    forced: int = 0


class MixtureDrafter(ScopedDrafter):
    """Drafts from every open source at once, most probable nodes first, and learns from every verified token.

    What a pass showed is learned in one compiled call with the next draft (`kernels/step.py`), which finds in the
    caches what learning has read. So passes that are not drafted for cost next to nothing.

    Parameters
    ----------
    config
        Limits of the tree.
    recycling, contexts
        Use the target's own top tokens, in so many contexts at most (a power of two).
    session
        Memory of earlier generations to draft from and to add to, or None.
    datastores
        Open stores to draft from.
    calibration
        Learned weights and phrases to start from and to go on learning; fresh ones when None.
    bigrams
        Of the target, if they are known.
    distilled
        What the stores have of the target; None opens their tables of any model.

    Attributes
    ----------
    session, calibration
        As given; from the next request on others, if they are replaced.
    sources
        What the text is looked up in.
    learns_phrases
        Whether requests are counted when they end.
    """

    _always_reads_stores = False
    """Whether to call kernels that read stores even without stores; set if they are compiled anyway."""

    def __init__(
        self,
        config: SpeculationConfig | None = None,
        *,
        recycling: bool = True,
        contexts: int = MANY_CONTEXTS,
        session: SessionMemory | None = None,
        datastores: Sequence[Datastore] = (),
        calibration: Calibration | None = None,
        bigrams: Bigrams | None = None,
        distilled: ModelTables | None = None,
    ) -> None:
        self.config = config or SpeculationConfig()
        self.calibration = self._own_calibration = calibration or Calibration()
        super().__init__(session)
        self.datastores = list(datastores)
        indexes = DenseIndexes(datastores if self.config.dense == AUTO else ())
        sees_states = recycling and indexes.layer in (None, "last")
        known = distilled or ModelTables(self.datastores)
        state_rows = known.states if sees_states else None
        ngram_rows, exact_rows = store_rows(self.datastores, NGRAM, EXACT)
        self.sources = TextSources(
            context=SuffixAutomaton(4096, shortest=1),
            unigrams=self.calibration.unigrams(),
            alignments=Alignments(),
            exact=exact_rows,
            dense=None if indexes.layer is None else DenseSource(indexes),
            ngram=ngram_rows,
            recycling=RecyclingTable(contexts) if recycling else None,
            distilled=known.tables,
            bigrams=bigrams,
            phrases=self.calibration.phrases if self.config.phrases == AUTO else None,
            states=None if state_rows is None else SimilarStates(state_rows),
        )
        self.wants_hidden: Layer | None = indexes.layer if state_rows is None else "last"
        self.top_k = self.sources.recycling.k if self.sources.recycling else 0
        self.learns_phrases = True
        find_origins = self.config.provenance and bool(exact_rows or self.sources.dense)
        self._state = RequestState(self.config.min_path_probability, find_origins, self._always_reads_stores)
        self._policy = DraftPolicy()
        self._pending = PendingPasses()
        self._transcript = Transcript()
        self._queries = None if self.sources.dense is None else DenseQueries(self.sources.dense)
        self._last = _LastDraft()
        self._asked = False  # whether a draft was requested since the last pass

    @compiles
    @log_compiling()
    def prepare(self) -> None:
        """Compile the kernels, or load them from Numba's cache, before the first request."""
        if self.sources.dense is not None:
            self.sources.dense.prepare()
        SuffixAutomaton(16).extend(np.arange(99, dtype=np.int32))  # compiles growing, which short texts do not need
        trial = MixtureDrafter(self.config, session=SessionMemory(), datastores=self.datastores)
        text = np.arange(12, dtype=np.int32) % 4
        trial.start(text, text)
        trial.observe_prompt(text[:1], text[None, : trial.top_k], np.zeros((1, trial.top_k), np.float32))
        tree = trial.propose(Budget(4, 4, np.array([1.0, 1.1, 1.2, 1.3, 1.4], np.float32)))
        top = np.zeros((len(tree) + 1, trial.top_k))
        trial.observe(VerifiedPass(tree, text[:0], text[:1], top.astype(np.int32), top.astype(np.float32)))
        trial.propose(Budget(4, 4))
        trial.observe(VerifiedPass(NO_DRAFT, text[:0], text[:1] + 9))
        trial.finish()

    def start(self, prompt_ids: NDArray[np.int32], prediction_ids: NDArray[np.int32] | None = None) -> None:
        """Begin a request: forget the last text, read the prompt and the expected text."""
        sources, session = self.sources, self.session
        sources.reset()
        sources.prediction = Prediction(prediction_ids) if prediction_ids is not None and len(prediction_ids) else None
        if session is None:
            self.forget_logits()
        self._transcript, self._pending = Transcript(session), PendingPasses()
        self._policy.begin_request()
        self._asked = False  # the last pass over another text may not have ended
        if self._queries is not None:
            self._queries.leave()
        with nullcontext() if session is None else session:
            sources.earlier = [] if session is None else list(session.automata)
            self._state.begin(sources, self.calibration, session)
        self._state.read(np.ascontiguousarray(prompt_ids, np.int32))

    def feed(self, token_ids: NDArray[np.int32]) -> None:
        """Append text that was neither drafted nor generated (the context of a later turn)."""
        self._learn_pending()
        self._state.drop_first()
        if self._queries is not None:
            self._queries.leave()
            self._state.dense_cursor[:] = 0
        if self.sources.states is not None:
            self.sources.states.leave()
            self._state.leave_states()
        self._state.read(np.ascontiguousarray(token_ids, np.int32))
        self._transcript.break_off()

    def observe_prompt(
        self, token_ids: NDArray[np.int32], top_ids: NDArray[np.int32], top_logits: NDArray[np.float32]
    ) -> None:
        """Fill the recycling table from the prompt's own logits."""
        if self.sources.recycling is not None:
            self.sources.recycling.learn_text(token_ids, top_ids, top_logits)

    def propose(self, budget: Budget) -> DraftTree:
        """Draft within the budget; with a cost curve, as many nodes as pay.

        While drafting takes longer than drafts save, more and more passes go by without one (`DraftPolicy`), so that
        text with nothing to look up costs next to nothing.
        """
        began = perf_counter()
        if len(budget.ahead) or self._last.forced:
            self._last.forced = self._state.force(budget.ahead)
        if budget.cost is None:
            return self.draft(budget)
        self._asked = True
        if min(budget.max_nodes, budget.max_depth) <= 0 or self._policy.skips():
            return NO_DRAFT
        tree = self.draft(budget)
        self._policy.learn(budget.cost, self._last.size, self._last.expected, self._last.forced, perf_counter() - began)
        if self._queries is not None and self._queries.comparison is not None:
            self._queries.comparison.weigh(self._last.size, budget.cost, self._policy.seconds_per_token)
        return tree

    def draft(self, budget: Budget, chain: bool = False) -> DraftTree:
        """Learn from pending passes, then draft within the budget; with `chain`, a single branch."""
        self._asked = True
        limit = min(budget.max_nodes, MAX_NODES)
        depth = self._last.forced + min(budget.max_depth, self.config.max_depth)
        if limit <= 0 or depth <= 0:
            return NO_DRAFT
        if (self._state.sampled or budget.noise is not None) and not self._state.is_noise(budget.noise, self.length):
            self._learn_pending()  # with the noise of that pass
            self._state.set_noise(budget.noise, self.length)
        waiting = self._pending.take()
        last = waiting.pop() if waiting and self._queries is None else ObservedPass()
        for observed in waiting:
            self._learn(observed)
        if self._queries is not None:
            self._query(self._queries, budget.cost, limit, depth)
        self._last.expected, block = self._state.step(last, limit, depth, budget.cost, int(chain))
        if len(last.emitted):
            self._transcript.append(last.emitted)
        self._last.size = block.shape[1]
        return DraftTree.of_block(block)

    def _query(self, queries: DenseQueries, cost: NDArray[np.float32] | None, limit: int, depth: int) -> None:
        """Search neighbours of the last hidden state, if none are followed and it pays."""
        match_len = self._state.longest_match()  # updates the cursors
        cursor = self._state.dense_cursor
        if not self._state.follows_neighbours:
            pace = None if cost is None else self._policy.seconds_per_token
            queries.query(cursor, match_len, self._state.newest_token, pace)
        if queries.comparison is not None:
            found = cursor.copy()
            cursor[:] = 0
            _, without = self._state.step(ObservedPass(), limit, depth, cost, chain=0)
            queries.comparison.without = self._state.nodes(without.shape[1])
            cursor[:] = found

    @property
    def first_token(self) -> int:
        """The first token of the last draft, made or skipped."""
        return int(self._state.fields["first_token"])

    def drop_first(self) -> None:
        """Do not judge a draft by its first token: the text continues with unobserved tokens."""
        self._state.drop_first()

    def _accepted(self, verified: VerifiedPass) -> int:
        """Return how many tokens of a draft count as accepted."""
        return len(verified.emitted) - 1

    def observe(self, verified: VerifiedPass) -> None:
        """Append the emitted tokens, and learn from the pass; both are done before the next draft."""
        if self._queries is not None:
            self._queries.see(verified.emitted, verified.last_hidden)
        tree, last = verified.tree, self._last
        forced = min(last.forced, len(tree))  # forced tokens are not estimates
        size, accepted = len(tree) - forced, max(self._accepted(verified) - forced, 0)
        expected = last.expected
        if size and len(tree) != last.size:  # a chain verifier verified one branch only
            expected = tree.expected_accepted - forced
        emitted, asked, skips = np.ascontiguousarray(verified.emitted, np.int32), self._asked, self._policy.left > 0
        self._asked = False
        if skips or self._pending.texts or not asked:
            if size:
                self.calibration.learn_draft(expected, accepted, self._state.sampled)
                self._state.drop_first()
            self._pending.append_text(emitted, last=asked and not skips)
        elif self.sources.recycling is None or verified.top_ids is None or verified.top_logits is None:
            self._pending.passes.append(ObservedPass(emitted, size=size, accepted=accepted, expected=expected))
        else:
            top = verified.top_ids, verified.top_logits
            states, hidden = self.sources.states, verified.hidden
            keys = None if states is None or hidden is None else states.keys(hidden)
            self._pending.passes.append(ObservedPass(emitted, tree.block, *top, size, accepted, expected, keys))
        if len(self._pending.passes) > MOST_PASSES:
            self._learn_pending()

    @property
    def length(self) -> int:
        """Number of tokens of the text, pending ones included."""
        return int(self._state.fields["length"]) + self._pending.num_tokens

    def _learn_pending(self) -> None:
        """Learn from all pending passes."""
        for one in self._pending.take():
            self._learn(one)

    def _learn(self, observed: ObservedPass) -> None:
        """Advance every source by emitted tokens, and learn at each."""
        self._state.step(observed, 0, 0, None, chain=0)
        self._transcript.append(observed.emitted)

    def use_bigrams(self, bigrams: Bigrams) -> None:
        """Draft from the target's top tokens after each single token, from the next request on."""
        self.sources.bigrams = bigrams

    def _share(self, siblings: SessionMemory, calibration: Calibration | None) -> None:
        if self.session is None:
            self.forget_logits()  # as `start` does without a session
        self.session = siblings
        if calibration is not None:
            calibration.begin_with(self.calibration)
            self.calibration = calibration

    def leave(self) -> None:
        """Stop working for a text."""
        super().leave()
        if self.calibration is not self._own_calibration:  # it has not counted this request, but shares phrases
            self.calibration = self._own_calibration
            self.calibration.keep()

    def forget_scope(self, scope: str | None) -> None:
        """See `ScopedDrafter.forget_scope`; no phrases are learned from the text."""
        super().forget_scope(scope)
        if self._own is not None and scope in (None, self._scope):
            self._transcript.is_forgotten = True

    def forget_logits(self) -> None:
        """Forget the target's top tokens in earlier texts."""
        if self.sources.recycling is not None:
            self.sources.recycling.reset()

    def finish(self) -> None:
        """End the request: phrases and session learn from the generated text; calibration is kept."""
        self._learn_pending()
        if self._queries is not None:
            self._queries.leave()
        self._remember(self._transcript.take())

    def remember(self, generated: NDArray[np.int32]) -> None:
        """Let phrases and session learn from a generated text (n,), as at the end of a request."""
        if self.session is not None:
            self.session.append(object(), generated)
        self._remember(generated)

    def _remember(self, generated: NDArray[np.int32]) -> None:
        if (generated >= 0).any():
            phrases = self.sources.phrases
            if phrases is not None and self.learns_phrases and not self._transcript.is_forgotten:
                phrases.learn(generated, self.requester_id)
            if self.session is not None:
                self.session.remember(generated[generated >= 0])
        self.requester_id, self._transcript.is_forgotten = None, False
        self.calibration.keep()
