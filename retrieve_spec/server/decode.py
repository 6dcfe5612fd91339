"""The work on one job: a prompt is read by pieces, decoded by passes, and cut where it must stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import numpy as np

from retrieve_spec.server.backend import Backend, DraftHints, Text
from retrieve_spec.server.jobs import Completion, Delta, Job
from retrieve_spec.server.samplers import Sampling
from retrieve_spec.server.slots import Slot, SlotPool
from retrieve_spec.server.stopping import StopScanner
from retrieve_spec.server.text import TextCodec


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
