"""The work on one job: a prompt is read in chunks, decoded by passes, and cut where it must stop."""

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
        limit = job.task.deadline_s
        self.deadline = None if limit is None else job.submitted + limit

    def run(self) -> Completion:
        """Do the work; what it comes to."""
        begun = monotonic()
        prompt = self.task.prompt_ids
        slot, cached = self.pool.take(prompt, reuse=self.task.reuse)
        self.done.setup_s = monotonic() - begun
        begun += self.done.setup_s
        self.done.cached_tokens = cached
        if self._prefill(slot, cached):
            if self.task.warm:
                self.task.hints()  # the drafter's memory reads the new chunks now, not with the next keystroke
                self.done.stop_type = "limit"
                self.done.prompt_s = monotonic() - begun
            else:
                self._decode(slot, begun)
        if self.job.cancel.is_set():
            self.done.outcome = "superseded" if self.job.superseded else "cancelled"
        return self.done

    def _expired(self) -> bool:
        if self.deadline is not None and monotonic() > self.deadline:
            self.done.deadline_hit = True
        return self.done.deadline_hit

    def _prefill(self, slot: Slot, cached: int) -> bool:
        """Read all of the prompt but the last chunk, which decoding reads itself; False when there is no use."""
        prompt = self.task.prompt_ids
        last = 1 if self.task.warm else self.chunk
        at = cached
        while len(prompt) - at > last:
            if self.job.cancel.is_set() or self._expired():
                self.done.stop_type = "limit"
                return False
            step = min(self.chunk, len(prompt) - at - 1)
            self.backend.prefill(slot.cache, prompt[at : at + step])
            at += step
            self.pool.settle(slot, prompt[:at])
        return not self.job.cancel.is_set()

    def _decode(self, slot: Slot, begun: float) -> None:
        task, prompt = self.task, self.task.prompt_ids
        room = self.backend.n_ctx - len(prompt)
        wanted = room if task.rules.max_tokens < 0 else min(task.rules.max_tokens, room)
        scanner = StopScanner(self.codec, task.rules)
        looked = monotonic()
        hints = task.hints() if task.drafting else DraftHints(enabled=False)
        self.done.setup_s += monotonic() - looked
        begun += monotonic() - looked
        emitted: list[int] = []
        started = None
        runs = self.backend.decode(
            slot.cache,
            prompt,
            max_tokens=wanted,
            end_ids=task.rules.end_ids,
            sampling=task.sampling,
            hints=hints,
            branches=task.alternatives > 0,
        )
        try:
            for token_ids in runs:
                if started is None:
                    started = monotonic()
                    self.done.prompt_s = started - begun
                emitted += token_ids
                if not self._accept(scanner, token_ids):
                    break
        finally:
            runs.close()  # type: ignore[attr-defined]
            self.pool.settle(slot, [*prompt, *emitted])
        scanner.finish()
        self._conclude(scanner, started or monotonic())
        if task.alternatives and not (self.job.cancel.is_set() or self.done.deadline_hit):
            alternatives = Alternatives(
                self.backend, self.codec, self.pool, task, lambda: self.job.cancel.is_set() or self._expired()
            )
            self.done.alternatives = alternatives.of(slot, self.done, emitted)

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

    def _conclude(self, scanner: StopScanner, started: float) -> None:
        rest = scanner.remaining()
        if rest and not self.job.cancel.is_set():
            self.publish(self.job, Delta(rest, ()))
        done = self.done
        done.text, done.token_ids = scanner.text, scanner.token_ids
        done.stop_type = scanner.stop_type if scanner.stopped else "limit"
        done.stopping_word = scanner.stopping_word
        done.predict_s = monotonic() - started
        done.figures = self.backend.figures()
