"""Answers by key: a bounded memory of generated texts, in this process or in a file that processes share.

A file begins with a head and a checksum, then come keys, counts, lengths and tokens as plain arrays. It is always
replaced as a whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from retrieve_spec.datastore.files import replace_file
from retrieve_spec.errors import (
    ConfigError,
    RetrieveSpecError,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
    StoreVersionError,
    TokenizerMismatchError,
    in_a_line,
)
from retrieve_spec.sources.automaton import BOUNDARY, SuffixAutomaton
from retrieve_spec.sources.session import loop_start, token_ids_of

logger = logging.getLogger(__name__)
KEY_BYTES, ANSWER_BYTES = 64, 16
"""Bytes that a key and an answer count beside their tokens."""
LOCK_S = 60.0
"""Seconds that a save waits for saves of other processes."""
OVERLAP = 8
"""Tokens at a prompt's end that are read before an answer, so that its beginning is found."""
_NO_BOUND = 1 << 62
_LEAST_BYTES = 64 << 20
"""Limit of the answers of all scopes, or room for two full scopes, whichever is larger."""
_NEW_SHARE = 16
"""A save writes the whole file, so it waits until one in this many bytes is new."""
_MAGIC, _VERSION = b"rs-answers\n\n", 1
_HEAD = struct.Struct("<12sIIQQ")
"""Magic, version, checksum of the rest, keys, answers."""
_NAME = 16
"""Bytes of a key: the part that all keys of a file share, and the key's own part."""
_ROLLOUTS = bytes(_NAME)
_REMEDY = "Delete the file, or give another path; answers are remembered anew."


