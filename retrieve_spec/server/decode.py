"""The work on one job: a cache that a prompt continues is taken, passes decode, and the text is cut where it must stop.

A cache serves the scope that filled it and no other: how much of a prompt is cached would tell what somebody else sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrieve_spec.server.jobs import Completion, Delta, DraftHints, Job
from retrieve_spec.server.sampling import Sampling
from retrieve_spec.server.text import StopScanner, TextCodec

if TYPE_CHECKING:
    from retrieve_spec.server.backend import Backend, Text

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


class Decode:
    """One job under way: looks after every pass for reasons to stop, and publishes what became visible.

    Attributes
    ----------
    done
        What the work has come to so far.
    text
        What takes part in passes, once it has started.
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        pool: SlotPool,
        job: Job,
        publish: Callable[[Job, Delta], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.job, self.task = job, job.task
        self.done = Completion(prompt_tokens=len(job.task.prompt_ids), waited_s=job.waited)
        self.text: Text | None = None
        self._slot: Slot | None = None
        self._backend, self._codec, self._pool, self._publish, self._clock = backend, codec, pool, publish, clock
        self._scanner = StopScanner(codec, job.task.rules, clock)
        self._said: list[int] = []
        self._worked, self._noted_at = 0.0, clock()
        self._told = 0  # tokens that were published

    def start(self) -> None:
        """Take a cache, and look up what to draft from."""
        task = self.task
        size = len(task.prompt_ids) * self._backend.token_bytes
        slot, cached = self._pool.take(task.prompt_ids, task.scope, reuse=task.reuse, size=size)
        self._slot, self.done.cached_tokens = slot, cached
        self.text = self._backend.decode(
            slot.cache,
            task.prompt_ids,
            max_tokens=self._most(),
            end_ids=task.rules.end_ids,
            sampling=Sampling() if task.warm else task.sampling,
            hints=self._hints(slot),
        )
        self.done.setup_s = self._since()

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are still to be read."""
        return len(self.task.prompt_ids) if self.text is None else self.text.unread

    def _hints(self, slot: Slot) -> DraftHints:
        """What to draft from; what was said behind this prompt before, if nothing else is expected there."""
        hints = self.task.hints()  # also where only the prompt is read: the drafter's memory reads the new chunks now
        if self.task.warm or not self.task.drafting:
            return DraftHints(enabled=False, scope=self.task.scope)
        if self.job.forgotten:
            hints = replace(hints, session=None)  # it would keep what is said
        return hints if hints.prediction else replace(hints, prediction=self._said_before(slot))

    def _said_before(self, slot: Slot) -> tuple[int, ...]:
        """What was said behind this prompt before, in part perhaps, if it agrees with what has been typed since.

        Where the model is sure it says the same again: it is verified in one pass instead of decoded again.
        """
        tokens = tuple(slot.behind.tolist())
        text, begun = self._codec.decode(tokens), self.task.rules.begun
        return tokens if text.startswith(begun) or begun.startswith(text) else ()

    def _most(self) -> int:
        """Tokens that may be said; of what was begun each says a byte or more."""
        if self.task.warm:
            return 1
        room = self._backend.n_ctx - len(self.task.prompt_ids)
        rules = self.task.rules
        return room if rules.max_tokens < 0 else min(rules.max_tokens + len(rules.begun.encode()), room)

    def wait(self) -> None:
        """Note that others had the pass."""
        self.done.waited_s += self._since()

    def _since(self) -> float:
        """Seconds since the last that were noted."""
        before, self._noted_at = self._noted_at, self._clock()
        return self._noted_at - before

    def proceed(self) -> bool:
        """Take what a pass brought; whether the task is done, and who waits may be told before it is closed."""
        text, slot, prompt, done = self.text, self._slot, self.task.prompt_ids, self.done
        assert text is not None
        assert slot is not None
        self._worked += self._since()
        fresh = text.take()
        if fresh and not self._said:
            done.prompt_s, done.first_s = self._worked, done.waited_s + done.setup_s + self._worked
            slot.token_ids, slot.copied = np.asarray(prompt, np.int64), text.copy_cache
        self._said += fresh
        slot.size = (len(prompt) + len(self._said)) * self._backend.token_bytes
        if self._goes_on(fresh, text.over):
            return False
        done.figures = text.figures
        done.prompt_s = done.prompt_s if self._said else self._worked
        done.predict_s = self._worked - done.prompt_s
        self._conclude()
        return True

    def _goes_on(self, fresh: list[int], is_over: bool) -> bool:
        """Whether there is more to do after a pass; the tokens of the last one are published with the end."""
        scanner, cancelled = self._scanner, self.job.cancel.is_set()
        if fresh and not self.task.warm:
            scanner.push(fresh)
        if cancelled:
            self.done.passes_after_cancel += len(fresh) > 0
            return False
        if is_over or scanner.stopped:
            return False
        self.done.deadline_hit = self.task.deadline_s is not None and self._worked > self.task.deadline_s
        if self.done.deadline_hit:
            return False
        self._tell(scanner.visible())
        return True

    def _tell(self, text: str) -> None:
        """Publish further text, and the tokens that were taken since the last."""
        shown = self._scanner.shown_ids
        if text or len(shown) > self._told:
            self._publish(self.job, Delta(text, tuple(shown[self._told :])))
        self._told = len(shown)

    def _conclude(self) -> None:
        scanner, done = self._scanner, self.done
        scanner.finish()
        if self.job.cancel.is_set():
            done.outcome = "superseded" if self.job.superseded else "cancelled"
        else:
            self._tell(scanner.remaining())
        done.text, done.token_ids = scanner.text, scanner.shown_ids
        done.surplus = len(scanner.shown_ids) - scanner.counted
        done.stop_type = scanner.stop_type if scanner.stopped else "limit"
        done.stopping_word = scanner.stopping_word

    def close(self, *, keep: bool = True) -> None:
        """End the text, however far it is, and give the cache back; after a failure nobody knows what it holds."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        try:
            slot.copied = None
            if self.text is not None:
                self.text.close()
                self._pool.settle(slot, [*self.task.prompt_ids, *([] if self.task.warm else self._said)])
        finally:
            if self.job.forgotten or not keep:
                self._pool.drop(slot)
            self._pool.release(slot)
