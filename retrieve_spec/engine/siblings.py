"""Siblings: what samples of one prompt have written so far, for each of them to draft from at once."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.sources.automaton import BOUNDARY, SuffixAutomaton
from retrieve_spec.sources.session import SessionMemory

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
    earlier
        Answers to the prompt from earlier calls (`RolloutMemory.automata`), which nothing is added to.
    """

    def __init__(
        self,
        session: SessionMemory | None = None,
        max_tokens: int = 1_000_000,
        earlier: Sequence[SuffixAutomaton] = (),
    ) -> None:
        super().__init__(max_tokens)
        self._session = session
        self._heard: dict[object, tuple[list[int], int]] = {}
        self._news: dict[object, None] = {}  # texts of which something is not read yet
        own = SuffixAutomaton(1024)
        self.automata = [*(session.automata if session is not None else ()), *earlier, own]

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

    def hear(self, text: object, token_ids: NDArray[np.int32]) -> None:
        """Take down how a sample's text has gone on, (n,) int32; it is read when somebody looks."""
        self._heard.setdefault(text, ([], 0))[0].extend(token_ids.tolist())
        self._news[text] = None

    def _read(self, sample: object) -> None:
        """Read what a sample has written since the last time."""
        own = self.automata[-1]
        text, known = self._heard[sample]
        if len(text) - known < (EAGER if len(own) < MUCH else PATIENT):
            return
        run = np.array([*text[max(known - OVERLAP, 0) :], BOUNDARY], np.int32)
        if len(own) + len(run) <= self.max_tokens:
            own.extend(run)
        text = text[-OVERLAP:]
        self._heard[sample] = text, len(text)
