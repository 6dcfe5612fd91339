"""Phrases that several requests share: counts of what follows one or two tokens, as a bounded table."""

from __future__ import annotations

import hashlib
import threading
import zlib

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError, StoreVersionError
from retrieve_spec.kernels import phrases as kernels
from retrieve_spec.kernels.recycling import WAYS
from retrieve_spec.kernels.source_table import KIND_PHRASES
from retrieve_spec.sources.rows import Row, on_large_pages, source_row
from retrieve_spec.sources.session import loop_start

CAPACITY, CONTINUATIONS, SEEN = 1 << 14, 16, 1 << 16
"""The most contexts, continuations of each, and fingerprints of phrases that only one requester had."""
_FORMAT = 2
"""Version of the bytes of `PhraseMemory.packed`."""
_WHOLE = "phrases as they were written"
_REMEDY = "Delete the file; they are learned again."
_KEYED = np.uint64(1 << 63)
"""Marks named requesters; requests are numbered from one."""


class PhraseMemory:
    """Tokens that follow one or two tokens in texts of different requests, with counts.

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

    def __init__(self) -> None:
        self.sets: NDArray[np.uint64] = on_large_pages(2 * CAPACITY, np.uint64)
        size = 2 * CONTINUATIONS * CAPACITY
        self.entries: NDArray[np.int32] = on_large_pages(size, np.int32).reshape(CAPACITY, 2 * CONTINUATIONS)
        self.seen: NDArray[np.uint64] = np.zeros((SEEN, 2), np.uint64)
        self.requests = 0
        self._lock = threading.Lock()  # drafters of other threads may learn, too

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
            for array in (self.sets, self.entries, self.seen):
                array[...] = 0
            self.requests = 0

    def learn(self, text: NDArray[np.int32], requester_id: str | None = None) -> None:
        """Count the phrases of a request's text.

        Parameters
        ----------
        text
            (n,) int32 generated tokens; `retrieve_spec.kernels.phrases.BOUNDARY` where other text stood between them.
        requester_id
            Who asked. Texts of one requester alone make nothing known; None: this request has one of its own.
        """
        text = np.ascontiguousarray(text[: loop_start(text)])
        with self._lock:
            self.requests += 1
            requester = np.uint64(self.requests) if requester_id is None else _number_of(requester_id)
            kernels.learn(self.sets, self.tokens, self.probs, self.seen, text, requester, self.requests)

    def packed(self) -> NDArray[np.uint8]:
        """Return the shared phrases as bytes (n,), after a version and a checksum.

        Fingerprints of what one requester alone was given are left out: two token ids can be found by trying all pairs.
        """
        with self._lock:
            body = np.concatenate([part.reshape(-1).view(np.uint8) for part in (self.sets, self.entries)])
        return np.concatenate([np.array([_FORMAT, zlib.crc32(body.tobytes())], np.uint32).view(np.uint8), body])

    def unpack(self, data: NDArray[np.uint8]) -> None:
        """Load what `packed` returned.

        Raises
        ------
        StoreVersionError, StoreCorruptError
            When these bytes are anything else; nothing is changed then.
        """
        size = 8 + self.sets.nbytes + self.entries.nbytes
        if data.dtype != np.uint8 or data.ndim != 1 or len(data) < 8:
            raise StoreCorruptError(_WHOLE, f"{data.dtype} of shape {data.shape}", _REMEDY)
        version, checksum = np.ascontiguousarray(data[:8]).view(np.uint32).tolist()
        if version != _FORMAT:
            raise StoreVersionError(f"phrases of format {_FORMAT}", f"format {version}", _REMEDY)
        body = np.ascontiguousarray(data[8:])
        if len(data) != size or zlib.crc32(body.tobytes()) != checksum:
            raise StoreCorruptError(_WHOLE, f"{len(data)} of {size} bytes, or altered ones", _REMEDY)
        sets, entries = body[: self.sets.nbytes], body[self.sets.nbytes :]
        with self._lock:
            self.sets[...] = sets.view(self.sets.dtype)
            self.entries[...] = entries.view(self.entries.dtype).reshape(self.entries.shape)
            self.seen[...] = 0
            self.requests = int((self.sets.reshape(-1, 2, WAYS)[:, 1] >> np.uint64(32)).max())

    def row(self, number: int) -> Row:
        """Return the row of the mixture's source table; its arrays are never replaced."""
        return source_row(
            KIND_PHRASES, number, "recycling", sets=self.sets, entries=self.entries, capacity=CAPACITY, k=CONTINUATIONS
        )


def _number_of(requester_id: str) -> np.uint64:
    digest = hashlib.blake2b(requester_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little")) | _KEYED
