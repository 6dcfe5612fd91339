"""Requests under way at an engine in, a drafter for each: begun, given their tokens, ended; with what they share."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.batch import BatchRow, Slots
from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import ConfigError, PromptError, RequestError
from retrieve_spec.integrations.state import (
    GREEDY,
    SAMPLED,
    load_calibrations,
    open_answers,
    open_folder,
)
from retrieve_spec.sources.answers import AnswerMemory
from retrieve_spec.sources.session import SessionMemory, token_ids_of

if TYPE_CHECKING:
    from retrieve_spec.datastore.store import Datastore

NOTHING = DraftTree()
_SAVE_EVERY = 64
"""Requests between two times that the session is written."""
_KEPT = 64
"""Drafters of ended requests that are kept for later ones …"""
_LARGE = 1 << 16
"""… but for those whose arrays have grown beyond so many rows."""


@dataclass(slots=True)
class Request:
    """A request under way: its drafter, and what `ServingDrafter.draft` has last drafted for it."""

    row: BatchRow
    kind: str
    tree: DraftTree = NOTHING


class Requests:
    """The base of `ServingDrafter`: requests by name, and the stores, calibrations and session that they share.

    Parameters are those of `ServingDrafter`.
    """

    def __init__(
        self,
        config: SpeculationConfig | None,
        datastores: Many[Datastore],
        session: SessionMemory | None,
        state: str | os.PathLike[str] | None,
    ) -> None:
        self.config = (config or SpeculationConfig()).with_options(dense="off", provenance=False)
        self.datastores = list(datastores)
        self.session = SessionMemory(self.config.session_tokens) if session is None and self.config.session else session
        self._folder = None if state is None else open_folder(state)
        self._calibrations = load_calibrations(self._folder)
        self._answers: AnswerMemory | None = None
        if self._folder is not None and self.session is not None:
            self._answers = open_answers(self._folder, self.session.max_tokens)
            self.session.keep_in(self._answers, self._answers.key(""))
        self._requests: dict[str, Request] = {}
        self._starting: dict[str, object] = {}
        self._idle: dict[str, list[BatchRow]] = {GREEDY: [], SAMPLED: []}
        self._slots: Slots | None = None
        self._slots_of: object = None
        self._ended = 0
        self._counts = dict.fromkeys(("requests", "steps", "rows", "drafted", "accepted", "emitted"), 0)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def start(
        self,
        request: str,
        prompt_ids: NDArray[Any] | Many[int],
        *,
        prediction_ids: NDArray[Any] | Many[int] | None = None,
        sampled: bool = False,
        asker: str | None = None,
    ) -> None:
        """Begin a request; other threads may go on with theirs while a long prompt is taken in.

        Parameters
        ----------
        request
            Its name, for all other methods.
        prompt_ids
            (L,) token ids, L ≥ 1.
        prediction_ids
            (P,) token ids of a text that the answer is expected to repeat, if there is one.
        sampled
            Whether its tokens are sampled; how far drafts can be trusted is learned apart.
        asker
            Whoever asks: phrases that one asker alone was given are not drafted. None: every request has its own.

        Raises
        ------
        RequestError
            A request of that name is under way.
        PromptError
            The prompt or the prediction is no sequence of token ids, or the prompt has none.
        """
        prompt = token_ids_of(prompt_ids, "a prompt")
        prediction = None if prediction_ids is None else token_ids_of(prediction_ids, "a prediction")
        if not len(prompt):
            raise PromptError("a prompt of one token at least", "an empty one", "Start with what the model reads.")
        with self._lock:
            if request in self._requests or request in self._starting:
                raise RequestError("a request that is not under way", repr(request), "Finish it, or use another name.")
            mine = self._starting[request] = object()
            kind = SAMPLED if sampled else GREEDY
            row = self._idle[kind].pop() if self._idle[kind] else None
        try:
            row = row or BatchRow(self.config, self.session, self.datastores, self._calibrations[kind])
            row.start(prompt, prediction)  # takes a while where the prompt is long: others go on
            row.requester_id = asker
            with self._lock:
                if self._starting.get(request) is mine:  # all requests may have been given up meanwhile
                    self._requests[request] = Request(row, kind)
                    self._slots = None
                    self._counts["requests"] += 1
        finally:
            with self._lock:
                if self._starting.get(request) is mine:
                    del self._starting[request]

    def length(self, request: str) -> int:
        """Tokens that a request has been given, the prompt included.

        Raises
        ------
        RequestError
            No request of that name is under way.
        """
        with self._lock:
            return self._of(request).row.length

    def feed(self, request: str, token_ids: NDArray[Any] | Many[int], *, verified: int | None = None) -> int:
        """Give a request its next tokens: what was accepted of its draft, and what the model said next.

        Parameters
        ----------
        token_ids
            (n,) token ids behind those it has been given.
        verified
            How many nodes of the last draft, in order, the engine has verified; None for all, 0 where it took another
            way. What was not verified says nothing about how far drafts can be trusted.

        Returns
        -------
        int
            How many of the tokens the draft had foreseen.

        Raises
        ------
        RequestError
            No request of that name is under way.
        PromptError
            These are no token ids.
        """
        emitted = token_ids_of(token_ids, "tokens")
        with self._lock:
            state = self._of(request)
            if not len(emitted):
                return 0
            tree, state.tree = state.tree, NOTHING
            if verified is not None and verified < len(tree):
                tree = tree.first(verified)
            path = path_of(tree, emitted)
            state.row.observe(VerifiedPass(tree, path, emitted))
            self._counts["accepted"] += len(path)
            self._counts["emitted"] += len(emitted)
            return len(path)

    def finish(self, request: str, *, keep: bool = True) -> None:
        """End a request and forget its text.

        Parameters
        ----------
        request
            Its name, which is free afterwards.
        keep
            Let the session, if there is one, and the phrases learn from what was generated; False for a request that
            was aborted, or that asked for it.

        Raises
        ------
        RequestError
            No request of that name is under way.
        """
        with self._lock:
            state = self._of(request)
            del self._requests[request]
            self._slots = None
            state.row.finish(keep)
            if len(self._idle[state.kind]) < _KEPT and len(state.row.context.edges) <= _LARGE:
                self._idle[state.kind].append(state.row)
            self._ended += 1
            if self._ended % _SAVE_EVERY == 1 and self._answers is not None:
                self._answers.keep(at_once=True)

    def abandon(self) -> None:
        """End all requests at once; nothing is learned from them, and their drafters are not used again."""
        with self._lock:
            self._requests.clear()
            self._starting.clear()
            self._slots = None

    def save(self) -> None:
        """Write what was learned to the state folder, if there is one; every so many requests that is done anyway."""
        with self._lock:
            if self._folder is None:
                return
            for calibration in self._calibrations.values():
                calibration.keep(at_once=True)
            if self._answers is not None:
                self._answers.keep(at_once=True)

    def _of(self, request: str) -> Request:
        state = self._requests.get(request)
        if state is None:
            raise RequestError("a request that is under way", repr(request), "Start it first.")
        return state

    def _each(self, requests: Many[str]) -> list[Request]:
        """Requests under way; `RequestError` where one is not, or named twice."""
        if len(set(requests)) < len(requests):
            raise RequestError("each request once", f"{list(requests)}", "Ask for one draft of each.")
        return [self._of(request) for request in requests]


def each_of(value: int | Many[int], rows: int, name: str) -> list[int]:
    """A limit for each of so many rows; `ConfigError` where there are others than that."""
    values = [int(value)] * rows if isinstance(value, int | np.integer) else list(value)
    if len(values) != rows:
        raise ConfigError(f"{name} for {rows} requests", f"{len(values)} of them", "Give one number, or one for each.")
    return values


def path_of(tree: DraftTree, emitted: NDArray[np.int32]) -> NDArray[np.int32]:
    """(a,) int32 nodes of the path of a tree that tokens (e,) took."""
    path: list[int] = []
    tokens, parents = tree.token_ids.tolist(), tree.parent.tolist()
    for token in emitted.tolist():
        at = path[-1] if path else -1
        child = at + 1  # children come behind their parent, the most probable one first
        while child < len(tokens) and (parents[child] != at or tokens[child] != token):
            child += 1
        if child == len(tokens):
            break
        path.append(child)
    return np.array(path, np.int32)
