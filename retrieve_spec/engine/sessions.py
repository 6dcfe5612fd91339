"""Sessions: memories of earlier generations, one for each scope, so that no scope drafts from another's text."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.errors import ConfigError
from retrieve_spec.sources.answers import AnswerMemory, answers_by_scope
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

    def of(self, scope: str = "", exact: bool = False) -> SessionMemory | None:
        """The session of a scope, opened if need be; None where there are none. `exact`: as published rules count."""
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

    def _open(self, scope: str, exact: bool) -> SessionMemory:
        session = SessionMemory(self._config.session_tokens, exact)
        if self.file is not None:
            session.keep_in(self.file, self.file.key(scope), self._vocabulary)
        self._opened[session] = scope
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

    def beside(self, model_key: str) -> Path | None:
        """Where what is learned about a model is kept, beside its answers."""
        path = None if self.file is None else self.file.path
        return None if path is None else path.with_name(f"{path.name}.{model_key}.npy")
