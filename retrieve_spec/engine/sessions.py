"""Sessions: memories of earlier generations, one for each scope, so that no scope drafts from another's text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.errors import ConfigError
from retrieve_spec.sources.session import SessionMemory
from retrieve_spec.sources.session_file import SessionFile

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
        As `SessionFile` says.
    """

    def __init__(self, config: SpeculationConfig, tokenizer: Any, vocabulary: int) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._opened: OrderedDict[tuple[str, bool], SessionMemory] = OrderedDict()
        self._lock = threading.Lock()
        self.file: SessionFile | None = None
        if not isinstance(config.session, bool):
            if tokenizer is None:
                raise ConfigError("a tokenizer to keep a session with", "none", "Give one to accelerate.")
            self.file = SessionFile(config.session, tokenizer_fingerprint(tokenizer), config.session_tokens)

    def of(self, scope: str = "", exact: bool = False) -> SessionMemory | None:
        """The session of a scope, opened if need be; None where there are none. `exact`: as published rules count."""
        if not self._config.session:
            return None
        with self._lock:
            session = self._opened.get((scope, exact))
            if session is None:
                session = self._opened[scope, exact] = self._open(scope, exact)
            self._opened.move_to_end((scope, exact))
            while len(self._opened) > OPEN:
                self._opened.popitem(last=False)
            return session

    def forget(self, scope: str | None = None) -> None:
        """Forget a scope, or all, and what the file holds of it; what is under way is not remembered."""
        with self._lock:
            for name in [name for name in self._opened if scope in (None, name[0])]:
                del self._opened[name]
            if self.file is not None:
                self.file.forget() if scope is None else self.file.forget_scope(scope)

    def _open(self, scope: str, exact: bool) -> SessionMemory:
        if self.file is not None:
            return self.file.open(scope, self._vocabulary, exact)
        return SessionMemory(self._config.session_tokens, exact)
