"""Sessions of a model, by scope, and what samples of one prompt share."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.errors import ConfigError
from retrieve_spec.sources.answers import AnswerMemory, RolloutMemory, answers_by_scope
from retrieve_spec.sources.automaton import BOUNDARY, SuffixAutomaton
from retrieve_spec.sources.session import SessionMemory

OPEN = 16
"""Scopes whose sessions are in memory at most, the last ones used."""


class Sessions:
    """Opens sessions by scope, in this process alone or with the answers of a file.

    Parameters
    ----------
    config
        Its `session` and `session_tokens`.
    tokenizer
        The model's, if it is known.
    vocabulary
        Tokens that the model knows.

    Attributes
    ----------
    file
        Where answers are kept for other processes, or None.

    Raises
    ------
    ConfigError
        The session has a file, and there is no tokenizer.
    StoreCorruptError, StoreVersionError, TokenizerMismatchError
        As `AnswerMemory` says.
    """

    def __init__(self, config: SpeculationConfig, tokenizer: Any, vocabulary: int) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._recent: OrderedDict[tuple[str, bool], SessionMemory] = OrderedDict()
        self._opened: weakref.WeakKeyDictionary[SessionMemory, str] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self.file: AnswerMemory | None = None
        if not isinstance(config.session, bool):
            if tokenizer is None:
                raise ConfigError("a tokenizer to keep a session with", "none", "Give one to accelerate.")
            self.file = answers_by_scope(config.session, tokenizer_fingerprint(tokenizer), config.session_tokens)

    def get(self, scope: str = "", exact: bool = False) -> SessionMemory | None:
        """Return the session of a scope, or None where there are none. `exact`: it counts as published rules do."""
        if not self._config.session:
            return None
        with self._lock:
            session = self._recent.get((scope, exact))
            if session is None:
                session = self._recent[scope, exact] = self._open(scope, exact)
            self._recent.move_to_end((scope, exact))
            while len(self._recent) > OPEN:
                self._recent.popitem(last=False)
            return session

    def forget(self, scope: str | None = None) -> None:
        """Forget a scope, or all, and what the file holds of it; what is under way is not remembered."""
        with self._lock:
            for session, opened in list(self._opened.items()):
                if scope in (None, opened):
                    session.keep_nowhere()
            for name in [name for name in self._recent if scope in (None, name[0])]:
                del self._recent[name]
            if self.file is not None:
                self.file.forget(b"" if scope is None else self.file.key(scope))

    def _open(self, scope: str, exact: bool) -> SessionMemory:
        session = SessionMemory(self._config.session_tokens, exact)
        if self.file is not None:
            session.keep_in(self.file, self.file.key(scope), self._vocabulary)
        self._opened[session] = scope
        return session

    def calibration_path(self, model_key: str) -> Path | None:
        """Return the file of a model's calibration, beside that of the answers."""
        path = None if self.file is None else self.file.path
        return None if path is None else path.with_name(f"{path.name}.{model_key}.npy")


OVERLAP = 8
"""Tokens before a new run that are read with it, so that it is found by what stands in front of it."""
EAGER, PATIENT = 1, 32
"""New tokens of a sample that are worth reading: every one of them at first, runs when much has been read."""
MUCH = 100_000


class Siblings(SessionMemory):
    """A memory of texts under way, which samples of one prompt share; no other prompt's samples see it.

    To a drafter it is a session: what the model's own session remembers is in it, and is added to at the end only. It
    hears of tokens when their drafter has learned from them: a memory that holds the answer already is always right.

    Parameters
    ----------
    session
        The model's session, or None.
    max_tokens
        Tokens read at most, those read twice counted twice.
    prompt
        (n,) int32 their prompt, where its answers are kept.
    rollouts
        Where they are, or None.
    vocabulary
        Tokens that the model knows: earlier answers with others are not drafted from.
    """

    def __init__(
        self,
        session: SessionMemory | None = None,
        max_tokens: int = 1_000_000,
        prompt: NDArray[np.int32] | None = None,
        rollouts: RolloutMemory | None = None,
        vocabulary: int = 1 << 31,
    ) -> None:
        super().__init__(max_tokens)
        self._prompt, self._rollouts = prompt, rollouts
        self._session = session
        self._heard: dict[object, tuple[list[int], int]] = {}
        self._news: dict[object, None] = {}  # texts with tokens that are not indexed yet
        self.automata = [] if session is None else list(session.automata)
        if prompt is not None and rollouts is not None:
            self.automata += rollouts.automata(prompt, vocabulary)
        self.automata.append(SuffixAutomaton(1024))

    def __enter__(self) -> Self:
        if self._session is not None:
            self._session.__enter__()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            if self._session is not None:
                self._session.__exit__(kind, error, trace)

    def _take_in(self) -> None:
        while self._news:
            self._read(self._news.popitem()[0])

    def remember(self, token_ids: NDArray[np.int32]) -> None:
        """Add the whole text of one sample, (n,) int32, to the session, if there is one."""
        if self._session is not None:
            self._session.remember(token_ids)

    def answer(self, token_ids: NDArray[np.int64]) -> None:
        """Keep a whole answer (m,) to the prompt for later calls, where they are kept."""
        if self._prompt is not None and self._rollouts is not None:
            self._rollouts.remember(self._prompt, token_ids.astype(np.int32))

    def append(self, text: object, token_ids: NDArray[np.int32]) -> None:
        """Append (n,) int32 tokens to a sample's text; they are indexed when a drafter next needs them."""
        self._heard.setdefault(text, ([], 0))[0].extend(token_ids.tolist())
        self._news[text] = None

    def _read(self, sample: object) -> None:
        """Index what a sample has written since the last time."""
        own = self.automata[-1]
        text, known = self._heard[sample]
        if len(text) - known < (EAGER if len(own) < MUCH else PATIENT):
            return
        run = np.array([*text[max(known - OVERLAP, 0) :], BOUNDARY], np.int32)
        if len(own) + len(run) <= self.max_tokens:
            own.extend(run)
        text = text[-OVERLAP:]
        self._heard[sample] = text, len(text)
