"""Jobs of the queue: a client's task, the work on it, and the deltas and completions that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Condition
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.scheduler import AHEAD, ORDINARY, TYPING, Turn
from retrieve_spec.server.backend import COPY_FROM, Backend, DraftHints, Slot, SlotPool
from retrieve_spec.server.sampling import Sampling, TokenLogProb
from retrieve_spec.server.text import StopRules, StopScanner, StopType, TextCodec

if TYPE_CHECKING:
    from retrieve_spec.server.guard import Refusal

Outcome = Literal["done", "superseded", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Task:
    """One completion to compute.

    Attributes
    ----------
    prompt_ids
        The prompt.
    scope
        The user; tasks of other users have no access to anything of it.
    typing
        Whether it completes text at a cursor; such tasks come before all others.
    rules, sampling, hints
        Stop rules, sampling, and sources of drafts. ``hints`` is called when the work begins.
    arrived
        Time of the request, by any clock: requests can overtake each other while they are read.
    client
        The client; a newer task of a client replaces an older one. None: never.
    document
        Text before the cursor, if the client has no id of its own: then only a task for the same document is replaced.
    deadline_s
        Seconds of work, from the first pass on, after which decoding ends with the text so far (None: no limit).
    stale_s
        Seconds of waiting after which an answer would be useless (None: no limit).
    warm
        Only read the prompt into a cache; all other tasks come first.
    reuse
        Whether the cache of an earlier prompt may be continued.
    settled
        Lengths of prefixes that later prompts may share; a cache that cannot be cut is copied at each of them.
    """

    prompt_ids: tuple[int, ...]
    rules: StopRules
    sampling: Sampling = field(default_factory=Sampling)
    hints: Callable[[], DraftHints] = DraftHints
    scope: str = ""
    typing: bool = False
    arrived: float = 0.0
    client: str | None = None
    document: str | None = None
    deadline_s: float | None = None
    stale_s: float | None = None
    warm: bool = False
    reuse: bool = True
    drafting: bool = True
    settled: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for tasks with the same result."""
        how = self.rules, self.sampling, self.warm, self.reuse, self.drafting, self.deadline_s
        return self.scope, self.typing, *how, self.prompt_ids

    @property
    def rank(self) -> int:
        """Rank of the task for the scheduler (`engine.scheduler`)."""
        return AHEAD if self.warm else TYPING if self.typing else ORDINARY

    def replaced_by(self, newer: Task) -> bool:
        """Whether a newer task makes this one useless."""
        if self.client is None or self.warm or newer.warm or newer.client != self.client:
            return False
        if newer.arrived < self.arrived:
            return False
        old, new = self.document, newer.document
        return old is None or new is None or same_document(old, new)


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text of one pass, its tokens, and their log-probabilities if requested.

    ``cached_tokens`` of the prompt were in the cache.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogProb, ...] = ()
    cached_tokens: int = 0


@dataclass(slots=True)
class Completion:
    """The result of a task.

    Attributes
    ----------
    outcome
        ``"superseded"`` if a newer task of the client, or the waiting time, made the answer useless.
    text, token_ids, logprobs
        The answer; log-probabilities only if requested.
    surplus
        Number of tokens beyond those that the model generated: if one token completed the begun word and continued,
        the continuation may be encoded as several.
    stop_type, stopping_word
        Reason of the end.
    prompt_tokens, cached_tokens
        Length of the prompt, and how much of it was cached.
    setup_s, prompt_s, predict_s, waited_s
        Seconds of setting up (sources of drafts, cache), reading the prompt, decoding, and waiting (for the first
        pass, and during passes without it).
    first_s
        Seconds from the request to the first token.
    report
        Passes and drafts.
    error, refusal
        The error, for the log, and the answer to a request that the model cannot serve.
    """

    outcome: Outcome = "done"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: tuple[TokenLogProb, ...] = ()
    surplus: int = 0
    stop_type: StopType = "none"
    stopping_word: str = ""
    deadline_hit: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    setup_s: float = 0.0
    prompt_s: float = 0.0
    predict_s: float = 0.0
    waited_s: float = 0.0
    first_s: float = 0.0
    report: GenerationReport = field(default_factory=GenerationReport)
    error: str = ""
    refusal: Refusal | None = None

    @property
    def predicted(self) -> int:
        """Number of tokens generated for the client."""
        return len(self.token_ids) - self.surplus


Sink = Callable[..., None]
"""Called in the queue's thread with what is new: any number of deltas, then one completion, which may come in the same
call as the last delta. It must not block or fail.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A client that waits for a job: its own task, and the sink for deltas and the completion."""

    task: Task
    sink: Sink


