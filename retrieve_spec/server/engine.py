"""One thread that owns the model: turns tasks into streamed completions, newest first for whoever is typing.

The queue is bounded, stale keystrokes are answered as superseded instead of late, identical tasks share one decode,
and cancellation is looked at after every pass, reading the prompt included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from time import monotonic

from retrieve_spec.errors import ServeError
from retrieve_spec.server.backend import Backend, DraftHints
from retrieve_spec.server.jobs import Completion, Delta, Job, Sink, Task, Ticket
from retrieve_spec.server.slots import Slot, SlotPool
from retrieve_spec.server.stopping import StopRules, StopScanner
from retrieve_spec.server.text import TextCodec

log = logging.getLogger("retrieve_spec.server")

_ALTERNATIVE_TOKENS = 32
_ALTERNATIVE_P = 0.05


class QueueFullError(ServeError):
    """More tasks wait than the server takes."""


class Engine:
    """Serves tasks one after another on one model.

    Parameters
    ----------
    backend
        The model.
    codec
        Its text codec.
    slots
        Caches kept.
    max_queue
        Tasks that may wait.
    prefill_chunk
        Tokens read per pass while a prompt is prefilled.
    on_done
        Called with every finished task and its completion, in the engine's thread.
    """

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        *,
        slots: int = 4,
        max_queue: int = 32,
        prefill_chunk: int = 512,
        on_done: Callable[[Task, Completion], None] | None = None,
    ) -> None:
        self.backend = backend
        self.codec = codec
        self._pool = SlotPool(backend, slots)
        self._max_queue = max_queue
        self._chunk = prefill_chunk
        self._on_done = on_done
        self._changed = Condition()
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._closed = False
        self._chores: list[Callable[[], None]] = []
        self._thread = Thread(target=self._work, name="retrieve-spec-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Cancel everything and end the thread."""
        with self._changed:
            self._closed = True
            for job in [*self._waiting, *([self._running] if self._running else [])]:
                job.cancel.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def queue_length(self) -> int:
        """Tasks waiting."""
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether a task is being worked on."""
        return self._running is not None

    def run_when_idle(self, chore: Callable[[], None]) -> None:
        """Have the model's thread do something between two tasks (attach a store, say)."""
        with self._changed:
            self._chores.append(chore)
            self._changed.notify_all()

    def submit(self, task: Task, sink: Sink) -> Ticket:
        """Queue a task; what comes of it goes to the sink.

        Raises
        ------
        QueueFullError
            The queue holds as many tasks as it may, none of them replaceable.
        """
        finished: list[Job] = []
        with self._changed:
            if self._closed:
                raise ServeError("a running engine", "one that was closed", "Start the server again.")
            twin = self._twin(task)
            if twin is not None:
                sink_job = twin
                if twin.text or twin.token_ids:
                    sink(Delta(twin.text, tuple(twin.token_ids)))
                twin.sinks.append(sink)
            else:
                finished += self._supersede(task)
                if len(self._waiting) >= self._max_queue:
                    finished += self._make_room(task)
                sink_job = Job(task, sink, monotonic())
                self._waiting.append(sink_job)
                self._changed.notify_all()
        for job in finished:
            self._finish(job, Completion("superseded", prompt_tokens=len(job.task.prompt_ids)))
        return Ticket(lambda: self._leave(sink_job, sink))

    def _twin(self, task: Task) -> Job | None:
        key = task.fingerprint()
        for job in [*self._waiting, *([self._running] if self._running else [])]:
            if not job.cancel.is_set() and not job.superseded and job.task.fingerprint() == key:
                return job
        return None

    def _supersede(self, task: Task) -> list[Job]:
        """Take waiting tasks that the new one replaces out of the queue, and stop a running one."""
        gone = [job for job in self._waiting if job.replaced_by(task)]
        self._waiting = [job for job in self._waiting if job not in gone]
        running = self._running
        if running is not None and (running.replaced_by(task) or (running.task.warm and not task.warm)):
            running.superseded = True
            running.cancel.set()
        return gone

    def _make_room(self, task: Task) -> list[Job]:
        replaceable = [job for job in self._waiting if job.task.warm] + [job for job in self._waiting if job.keystroke]
        if replaceable and not task.warm:
            self._waiting.remove(replaceable[0])
            return replaceable[:1]
        raise QueueFullError(
            f"fewer than {self._max_queue} waiting requests", f"{len(self._waiting)}", "Try again in a moment."
        )

    def _leave(self, job: Job, sink: Sink) -> None:
        gone = False
        with self._changed:
            if sink in job.sinks:
                job.sinks.remove(sink)
            if not job.sinks:
                job.cancel.set()
                gone = job in self._waiting
                if gone:
                    self._waiting.remove(job)
        if gone:
            self._finish(job, Completion("cancelled", prompt_tokens=len(job.task.prompt_ids)))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closed or self._chores):
                    self._changed.wait()
                chores, self._chores = self._chores, []
                job = None
                if self._waiting:
                    job = min(self._waiting, key=lambda waiting: waiting.task.warm)
                    self._waiting.remove(job)
                    self._running = job
            for chore in chores:
                try:
                    chore()
                except Exception:
                    log.exception("a task between requests failed")
            if job is not None:
                self._serve(job)
            elif self._closed:
                return

    def _serve(self, job: Job) -> None:
        waited = monotonic() - job.submitted
        stale = job.task.stale_s is not None and waited > job.task.stale_s
        if job.cancel.is_set() or stale:
            superseded = stale or job.superseded
            done = Completion("superseded" if superseded else "cancelled", prompt_tokens=len(job.task.prompt_ids))
        else:
            done = self._attempt(job)
        done.waited_s = waited
        with self._changed:
            self._running = None
        self._finish(job, done)

    def _attempt(self, job: Job) -> Completion:
        try:
            return _Decode(self, job).run()
        except Exception as error:
            log.exception("a completion failed")
            self._pool.clear()
            return Completion("failed", error=f"{type(error).__name__}: {error}")

    def _finish(self, job: Job, done: Completion) -> None:
        with self._changed:
            sinks, job.sinks = job.sinks, []
            job.cancel.set()
        if self._on_done is not None:
            self._on_done(job.task, done)
        for sink in sinks:
            sink(done)

    def publish(self, job: Job, delta: Delta) -> None:
        """Hand a delta to everyone who waits for a job."""
        with self._changed:
            job.text += delta.text
            job.token_ids.extend(delta.token_ids)
            sinks = list(job.sinks)
            for sink in sinks:
                sink(delta)

    @property
    def pool(self) -> SlotPool:
        """The caches."""
        return self._pool

    @property
    def prefill_chunk(self) -> int:
        """Tokens read per pass while a prompt is prefilled."""
        return self._chunk


