"""The work on one job: a prompt is read by pieces, decoded by passes, and cut where it must stop.

It says which text of the model is to take part in the next pass, and goes on when that is over. Between any two passes
it can be left aside, so that somebody at a cursor need not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from time import monotonic

import numpy as np

from retrieve_spec.config import FEW_ROOTS
from retrieve_spec.server.backend import Backend, DraftHints, Text
from retrieve_spec.server.jobs import Completion, Delta, Job
from retrieve_spec.server.slots import Slot, SlotPool
from retrieve_spec.server.stopping import StopScanner
from retrieve_spec.server.text import TextCodec


class Decode:
    """Reads a prompt by a ``piece`` in a pass, decodes, and looks after every pass for reasons to stop.

    What becomes visible is published.

    Attributes
    ----------
    done
        What the work has come to so far.
    text
        What is to take part in the next pass; None where the work needs no pass of the model's engine.
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        pool: SlotPool,
        job: Job,
        piece: int,
        publish: Callable[[Job, Delta], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.backend, self.codec, self.pool, self.publish = backend, codec, pool, publish
        self.job, self.task = job, job.task
        self.done = Completion(prompt_tokens=len(job.task.prompt_ids), waited_s=job.waited)
        self.text: Text | None = None
        self._piece = piece
        self._slot: Slot | None = None
        self._scanner = StopScanner(codec, job.task.rules, clock)
        self._clock = clock
        self._worked, self._noted_at = 0.0, clock()
        self._is_said = False
        self._told = 0  # tokens that were published
        self._steps = self._all_steps()

    @property
    def is_reading(self) -> bool:
        """Whether more of the prompt is still to be read than one pass reads with the first draft behind it."""
        return self.task.warm or (self.text is not None and self.text.unread > FEW_ROOTS)

    def proceed(self) -> bool:
        """Begin, or go on after a pass; whether the task is done, and who waits may be told before it is closed."""
        self._worked += self._since()
        try:
            self.text = next(self._steps)
        except StopIteration:
            self.close()
        else:
            if not self._is_said:
                return False
        if self.job.cancel.is_set():
            self.done.outcome = "superseded" if self.job.superseded else "cancelled"
        return True

    def wait(self) -> None:
        """Note that others had the pass."""
        self.done.waited_s += self._since()

    def _since(self) -> float:
        """Seconds since the last that were noted."""
        before, self._noted_at = self._noted_at, self._clock()
        return self._noted_at - before

    def close(self) -> None:
        """End the work, however far it is, and give the cache back."""
        self.text = None
        try:
            self._steps.close()
        finally:
            slot, self._slot = self._slot, None
            if slot is not None:
                if self.job.forgotten:
                    self.pool.drop(slot)
                self.pool.release(slot)

    def drop(self) -> None:
        """The same, and forget the cache: nobody knows what it holds after a failure."""
        if self._slot is not None:
            self.pool.drop(self._slot)
        self.close()

    def _all_steps(self) -> Generator[Text | None, None, None]:
        """Yields what is to take part in the next pass."""
        task = self.task
        size = len(task.prompt_ids) * self.backend.token_bytes
        slot, cached = self.pool.take(task.prompt_ids, task.scope, reuse=task.reuse, size=size)
        self._slot, self.done.cached_tokens = slot, cached
        if task.warm:
            return (yield from self._warm(slot, cached))
        hints = task.hints() if task.drafting else DraftHints(enabled=False)
        if self.job.forgotten:
            hints = replace(hints, session=None)  # it would keep what is said
        if hints.enabled and not hints.prediction:
            hints = replace(hints, prediction=self._said_before(slot))
        text = self.backend.decode(
            slot.cache,
            task.prompt_ids,
            max_tokens=self._most(),
            end_ids=task.rules.end_ids,
            sampling=task.sampling,
            hints=hints,
            piece=self._piece,
        )
        self.done.setup_s = self._since()
        said: list[int] = []
        try:
            yield from self._decode(slot, text, said)
            self._conclude()
            self._is_said = True
            yield None  # who waits is told before the cache is put in order
        finally:
            slot.copied = None
            text.close()
            self.pool.settle(slot, [*task.prompt_ids, *said])

    def _said_before(self, slot: Slot) -> tuple[int, ...]:
        """What was said behind this prompt before, in part perhaps, if it agrees with what has been typed since.

        Where the model is sure it says the same again: it is verified in one pass instead of decoded again.
        """
        tokens = tuple(slot.behind.tolist())
        text, begun = self.codec.decode(tokens), self.task.rules.begun
        return tokens if text.startswith(begun) or begun.startswith(text) else ()

    def _warm(self, slot: Slot, read: int) -> Generator[None, None, None]:
        """Only read the prompt."""
        prompt = self.task.prompt_ids
        self.done.stop_type = "limit"
        while len(prompt) - read > 1 and not (self.job.cancel.is_set() or self._expired()):
            step = min(self._piece, len(prompt) - read - 1)
            self.backend.prefill(slot.cache, prompt[read : read + step])
            read += step
            self.pool.settle(slot, prompt[:read])
            yield
        self.task.hints()  # the drafter's memory reads the new chunks now, not with the next keystroke
        self.done.prompt_s = self._worked

    def _decode(self, slot: Slot, text: Text, said: list[int]) -> Generator[Text, None, None]:
        """Read the prompt and decode until the text ends; all tokens that are decoded are `said`."""
        prompt, done = self.task.prompt_ids, self.done
        while not text.over:
            yield text
            fresh = text.take()
            if fresh and not said:
                done.prompt_s, done.first_s = self._worked, done.waited_s + done.setup_s + self._worked
                slot.token_ids, slot.copied = np.asarray(prompt, np.int64), text.copy_cache
            said += fresh
            slot.size = (len(prompt) + len(said)) * self.backend.token_bytes
            if not self._accept(fresh, text.over):
                break
        done.figures = text.figures
        done.prompt_s = done.prompt_s if said else self._worked
        done.predict_s = self._worked - done.prompt_s

    def _most(self) -> int:
        """Tokens that may be said; of what was begun each says a byte or more."""
        room = self.backend.n_ctx - len(self.task.prompt_ids)
        rules = self.task.rules
        return room if rules.max_tokens < 0 else min(rules.max_tokens + len(rules.begun.encode()), room)

    def _expired(self) -> bool:
        limit = self.task.deadline_s
        if limit is not None and self._worked > limit:
            self.done.deadline_hit = True
        return self.done.deadline_hit

    def _accept(self, token_ids: list[int], is_last: bool) -> bool:
        """Take the tokens of one pass; whether to go on. Those of the last one are published with the end."""
        scanner = self._scanner
        if token_ids:
            scanner.push(token_ids)
        if self.job.cancel.is_set():
            self.done.passes_after_cancel += len(token_ids) > 0
            return False
        if is_last or scanner.stopped or self._expired():
            return False
        self._tell(scanner.visible())
        return True

    def _tell(self, text: str) -> None:
        """Publish further text, and the tokens that were taken since the last."""
        shown = self._scanner.shown_ids
        if text or len(shown) > self._told:
            self.publish(self.job, Delta(text, tuple(shown[self._told :])))
        self._told = len(shown)

    def _conclude(self) -> None:
        scanner = self._scanner
        scanner.finish()
        if not self.job.cancel.is_set():
            self._tell(scanner.remaining())
        done = self.done
        done.text, done.token_ids = scanner.text, scanner.shown_ids
        done.surplus = len(scanner.shown_ids) - scanner.counted
        done.stop_type = scanner.stop_type if scanner.stopped else "limit"
        done.stopping_word = scanner.stopping_word
