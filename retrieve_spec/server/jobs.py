"""Jobs: what a client asks of the queue, the work on it, and the deltas and completions that come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Condition
from time import monotonic
from typing import Any, Literal

import numpy as np

from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.scheduler import AHEAD, ORDINARY, TYPING, Turn
from retrieve_spec.server.backend import COPY_FROM, Backend, DraftHints, Slot, SlotPool, can_cut
from retrieve_spec.server.sampling import Sampling, TokenLogProb
from retrieve_spec.server.text import StopRules, StopScanner, StopType, TextCodec

Outcome = Literal["done", "superseded", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Task:
    """One completion to compute.

    Attributes
    ----------
    prompt_ids
        The prompt.
    scope
        Whose task it is: nothing of it is seen by tasks of another scope.
    typing
        It completes text at somebody's cursor, and comes before all that does not.
    rules, sampling, hints
        When to stop, how to choose tokens, what to draft from. ``hints`` is called when the work begins.
    arrived
        When it was asked for, by a clock of any kind: requests may overtake one another while they are read.
    client
        Who asks; a newer task of the same client replaces an older one. None never replaces.
    document
        Text before the cursor; without an explicit client id only a task about the same document is replaced.
    deadline_s
        Seconds of work, from the first pass on, after which decoding ends with what there is (None: none).
    stale_s
        Seconds of waiting after which an answer is of no use any more (None: none).
    warm
        Only read the prompt into a cache; gives way to every other task.
    reuse
        May continue a cache of an earlier prompt.
    settled
        Numbers of tokens with which later prompts may begin, too: a cache that cannot be cut is copied at each.
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
        """Equal for tasks that must give the same text."""
        how = self.rules, self.sampling, self.warm, self.reuse, self.drafting, self.deadline_s
        return self.scope, self.typing, *how, self.prompt_ids

    @property
    def rank(self) -> int:
        """What comes first (`engine.scheduler`)."""
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
    """Text that became certain with one pass, and the tokens of the pass, with their log-probabilities if asked for.

    ``cached_tokens`` of the prompt did not have to be read.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogProb, ...] = ()
    cached_tokens: int = 0


@dataclass(slots=True)
class Completion:
    """The end of a task.

    Attributes
    ----------
    outcome
        ``"superseded"`` when a newer task of the client, or its own age, made the answer useless.
    text, token_ids, logprobs
        What was decoded; the log-probabilities of the tokens only where they are asked for.
    surplus
        How many more tokens that is than the model said: where one said the end of what was begun and more, the more
        may be several.
    stop_type, stopping_word
        Why it ended.
    prompt_tokens, cached_tokens
        Length of the prompt, and how much of it a cache already held.
    setup_s, prompt_s, predict_s, waited_s
        Seconds spent looking up what to draft from and which cache to continue, reading the prompt, decoding, and
        waiting (for the first pass, or aside while others had theirs).
    first_s
        Seconds until there was a token, from when it was asked for.
    report
        Passes and drafts.
    error
        What failed, for the log.
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

    @property
    def predicted(self) -> int:
        """Tokens that the model said and the client sees."""
        return len(self.token_ids) - self.surplus


Sink = Callable[[Delta | Completion], None]
"""Called from the queue's thread: any number of deltas, then one completion. It does not wait, and does not fail."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Somebody who waits for a job: the task as they asked for it, and the sink of its deltas and completion."""

    task: Task
    sink: Sink


def same_document(old: str, new: str) -> bool:
    """Whether two texts before a cursor look like one file a few keystrokes apart.

    The lines above the cursor's line do not change while somebody types; a window may have slid over them.
    """
    above = old[: old.rfind("\n") + 1][-200:]
    if above.strip():
        return above in new[-4000:]
    shared = min(len(old), len(new)) // 2
    return old[:shared] == new[:shared]


