"""Rollout memory: the last answers to every prompt, for later samples of the same prompt to draft from.

In reinforcement learning a model answers the same prompts again and again while its weights change. An answer of older
weights is as good a draft as it is right: nothing is dropped when weights change, newer answers push older ones out,
and calibration says what either half of them is worth.
"""

from __future__ import annotations

import hashlib
import os
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import ConfigError
from retrieve_spec.sources.answer_file import ROLLOUTS
from retrieve_spec.sources.automaton import BOUNDARY, SuffixAutomaton
from retrieve_spec.sources.kept_answers import KeptAnswers

OVERLAP = 8
"""Tokens at a prompt's end that are read in front of an answer, so that its beginning is found."""


def prompt_key(prompt_ids: NDArray[np.int32]) -> bytes:
    """16 bytes that name a prompt, (n,) tokens."""
    return hashlib.blake2b(np.ascontiguousarray(prompt_ids, "<i4").tobytes(), digest_size=16).digest()


class RolloutMemory(KeptAnswers):
    """The last answers to every prompt, bounded, kept in a file that processes share.

    Pass it to `accelerate` (`rollouts=memory`). Answers are drafted for samples of their own prompt alone, which is
    known by a hash of its tokens. Of equal answers one is kept, of one that ends in a loop the loop once. The prompt
    that was answered longest ago is forgotten first. Threads may share a memory.

    Parameters
    ----------
    path
        File to load, if it exists, and to save to; None keeps everything in this process.
    answers
        Answers kept of a prompt; the oldest gives way.
    max_bytes
        Bound of what is kept, about four bytes a token.
    save_every
        Save after so many new answers when a generation ends (0: only when told to). A save that fails is logged.

    Raises
    ------
    ConfigError
        A bound is no whole number or less than 1, or the path is no path.
    StoreCorruptError, StoreVersionError
        The file is damaged, no memory of rollouts, or of another version.

    Examples
    --------
    >>> with rs.RolloutMemory("rollouts.bin") as memory:  # saved at the end
    ...     rs.accelerate(model, rollouts=memory)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        answers: int = 16,
        max_bytes: int = 64 << 20,
        save_every: int = 256,
    ) -> None:
        for name, value, least in (("answers", answers, 1), ("max_bytes", max_bytes, 1), ("save_every", save_every, 0)):
            if not isinstance(value, Integral) or value < least:
                raise ConfigError(
                    f"{name} to be a whole number of at least {least}", repr(value), "Leave it at its default."
                )
        if not isinstance(path, str | os.PathLike | None):
            raise ConfigError(
                "a path to keep rollouts at", repr(path)[:60], "Name a file: RolloutMemory('rollouts.bin')."
            )
        super().__init__(path, ROLLOUTS, max_bytes=max_bytes, answers=answers)
        self.save_every = save_every

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is None:
            return
        if kind is None:
            self.save()
        else:  # what ended the block is what its caller is to hear of
            self._save_or_log()

    @property
    def calibration_path(self) -> Path | None:
        """Where what is learned about the answers is kept, beside them."""
        return None if self.path is None else self.path.with_name(self.path.name + ".calibration.npy")

    def answers_to(self, prompt_ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
        """Answers that are kept to a prompt (n,), oldest first, each (m,) int32."""
        return self.answers_of(prompt_key(prompt_ids))

    def remember(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Keep an answer (m,) to a prompt (n,); see `KeptAnswers.add`."""
        self.add(prompt_key(prompt_ids), token_ids)

    def automata(self, prompt_ids: NDArray[np.int32], vocabulary: int) -> list[SuffixAutomaton]:
        """What samples of a prompt (n,) draft from: the older half of its answers and the newer, as far as there are.

        Answers with tokens of `vocabulary` and beyond are another model's and left out.
        """
        answers = [ids for ids in self.answers_to(prompt_ids) if len(ids) and int(ids.max()) < vocabulary]
        older = len(answers) // 2
        made = []
        for half in (answers[:older], answers[older:]):
            if half:
                automaton = SuffixAutomaton(1024)
                for ids in half:
                    automaton.extend(np.concatenate([prompt_ids[-OVERLAP:], ids, [BOUNDARY]]).astype(np.int32))
                made.append(automaton)
        return made

    def _is_due(self) -> bool:
        return 0 < self.save_every <= len(self._new)
