"""Session file: the model's own answers by whom they were given to, for the sessions of this and later processes."""

from __future__ import annotations

import hashlib
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import TokenizerMismatchError
from retrieve_spec.sources.answer_file import SESSIONS
from retrieve_spec.sources.kept_answers import ANSWER_BYTES, KeptAnswers
from retrieve_spec.sources.session import SessionMemory

_NAME = 16
"""Bytes of a key for the tokenizer, and for the scope."""
_LEAST_BYTES = 64 << 20
"""Bound of a file, or room for two full scopes, whichever is more."""
_NEW_SHARE = 16
"""A save writes the whole file, so it waits until one in so many bytes is new."""


class SessionFile(KeptAnswers):
    """Answers in the tokens of one tokenizer, by scope, in a file.

    Parameters
    ----------
    path
        File to load, if it exists, and to save to.
    tokenizer
        Fingerprint of the tokenizer (`retrieve_spec.datastore.fingerprint`); "" where it is not known.
    session_tokens
        Tokens kept of a scope.

    Raises
    ------
    StoreCorruptError, StoreVersionError
        The file is damaged, something else, or of another version.
    TokenizerMismatchError
        Its answers are in the tokens of another tokenizer.
    """

    def __init__(self, path: str | os.PathLike[str], tokenizer: str, session_tokens: int) -> None:
        self.session_tokens = session_tokens
        self._opened: weakref.WeakSet[KeptSession] = weakref.WeakSet()
        self._tokenizer = hashlib.blake2b(tokenizer.encode(), digest_size=_NAME).digest()
        key_bytes = 4 * session_tokens
        super().__init__(path, SESSIONS, max_bytes=max(_LEAST_BYTES, 2 * key_bytes), key_bytes=key_bytes)

    def open(self, scope: str, vocabulary: int, exact: bool = False) -> KeptSession:
        """A session that begins with the answers of a scope, and adds to them.

        Answers with tokens of `vocabulary` and beyond are left out; `exact` is as for `SuffixAutomaton`.
        """
        session = KeptSession(self, self._key(scope), vocabulary, exact)
        self._opened.add(session)
        return session

    def forget_scope(self, scope: str) -> None:
        """Forget the answers of a scope; see `forget`."""
        self.forget(self._key(scope))

    def forget(self, key: bytes | None = None) -> None:
        """Forget one key, or everything, in the file, too; open sessions of it, which may be at work, add no more."""
        for session in list(self._opened):
            session.part(key)
        super().forget(key)

    def beside(self, model_key: str) -> Path:
        """Where what is learned about a model is kept, beside its answers."""
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.{model_key}.npy")

    def _key(self, scope: str) -> bytes:
        return self._tokenizer + hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=_NAME).digest()

    def _is_due(self) -> bool:
        new = sum(ANSWER_BYTES + len(ids) for _, ids in self._new)
        return new > 0 and new * _NEW_SHARE >= self.num_bytes

    def _read(self, path: Path) -> dict[bytes, list[bytes]]:
        known = super()._read(path)
        for key in known:
            if not key.startswith(self._tokenizer):
                raise TokenizerMismatchError(
                    f"answers in tokens of tokenizer {self._tokenizer.hex()[:12]} in {path}",
                    f"those of tokenizer {key[:_NAME].hex()[:12]}",
                    "Give every tokenizer a file of its own.",
                )
        return known


class KeptSession(SessionMemory):
    """A session whose answers are kept in a file, too; texts that are only `read` are not."""

    def __init__(self, file: SessionFile, key: bytes, vocabulary: int, exact: bool = False) -> None:
        super().__init__(file.session_tokens, exact)
        self._file: SessionFile | None = file
        self._key = key
        for ids in file.answers_of(key):
            if int(ids.max()) < vocabulary:
                self.read(ids)

    def remember(self, token_ids: NDArray[np.int32]) -> None:
        """Add one generated text, (n,) int32."""
        super().remember(token_ids)
        if (file := self._file) is not None:
            file.add(self._key, token_ids)

    def part(self, key: bytes | None) -> None:
        """Keep nothing in the file from now on, if it was to forget this session's key, or everything (None)."""
        if key in (None, self._key):
            self._file = None