class Job:
    """A task, the work on it, and everyone who waits for it.

    After every pass it checks for reasons to stop, and publishes what became visible.

    Parameters
    ----------
    task, sink
        What to do, and who waits for it first.
    backend, codec, pool
        The model, its text codec and its caches.
    changed
        Held while the waiters, or what they have been told, change.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    turn
        What the scheduler knows of it; `turn.cancelled` ends the work after the current pass.
    forgotten
        Whether its user had everything forgotten meanwhile: nothing of it is kept.
    done
        What the work has come to so far.
    text
        What takes part in passes, once it has begun.
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
        self._slot: Any = None
        self._settled = list[int]()  # those of the task at which the cache is still to be copied
        self._backend, self._codec, self._pool, self._changed, self._clock = backend, codec, pool, changed, clock
        self._scanner = StopScanner(codec, task.rules, clock)
        self._said: list[int] = []
        self._told = 0  # tokens that were published
        self._noted_at = clock()

    def cancel(self, outcome: Outcome = "cancelled") -> None:
        """End the work after the current pass; the first reason that is given is the outcome."""
        if not self.turn.cancelled:
            self.done.outcome = outcome  # first: whoever finds it cancelled reads why
            self.turn.cancelled = True

    def join(self, waiter: Waiter) -> None:
        """Add a waiter, and send them what has been published."""
        scanner = self._scanner
        if scanner.shown or self._told:
            told = tuple(scanner.shown_ids[: self._told])
            waiter.sink(self._delta(scanner.text[: scanner.shown], told, self._logprobs(0, self._told)))
        self.waiters.append(waiter)

    def start(self) -> None:
        """Take a cache, and collect what to draft from."""
        task, self._noted_at = self.task, self._clock()
        slot, self.done.cached_tokens = self._pool.take(task.prompt_ids, task.scope, reuse=task.reuse)
        self._slot = slot
        if not can_cut(slot.cache):
            new = range(self.done.cached_tokens + 1, len(task.prompt_ids))
            self._settled = [count for count in task.settled if count in new]
        self.text = self._next_text()
        self.done.setup_s = self._since()

    def _decode(self, prompt_ids: tuple[int, ...], hints: DraftHints, *, warm: bool) -> Any:
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
        """Return the next text to decode: the prompt up to the next copy of the cache, at last all of it."""
        task = self.task
        if self._settled:
            ids = task.prompt_ids[: self._settled[0]]
            return self._decode(ids, DraftHints(False, scope=task.scope), warm=True)
        return self._decode(task.prompt_ids, self._hints(self._slot), warm=task.warm)

    def _settle(self) -> None:
        """Keep a copy of the cache where later prompts may go on from, and read on."""
        self.text.close()
        count = self._settled.pop(0)
        if not self.forgotten:
            self._pool.settle(self._slot, self.task.prompt_ids[:count])
        self.text = self._next_text()

    def _hints(self, slot: Slot) -> DraftHints:
        """What to draft from; what was said after this prompt before, if nothing else is expected there."""
        hints = self.task.hints()  # also where only the prompt is read: the drafter's memory reads the new chunks now
        if self.task.warm or not self.task.drafting:
            return DraftHints(enabled=False, scope=self.task.scope)
        if self.forgotten:
            hints = replace(hints, session=None)  # it would keep what is said
        return hints if hints.prediction else replace(hints, prediction=self._said_before(slot))

    def _said_before(self, slot: Slot) -> tuple[int, ...]:
        """What was said after this prompt before, in part perhaps, if it agrees with what has been typed since.

        Where the model is sure it says the same again: it is verified in one pass instead of decoded again.
        """
        tokens = tuple(slot.continuation.tolist())
        text, begun = self._codec.decode(tokens), self.task.rules.begun
        return tokens if text.startswith(begun) or begun.startswith(text) else ()

    def _most(self) -> int:
        """Tokens to generate at most; each token of what was begun spells a byte or more."""
        room = self._backend.n_ctx - len(self.task.prompt_ids)
        rules = self.task.rules
        return room if rules.max_tokens < 0 else min(rules.max_tokens + len(rules.begun.encode()), room)

    def copies_from(self, other: Job) -> bool:
        """Whether it can copy, from a task of its rank, a prompt's beginning that is still being read."""
        prompt, theirs = self.task.prompt_ids, other.task.prompt_ids
        shared = max(COPY_FROM, len(prompt) // 2)
        may_copy = self.task.reuse and self.task.rank == other.task.rank and self.task.scope == other.task.scope
        return may_copy and other.text.unread > 0 and shared <= len(prompt) and prompt[:shared] == theirs[:shared]

    def wait(self) -> None:
        """Note that others had the pass."""
        self.done.waited_s += self._since()

    def _since(self) -> float:
        """Seconds since the last call."""
        before, self._noted_at = self._noted_at, self._clock()
        return self._noted_at - before

    def proceed(self) -> bool:
        """Take the tokens of a pass; return whether the task is done, so that waiters hear before it is closed."""
        text, slot, prompt, done = self.text, self._slot, self.task.prompt_ids, self.done
        self.turn.worked_s += self._since()
        fresh = text.take()
        if self._settled and not self.turn.cancelled:
            if text.over:
                self._settle()
            return False
        if fresh and not self._said:
            done.prompt_s = self.turn.worked_s
            done.first_s = done.waited_s + done.setup_s + done.prompt_s
            slot.token_ids, slot.copied = np.asarray(prompt, np.int64), text.copy_cache
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
        """Whether there is more to do after a pass; the tokens of the last one are published with the end."""
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
            text, tokens = self._scanner.visible(), tuple(self._scanner.shown_ids[self._told :])
            logprobs = self._logprobs(self._told, self._told + len(tokens))
            self._told += len(tokens)
            for waiter in self.waiters if text or tokens else ():
                waiter.sink(self._delta(text, tokens, logprobs))

    def _delta(self, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogProb, ...]) -> Delta:
        return Delta(text, tokens, logprobs, self.done.cached_tokens)

    def _logprobs(self, first: int, end: int) -> tuple[TokenLogProb, ...]:
        """What was noted of tokens that are shown; nothing is begun then, so that they are all that were said."""
        return tuple(self.text.noted[first:end]) if self.task.sampling.logprobs is not None else ()

    def _conclude(self) -> None:
        scanner, done = self._scanner, self.done
        scanner.finish()
        if not self.turn.cancelled:
            self._publish()
        done.text, done.token_ids = scanner.text, scanner.shown_ids
        done.logprobs = self._logprobs(0, len(done.token_ids))
        done.surplus = len(scanner.shown_ids) - scanner.counted
        done.stop_type = scanner.stop_type if scanner.stopped else "limit"
        done.stopping_word = scanner.stopping_word

    def close(self, *, keep: bool = True) -> None:
        """End the text, however far it is, and give the cache back; after a failure nobody knows what it holds."""
        (slot, self._slot), held = (self._slot, None), None
        if slot is None:
            return
        try:
            if self.text is not None:
                self.text.close()
                held = [*self.task.prompt_ids, *([] if self.task.warm else self._said)]
        finally:
            self._pool.release(slot, held if keep and not self.forgotten else None)
