"""One thread that owns the model: turns tasks into streamed completions, those at somebody's cursor before all others.

Work is done in turns of whole passes. After every pass a task gives way to one that comes before it, and after a while
to another of its kind: text at a cursor never waits for a chat, and chats go on beside one another. The queue is
bounded, stale keystrokes are answered as superseded instead of late, identical tasks of one scope share one decode, and
cancellation is looked at after every pass, reading the prompt included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Event, Thread
from time import monotonic

from retrieve_spec.errors import ServeError
from retrieve_spec.server.backend import Backend
from retrieve_spec.server.decode import Decode
from retrieve_spec.server.jobs import Completion, Delta, Job, Sink, Task, Ticket, Waiter
from retrieve_spec.server.slots import SlotPool
from retrieve_spec.server.text import TextCodec

log = logging.getLogger("retrieve_spec.server")

_TURN_S = 0.5
"""How long a task works before another of its kind has its turn."""
_CHORE_S = 10.0


class QueueFullError(ServeError):
    """More tasks wait than the server takes."""


class Engine:
    """Serves tasks by turns on one model.

    Parameters
    ----------
    backend
        The model.
    codec
        Its text codec.
    slots
        Caches kept besides those of tasks under way.
    cache_bytes
        Bytes they may take.
    max_queue
        Tasks that may wait.
    max_begun
        Tasks of one kind that may be under way beside one another.
    share
        Tasks of one scope that may wait.
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
        cache_bytes: int = 2 << 30,
        max_queue: int = 32,
        max_begun: int = 4,
        share: int | None = None,
        prefill_chunk: int = 512,
        on_done: Callable[[Task, Completion], None] | None = None,
    ) -> None:
        self.backend = backend
        self.codec = codec
        self._pool = SlotPool(backend, slots, cache_bytes)
        self._max_queue, self._max_begun = max_queue, max_begun
        self._share = max_queue if share is None else share
        self._chunk = prefill_chunk
        self._on_done = on_done
        self._changed = Condition()
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._turns = 0
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
            for job in self._jobs():
                job.cancel.set()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def queue_length(self) -> int:
        """Tasks that wait for their first pass."""
        return sum(job.begun is None for job in list(self._waiting))

    @property
    def begun(self) -> int:
        """Tasks under way."""
        return sum(job is not self._running for job in list(self._waiting) if job.begun) + (self._running is not None)

    @property
    def busy(self) -> bool:
        """Whether a task is being worked on."""
        return self._running is not None

    def run_when_idle(self, chore: Callable[[], None]) -> None:
        """Have the model's thread do something between two passes (attach a store, say)."""
        with self._changed:
            self._chores.append(chore)
            self._changed.notify_all()

    def forget(self, scope: str) -> int:
        """Forget all caches of a scope, and what was learned from its text; how many caches there were."""
        count, done = 0, Event()

        def chore() -> None:
            nonlocal count
            count = self._pool.forget(scope)
            self.backend.forget(scope)
            done.set()

        if not self._thread.is_alive():
            chore()
        else:
            self.run_when_idle(chore)
            done.wait(_CHORE_S)
        return count

    def caches(self, scope: str) -> int:
        """Caches kept of a scope."""
        return self._pool.count(scope)

    def submit(self, task: Task, sink: Sink) -> Ticket:
        """Queue a task; what comes of it goes to the sink.

        Raises
        ------
        QueueFullError
            The queue holds as many tasks as it may, none of them replaceable.
        """
        gone: list[Waiter] = []
        key = task.fingerprint()
        with self._changed:
            if self._closed:
                raise ServeError("a running engine", "one that was closed", "Start the server again.")
            job = self._twin(key)
            if job is None and self._overtaken(task):
                sink(Completion("superseded", prompt_tokens=len(task.prompt_ids)))
                return Ticket(lambda: None)
            if job is not None:
                if job.text or job.token_ids:
                    sink(Delta(job.text, tuple(job.token_ids)))
                waiter = Waiter(task, sink)
                job.waiters.append(waiter)
                gone += self._supersede(task, besides=job)
            else:
                gone += self._supersede(task)
                gone += self._make_room(task)
                job = Job(task, key, sink, monotonic())
                waiter = job.waiters[0]
                self._queue(job)
        for other in gone:
            self._tell(other, Completion("superseded", prompt_tokens=len(other.task.prompt_ids)))
        return Ticket(lambda: self._leave(job, waiter))

    def _jobs(self) -> list[Job]:
        return [*self._waiting, *([self._running] if self._running else [])]

    def _queue(self, job: Job) -> None:
        self._turns += 1
        job.turn = self._turns
        self._waiting.append(job)
        self._changed.notify_all()

    def _twin(self, key: bytes) -> Job | None:
        for job in self._jobs():
            if not job.cancel.is_set() and not job.superseded and job.key == key:
                return job
        return None

    def _overtaken(self, task: Task) -> bool:
        """Whether a request that came later replaces this one: large ones take longer to read."""
        waiters = (waiter for job in self._jobs() for waiter in job.waiters)
        return any(task.replaced_by(w.task) and w.task.arrived > task.arrived for w in waiters)

    def _supersede(self, task: Task, besides: Job | None = None) -> list[Waiter]:
        """Whoever waits for what the new task replaces, taken out; a job that nobody waits for any more ends.

        The last one who waits for a job under way is told by the job itself, after the pass it is in.
        """
        gone: list[Waiter] = []
        for job in self._jobs():
            replaced = [] if job is besides else [w for w in job.waiters if w.task.replaced_by(task)]
            if job.task.warm and not task.warm and job.begun:
                replaced = list(job.waiters)
            if replaced and len(replaced) == len(job.waiters):
                job.superseded = True
                job.cancel.set()
                if job.begun or job is self._running:
                    continue
                self._waiting.remove(job)
            for waiter in replaced:
                job.waiters.remove(waiter)
            gone += replaced
        return gone

    def _make_room(self, task: Task) -> list[Waiter]:
        """Take a waiting task out where the queue is full: one that only reads ahead, or an older one of the client."""
        unbegun = [job for job in self._waiting if job.begun is None]
        mine = [job for job in unbegun if job.task.scope == task.scope]
        full = len(unbegun) >= self._max_queue
        if not full and len(mine) < self._share:
            return []
        candidates = [] if task.warm else [job for job in (unbegun if full else mine) if job.task.warm]
        if task.client is not None:
            candidates += [job for job in mine if {w.task.client for w in job.waiters} == {task.client}]
        if not candidates:
            raise QueueFullError(
                f"fewer than {self._max_queue if full else self._share} waiting requests",
                f"{len(unbegun if full else mine)}",
                "Try again in a moment.",
            )
        self._waiting.remove(candidates[0])
        candidates[0].cancel.set()
        return candidates[0].waiters

    def _leave(self, job: Job, waiter: Waiter) -> None:
        gone = False
        with self._changed:
            if waiter not in job.waiters:
                return
            if len(job.waiters) == 1:
                job.cancel.set()
                gone = job in self._waiting and job.begun is None
                if gone:
                    self._waiting.remove(job)
            job.waiters.remove(waiter)
        if gone:
            self._count(job.task, Completion("cancelled", prompt_tokens=len(job.task.prompt_ids)))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closed or self._chores):
                    self._changed.wait()
                chores, self._chores = self._chores, []
                job = self._next()
                if job is not None:
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

    def _next(self) -> Job | None:
        """Whose turn it is."""
        ready = [job for job in self._waiting if self._may_work(job)]
        return min(ready, key=lambda job: (not job.cancel.is_set(), job.task.rank, job.turn), default=None)

    def _may_work(self, job: Job) -> bool:
        """Whether a task is under way, or may be beside the others of its kind."""
        if job.begun is not None or job.cancel.is_set():
            return True
        return sum(other.begun is not None and other.task.rank == job.task.rank for other in self._waiting) < (
            self._max_begun
        )

    def _gives_way(self, job: Job, since: float) -> bool:
        """Whether a task that has just done a pass lets another one work."""
        with self._changed:
            if job.cancel.is_set():
                return False
            over = monotonic() - since > _TURN_S
            return bool(self._chores) or any(
                other.task.rank < job.task.rank or (over and other.task.rank == job.task.rank)
                for other in self._waiting
                if other.cancel.is_set() or self._may_work(other)
            )

    def _serve(self, job: Job) -> None:
        if job.begun is None:
            job.waited = monotonic() - job.submitted
            stale = job.task.stale_s is not None and job.waited > job.task.stale_s
            if job.cancel.is_set() or stale:
                superseded = stale or job.superseded
                done = Completion("superseded" if superseded else "cancelled", prompt_tokens=len(job.task.prompt_ids))
                return self._finish(job, done)
            job.begun = Decode(self.backend, self.codec, self._pool, job, self._chunk, self.publish)
        since = monotonic()
        try:
            finished = job.begun.run(lambda: self._gives_way(job, since))
        except Exception as error:
            log.exception("a completion failed")
            job.begun.drop()
            self._pool.clear()
            return self._finish(job, Completion("failed", error=f"{type(error).__name__}: {error}"))
        if finished:
            return self._finish(job, job.begun.done)
        with self._changed:
            self._running = None
            self._queue(job)

    def _finish(self, job: Job, done: Completion) -> None:
        done.waited_s = job.waited
        with self._changed:
            self._running = None
            waiters, job.waiters = job.waiters, []
            job.cancel.set()
        self._count(job.task, done)
        for waiter in waiters:
            waiter.sink(done)

    def _tell(self, waiter: Waiter, done: Completion) -> None:
        self._count(waiter.task, done)
        waiter.sink(done)

    def _count(self, task: Task, done: Completion) -> None:
        if self._on_done is not None:
            self._on_done(task, done)

    def publish(self, job: Job, delta: Delta) -> None:
        """Hand a delta to everyone who waits for a job."""
        with self._changed:
            job.text += delta.text
            job.token_ids.extend(delta.token_ids)
            for waiter in job.waiters:
                waiter.sink(delta)
