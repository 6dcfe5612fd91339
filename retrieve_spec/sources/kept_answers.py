"""Kept answers: the last answers by key, bounded, in a file that processes share; the base of rollouts and sessions."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from retrieve_spec.datastore.files import replace_file
from retrieve_spec.errors import ConfigError, RetrieveSpecError, StoreError, StoreLockedError, in_a_line
from retrieve_spec.sources.answer_file import Kind, packed, unpacked
from retrieve_spec.sources.session import loop_start
from retrieve_spec.sources.token_ids import token_ids_of

logger = logging.getLogger(__name__)
KEY_BYTES, ANSWER_BYTES = 64, 16
"""What a key and an answer count for beside their tokens."""
LOCK_S = 60.0
"""Seconds that a save waits for other processes' saves."""
NO_BOUND = 1 << 62
_MANY_NEW = 1024
"""New answers after which those that are not kept any more are dropped."""
Answers = OrderedDict[bytes, None]
"""Answers to one key, oldest first, each as the bytes of its little-endian int32 tokens."""


class KeptAnswers:
    """Answers by key, of equal ones one, of one that ends in a loop the loop once; threads may share them.

    Parameters
    ----------
    path
        File to load, if it exists, and to save to; None keeps everything in this process.
    kind
        What the file holds.
    max_bytes
        Bound of what is kept of all keys, about four bytes a token; the key that was added to longest ago gives way.
    answers, key_bytes
        Bounds of what is kept of one key: answers, and bytes as `max_bytes` counts them; the oldest give way.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        kind: Kind,
        *,
        max_bytes: int,
        answers: int = NO_BOUND,
        key_bytes: int = NO_BOUND,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.answers, self.key_bytes, self.max_bytes = answers, key_bytes, max_bytes
        self._kind = kind
        self._known: OrderedDict[bytes, Answers] = OrderedDict()  # the key that was added to last stands last
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0
        self._new: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()  # since the file was last read
        self._most_new = _MANY_NEW
        self._gone: set[bytes] = set()  # keys that were forgotten, but not yet in the file
        self._all_gone = False
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._lock = threading.RLock()
        self._busy = 0
        if self.path is not None:
            with contextlib.suppress(OSError):  # the first save says what is wrong
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take(self._read(self.path))

    def __len__(self) -> int:
        """Keys whose answers are kept."""
        with self._alone():
            return len(self._known)

    @property
    def num_bytes(self) -> int:
        """What is kept, as `max_bytes` counts it."""
        with self._alone():
            return self._bytes

    def answers_of(self, key: bytes) -> tuple[NDArray[np.int32], ...]:
        """Answers that are kept of a key, oldest first, each (m,) int32."""
        with self._alone():
            return tuple(np.frombuffer(ids, "<i4").astype(np.int32) for ids in self._known.get(key, ()))

    def add(self, key: bytes, token_ids: NDArray[np.int32]) -> None:
        """Keep an answer (m,).

        It waits while the memory is in use, even where the garbage collector ends a generation in the middle of that.

        Raises
        ------
        PromptError
            The answer holds something else than token ids, such as the negative ones that stand for "no label".
        """
        ids = token_ids_of(token_ids, "an answer")
        self._waiting.append((key, ids[: loop_start(ids)].astype("<i4").tobytes()))
        with self._alone():  # takes in what waits
            pass

    def save(self) -> None:
        """Write the file, with what other processes have saved meanwhile; their answers are known here from now on.

        Raises
        ------
        ConfigError
            There is no path.
        StoreError
            It cannot be written; the file that is there is left as it is.
        StoreLockedError
            Another process has been saving for a minute.
        StoreCorruptError, StoreVersionError
            The file that is there is something else; it is left as it is.
        """
        with self._alone(), self._file_lock() as path:
            before = self._known, self._sizes, self._bytes
            try:
                self._take_in(path)
                replace_file(path, packed(self._known, self._kind), private=True)
            except BaseException:
                self._known, self._sizes, self._bytes = before
                raise
            self._saved()

    def keep(self, at_once: bool = False) -> None:
        """Save if that is due, or with `at_once` if anything is new; what goes wrong is logged."""
        if self.path is None or self._busy or not (self._is_due() or (at_once and self._is_changed())):
            return  # busy: the garbage collector ended a generation in the middle of a save
        self._save_or_log()  # a full disk must not end a training run

    def _save_or_log(self) -> None:
        try:
            self.save()
        except RetrieveSpecError as error:
            logger.warning("%s are not saved: %s", self._kind.name, in_a_line(error))
            self._drop_gone()

    def forget(self, key: bytes | None = None) -> None:
        """Forget one key, or everything, in the file, too: other processes forget with their next save.

        What cannot be taken out of the file now is taken out with the next save.

        Raises
        ------
        StoreError, StoreLockedError, StoreCorruptError, StoreVersionError
            The file is as it was; here all is forgotten.
        """
        with self._alone():
            for one in list(self._known) if key is None else [key]:
                self._drop(one)
            for new in [new for new in self._new if key in (None, new[0])]:
                del self._new[new]
            if self.path is None:
                return
            self._all_gone |= key is None
            if key is not None:
                self._gone.add(key)
            with self._file_lock() as path:
                if not self._all_gone:
                    self._take_in(path)
                replace_file(path, packed(self._known, self._kind), private=True)
            self._saved()

    def _is_changed(self) -> bool:
        """Whether the file is to hold something else than when it was last written."""
        return bool(self._new or self._gone or self._all_gone)

    def _is_due(self) -> bool:
        """Whether enough is new for a save."""
        raise NotImplementedError

    def _read(self, path: Path) -> dict[bytes, list[bytes]]:
        """What the file holds, checked."""
        return unpacked(path, self._kind)

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
                    if self.path is not None and ids:
                        self._new[key, ids] = None
                        self._new.move_to_end((key, ids))
                if len(self._new) > self._most_new:
                    self._drop_gone()
                    self._most_new = max(_MANY_NEW, 2 * len(self._new))
                yield
            finally:
                self._busy = before

    def _drop_gone(self) -> None:
        """Do not save new answers that are not kept any more."""
        for key, ids in list(self._new):
            if ids not in self._known.get(key, ()):
                del self._new[key, ids]

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[Path]:
        """Be the only process that writes the file."""
        if self.path is None:
            raise ConfigError(f"{self._kind.name} with a path", "none", "Give one.")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_name(self.path.name + ".lock"), timeout=LOCK_S):
                yield self.path
        except Timeout as error:
            raise StoreLockedError(
                f"to write to {self.path}",
                "another process is writing to it",
                "Wait until it has finished, then try again.",
            ) from error
        except RetrieveSpecError:  # some are OSErrors too
            raise
        except OSError as error:
            raise StoreError(
                f"to write {self._kind.name} to {self.path}",
                in_a_line(error),
                "Check permissions and free space, or give another path; until a save succeeds the file is as it was.",
            ) from error

    def _take_in(self, path: Path) -> None:
        """Let all that is kept be what the file holds, and what is new behind it."""
        if path.exists():
            known = self._read(path)
            self._take({} if self._all_gone else {key: known[key] for key in known if key not in self._gone})
            for key, ids in self._new:
                self._put(key, ids)

    def _saved(self) -> None:
        """All that is kept stands in the file, and nothing else."""
        self._new.clear()
        self._gone.clear()
        self._all_gone = False

    def _take(self, known: dict[bytes, list[bytes]]) -> None:
        """Let `known` be all that is kept, as far as it fits."""
        self._known, self._sizes, self._bytes = OrderedDict(), {}, 0
        for key, answers in known.items():
            for ids in answers:
                self._put(key, ids)

    def _put(self, key: bytes, ids: bytes) -> None:
        """Take an answer in as the newest of the newest key, and let the oldest go to the bounds."""
        if not ids:
            return
        if key not in self._known:
            self._known[key] = OrderedDict()
            self._grow(key, KEY_BYTES)
        self._known.move_to_end(key)
        answers = self._known[key]
        if ids in answers:
            answers.move_to_end(ids)
            return
        answers[ids] = None
        self._grow(key, ANSWER_BYTES + len(ids))
        while len(answers) > self.answers or (self._sizes[key] > self.key_bytes and len(answers) > 1):
            self._drop_oldest(key)
        while self._bytes > self.max_bytes:
            first = next(iter(self._known))
            if len(self._known) > 1 or len(answers) == 1:
                self._drop(first)
            else:
                self._drop_oldest(first)

    def _grow(self, key: bytes, by: int) -> None:
        self._sizes[key] = self._sizes.get(key, 0) + by
        self._bytes += by

    def _drop_oldest(self, key: bytes) -> None:
        ids, _ = self._known[key].popitem(last=False)
        self._grow(key, -ANSWER_BYTES - len(ids))

    def _drop(self, key: bytes) -> None:
        if self._known.pop(key, None) is not None:
            self._bytes -= self._sizes.pop(key)