def same_document(old: str, new: str) -> bool:
    """Whether two texts before a cursor seem to be one document, a few keystrokes apart.

    Lines above the cursor's line do not change while one types, but the client may send fewer or more of them.
    """
    above = old[: old.rfind("\n") + 1][-200:]
    if above.strip():
        return above in new[-4000:]
    shared = min(len(old), len(new)) // 2
    return old[:shared] == new[:shared]


class Job:
    """A task, the work on it, and the clients that wait for it.

    After every pass it checks whether to stop, and publishes new text.

    Parameters
    ----------
    task, sink
        What to do, and the sink of the first client that waits.
    backend, codec, pool
        The model, its text codec and its caches.
    changed
        Held while the waiters, or what they were sent, change.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    turn
        Its record in the scheduler; `turn.cancelled` ends the work after the current pass.
    forgotten
        Whether the user deleted everything in the meantime; then nothing of this job is kept.
    done
        The result so far.
    text
        The text in the engine, once the work has begun.
    """

    def __init__(
        self, task: Task, sink: Sink, backend: Backend, codec: TextCodec, pool: SlotPool, changed: Condition,
        clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self.task, self.waiters = task, [Waiter(task, sink)]
        self.forgotten = False
        self.turn = Turn(task.rank, cache_bytes=len(task.prompt_ids) * backend.token_bytes, deadline_s=task.deadline_s)
        self.done = Completion(prompt_tokens=len(task.prompt_ids))
        self.text: Any = None
        self._prompt = np.array(task.prompt_ids, np.int64)
        self._slot: Any = None
        self._settled = list[int]()  # positions at which the cache is still to be copied
        self._backend, self._codec, self._pool, self._changed, self._clock = backend, codec, pool, changed, clock
        self._scanner = StopScanner(codec, task.rules, clock)
        self._said: list[int] = []
        self._told = 0  # published tokens
        self._noted_at = clock()

    def cancel(self, outcome: Outcome = "cancelled") -> None:
        """End the work after the current pass; the first reason becomes the outcome."""
        if not self.turn.cancelled:
            self.done.outcome = outcome  # set first, since readers of the cancellation need the reason
            self.turn.cancelled = True

    def join(self, waiter: Waiter) -> None:
        """Add a waiter, and send it what was published so far."""
        scanner = self._scanner
        if scanner.shown or self._told:
            told = tuple(scanner.shown_ids[: self._told])
            waiter.sink(self._delta(scanner.text[: scanner.shown], told, self._logprobs(0, self._told)))
        self.waiters.append(waiter)

    def start(self) -> None:
        """Take a cache, and collect sources of drafts."""
        task, self._noted_at = self.task, self._clock()
        slot, self.done.cached_tokens = self._pool.take(self._prompt, task.scope, reuse=task.reuse)
        self._slot = slot
        if not self._backend.cuts_caches:
            new = range(self.done.cached_tokens + 1, len(task.prompt_ids))
            self._settled = [count for count in task.settled if count in new]
        self.text = self._next_text()
        self.done.setup_s = self._since()

    def _decode(self, prompt_ids: NDArray[np.int64], hints: DraftHints, *, warm: bool) -> Any:
        task = self.task
        return self._backend.decode(
            self._slot.cache,
            prompt_ids,
            max_tokens=1 if warm else self._most(),
            end_ids=task.rules.end_ids,
            sampling=Sampling() if warm else task.sampling,
            hints=hints,
            turn=self.turn,
        )

    def _next_text(self) -> Any:
        """Return the next text to decode: the prompt up to the next place to copy the cache, finally all of it."""
        task = self.task
        if self._settled:
            ids = self._prompt[: self._settled[0]]
            return self._decode(ids, DraftHints(False, scope=task.scope), warm=True)
        return self._decode(self._prompt, self._hints(self._slot), warm=task.warm)

    def _settle(self) -> None:
        """Keep a copy of the cache, where later prompts may continue, and read on."""
        self.text.close()
        count = self._settled.pop(0)
        if not self.forgotten:
            self._pool.settle(self._slot, self._prompt[:count])
        self.text = self._next_text()

    def _hints(self, slot: Slot) -> DraftHints:
        """Return sources of drafts; without a prediction, an earlier answer to this prompt is the prediction."""
        hints = self.task.hints()  # even if only the prompt is processed: the drafter's memory reads the new chunks now
        if self.task.warm or not self.task.drafting:
            return DraftHints(enabled=False, scope=self.task.scope)
        if self.forgotten:
            hints = replace(hints, session=None)  # the session would remember the answer
        return hints if hints.prediction else replace(hints, prediction=self._said_before(slot))

    def _said_before(self, slot: Slot) -> tuple[int, ...]:
        """Return the earlier answer to this prompt, or part of it, if it agrees with what was typed since.

        The model often repeats it, and then one pass verifies it.
        """
        tokens = tuple(slot.continuation.tolist())
        text, begun = self._codec.decode(tokens), self.task.rules.begun
        return tokens if text.startswith(begun) or begun.startswith(text) else ()

    def _most(self) -> int:
        """Return the most tokens to generate; each token of a begun word has at least one byte."""
        room = self._backend.n_ctx - len(self.task.prompt_ids)
        rules = self.task.rules
        return room if rules.max_tokens < 0 else min(rules.max_tokens + len(rules.begun.encode()), room)

    def copies_from(self, other: Job) -> bool:
        """Whether it can copy a prefix that another task of its rank is still reading."""
        prompt, theirs = self.task.prompt_ids, other.task.prompt_ids
        shared = max(COPY_FROM, len(prompt) // 2)
        may_copy = self.task.reuse and self.task.rank == other.task.rank and self.task.scope == other.task.scope
        return may_copy and other.text.unread > 0 and shared <= len(prompt) and prompt[:shared] == theirs[:shared]

    def wait(self) -> None:
        """Note that a pass did not include this job."""
        self.done.waited_s += self._since()

    def _since(self) -> float:
        """Return the seconds since the last call."""
        before, self._noted_at = self._noted_at, self._clock()
        return self._noted_at - before

    def proceed(self) -> bool:
        """Take the tokens of a pass; return whether the task is done. The caller informs waiters, then closes it."""
        text, slot, prompt, done = self.text, self._slot, self._prompt, self.done
        self.turn.worked_s += self._since()
        fresh = text.take()
        if self._settled and not self.turn.cancelled:
            if text.over:
                self._settle()
            return False
        if fresh and not self._said:
            done.prompt_s = self.turn.worked_s
            done.first_s = done.waited_s + done.setup_s + done.prompt_s
            slot.token_ids, slot.copied = prompt, text.copy_cache
        self._said += fresh
        self.turn.cache_bytes = (len(prompt) + len(self._said)) * self._backend.token_bytes
        if self._goes_on(fresh, text.over):
            return False
        done.report = text.report
        done.prompt_s = done.prompt_s if self._said else self.turn.worked_s
        done.predict_s = self.turn.worked_s - done.prompt_s
        self._conclude()
        return True

    def _goes_on(self, fresh: list[int], is_over: bool) -> bool:
        """Whether the task continues after a pass; the tokens of the last pass are published with the end."""
        scanner = self._scanner
        if fresh and not self.task.warm:
            scanner.push(fresh)
        if self.turn.cancelled or is_over or scanner.stopped:
            return False
        self.done.deadline_hit = self.turn.is_past_deadline
        if self.done.deadline_hit:
            return False
        self._publish()
        return True

    def _publish(self) -> None:
        """Publish the text and tokens that are new since the last call."""
        with self._changed:
            if (news := self.unpublished()) is not None:
                for waiter in self.waiters:
                    waiter.sink(news)

    def unpublished(self) -> Delta | None:
        """Return the text and tokens that are new since the last call; the caller sends them to all waiters."""
        text, tokens = self._scanner.visible(), tuple(self._scanner.shown_ids[self._told :])
        logprobs = self._logprobs(self._told, self._told + len(tokens))
        self._told += len(tokens)
        return self._delta(text, tokens, logprobs) if text or tokens else None

    def _delta(self, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogProb, ...]) -> Delta:
        return Delta(text, tokens, logprobs, self.done.cached_tokens)

    def _logprobs(self, first: int, end: int) -> tuple[TokenLogProb, ...]:
        """Return the log-probabilities of tokens; tasks that have them have no begun word, so all are shown."""
        return tuple(self.text.noted[first:end]) if self.task.sampling.logprobs is not None else ()

    def _conclude(self) -> None:
        scanner, done = self._scanner, self.done
        scanner.finish()
        done.text, done.token_ids = scanner.text, scanner.shown_ids
        done.logprobs = self._logprobs(0, len(done.token_ids))
        done.surplus = len(scanner.shown_ids) - scanner.counted
        done.stop_type = scanner.stop_type if scanner.stopped else "limit"
        done.stopping_word = scanner.stopping_word

    def close(self, *, keep: bool = True) -> None:
        """End the text and return the cache; after a failure its contents are unknown, and it is not kept."""
        (slot, self._slot), held = (self._slot, None), None
        if slot is None:
            return
        try:
            if self.text is not None:
                self.text.close()
                said = [] if self.task.warm else self._said
                held = np.concatenate([self._prompt, np.array(said, np.int64)])
        finally:
            self._pool.release(slot, held if keep and not self.forgotten else None)