def name_of(text: str | bytes) -> bytes:
    """Return one half of a key."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=_NAME).digest()


class _Bounded:
    """Answers by key, without repeats and within limits; the oldest answers, and the least recent key, are dropped.

    Each answer is the bytes of its little-endian int32 tokens.
    """

    def __init__(self, max_bytes: int, answers: int, key_bytes: int) -> None:
        self.bounds = max_bytes, answers, key_bytes
        self.known: OrderedDict[bytes, OrderedDict[bytes, None]] = OrderedDict()
        self._sizes: dict[bytes, int] = {}
        self.num_bytes = self.count = 0

    def put(self, key: bytes, ids: bytes) -> None:
        """Add an answer as the newest of its key, which becomes the newest key; drop the oldest beyond the limits."""
        max_bytes, most, key_bytes = self.bounds
        if key not in self.known:
            self.known[key] = OrderedDict()
            self._grow(key, KEY_BYTES)
        self.known.move_to_end(key)
        answers = self.known[key]
        if ids not in answers:
            self._grow(key, ANSWER_BYTES + len(ids))
            self.count += 1
        answers[ids] = None
        answers.move_to_end(ids)
        while len(answers) > most or (self._sizes[key] > key_bytes and len(answers) > 1):
            self._drop_oldest(key)
        while self.num_bytes > max_bytes:
            first = next(iter(self.known))
            if first != key or len(answers) == 1:
                self.drop(first)
            else:
                self._drop_oldest(first)

    def drop(self, key: bytes) -> None:
        """Drop a key."""
        if (answers := self.known.pop(key, None)) is not None:
            self.num_bytes -= self._sizes.pop(key)
            self.count -= len(answers)

    def _grow(self, key: bytes, by: int) -> None:
        self._sizes[key] = self._sizes.get(key, 0) + by
        self.num_bytes += by

    def _drop_oldest(self, key: bytes) -> None:
        ids, _ = self.known[key].popitem(last=False)
        self._grow(key, -ANSWER_BYTES - len(ids))
        self.count -= 1


class AnswerMemory:
    """Answers by key, within limits, without repeats; an answer that ends in a loop has it once. Threads may share it.

    Parameters
    ----------
    path
        File to load, if it exists, and to save to; None keeps everything in this process.
    owner
        16 bytes that all keys begin with: whose answers these are (`answers_by_scope`, `RolloutMemory`).
    max_bytes
        Bound of what is kept of all keys, about four bytes a token; the key that was added to longest ago gives way.
    answers, key_bytes
        Bounds of what is kept of one key: answers, and bytes as `max_bytes` counts them; the oldest give way.

    Raises
    ------
    StoreCorruptError, StoreVersionError
        The file is damaged, something else, or of another version.
    TokenizerMismatchError
        Its keys have another owner.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        owner: bytes,
        *,
        max_bytes: int,
        answers: int = _NO_BOUND,
        key_bytes: int = _NO_BOUND,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._owner = owner
        self._kept = _Bounded(max_bytes, answers, key_bytes)
        self._new: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()  # since the file was last read
        self._gone: set[bytes] = set()  # prefixes of keys that are forgotten, but still in the file
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._lock = threading.RLock()
        self._busy = False
        if self.path is not None:
            self._kept = self._merged(self.path)

    def __len__(self) -> int:
        """Number of keys with answers."""
        with self._exclusive():
            return len(self._kept.known)

    @property
    def num_bytes(self) -> int:
        """Size, as `max_bytes` counts it."""
        with self._exclusive():
            return self._kept.num_bytes

    def key(self, name: str | bytes) -> bytes:
        """Return the key of a name: of a scope, or of a prompt."""
        return self._owner + name_of(name)

    def answers_of(self, key: bytes) -> tuple[NDArray[np.int32], ...]:
        """Return the answers of a key, oldest first, each (m,) int32."""
        with self._exclusive():
            return tuple(np.frombuffer(ids, "<i4").astype(np.int32) for ids in self._kept.known.get(key, ()))

    def add(self, key: bytes, token_ids: NDArray[np.int32]) -> None:
        """Add an answer (m,).

        It waits while the memory is in use, even where the garbage collector ends a generation in the middle of that.

        Raises
        ------
        PromptError
            The answer holds something else than token ids, such as the negative ones that stand for "no label".
        """
        ids = token_ids_of(token_ids, "an answer")
        if len(ids):
            self._waiting.append((key, ids[: loop_start(ids)].astype("<i4").tobytes()))
        with self._exclusive():  # applies pending changes
            pass

    def save(self) -> None:
        """Write the file, merged with what other processes have saved, which is loaded, too.

        Raises
        ------
        ConfigError
            There is no path.
        StoreError
            It cannot be written; the file that is there is left as it is.
        StoreLockedError
            Another process has been saving for a minute.
        StoreCorruptError, StoreVersionError, TokenizerMismatchError
            The file that is there is something else; it is left as it is.
        """
        with self._exclusive(), self._file_lock() as path:
            kept = self._merged(path) if path.exists() else self._kept
            replace_file(path, packed(kept.known), private=True)
            self._kept = kept
            self._new.clear()
            self._gone.clear()

    def keep(self, at_once: bool = False) -> None:
        """Save if it is due, or with `at_once` if anything is new; errors are logged."""
        if self.path is None or self._busy:  # the garbage collector may end a generation during a save
            return
        if self._is_due() or (at_once and (self._new or self._gone)):
            self._save_or_log()

    def _save_or_log(self) -> None:
        try:
            self.save()
        except RetrieveSpecError as error:  # a full disk must not end a training run
            logger.warning("answers are not saved: %s", in_a_line(error))

    def forget(self, key: bytes = b"") -> None:
        """Forget one key, or everything, in the file, too; other processes forget it with their next save.

        What cannot be taken out of the file now is taken out with the next save.

        Raises
        ------
        StoreError, StoreLockedError, StoreCorruptError, StoreVersionError, TokenizerMismatchError
            The file is as it was; here all is forgotten.
        """
        with self._exclusive():
            for one in [one for one in self._kept.known if one.startswith(key)]:
                self._kept.drop(one)
            for new in [new for new in self._new if new[0].startswith(key)]:
                del self._new[new]
            if self.path is None:
                return
            self._gone.add(key)
            if key:
                self.save()
                return
            with self._file_lock() as path:  # regardless of its content
                replace_file(path, packed(self._kept.known), private=True)
            self._gone.clear()

    def _is_due(self) -> bool:
        """Return whether enough is new for a save."""
        new = sum(ANSWER_BYTES + len(ids) for _, ids in self._new)
        return new > 0 and new * _NEW_SHARE >= self.num_bytes

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the memory against other threads, after pending answers have been added."""
        with self._lock:
            before, self._busy = self._busy, True
            try:
                while not before and self._waiting:
                    self._take(*self._waiting.popleft())
                yield
            finally:
                self._busy = before

    def _take(self, key: bytes, ids: bytes) -> None:
        self._kept.put(key, ids)
        if self.path is not None:
            self._new[key, ids] = None
            self._new.move_to_end((key, ids))
            if len(self._new) > 2 * self._kept.count + _NEW_SHARE:
                for new in [new for new in self._new if new[1] not in self._kept.known.get(new[0], ())]:
                    del self._new[new]

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[Path]:
        """Lock the file against other processes."""
        if self.path is None:
            raise ConfigError("answers with a path", "none", "Give one.")
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
                f"to write answers to {self.path}",
                in_a_line(error),
                "Check permissions and free space, or give another path; until a save succeeds the file is as it was.",
            ) from error

    def _merged(self, path: Path) -> _Bounded:
        """Return the answers of the file, then new ones, within the limits."""
        kept = _Bounded(*self._kept.bounds)
        for key, answers in unpacked(path).items():
            if not key.startswith(self._owner):
                expected, got = (
                    "prompts" if owner == _ROLLOUTS else f"tokenizer {owner.hex()[:12]}"
                    for owner in (self._owner, key[:_NAME])
                )
                raise TokenizerMismatchError(
                    f"answers of {expected} in {path}", f"those of {got}", "Give each a file of its own."
                )
            if not any(key.startswith(gone) for gone in self._gone):
                for ids in answers:
                    kept.put(key, ids)
        for key, ids in self._new:
            if ids in self._kept.known.get(key, ()):
                kept.put(key, ids)
        return kept


def answers_by_scope(path: str | os.PathLike[str] | None, tokenizer: str, session_tokens: int) -> AnswerMemory:
    """Return answers by scope, in the tokens of a tokenizer (its fingerprint, "" if unknown)."""
    key_bytes = 4 * session_tokens
    return AnswerMemory(path, name_of(tokenizer), max_bytes=max(_LEAST_BYTES, 2 * key_bytes), key_bytes=key_bytes)


class RolloutMemory(AnswerMemory):
    """The last answers to every prompt, within limits, in a file that processes share.

    In reinforcement learning a model answers the same prompts again and again while its weights change. An answer of
    older weights is as good a draft as it is right: nothing is dropped when weights change, newer answers push older
    ones out, and calibration says what either half of them is worth.

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
        A bound is no whole number, or less than 1.
    StoreCorruptError, StoreVersionError, TokenizerMismatchError
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
        super().__init__(path, _ROLLOUTS, max_bytes=max_bytes, answers=answers)
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
        else:  # keep the exception that ended the block
            self._save_or_log()

    @property
    def calibration_path(self) -> Path | None:
        """Path of the calibration of these answers, beside them."""
        return None if self.path is None else self.path.with_name(self.path.name + ".calibration.npy")

    def answers_to(self, prompt_ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
        """Return the answers to a prompt (n,), oldest first, each (m,) int32."""
        return self.answers_of(self._key_of(prompt_ids))

    def remember(self, prompt_ids: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """Add an answer (m,) to a prompt (n,); see `AnswerMemory.add`."""
        self.add(self._key_of(prompt_ids), token_ids)

    def _key_of(self, prompt_ids: NDArray[np.int32]) -> bytes:
        return self.key(np.ascontiguousarray(prompt_ids, "<i4").tobytes())

    def automata(self, prompt_ids: NDArray[np.int32], vocabulary: int) -> list[SuffixAutomaton]:
        """Return the automata that samples of a prompt (n,) draft from: the older and the newer half of its answers.

        Answers with tokens of `vocabulary` and beyond are another model's and left out.
        """
        answers = [ids for ids in self.answers_to(prompt_ids) if int(ids.max()) < vocabulary]
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


def packed(known: Mapping[bytes, Mapping[bytes, None]]) -> bytes:
    """Return answers (tokens as little-endian int32 bytes) by key as bytes, in their order."""
    answers = [ids for of_key in known.values() for ids in of_key]
    body = b"".join(
        [
            *known,
            np.array([len(of_key) for of_key in known.values()], "<u4").tobytes(),
            np.array([len(ids) // 4 for ids in answers], "<u4").tobytes(),
            *answers,
        ]
    )
    return _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(body), len(known), len(answers)) + body


def unpacked(path: Path) -> dict[bytes, list[bytes]]:
    """Return what `packed` wrote to a file; empty without the file.

    Raises
    ------
    StoreError
        It cannot be read.
    StoreCorruptError
        The file is something else, or damaged.
    StoreVersionError
        It was written by another version of this library.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_HEAD.size)
            if data.startswith(_MAGIC):  # else it may be any file, for example a model's weights
                data += file.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"to read {path}", in_a_line(error), "Give another path, or let it be read.") from error
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise StoreCorruptError(f"a file of answers in {path}", "another file", _REMEDY)
    _, version, checksum, keys, count = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise StoreVersionError(f"answers of format {_VERSION} in {path}", f"format {version}", _REMEDY)
    body = memoryview(data)[_HEAD.size :]
    size = 2 * _NAME
    first = keys * (size + 4) + 4 * count
    if zlib.crc32(body) != checksum or len(body) < first:
        raise StoreCorruptError(f"answers in {path} as they were written", "a truncated or altered file", _REMEDY)
    counts = np.frombuffer(body, "<u4", keys, keys * size).astype(np.int64)
    lengths = np.frombuffer(body, "<u4", count, keys * (size + 4)).astype(np.int64)
    if counts.sum() != count or first + 4 * lengths.sum() != len(body) or (lengths == 0).any():
        raise StoreCorruptError(f"answers in {path} that add up", "lengths that do not", _REMEDY)
    if len(body) > first and int(np.frombuffer(body, "<i4", offset=first).min()) < 0:
        raise StoreCorruptError(f"token ids in {path}", "a negative one", _REMEDY)
    ends = (first + 4 * np.cumsum(lengths)).tolist()
    answers = [bytes(body[begin:end]) for begin, end in zip([first, *ends], ends, strict=False)]
    last = np.cumsum(counts).tolist()
    names = [bytes(body[at : at + size]) for at in range(0, keys * size, size)]
    return {name: answers[end - n : end] for name, end, n in zip(names, last, counts.tolist(), strict=True)}
