"""Phrases that several requests had in common: counts of what follows one or two tokens, as a bounded table."""

from __future__ import annotations

import hashlib
import threading
import zlib
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import phrases as kernels
from retrieve_spec.kernels import source_table
from retrieve_spec.kernels.recycling import find, mix
from retrieve_spec.sources.recycling import on_lines
from retrieve_spec.sources.rows import Row, source_row
from retrieve_spec.sources.session import loop_start

CAPACITY, CONTINUATIONS, SEEN = 1 << 14, 16, 1 << 16
"""Contexts known at most, continuations of each, and fingerprints kept of what one asker alone was given."""
_KEYED = np.uint64(1 << 63)
"""Marks askers that are keys; requests are numbered from one."""


class PhraseMemory:
    """What is common to the texts of different requests: tokens that follow one or two tokens, with counts.

    A request counts when it ends. A continuation is drafted, and kept in readable form, only after two different
    requests (of two different keys, where they have keys) were given it: of what one of them alone said there is a
    64-bit fingerprint, and nothing that could be drafted. Of a text that ends in a loop the loop counts once.

    Attributes
    ----------
    sets, entries, seen
        As in `retrieve_spec.kernels.recycling` and `retrieve_spec.kernels.phrases`.
    requests
        How many requests were counted.
    """

    _PARTS: ClassVar[tuple[str, ...]] = ("sets", "entries", "seen")

    def __init__(self) -> None:
        self.sets: NDArray[np.uint64] = on_lines(2 * CAPACITY, np.uint64)
        size = 2 * CONTINUATIONS * CAPACITY
        self.entries: NDArray[np.int32] = on_lines(size, np.int32).reshape(CAPACITY, 2 * CONTINUATIONS)
        self.seen: NDArray[np.uint64] = np.zeros((SEEN, 2), np.uint64)
        self.requests = 0
        self._lock = threading.Lock()  # drafters of other threads may learn too

    @property
    def tokens(self) -> NDArray[np.int32]:
        """(CAPACITY, CONTINUATIONS) int32 continuations."""
        return self.entries[:, :CONTINUATIONS]

    @property
    def probs(self) -> NDArray[np.float32]:
        """(CAPACITY, CONTINUATIONS) float32 their shares."""
        return self.entries[:, CONTINUATIONS:].view(np.float32)

    def forget(self) -> None:
        """Forget everything."""
        with self._lock:
            for name in self._PARTS:
                getattr(self, name)[...] = 0
            self.requests = 0

    def learn(self, text: NDArray[np.int32], key: str | None = None) -> None:
        """Count the phrases of what a request was given.

        Parameters
        ----------
        text
            (n,) int32 generated tokens; `retrieve_spec.kernels.phrases.BOUNDARY` where other text stood between them.
        key
            Who asked. Texts of one key alone make nothing known; None: this request is an asker of its own.
        """
        text = np.ascontiguousarray(text[: loop_start(text)])
        with self._lock:
            self.requests += 1
            asker = np.uint64(self.requests) if key is None else _number_of(key)
            kernels.learn(self.sets, self.tokens, self.probs, self.seen, text, asker, self.requests)

    def known(self, context: list[int]) -> dict[int, float]:
        """Continuations and their shares after exactly this context (oldest token first)."""
        h = np.uint64(0)
        for token in reversed(context):
            h = np.uint64(mix(h, token))
        e = find(self.sets, h)
        if e < 0:
            return {}
        kept = self.tokens[e] >= 0
        return dict(zip(self.tokens[e][kept].tolist(), self.probs[e][kept].tolist(), strict=True))

    def packed(self) -> NDArray[np.uint8]:
        """All of it as bytes (n,), with a checksum in front."""
        with self._lock:
            parts = [np.array([self.requests], np.int64), *(getattr(self, name) for name in self._PARTS)]
            body = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
        return np.concatenate([np.array([zlib.crc32(body.tobytes())], np.uint32).view(np.uint8), body])

    def unpack(self, data: NDArray[np.uint8]) -> bool:
        """Take over what `packed` gave; False, and nothing is changed, when these bytes are anything else."""
        sizes = [8, *(getattr(self, name).nbytes for name in self._PARTS)]
        if data.dtype != np.uint8 or data.shape != (4 + sum(sizes),):
            return False
        body = np.ascontiguousarray(data[4:])
        if zlib.crc32(body.tobytes()) != int(np.ascontiguousarray(data[:4]).view(np.uint32)[0]):
            return False
        first, *parts = np.split(body, np.cumsum(sizes)[:-1])
        self.requests = int(first.view(np.int64)[0])
        for name, part in zip(self._PARTS, parts, strict=True):
            array = getattr(self, name)
            array[...] = part.view(array.dtype).reshape(array.shape)
        return True

    def row(self, number: int) -> Row:
        """Row of the mixture's source table; its arrays are never replaced."""
        return source_row(
            source_table.PHRASES,
            number,
            {source_table.RECYCLING_SETS: self.sets, source_table.RECYCLING_ENTRIES: self.entries},
            {source_table.RECYCLING_CAPACITY: CAPACITY, source_table.RECYCLING_K: CONTINUATIONS},
        )


def _number_of(key: str) -> np.uint64:
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little")) | _KEYED