class _Decode:
    """The work on one job: read the prompt, decode, look for reasons to stop after every pass."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self.engine, self.job, self.task = engine, job, job.task
        self.backend = engine.backend
        self.done = Completion(prompt_tokens=len(job.task.prompt_ids))
        limit = job.task.deadline_s
        self.deadline = None if limit is None else job.submitted + limit

    def run(self) -> Completion:
        begun = monotonic()
        prompt = self.task.prompt_ids
        slot, cached = self.engine.pool.take(prompt, reuse=self.task.reuse)
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
        last = 1 if self.task.warm else self.engine.prefill_chunk
        at = cached
        while len(prompt) - at > last:
            if self.job.cancel.is_set() or self._expired():
                self.done.stop_type = "limit"
                return False
            step = min(self.engine.prefill_chunk, len(prompt) - at - 1)
            self.backend.prefill(slot.cache, prompt[at : at + step])
            at += step
            self.engine.pool.settle(slot, prompt[:at])
        return not self.job.cancel.is_set()

    def _decode(self, slot: Slot, begun: float) -> None:
        task, prompt = self.task, self.task.prompt_ids
        room = self.backend.n_ctx - len(prompt)
        wanted = room if task.rules.max_tokens < 0 else min(task.rules.max_tokens, room)
        scanner = StopScanner(self.engine.codec, task.rules)
        looked = monotonic()
        hints = task.hints() if task.drafting else DraftHints(enabled=False)
        self.done.setup_s += monotonic() - looked
        begun += monotonic() - looked
        emitted: list[int] = []
        started = None
        runs = self.backend.decode(
            slot.cache, prompt, max_tokens=wanted, end_ids=task.rules.end_ids, sampling=task.sampling, hints=hints
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
            self.engine.pool.settle(slot, [*prompt, *emitted])
        scanner.finish()
        self._conclude(scanner, started or monotonic())
        if task.alternatives and not self.job.cancel.is_set():
            self._alternatives(slot)

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
            self.engine.publish(self.job, Delta(fresh, tuple(taken)))
        return not (scanner.stopped or self._expired())

    def _conclude(self, scanner: StopScanner, started: float) -> None:
        rest = scanner.remaining()
        if rest and not self.job.cancel.is_set():
            self.engine.publish(self.job, Delta(rest, ()))
        done = self.done
        done.text, done.token_ids = scanner.text, scanner.token_ids
        done.stop_type = scanner.stop_type if scanner.stopped else "limit"
        done.stopping_word = scanner.stopping_word
        done.predict_s = monotonic() - started
        done.figures = self.backend.figures()

    def _alternatives(self, slot: Slot) -> None:
        """Continuations of the next likeliest first tokens, to the end of their line, while time is left."""
        prompt, backend = self.task.prompt_ids, self.backend
        if not backend.crop(slot.cache, len(prompt) - 1):
            return
        choices = backend.likely_next(slot.cache, prompt[-1], self.task.alternatives + 1)
        self.engine.pool.settle(slot, prompt)
        first = self.done.token_ids[:1]
        limit = self.task.rules.newline_after_s
        until = monotonic() + (limit if limit is not None else 1.0)
        for token_id, p in choices:
            late = monotonic() > until or self.job.cancel.is_set() or self._expired()
            if late or p < _ALTERNATIVE_P or len(self.done.alternatives) >= self.task.alternatives:
                break
            if [token_id] == first or token_id in self.task.rules.end_ids or not backend.crop(slot.cache, len(prompt)):
                continue
            text = self._branch(slot, token_id)
            if text.strip() and text != self.done.text:
                self.done.alternatives.append(text)

    def _branch(self, slot: Slot, token_id: int) -> str:
        asked = self.task.rules
        length = _ALTERNATIVE_TOKENS if asked.max_tokens < 0 else min(_ALTERNATIVE_TOKENS, asked.max_tokens)
        rules = StopRules(length, asked.end_ids, asked.words, asked.min_indent, newline_after_s=-1.0)
        scanner = StopScanner(self.engine.codec, rules)
        scanner.push([token_id])
        prompt = [*self.task.prompt_ids, token_id]
        emitted: list[int] = []
        if not scanner.stopped and len(prompt) < self.backend.n_ctx:
            runs = self.backend.decode(
                slot.cache,
                prompt,
                max_tokens=min(rules.max_tokens, self.backend.n_ctx - len(prompt)),
                end_ids=rules.end_ids,
                sampling=self.task.sampling,
                hints=DraftHints(enabled=self.task.drafting),
            )
            for token_ids in runs:
                emitted += token_ids
                scanner.push(token_ids)
                if scanner.stopped or self.job.cancel.is_set():
                    break
            runs.close()  # type: ignore[attr-defined]
        self.engine.pool.settle(slot, [*prompt, *emitted])
        scanner.finish()
        return scanner.text
