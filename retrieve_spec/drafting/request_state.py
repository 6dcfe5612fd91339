"""Request state: one text in all sources, as the record that kernels read and the arrays it points to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.calibration import Calibration
from retrieve_spec.drafting.drafter import NoiseKey
from retrieve_spec.drafting.text_sources import TextSources
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.kernels import blend, expand, request, step
from retrieve_spec.kernels.calibration import LENGTH_CLASSES, NUM_SOURCES, begin_request
from retrieve_spec.kernels.source_table import CURSOR, TAIL
from retrieve_spec.sources import CONTEXT, SESSION
from retrieve_spec.sources.rows import SourceTable, address_of
from retrieve_spec.sources.session import FOLLOWED, SessionMemory

_NO_COST = np.empty(0, np.float32)
_NO_TOKENS = np.empty(0, np.int32)
_NO_IDS = np.empty((0, 1), np.int32)
_NO_LOGITS = np.empty((0, 1), np.float32)


class ObservedPass(NamedTuple):
    """What is learned at once of one pass, or of several: tokens (e,); the verified nodes as the block of a `DraftTree`
    and the target's top tokens (n + 1, k), or nothing; nodes of the draft that led to them, how many tokens of it were
    accepted and were expected to be; keys (n + 1, dims) of the target's hidden states, or nothing."""

    emitted: NDArray[np.int32] = _NO_TOKENS
    verified: NDArray[np.int32] = NO_DRAFT.block
    top_ids: NDArray[np.int32] = _NO_IDS
    top_logits: NDArray[np.float32] = _NO_LOGITS
    size: int = 0
    accepted: int = 0
    expected: float = 0.0
    keys: NDArray[np.int8] | None = None


_NOTHING = ObservedPass()
MOST_PASSES, _MOST_TEXTS = 4, 64
"""The most passes that wait to be learned from, and the most of which only the tokens wait."""


class PendingPasses:
    """Passes to learn from before the next draft; of passes without a draft only the tokens.

    Attributes
    ----------
    passes
        Those that were drafted for.
    texts
        Tokens (e,) of those after them.
    """

    def __init__(self) -> None:
        self.passes: list[ObservedPass] = []
        self.texts: list[NDArray[np.int32]] = []

    @property
    def num_tokens(self) -> int:
        """Number of pending tokens."""
        return sum(map(len, self.texts)) + sum(len(one.emitted) for one in self.passes)

    def append_text(self, emitted: NDArray[np.int32], last: bool) -> None:
        """Add the tokens (e,) of a pass; with `last`, all pending tokens count as one pass from now on."""
        self.texts.append(emitted)
        if last or len(self.texts) > _MOST_TEXTS:
            self.passes = self.take()

    def extend_last(self, emitted: NDArray[np.int32]) -> bool:
        """Append tokens (e,) to those of the last pass; return whether there is one."""
        if self.passes:
            last = self.passes[-1]
            self.passes[-1] = last._replace(emitted=np.concatenate([last.emitted, emitted]))
        return bool(self.passes)

    def take(self) -> list[ObservedPass]:
        """Return all pending passes, and clear them."""
        passes, self.passes = self.passes, []
        if self.texts:
            texts, self.texts = self.texts, []
            passes.append(ObservedPass(texts[0] if len(texts) == 1 else np.concatenate(texts)))
        return passes


def _scratch_of(num_sources: int) -> dict[str, NDArray[Any]]:
    """Return arrays of the expansion kernel for a number of sources, by field of a request; passes reuse them."""
    pool = 64 * MAX_NODES
    return {
        "node_cursors": np.zeros(((MAX_NODES + 1) * num_sources, CURSOR), np.int64),
        "node_tails": np.zeros((MAX_NODES + 1, TAIL), np.int32),
        "pool_p": np.empty(pool, np.float32),
        "pool_ids": np.empty((pool, expand.POOL_COLUMNS), np.int32),
        "heap": np.empty(pool, np.int32),
        "scratch": blend.scratch_memory(num_sources),
        "nodes": np.empty((MAX_NODES, request.NODE_COLUMNS), np.int64),
        "node_p": np.empty(MAX_NODES, np.float32),
    }


def _first_noise(noise: NoiseKey, length: int) -> NoiseKey:
    """Return the key of the noise of a text's first token, given that of the token after `length` others."""
    seed, row, position = noise
    return NoiseKey(seed, row, position - length)


