"""Keeps the key-value caches of recent prompts and finds the one a new prompt can continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrieve_spec.server.backend import Backend

_COPY_FROM = 64
"""A shared beginning of at least so many tokens is copied rather than read again."""


@dataclass(slots=True)
class Slot:
    """One cache and the (n,) int64 tokens whose keys and values it holds."""

    cache: Any
    token_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    used: int = 0


def common_prefix(a: ArrayLike, b: ArrayLike) -> int:
    """Length of the longest common prefix of two token sequences."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class SlotPool:
    """A fixed number of caches, reused by longest common prefix.

    Parameters
    ----------
    backend
        Owner of the caches.
    size
        Caches at most.
    """

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend = backend
        self._size = size
        self._slots: list[Slot] = []
        self._ticks = 0

    def take(self, prompt_ids: Sequence[int], *, reuse: bool = True) -> tuple[Slot, int]:
        """A cache that holds the beginning of a prompt, and how many tokens of it (at most all but the last)."""
        self._ticks += 1
        prompt = np.asarray(prompt_ids, np.int64)
        best, shared = None, 0
        if reuse:
            for slot in self._slots:
                n = common_prefix(slot.token_ids, prompt)
                if n > shared:
                    best, shared = slot, n
        keep = min(shared, len(prompt) - 1)
        slot, keep = self._prepare(best, keep)
        slot.token_ids = prompt[:keep]
        slot.used = self._ticks
        return slot, keep

    def _prepare(self, best: Slot | None, keep: int) -> tuple[Slot, int]:
        if best is not None and keep > 0:
            continues = 2 * keep >= len(best.token_ids)
            if continues:
                if self._backend.crop(best.cache, keep):
                    return best, keep
                self.drop(best)
            elif keep >= _COPY_FROM:
                copy = self._backend.clone(best.cache)
                if self._backend.crop(copy, keep):
                    return self._fresh(copy), keep
        return self._fresh(self._backend.new_cache()), 0

    def _fresh(self, cache: Any) -> Slot:
        slot = Slot(cache)
        self._slots.append(slot)
        while len(self._slots) > self._size:
            others = [other for other in self._slots if other is not slot]
            self.drop(min(others, key=lambda other: other.used) if others else slot)
        return slot

    def settle(self, slot: Slot, token_ids: Sequence[int]) -> None:
        """Record what a cache holds after it was worked on: a prefix of these tokens, as long as the cache is."""
        length = self._backend.cache_length(slot.cache)
        if length > len(token_ids) and not self._backend.crop(slot.cache, len(token_ids)):
            self.drop(slot)
            return
        slot.token_ids = np.asarray(token_ids[:length], np.int64)

    def drop(self, slot: Slot) -> None:
        """Forget a cache."""
        self._slots = [other for other in self._slots if other is not slot]

    def clear(self) -> None:
        """Forget all caches."""
        self._slots = []
