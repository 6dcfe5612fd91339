"""Request queue: runs tasks on the model's engine in a thread of its own, and streams their results.

The engine's scheduler decides which tasks begin and which share a pass. The queue limits the number of waiting tasks,
answers outdated keystrokes as superseded, and decodes identical tasks of one scope once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Condition, Thread
from time import monotonic
from typing import Any, TypeVar

from retrieve_spec.engine.scheduler import Scheduler, of_lowest_rank
from retrieve_spec.errors import ServeError, in_a_line
from retrieve_spec.server.backend import Backend, SlotPool
from retrieve_spec.server.guard import Refusal
from retrieve_spec.server.jobs import Completion, Job, Sink, Task, Waiter
from retrieve_spec.server.text import TextCodec

log = logging.getLogger("retrieve_spec.server")

T = TypeVar("T")


def _refusal(expected: str, got: str, remedy: str) -> Refusal:
    return Refusal(503, str(ServeError(expected, got, remedy)), "overloaded")


class RequestQueue:
    """Runs tasks on one model, whose engine schedules them.

    Parameters
    ----------
    backend
        The model.
    codec
        Its text codec.
    slots
        Number of caches kept besides those of running tasks.
    cache_bytes
        Limit of their bytes, and of the bytes of running tasks.
    max_queue
        Limit of waiting tasks.
    max_begun
        Limit of running tasks, completions at a cursor not counted.
    share
        Limit of waiting tasks of one scope.
    prefill_chunk
        Prompt tokens read per pass.
    on_done
        Called with every finished task and its completion, in the queue's thread.
    clock
        Seconds, monotonic; a simulation gives its own.

    Attributes
    ----------
    on_idle
        Called in the queue's thread when there is no work; requests wait until it returns.
    """

    on_idle: Callable[[], None] | None = None

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
        on_done: Callable[[Task, Completion], None] = lambda task, done: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.backend = backend
        self.codec = codec
        self._pool = SlotPool(backend, slots, cache_bytes)
        self._max_queue = max_queue
        self._share = max_queue if share is None else share
        self._scheduler = Scheduler(
            max_running=max_begun, cache_bytes=cache_bytes, prefill_chunk=prefill_chunk, clock=clock
        )
        backend.schedule_with(self._scheduler)
        self._on_done = on_done
        self._changed = Condition()
        self._jobs: list[Job] = []  # in the order they came
        self._closed = False
        self._chores: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._thread = Thread(target=self._work, name="retrieve-spec-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.cancel()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def queue_length(self) -> int:
        """Number of tasks that wait for their first pass."""
        return sum(not job.turn.has_begun for job in list(self._jobs))

    @property
    def begun(self) -> int:
        """Number of running tasks."""
        return sum(job.turn.has_begun for job in list(self._jobs))

    def is_idle(self) -> bool:
        """Whether the thread waits for work."""
        return not (self._jobs or self._closed or self._chores)

    def run_when_idle(self, chore: Callable[[], T]) -> Future[T]:
        """Run a function in the model's thread between two passes (to attach a store, for example)."""
        done: Future[T] = Future()
        with self._changed:
            self._chores.append((chore, done))
            self._changed.notify_all()
        return done

    def forget(self, scope: str) -> int:
        """Drop all caches of a scope, and what was learned from its texts; return the number of caches.

        Waiting and running tasks are answered, but nothing of them is kept. Raises the backend's error.
        """

        def chore() -> int:
            for job in list(self._jobs):
                job.forgotten |= job.task.scope == scope
            count = self._pool.forget(scope)
            self.backend.forget(scope)
            return count

        return self.run_when_idle(chore).result() if self._thread.is_alive() else chore()

    def caches(self, scope: str) -> int:
        """Return the number of caches kept for a scope."""
        return self._pool.count(scope)

    def submit(self, task: Task, sink: Sink) -> Callable[[], None]:
        """Add a task to the queue; its deltas and completion go to the sink.

        Returns a function to call when the client disconnects: the work stops after the current pass, unless another
        client waits for it.

        Raises
        ------
        Refusal
            503: the queue is full of tasks that cannot be replaced, or the server is ending.
        """
        gone: list[Waiter] = []
        fresh = Job(task, sink, self.backend, self.codec, self._pool, self._changed, self._scheduler.clock)
        try:
            with self._changed:
                if self._closed:
                    raise _refusal("to take a request", "the server is ending", "Start it again.")
                self._scheduler.submit(fresh.turn)
                twins = (job for job in self._jobs if not job.turn.cancelled)
                job = next((job for job in twins if job.task.key == task.key), None)
                if job is None and self._overtaken(task):
                    sink(Completion("superseded", prompt_tokens=len(task.prompt_ids)))
                    return lambda: None
                (waiter,) = fresh.waiters
                gone += self._supersede(task, besides=job)
                if job is not None:
                    job.join(waiter)
                else:
                    gone += self._make_room(task)
                    job = fresh
                    self._jobs.append(job)
                    self._changed.notify_all()
        finally:  # even if the queue is full
            for other in gone:
                done = Completion("superseded", prompt_tokens=len(other.task.prompt_ids))
                self._on_done(other.task, done)
                other.sink(done)
        return lambda: self._leave(job, waiter)

    def _overtaken(self, task: Task) -> bool:
        """Whether a task that arrived later replaces this one, whose request took longer to read."""
        waiters = (waiter for job in self._jobs for waiter in job.waiters)
        return any(task.replaced_by(w.task) and w.task.arrived > task.arrived for w in waiters)

    def _supersede(self, task: Task, besides: Job | None = None) -> list[Waiter]:
        """Remove and return the waiters of tasks that the new task replaces; jobs without waiters end.

        The last waiter of a running job gets its completion from the job, after the current pass.
        """
        gone: list[Waiter] = []
        for job in list(self._jobs):
            replaced = [] if job is besides else [w for w in job.waiters if w.task.replaced_by(task)]
            if job.task.warm and not task.warm and job.turn.has_begun:
                replaced = list(job.waiters)
            if replaced and len(replaced) == len(job.waiters):
                job.cancel("superseded")
                if job.turn.has_begun:
                    continue
                self._jobs.remove(job)
            job.waiters = [waiter for waiter in job.waiters if waiter not in replaced]
            gone += replaced
        return gone

    def _make_room(self, task: Task) -> list[Waiter]:
        """If the queue is full, remove a waiting task: one that only reads ahead, or an older one of the client."""
        unbegun = [job for job in self._jobs if not job.turn.has_begun]
        mine = [job for job in unbegun if job.task.scope == task.scope]
        full = len(unbegun) >= self._max_queue
        if not full and len(mine) < self._share:
            return []
        candidates = [] if task.warm else [job for job in (unbegun if full else mine) if job.task.warm]
        if task.client is not None:
            candidates += [job for job in mine if {w.task.client for w in job.waiters} == {task.client}]
        if not candidates:
            raise _refusal(
                f"fewer than {self._max_queue if full else self._share} waiting requests",
                f"{len(unbegun if full else mine)}",
                "Try again in a moment.",
            )
        self._jobs.remove(candidates[0])
        candidates[0].cancel("superseded")
        return candidates[0].waiters

    def _leave(self, job: Job, waiter: Waiter) -> None:
        gone = False
        with self._changed:
            if waiter not in job.waiters:
                return
            if len(job.waiters) == 1:
                job.cancel()
                gone = job in self._jobs and not job.turn.has_begun
                if gone:
                    self._jobs.remove(job)
            job.waiters.remove(waiter)
        if gone:
            self._on_done(job.task, Completion("cancelled", prompt_tokens=len(job.task.prompt_ids)))

    def _work(self) -> None:
        try:
            while True:
                self._spend_idle_time()
                with self._changed:
                    while self.is_idle():
                        self._changed.wait()
                    if self._closed and not (self._jobs or self._chores):
                        return
                try:
                    self.go_on()
                except Exception as error:
                    log.exception("the queue failed")
                    self._fail_all(error)
        finally:  # even if an exception ends the thread
            ended = RuntimeError("the model's thread has ended")
            with self._changed:
                self._closed = True
                chores, self._chores = self._chores, []
            for _, done in chores:
                done.set_exception(ended)
            self._fail_all(ended)

    def _spend_idle_time(self) -> None:
        """Call `on_idle` if there is no work; after an error, do not call it again."""
        if self.on_idle is None or not self.is_idle():
            return
        try:
            self.on_idle()
        except Exception:
            log.exception("learning between requests failed, and is disabled")
            self.on_idle = None

    def go_on(self) -> bool:
        """Run waiting functions and one pass; return whether there is more to do. Called in the model's thread only."""
        with self._changed:
            chores, self._chores = self._chores, []
            jobs = list(self._jobs)
        for chore, done in chores:
            try:
                done.set_result(chore())
            except Exception as error:
                log.warning("a task between requests failed: %s", in_a_line(error))
                done.set_exception(error)
        jobs = [job for job in jobs if not (job.turn.cancelled and self._proceed(job))]
        self._pass(self._begin(jobs))
        return bool(self._jobs or self._chores)

    def _begin(self, jobs: list[Job]) -> list[Job]:
        """Begin the tasks that the scheduler allows; return all running ones."""
        running = [job for job in jobs if job.turn.has_begun]
        for job in self._scheduler.in_order([job for job in jobs if not job.turn.has_begun]):
            if any(job.copies_from(other) for other in running):
                continue
            if not self._scheduler.may_begin(job.turn, [other.turn for other in running]):
                continue
            job.done.waited_s = self._scheduler.clock() - job.turn.submitted
            if job.task.stale_s is not None and job.done.waited_s > job.task.stale_s:
                self._finish(job, Completion("superseded", prompt_tokens=len(job.task.prompt_ids)))
                continue
            with self._changed:
                if job not in self._jobs:
                    continue  # its client has gone
                job.turn.has_begun = True
            with self._failing(job):
                job.start()
                running.append(job)
        return running

    def _pass(self, running: list[Job]) -> None:
        """Run one pass, and let jobs take its tokens; an error in the pass ends all jobs that share it."""
        if not running:
            return
        with self._failing(*of_lowest_rank(running)):
            self.backend.step([job.text for job in running])
            for job in running:
                if job.text.has_news:
                    self._proceed(job)
                else:
                    job.wait()

    def _proceed(self, job: Job) -> bool:
        """Let a job continue after a pass; return whether it is done."""
        if not job.turn.has_begun:
            self._finish(job, job.done)
            return True
        with self._failing(job):
            if not job.proceed():
                return False
            self._finish(job, job.done)
            job.close()  # the cache is not needed
        return True

    @contextmanager
    def _failing(self, *jobs: Job) -> Iterator[None]:
        """End these jobs with an error raised inside, and report it to their clients."""
        try:
            yield
        except Refusal as refusal:
            for job in jobs:
                job.close(keep=False)
                self._finish(job, Completion("failed", error=refusal.detail, refusal=refusal))
        except Exception as error:
            log.exception("a completion failed")
            for job in jobs:
                self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job that failed, and drop all caches, because memory may have run out."""
        try:
            job.close(keep=False)
        except Exception:
            log.exception("a completion that failed could not be ended")
        self._pool.clear()
        self._finish(job, Completion("failed", error=f"{type(error).__name__}: {error}"))

    def _fail_all(self, error: Exception) -> None:
        for job in list(self._jobs):
            self._fail(job, error)

    def _finish(self, job: Job, done: Completion) -> None:
        """End a job; its waiters get the last text at once with the completion, so that both are sent together."""
        with self._changed:
            if job not in self._jobs:
                return  # its waiters have been informed
            self._jobs.remove(job)
            waiters, job.waiters = job.waiters, []
            last = job.unpublished() if done is job.done and not job.turn.cancelled else None
            job.turn.cancelled = True
        self._on_done(job.task, done)
        for waiter in waiters:
            waiter.sink(*([done] if last is None else [last, done]))