class RequestState:
    """One text in all sources, advanced and drafted for by compiled calls.

    What is learned about the use of each source goes on from request to request.

    Parameters
    ----------
    min_p
        Least path probability of a drafted node.
    find_origins
        Say where drafted nodes stand in stores.
    reads_stores
        Call the kernels that read stores even where there are none, because they are compiled anyway.

    Attributes
    ----------
    address
        Of the `REQUEST` record that kernels are given.
    fields
        The record itself, read and written by name.
    sampled
        Whether tokens are sampled with noise that is known.
    """

    def __init__(self, min_p: float, find_origins: bool = False, reads_stores: bool = False) -> None:
        self._record = np.zeros(1, request.REQUEST)
        self.fields: Any = self._record[0]
        verified = "num_verified", "num_accepted", "expected"
        self._verified: list[NDArray[Any]] = [self._record[name] for name in verified]  # faster to write than by name
        self.address = address_of(self._record)
        self._always_stores = reads_stores
        self._arrays: dict[str, NDArray[Any]] = {
            "newest": np.zeros((1, TAIL), np.int32),
            "recent": np.zeros(request.MATCH, np.int32),
            "trust": np.empty((NUM_SOURCES, 1 + LENGTH_CLASSES, 2)),
            "use": np.empty(0),
        }
        self.fields["min_p"], self.fields["find_origins"] = min_p, find_origins
        self.sampled = False
        self._first_noise = NoiseKey(0, 0, 0)  # of the text's first token
        self._session_lock: AbstractContextManager[Any] = nullcontext()

    def begin(self, sources: TextSources, calibration: Calibration, session: SessionMemory | None) -> None:
        """Begin a text; the session does not change."""
        groups = sources.rows()
        rows = [row for group in groups.values() for row in group]
        places = dict(zip(groups, accumulate(map(len, groups.values()), initial=0), strict=False))
        self._context, self._earlier = sources.context, list(sources.earlier)
        self._session_lock = nullcontext() if session is None else session
        self._table = SourceTable(rows)
        has_stores = bool(groups["exact"] or groups["ngram"])
        reads_stores = has_stores or groups["dense"] or groups["states"] or self._always_stores
        self._reads_stores = 1 if reads_stores else None
        self._reset_arrays(len(rows), calibration)
        fields = self.fields
        fields["has_prediction"], fields["has_stores"] = bool(groups["prediction"]), has_stores
        fields["text_source"] = places["context"]
        fields["first_session"] = self._first_session = places["session"]
        fields["num_sessions"] = len(groups["session"])
        fields["first_exact"], fields["num_exact"] = places["exact"], len(groups["exact"])
        fields["dense_source"] = places["dense"] if groups["dense"] else -1
        fields["states_source"] = places["states"] if groups["states"] else -1
        if groups["states"]:
            self.leave_states()
        fields["alignment_source"] = places["alignment"] if groups["alignment"] else -1
        fields["length"] = fields["num_recent"] = fields["position_offset"] = fields["num_forced"] = 0
        fields["sampled"] = fields["first_p"] = fields["least_p"] = 0
        self.sampled = False

    def _reset_arrays(self, num_sources: int, learned: Calibration) -> None:
        """Clear the kernels' arrays of a text, and set their addresses in the record."""
        if len(self._arrays["use"]) != num_sources:
            self._arrays |= {"use": np.full(num_sources, request.OF_USE), **_scratch_of(num_sources)}
        self._arrays["cursors"] = self.cursors = np.zeros((num_sources, CURSOR), np.int64)
        self._arrays["newest"][:] = 0
        begin_request(self._arrays["trust"])
        shared: dict[str, NDArray[Any]] = {"cells": learned.cells, "scale": learned.scale, "drafts": learned.drafts}
        for name, array in (self._arrays | shared | {"table": self._table.records}).items():
            self.fields[name] = address_of(array)
        self.fields["num_sources"], self.fields["pool_size"] = num_sources, len(self._arrays["heap"])

    def refresh_sessions(self) -> None:
        """Update the addresses of a session whose arrays were replaced; the caller holds the session's lock.

        Drafters of other threads add to it.
        """
        for i, automaton in enumerate(self._earlier, self._first_session):
            self._table.put(i, automaton.row(SESSION))

    def read(self, ids: NDArray[np.int32]) -> None:
        """Append text (n,) that was not generated."""
        with self._session_lock:
            self.refresh_sessions()
            appended = request.read(self.address, ids, FOLLOWED, self._reads_stores)
        if appended < len(ids):  # the text's automaton was full
            self.extend(ids[appended:])

    def extend(self, ids: NDArray[np.int32]) -> None:
        """Append tokens to the text's automaton, which grows if needed, and update its address."""
        self._context.extend(ids)
        self._table.put(int(self.fields["text_source"]), self._context.row(CONTEXT))

    def step(
        self, observed: ObservedPass, max_nodes: int, max_depth: int, cost: NDArray[np.float32] | None, chain: int
    ) -> tuple[float, NDArray[np.int32]]:
        """Learn from pending passes, then draft: one compiled call, or two if the automaton had no room.

        Returns
        -------
        expected
            Accepted tokens expected of the nodes that are not forced.
        block
            The nodes, as the block of a `DraftTree`.
        """
        num_appended, expected, block = self._call(observed, max_nodes, max_depth, cost, chain)
        if num_appended < len(observed.emitted):
            self.extend(observed.emitted[num_appended:])
            _, expected, block = self._call(_NOTHING, max_nodes, max_depth, cost, chain)
        return expected, block

    def _call(
        self, observed: ObservedPass, max_nodes: int, max_depth: int, cost: NDArray[np.float32] | None, chain: int
    ) -> tuple[int, float, NDArray[np.int32]]:
        """Return how many observed tokens the automaton had room for, then what `step` returns."""
        emitted, verified, top_ids, top_logits, size, accepted, expected, keys = observed
        if self.fields["states_source"] >= 0:
            self.fields["keys"] = 0 if keys is None else address_of(keys)
        num_verified, num_accepted, expected_accepted = self._verified
        num_verified[0], num_accepted[0], expected_accepted[0] = size, accepted, expected
        cost = _NO_COST if cost is None else cost[: max_nodes + 1]
        with self._session_lock:
            if self._earlier:
                self.refresh_sessions()
            drafted: tuple[int, float, NDArray[np.int32]] = step.propose(
                self.address,
                cost,
                max_nodes,
                max_depth,
                chain,
                emitted,
                verified,
                top_ids,
                top_logits,
                self._reads_stores,
            )
        return drafted

    def force(self, chain: DraftTree) -> int:
        """Begin the next draft with given tokens; return how many there are."""
        count = len(chain)
        self.fields["num_forced"] = count
        if count:
            places = chain.token_ids, chain.parent, chain.depth, np.full(count, len(self._table))
            self._arrays["nodes"][:count] = np.stack(places, axis=1)
            self._arrays["node_p"][:count] = np.exp(chain.log_p)
        return count

    def is_noise(self, noise: NoiseKey | None, length: int) -> bool:
        """Return whether drafts already use the noise that has this key after a text of that many tokens."""
        if noise is None:
            return not self.sampled
        return self.sampled and self._first_noise == _first_noise(noise, length)

    def set_noise(self, noise: NoiseKey | None, length: int) -> None:
        """Set the noise that has this key after a text of that many tokens; None: tokens are not sampled."""
        self.sampled = noise is not None
        self.fields["sampled"] = self.sampled
        if noise is None:
            return
        self._first_noise = seed, row, offset = _first_noise(noise, length)
        self.fields["seed"] = (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # its 64 bits, signed
        self.fields["row"], self.fields["position"] = row, offset + length
        self.fields["position_offset"] = offset

    def drop_first(self) -> None:
        """Do not judge a draft by its first token: the text continues with unobserved tokens."""
        self.fields["first_p"] = 0.0

    def nodes(self, count: int) -> NDArray[np.int64]:
        """(count, 2) tokens and parents of the last draft's nodes, best first."""
        found: NDArray[np.int64] = self._arrays["nodes"][:count, :2].copy()
        return found

    @property
    def newest_token(self) -> int:
        """The last token of the text."""
        return int(self._arrays["newest"][0, 0])

    @property
    def dense_cursor(self) -> NDArray[np.int64]:
        """(CURSOR,) int64 cursor in the trie of neighbours."""
        cursor: NDArray[np.int64] = self.cursors[int(self.fields["dense_source"])]
        return cursor

    @property
    def follows_neighbours(self) -> bool:
        """Whether neighbours that were found earlier still match the text."""
        lo, hi, _, match_len = self.dense_cursor.tolist()
        return bool(lo < hi and match_len >= 0)

    def leave_states(self) -> None:
        """Predict nothing from hidden states until one is observed."""
        self.cursors[int(self.fields["states_source"])] = -1

    def longest_match(self) -> int:
        """Length of the longest match of any source except neighbours."""
        with self._session_lock:
            self.refresh_sessions()
            return int(step.longest_match(self.address, self._reads_stores))
