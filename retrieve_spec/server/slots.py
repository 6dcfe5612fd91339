"""Slots: the key-value caches of recent prompts, and the one that a new prompt can continue.

A cache serves the scope that filled it and no other: how much of a prompt is cached would tell what somebody else sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrieve_spec.server.backend import Backend

COPY_FROM = 64
"""A shared beginning of at least so many tokens is copied rather than read again."""


@dataclass(slots=True, eq=False)
class Slot:
    """One cache, the (n,) int64 tokens whose keys and values it holds, and whose they are.

    While a slot is `held` by a task under way nobody else works on it, and what it holds may only be `copied`, if at
    all; one that was `dropped` is not kept any longer than that. What the cache held `behind` the prompt that it was
    taken for was said there before, or stood there.
    """

    cache: Any
    scope: str = ""
    token_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    used: int = 0
    size: int = 0
    held: bool = True
    dropped: bool = False
    copied: Callable[[], Any] | None = None
    behind: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def common_prefix(a: ArrayLike, b: ArrayLike) -> int:
    """Length of the longest common prefix of two token sequences."""
    a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


class SlotPool:
    """A fixed number of caches besides those that are worked on, reused by longest common prefix."""

    def __init__(self, backend: Backend, size: int, most_bytes: int = 2 << 30) -> None:
        self._backend = backend
        self._size, self._most_bytes = size, most_bytes
        self._slots: list[Slot] = []
        self._ticks = 0

    def take(
        self, prompt_ids: Sequence[int], scope: str = "", *, reuse: bool = True, size: int = 0
    ) -> tuple[Slot, int]:
        """Hold a cache with the beginning of a prompt in it; how many tokens of it (at most all but the last).

        It will take ``size`` bytes.
        """
        self._ticks += 1
        prompt = np.asarray(prompt_ids, np.int64)
        best, shared = None, 0
        if reuse:
            for slot in self._slots:
                usable = slot.scope == scope and not slot.dropped and (slot.copied is not None or not slot.held)
                n = common_prefix(slot.token_ids, prompt) if usable else 0
                if n > shared or (n == shared and best is not None and best.held):
                    best, shared = slot, n
        keep = min(shared, len(prompt) - 1)
        behind = best.token_ids[len(prompt) :] if best is not None and shared == len(prompt) else prompt[:0]
        slot, keep = self._prepare(best, keep, scope)
        slot.token_ids, slot.behind = prompt[:keep], behind
        slot.used, slot.held, slot.size = self._ticks, True, max(slot.size, size)
        self._shrink()
        return slot, keep

    def _prepare(self, best: Slot | None, keep: int, scope: str) -> tuple[Slot, int]:
        if best is not None and keep > 0:
            continues = 2 * keep >= len(best.token_ids) and not best.held
            if continues:
                if self._backend.crop(best.cache, keep):
                    return best, keep
                self.drop(best)
            elif keep >= COPY_FROM:
                copy = self._copy(best)
                if copy is not None and self._backend.crop(copy, keep):
                    return self._fresh(copy, scope), keep
        return self._fresh(self._backend.new_cache(), scope), 0

    def _copy(self, slot: Slot) -> Any:
        """A copy of what a slot holds, or None."""
        if slot.copied is not None:
            return slot.copied()
        return self._backend.clone(slot.cache)

    def _fresh(self, cache: Any, scope: str) -> Slot:
        slot = Slot(cache, scope)
        self._slots.append(slot)
        return slot

    def _shrink(self) -> None:
        """Let go of what is too much: of the scope that keeps most caches the one that was used longest ago."""
        while free := [slot for slot in self._slots if not slot.held]:
            if len(free) <= self._size and sum(slot.size for slot in free) <= self._most_bytes:
                return
            kept = Counter(slot.scope for slot in free)
            most = max(kept.values())
            self.drop(min((slot for slot in free if kept[slot.scope] == most), key=lambda slot: slot.used))

    def settle(self, slot: Slot, token_ids: Sequence[int]) -> None:
        """Record what a cache holds after it was worked on: a prefix of these tokens, as long as the cache is."""
        length = self._backend.cache_length(slot.cache)
        if length > len(token_ids) and not self._backend.crop(slot.cache, len(token_ids)):
            self.drop(slot)
            return
        slot.token_ids = np.asarray(token_ids[:length], np.int64)
        slot.size = self._backend.cache_bytes(slot.cache)

    @property
    def held_bytes(self) -> int:
        """Bytes of the caches that are worked on, as they were when that began or as they will be."""
        return sum(slot.size for slot in self._slots if slot.held)

    def release(self, slot: Slot) -> None:
        """Give a cache back that was taken."""
        slot.held, slot.copied = False, None
        if slot.dropped:
            self._slots = [other for other in self._slots if other is not slot]
        self._shrink()

    def drop(self, slot: Slot) -> None:
        """Forget a cache, at the latest when it is given back."""
        slot.dropped = True
        slot.token_ids = slot.token_ids[:0]
        if not slot.held:
            self._slots = [other for other in self._slots if other is not slot]

    def forget(self, scope: str) -> int:
        """Forget all caches of a scope; how many there were."""
        mine = [slot for slot in self._slots if slot.scope == scope and not slot.dropped]
        for slot in mine:
            self.drop(slot)
        return len(mine)

    def count(self, scope: str) -> int:
        """Caches kept of a scope."""
        return sum(slot.scope == scope and not slot.dropped for slot in self._slots)

    def clear(self) -> None:
        """Forget all caches."""
        for slot in list(self._slots):
            self.drop(slot)
