"""Rollout memory: the last answers to every prompt, for later samples of the same prompt to draft from.

In reinforcement learning a model answers the same prompts again and again while its weights change. An answer of older
weights is as good a draft as it is right: nothing is dropped when weights change, newer answers push older ones out,
and calibration says what either half of them is worth.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from retrieve_spec.datastore.files import replace_file
from retrieve_spec.errors import ConfigError, StoreLockedError, in_a_line
from retrieve_spec.sources.automaton import BOUNDARY, SuffixAutomaton
from retrieve_spec.sources.rollout_file import packed, unpacked
from retrieve_spec.sources.session import loop_start
from retrieve_spec.sources.token_ids import token_ids_of

logger = logging.getLogger(__name__)
OVERLAP = 8
"""Tokens at a prompt's end that are read in front of an answer, so that its beginning is found."""
PROMPT_BYTES, ANSWER_BYTES = 64, 16
"""What a prompt and an answer count for beside their tokens."""
LOCK_S = 60.0
"""Seconds that a save waits for other processes' saves."""
Answers = tuple[NDArray[np.int32], ...]
_MANY_NEW = 1024
"""New answers after which those that are not kept any more are dropped."""


def prompt_key(prompt_ids: NDArray[np.int32]) -> bytes:
    """16 bytes that name a prompt, (n,) tokens."""
    return hashlib.blake2b(np.ascontiguousarray(prompt_ids, "<i4").tobytes(), digest_size=16).digest()


class RolloutMemory:
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
        A bound is less than 1.
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
            if value < least:
                raise ConfigError(f"{name} of at least {least}", repr(value), "Leave it at its default.")
        self.path = None if path is None else Path(path)
        self.answers, self.max_bytes, self.save_every = answers, max_bytes, save_every
        self._known: OrderedDict[bytes, Answers] = OrderedDict()  # the prompt that was answered last stands last
        self._bytes = 0
        self._new: list[tuple[bytes, NDArray[np.int32]]] = []  # since the file was last read
        self._most_new = _MANY_NEW
        self._waiting: deque[tuple[bytes, NDArray[np.int32]]] = deque()
        self._lock = threading.RLock()
        self._busy = 0
        if self.path is not None:
            with contextlib.suppress(OSError):  # the first save says what is wrong
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._known.update(unpacked(self.path))
            self._fit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is not None:
            self.save()

    def __len__(self) -> int:
        """Prompts whose answers are kept."""
        with self._alone():
            return len(self._known)

    @property
    def num_bytes(self) -> int:
        """What is kept, as `max_bytes` counts it."""
        with self._alone():
            return _size(self._known)

    @property
    def calibration_path(self) -> Path | None:
        """Where what is learned about the answers is kept, beside them."""
        return None if self.path is None else self.path.with_name(self.path.name + ".calibration.npy")

    def answers_to(self, prompt_ids: NDArray[np.int32]) -> Answers:
        """Answers that are kept to a prompt (n,), oldest first, each (m,) int32."""
        with self._alone():
            return self._known.get(prompt_key(prompt_ids), ())

    def remember(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Keep an answer (m,) to a prompt (n,).

        It waits while the memory is in use, even where the garbage collector ends a generation in the middle of that.

        Raises
        ------
        PromptError
            The answer holds something else than token ids, such as the negative ones that stand for "no label".
        """
        ids = token_ids_of(token_ids, "an answer")
        self._waiting.append((prompt_key(prompt_ids), ids[: loop_start(ids)].copy()))
        with self._alone():  # takes in what waits
            pass

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

    def save(self) -> None:
        """Write the file, with what other processes have saved meanwhile; their answers are known here from now on.

        Raises
        ------
        ConfigError
            The memory has no path.
        StoreLockedError
            Another process has been saving for a minute.
        StoreCorruptError, StoreVersionError
            The file that is there is something else; it is left as it is.
        """
        with self._alone(), self._file_lock() as path:
            kept = self._known
            try:
                self._known = OrderedDict(unpacked(path)) if path.exists() else kept.copy()
                for key, ids in self._new:
                    self._put(key, ids)
                self._fit()
                replace_file(path, packed(self._known))
            except BaseException:
                self._known = kept
                raise
            self._new = []

    def keep(self) -> None:
        """Save if enough answers are new; what goes wrong is logged."""
        if self.path is None or not self.save_every or len(self._new) < self.save_every or self._busy:
            return  # busy: the garbage collector ended a generation in the middle of a save
        try:
            self.save()
        except OSError as error:  # a full disk must not end a training run
            logger.warning("rollouts are not saved: %s", in_a_line(error))
            self._new = self._new[-self.answers * max(len(self._known), 1) :]

    def forget(self) -> None:
        """Forget everything, and empty the file: other processes forget with their next save, too."""
        with self._alone():
            self._known.clear()
            self._new, self._bytes = [], 0
            if self.path is not None:
                with self._file_lock() as path:
                    replace_file(path, packed({}))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Have the memory for this thread, with all that was to be remembered."""
        with self._lock:
            before = self._busy
            try:
                self._busy = before + 1
                while not before and self._waiting:
                    key, ids = self._waiting.popleft()
                    self._put(key, ids)
                    if self.path is not None:
                        self._new.append((key, ids))
                if len(self._new) > self._most_new:
                    self._new = self._still_kept()
                    self._most_new = max(_MANY_NEW, 2 * len(self._new))
                yield
            finally:
                self._busy = before

    def _still_kept(self) -> list[tuple[bytes, NDArray[np.int32]]]:
        """New answers that are kept by now, each once."""
        kept = {(key, ids.tobytes()) for key, answers in self._known.items() for ids in answers}
        new = {(key, ids.tobytes()): (key, ids) for key, ids in reversed(self._new)}
        return [new[name] for name in reversed(new) if name in kept]

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[Path]:
        """Be the only process that writes the file."""
        if self.path is None:
            raise ConfigError("a rollout memory with a path", "one without", "Make it with RolloutMemory(path).")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path.with_name(self.path.name + ".lock"), timeout=LOCK_S):
                yield self.path
        except Timeout as error:
            raise StoreLockedError(
                f"to write to {self.path}",
                "another process is writing to it",
                "Wait until it has finished, then try again.",
            ) from error

    def _put(self, key: bytes, ids: NDArray[np.int32]) -> None:
        """Take an answer in as the newest of the newest prompt."""
        if not len(ids):
            return
        before = self._known.get(key, ())
        others = [one for one in before if not np.array_equal(one, ids)]
        self._known[key] = answers = (*others, ids)[-self.answers :]
        self._known.move_to_end(key)
        self._bytes += _size({key: answers}) - (_size({key: before}) if before else 0)
        if self._bytes > self.max_bytes:
            self._fit()

    def _fit(self) -> None:
        """Forget the prompts that were answered longest ago, and of the last one the oldest answers, to the bound."""
        for key, answers in list(self._known.items()):
            if len(answers) > self.answers:
                self._known[key] = answers[-self.answers :]
        self._bytes = _size(self._known)
        while self._bytes > self.max_bytes:
            key, answers = next(iter(self._known.items()))
            self._bytes -= _size({key: answers})
            if len(self._known) > 1 or len(answers) == 1:
                del self._known[key]
            else:
                self._known[key] = answers[1:]
                self._bytes += _size({key: answers[1:]})


def _size(known: dict[bytes, Answers]) -> int:
    """What answers take, as `max_bytes` counts it."""
    return sum(PROMPT_BYTES + sum(ANSWER_BYTES + ids.nbytes for ids in answers) for answers in known.values())
