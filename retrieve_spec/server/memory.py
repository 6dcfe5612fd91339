"""Workspace memory: everything the server has seen of a workspace, as what one completion is drafted from.

Order of trust: the client's prediction, the file under the cursor (both sides), chunks the editor sent, completions the
user accepted, open buffers, the rest of the workspace. Drafts are verified, so the order costs or saves time only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.server.backend import DraftHints
from retrieve_spec.server.continuations import Continuation, key_starts, scan_texts
from retrieve_spec.server.prompts import FimAssembler
from retrieve_spec.server.text import TextCodec, with_line_feeds
from retrieve_spec.server.workspace import Workspace
from retrieve_spec.sources.session import SessionMemory

_CANDIDATES = 4
_TAIL_TOKENS = 8
_ANSWERS = 64
_RECENT_ANSWERS = 8
_READ_TEXTS = 20_000
_ENCODED_AT_ONCE = 200_000
"""Characters for the drafter's memory that are encoded with one request."""


class RecentTexts:
    """Texts by key, the latest last, bounded in characters."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._texts: OrderedDict[str, str] = OrderedDict()
        self.chars = 0

    def put(self, key: str, text: str) -> None:
        """Remember a text as the latest; an older one under the key goes."""
        self.remove(key)
        if not text or len(text) > self._max_chars:
            return
        self._texts[key] = text
        self.chars += len(text)
        while self.chars > self._max_chars:
            _, dropped = self._texts.popitem(last=False)
            self.chars -= len(dropped)

    def remove(self, key: str) -> None:
        """Forget a text."""
        self.chars -= len(self._texts.pop(key, ""))

    def latest_first(self) -> list[str]:
        """All texts, the latest first."""
        return list(reversed(self._texts.values()))

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    def clear(self) -> None:
        """Forget everything."""
        self._texts.clear()
        self.chars = 0


class Memory:
    """What one user's editors have shown.

    Parameters
    ----------
    codec
        Text codec of the model, with a cache of the user's own texts.
    workspace
        Indexed folders, if any.
    assembler
        Builds fill-in-the-middle prompts, None for a model that cannot infill.
    scope
        Whose memory it is.
    max_chars
        Bound of chunks, buffers and accepted completions, each.
    accepted_tokens
        Tokens of accepted completions that the drafter reads with every request.
    session_tokens
        Bound of the drafter's own memory of chunks, buffers and completions.
    open_session
        Gives that memory, where the model's answers in it are kept for later; None keeps it here.
    """

    def __init__(
        self,
        codec: TextCodec,
        workspace: Workspace | None,
        *,
        assembler: FimAssembler | None = None,
        scope: str = "",
        max_chars: int = 2_000_000,
        accepted_tokens: int = 512,
        session_tokens: int = 1_000_000,
        open_session: Callable[[], SessionMemory | None] | None = None,
    ) -> None:
        self.codec = codec
        self.workspace = workspace
        self.assembler, self.scope = assembler, scope
        self.chunks = RecentTexts(max_chars)
        self.buffers = RecentTexts(max_chars)
        self.accepted = RecentTexts(max_chars // 4)
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._session = SessionMemory(session_tokens)
        self._opened = open_session
        self._unread: deque[str] = deque()
        self._encoded: list[NDArray[np.int32]] = []
        self._read: set[int] = set()
        self._accepted_tokens = accepted_tokens
        self._lock = threading.Lock()
        self.times_forgotten = 0

    def note_chunks(self, chunks: Sequence[tuple[str | None, str]]) -> None:
        """Remember pieces of other files that came with a request."""
        with self._lock:
            for name, text in chunks:
                self.chunks.put(f"{name or ''}\0{text}", text)
                self._have_read(text)

    def note_buffer(self, key: str, text: str) -> None:
        """Remember the text of an open file; "" forgets it."""
        text = with_line_feeds(text)
        with self._lock:
            if key not in self.buffers:
                self._have_read(text)
            self.buffers.put(key, text)

    def note_answer(self, before: str, text: str) -> None:
        """Remember what was suggested after a text, to see later whether the user took it."""
        if not text.strip():
            return
        with self._lock:
            self._answers[before[-80:]] = text
            while len(self._answers) > _ANSWERS:
                self._answers.popitem(last=False)

    def note_accepted(self, text: str) -> None:
        """Remember a suggestion the user took."""
        text = with_line_feeds(text)
        with self._lock:
            self.accepted.put(text, text)

    def note_typed(self, before: str) -> None:
        """Find suggestions that now stand in front of the cursor: they were accepted, or typed out."""
        with self._lock:
            for context, answer in list(self._answers.items()):
                first = answer.rstrip()
                if context and (context + first) in before[-(len(context) + len(answer) + 400) :]:
                    self.accepted.put(answer, context[context.rfind("\n") + 1 :] + answer)
                    del self._answers[context]

    def forget(self) -> None:
        """Drop everything."""
        with self._lock:
            for texts in (self.chunks, self.buffers, self.accepted):
                texts.clear()
            self._answers.clear()
            self.times_forgotten += 1
            self._session = SessionMemory(self._session.max_tokens)
            self._unread, self._encoded, self._read = deque(), [], set()
        self.codec.forget()

    def contents(self) -> dict[str, int]:
        """What there is to forget: how much of each kind."""
        with self._lock:
            return {
                "chunks": len(self.chunks),
                "buffers": len(self.buffers),
                "accepted": len(self.accepted),
                "answers": len(self._answers),
                "session_tokens": len(self._drafted()),
                "encodings": self.codec.cached,
            }

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

    def continuations(self, left: str, right: str) -> list[Continuation]:
        """What followed the text left of the cursor before, the best guess first."""
        starts = key_starts(left)
        if not starts:
            return []
        with self._lock:
            answers = [context + answer for context, answer in reversed(self._answers.items())][:_RECENT_ANSWERS]
            near = [left[: len(left) - 1], right, *answers, *self.accepted.latest_first()[:16]]
            far = [*self.chunks.latest_first()[:32], *self.buffers.latest_first()[:16]]
        found = scan_texts(left, near, starts, _CANDIDATES) + scan_texts(left, far, starts, _CANDIDATES)
        if self.workspace is not None:
            found += self.workspace.find(left, _CANDIDATES)
        # Nearer texts first among equals: `sorted` is stable.
        best = sorted({hit.text: hit for hit in reversed(found)}.values(), key=lambda hit: -hit.matched)
        return best[:_CANDIDATES]

    def hints(
        self, left: str, right: str, context_ids: Sequence[int], expected: Sequence[int] = (), begun: str = ""
    ) -> Callable[[], DraftHints]:
        """What to draft a completion between two texts from; called in the model's thread when the work begins.

        ``context_ids`` are what the model was shown, the text left of the cursor last. A continuation found by
        characters is encoded on its own, as the model will write it, and stands in the context behind a copy of the
        last tokens, where the drafter's own search finds it among the others: as the expected text it would be
        trusted too much, even after a long match. Of the text left of the cursor the model says again what was
        ``begun``.
        """
        candidates = [self.codec.encode(begun + hit.text) for hit in self.continuations(left, right)]
        tail = list(context_ids[-_TAIL_TOKENS:])
        context = [i for ids in self._accepted() for i in ids]
        for ids in reversed(candidates):
            context += tail + ids
        found = (*context, *context_ids)
        return lambda: DraftHints(True, tuple(expected), found, self._session_now(), self.scope)

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

    def _accepted(self) -> list[list[int]]:
        """Accepted completions as tokens, the latest last, within the bound."""
        with self._lock:
            texts = self.accepted.latest_first()[:64]
        room, taken = self._accepted_tokens, []
        for text in texts:
            ids = self.codec.encode_cached(text)
            if len(ids) > room:
                break
            taken.append(ids)
            room -= len(ids)
        return taken[::-1]
