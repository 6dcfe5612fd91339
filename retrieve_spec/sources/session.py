"""Texts of earlier generations as an old and a young automaton: memory is bounded and old text fades."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import PromptError
from retrieve_spec.sources.automaton import BOUNDARY, SuffixAutomaton

if TYPE_CHECKING:
    from retrieve_spec.sources.answers import AnswerMemory

FOLLOWED = 64
"""Tokens of a prompt's end that are matched against the session."""
LONGEST_LOOP = 64
"""The longest loop that is noticed, in tokens."""


_LARGEST = 2**31 - 1
_FEW = 64
"""For fewer numbers than this, Python is faster than NumPy."""


def token_ids_of(token_ids: NDArray[Any] | Sequence[int], what: str) -> NDArray[np.int32]:
    """Return (n,) int32, a copy, because the caller may write to its own array.

    Raises
    ------
    PromptError
        They are no whole numbers, or no token has such a number; `what` names them.
    """
    ids = np.asarray(token_ids)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise PromptError(f"{what} of token ids from 0, (n,)", f"{ids.dtype} of shape {ids.shape}", "Give one text.")
    few = ids.tolist() if ids.size <= _FEW else (ids.min(), ids.max())
    if min(few) < 0 or max(few) > _LARGEST:
        raise PromptError(f"{what} of token ids from 0", f"{ids.min()} … {ids.max()}", "Leave out placeholders.")
    return ids.astype(np.int32)


def loop_start(token_ids: NDArray[np.int32]) -> int:
    """Return where a text (n,) begins the third repetition of what it repeats to its end; n if it does not loop.

    Loops of up to 64 tokens are found, the shortest period first.
    """
    n = len(token_ids)
    for period in range(1, min(LONGEST_LOOP, n // 3) + 1):
        different = np.flatnonzero(token_ids[period:] != token_ids[:-period])
        begins = int(different[-1]) + 1 if len(different) else 0  # start of the part with this period
        if n - begins >= 3 * period:
            return begins + 2 * period
    return n


class SessionMemory:
    """Bounded memory of generated texts.

    Of a text that ends in a loop the loop is remembered once: a hundred repetitions are no hundred observations.

    New texts go to the young automaton; when it holds half the bound it becomes the old one and the old one is
    forgotten. Nothing is ever rebuilt, so remembering costs the same at any size.

    Drafters of several requests, on several threads, may share a memory: `with memory:` keeps it as it is while kernels
    read its automata. A request goes on reading the automata it began with, however old they have become.

    Parameters
    ----------
    max_tokens
        Tokens kept at most.
    exact
        As for `SuffixAutomaton`.
    """

    def __init__(self, max_tokens: int = 1_000_000, exact: bool = False) -> None:
        self.max_tokens = max_tokens
        self._exact = exact
        self.automata = [SuffixAutomaton(1024, exact=exact), SuffixAutomaton(1024, exact=exact)]
        self._texts: list[list[NDArray[np.int32]]] = [[], []]
        self._lock = threading.RLock()
        self._busy = 0  # nesting depth of readers and writers in the thread that holds the lock
        self._waiting: deque[NDArray[np.int32]] = deque()
        self._kept: tuple[AnswerMemory, bytes] | None = None

    def keep_in(self, answers: AnswerMemory, key: bytes, vocabulary: int = 1 << 31) -> None:
        """Begin with the answers kept under a key, and keep new ones there.

        Answers with tokens of `vocabulary` and beyond are left out. Texts that are only `read` are not kept.
        """
        for ids in answers.answers_of(key):
            if int(ids.max()) < vocabulary:
                self.read(ids)
        self._kept = answers, key

    def keep_nowhere(self) -> None:
        """Stop keeping new answers."""
        self._kept = None

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._busy += 1
        try:
            if self._busy == 1:
                self._take_in()
        except BaseException:  # such as Ctrl-C: `__exit__` is not called if `__enter__` fails
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy -= 1
        self._lock.release()

    def _take_in(self) -> None:
        """Add pending texts, while no kernel reads."""
        while self._waiting:
            self._add(self._waiting.popleft())

    @property
    def texts(self) -> list[NDArray[np.int32]]:
        """The remembered texts, oldest first, each (n,) int32."""
        with self:
            return [text for texts in self._texts for text in texts]

    def __len__(self) -> int:
        with self:
            return sum(len(a) for a in self.automata)

    def append(self, text: object, token_ids: NDArray[np.int32]) -> None:
        """Do nothing: this memory contains finished texts only."""

    def remember(self, token_ids: NDArray[np.int32]) -> None:
        """Add one generated text, (n,) int32."""
        self.read(token_ids)
        if (kept := self._kept) is not None:
            kept[0].add(kept[1], token_ids)

    def read(self, token_ids: NDArray[np.int32]) -> None:
        """Add a text (n,) int32 by any author.

        It waits while kernels read, even where the garbage collector ends a request in the middle of another's step.
        """
        self._waiting.append(token_ids.astype(np.int32))
        with self:  # applies pending texts
            pass

    def _add(self, token_ids: NDArray[np.int32]) -> None:
        half = self.max_tokens // 2
        text = token_ids[: loop_start(token_ids)]
        if not len(text) or not half:
            return
        if len(self.automata[1]) + len(text) > half:
            self.automata = [self.automata[1], SuffixAutomaton(1024, exact=self._exact)]
            self._texts = [self._texts[1], []]
        kept = text[max(len(text) - half, 0) :].copy()
        self._texts[1].append(kept)
        self.automata[1].extend(np.append(kept, np.int32(BOUNDARY)))
