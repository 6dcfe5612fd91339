"""One thread that owns the model: turns tasks into streamed completions, newest first for whoever is typing.

The queue is bounded, stale keystrokes are answered as superseded instead of late, identical tasks share one decode,
and cancellation is looked at after every pass, reading the prompt included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic

from retrieve_spec.errors import ServeError
from retrieve_spec.server.backend import Backend
from retrieve_spec.server.decode import Decode
from retrieve_spec.server.jobs import Completion, Delta, Job, Sink, Task, Ticket
from retrieve_spec.server.slots import SlotPool
from retrieve_spec.server.text import TextCodec

log = logging.getLogger("retrieve_spec.server")


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
        key = task.fingerprint()
        with self._changed:
            if self._closed:
                raise ServeError("a running engine", "one that was closed", "Start the server again.")
            twin = self._twin(key)
            if twin is not None:
                sink_job = twin
                if twin.text or twin.token_ids:
                    sink(Delta(twin.text, tuple(twin.token_ids)))
                twin.sinks.append(sink)
            else:
                finished += self._supersede(task)
                if len(self._waiting) >= self._max_queue:
                    finished += self._make_room(task)
                sink_job = Job(task, key, sink, monotonic())
                self._waiting.append(sink_job)
                self._changed.notify_all()
        for job in finished:
            self._finish(job, Completion("superseded", prompt_tokens=len(job.task.prompt_ids)))
        return Ticket(lambda: self._leave(sink_job, sink))

    def _twin(self, key: bytes) -> Job | None:
        for job in [*self._waiting, *([self._running] if self._running else [])]:
            if not job.cancel.is_set() and not job.superseded and job.key == key:
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
            return Decode(self.backend, self.codec, self._pool, job, self._chunk, self.publish).run()
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
