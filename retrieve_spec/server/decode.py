"""The work on one job: a prompt is read in chunks, decoded by passes, and cut where it must stop.

Between any two passes it can be left, so that somebody at a cursor need not wait, and gone on with later: what was said
so far is then the end of a longer prompt whose keys and values are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from retrieve_spec.server.alternatives import Alternatives
from retrieve_spec.server.backend import Backend, DraftHints
from retrieve_spec.server.jobs import Completion, Delta, Job
from retrieve_spec.server.slots import Slot, SlotPool
from retrieve_spec.server.stopping import StopScanner
from retrieve_spec.server.text import TextCodec


class Decode:
    """Reads a prompt, decodes, and looks for reasons to stop after every pass.

    Parameters
    ----------
    backend
        The model.
    codec
        Its text codec.
    pool
        The caches.
    job
        What is asked for.
    prefill_chunk
        Tokens read per pass while the prompt is prefilled.
    publish
        Called with what became visible.

    Attributes
    ----------
    done
        What the work has come to so far.
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        pool: SlotPool,
        job: Job,
        prefill_chunk: int,
        publish: Callable[[Job, Delta], None],
    ) -> None:
        self.backend, self.codec, self.pool, self.chunk, self.publish = backend, codec, pool, prefill_chunk, publish
        self.job, self.task = job, job.task
        self.done = Completion(prompt_tokens=len(job.task.prompt_ids))
        self._slot: Slot | None = None
        self._read = 0
        self._scanner = StopScanner(codec, job.task.rules)
        self._hints: DraftHints | None = None
        self._emitted: list[int] = []
        self._worked = 0.0
        self._resumed = 0.0
        self._turns = 0

    def run(self, give_way: Callable[[], bool]) -> bool:
        """Work until the task is done or, after a pass, has to give way; whether it is done."""
        self._resumed = monotonic()
        self._turns += 1
        try:
            finished = self._work(give_way)
        finally:
            self._worked += monotonic() - self._resumed
        if finished:
            self.close()
            if self.job.cancel.is_set():
                self.done.outcome = "superseded" if self.job.superseded else "cancelled"
        return finished

    def close(self) -> None:
        """Give the cache back."""
        if self._slot is not None:
            self.pool.release(self._slot)
            self._slot = None

    def drop(self) -> None:
        """Forget the cache: nobody knows what it holds after a failure."""
        if self._slot is not None:
            self.pool.drop(self._slot)
        self.close()

    def _work(self, give_way: Callable[[], bool]) -> bool:
        if self._slot is None:
            begun = monotonic()
            self._slot, self._read = self.pool.take(self.task.prompt_ids, self.task.scope, reuse=self.task.reuse)
            self.done.cached_tokens = self._read
            self.done.setup_s = monotonic() - begun
        if not self._prefill(self._slot, give_way):
            return False
        if self.job.cancel.is_set() or self._expired():
            self.done.stop_type = "limit"
            self._conclude()
            return True
        if self.task.warm:
            self.task.hints()  # the drafter's memory reads the new chunks now, not with the next keystroke
            self.done.stop_type = "limit"
            return True
        return self._decode(self._slot, give_way)

    def _expired(self) -> bool:
        limit = self.task.deadline_s
        if limit is not None and self._worked + monotonic() - self._resumed > limit:
            self.done.deadline_hit = True
        return self.done.deadline_hit

    def _prefill(self, slot: Slot, give_way: Callable[[], bool]) -> bool:
        """Read all of the prompt but the last chunk, which decoding reads itself; False when it has to give way."""
        prompt, begun = self.task.prompt_ids, monotonic()
        last = 1 if self.task.warm else self.chunk
        while len(prompt) - self._read > last and not (self.job.cancel.is_set() or self._expired()):
            step = min(self.chunk, len(prompt) - self._read - 1)
            self.backend.prefill(slot.cache, prompt[self._read : self._read + step])
            self._read += step
            self.pool.settle(slot, prompt[: self._read])
            if give_way():
                self.done.prompt_s += monotonic() - begun
                return False
        self.done.prompt_s += monotonic() - begun
        return True

    def _decode(self, slot: Slot, give_way: Callable[[], bool]) -> bool:
        """Decode until the text ends; False when it has to give way."""
        task, said = self.task, self._emitted
        prompt = [*task.prompt_ids, *said]
        room = self.backend.n_ctx - len(prompt)
        wanted = room if task.rules.max_tokens < 0 else min(task.rules.max_tokens - len(said), room)
        looked = monotonic()
        if self._hints is None:
            self._hints = task.hints() if task.drafting else DraftHints(enabled=False)
            self.done.setup_s += monotonic() - looked
        begun, first, going = monotonic(), not said, True
        runs = self.backend.decode(
            slot.cache,
            prompt,
            max_tokens=wanted,
            end_ids=task.rules.end_ids,
            sampling=task.sampling,
            hints=self._hints.after(said),
            branches=task.alternatives > 0,
        )
        paused = False
        try:
            for token_ids in runs:
                if first and token_ids:
                    self.done.prompt_s += monotonic() - begun
                    begun, first = monotonic(), False
                said += token_ids
                going = self._accept(self._scanner, token_ids)
                if not going:
                    break
                if give_way():
                    paused = True
                    break
        finally:
            runs.close()  # type: ignore[attr-defined]
            self.pool.settle(slot, [*task.prompt_ids, *said])
            self.done.figures += self.backend.figures()
            self.done.predict_s += monotonic() - begun
        if paused and len(said) < self._most():
            return False
        self._conclude()
        self._look_beside(slot)
        return True

    def _most(self) -> int:
        """Tokens that may be said."""
        room = self.backend.n_ctx - len(self.task.prompt_ids)
        most = self.task.rules.max_tokens
        return room if most < 0 else min(most, room)

    def _accept(self, scanner: StopScanner, token_ids: Sequence[int]) -> bool:
        """Take one run of tokens; whether to go on."""
        before = len(scanner.token_ids)
        scanner.push(token_ids)
        if self.job.cancel.is_set():
            self.done.passes_after_cancel += 1
            return False
        fresh = scanner.visible()
        taken = scanner.token_ids[before:]
        if fresh or taken:
            self.publish(self.job, Delta(fresh, tuple(taken)))
        return not (scanner.stopped or self._expired())

    def _conclude(self) -> None:
        scanner = self._scanner
        scanner.finish()
        rest = scanner.remaining()
        if rest and not self.job.cancel.is_set():
            self.publish(self.job, Delta(rest, ()))
        done = self.done
        done.text, done.token_ids = scanner.text, scanner.token_ids
        done.stop_type = scanner.stop_type if scanner.stopped else "limit"
        done.stopping_word = scanner.stopping_word

    def _look_beside(self, slot: Slot) -> None:
        """Other suggestions, where they were asked for and the text was decoded in one go."""
        if not self.task.alternatives or self._turns > 1 or self.job.cancel.is_set() or self.done.deadline_hit:
            return
        alternatives = Alternatives(
            self.backend, self.codec, self.pool, self.task, lambda: self.job.cancel.is_set() or self._expired()
        )
        self.done.alternatives = alternatives.of(slot, self.done, self._emitted)
