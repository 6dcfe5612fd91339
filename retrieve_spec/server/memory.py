"""Memory: what one user's editors have shown, as tokens that the user's completions are drafted from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.server.backend import DraftHints
from retrieve_spec.server.prompts import FimAssembler
from retrieve_spec.server.text import TextCodec, with_line_feeds
from retrieve_spec.sources.session import SessionMemory

_READ_TEXTS = 20_000
_ENCODED_AT_ONCE = 200_000
"""Characters for the drafter's memory that are encoded with one request."""


class Memory:
    """What one user's editors have shown.

    Parameters
    ----------
    codec
        Text codec of the model, with a cache of the user's own texts.
    assembler
        Builds fill-in-the-middle prompts, None for a model that cannot infill.
    scope
        Whose memory it is.
    session_tokens
        Bound of the drafter's own memory of chunks, buffers and completions.
    open_session
        Gives that memory, where the model's answers in it are kept for later; None keeps it here.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        assembler: FimAssembler | None = None,
        scope: str = "",
        session_tokens: int = 1_000_000,
        open_session: Callable[[], SessionMemory | None] | None = None,
    ) -> None:
        self.codec = codec
        self.assembler, self.scope = assembler, scope
        self._session = SessionMemory(session_tokens)
        self._opened = open_session
        self._unread: deque[str] = deque()
        self._encoded: list[NDArray[np.int32]] = []
        self._read: set[int] = set()
        self._buffers: set[str] = set()
        self._lock = threading.Lock()

    def note_chunks(self, texts: Iterable[str]) -> None:
        """Read pieces of other files that came with a request."""
        with self._lock:
            for text in texts:
                self._have_read(text)

    def note_buffer(self, key: str, text: str) -> None:
        """Read an open file, the first time it is shown."""
        with self._lock:
            if key not in self._buffers:
                self._buffers.add(key)
                self._have_read(with_line_feeds(text))

    def forget(self) -> None:
        """Drop everything."""
        with self._lock:
            self._session = SessionMemory(self._session.max_tokens)
            self._unread, self._encoded, self._read, self._buffers = deque(), [], set(), set()
        self.codec.forget()

    def contents(self) -> dict[str, int]:
        """What there is to forget: how much of each kind."""
        with self._lock:
            return {"session_tokens": len(self._drafted()), "encodings": self.codec.cached}

    def encode_new(self) -> None:
        """Encode texts for the drafter's memory, a bounded part of those that wait; not for the model's thread."""
        room = _ENCODED_AT_ONCE
        while room > 0:
            with self._lock:
                if not self._unread:
                    return
                text = self._unread.popleft()
            ids = np.asarray(self.codec.encode_cached(text), np.int32)
            room -= len(text)
            with self._lock:
                if hash(text) in self._read:  # not forgotten meanwhile
                    self._encoded.append(ids)

    def hints(self, context_ids: Sequence[int], expected: Sequence[int] = ()) -> Callable[[], DraftHints]:
        """What to draft a completion from; called in the model's thread when the work begins.

        ``context_ids`` are what the model was shown, the text left of the cursor last.
        """
        return lambda: DraftHints(True, tuple(expected), tuple(context_ids), self._session_now(), self.scope)

    def _have_read(self, text: str) -> None:
        """Queue a text for the drafter's memory, once."""
        text = text[:_ENCODED_AT_ONCE]
        key = hash(text)
        if text and key not in self._read:
            if len(self._read) >= _READ_TEXTS:
                self._read.clear()  # long ago: the drafter's memory has let go of most of them, too
            self._read.add(key)
            self._unread.append(text)

    def _drafted(self) -> SessionMemory:
        """The drafter's memory, wherever it is kept."""
        opened = None if self._opened is None else self._opened()
        return self._session if opened is None else opened

    def _session_now(self) -> SessionMemory:
        """The drafter's memory with everything read so far; for the model's thread only."""
        with self._lock:
            encoded, self._encoded = self._encoded, []
            session = self._drafted()
        for ids in encoded:
            session.read(ids)
        return session
