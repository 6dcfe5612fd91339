"""Jobs: what a client asks of the queue, and the deltas and completions that come back."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Literal

from retrieve_spec.server.sampling import Sampling
from retrieve_spec.server.text import StopRules, StopType

Outcome = Literal["done", "superseded", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class DraftHints:
    """What to draft a completion from, besides the prompt and the stores.

    Attributes
    ----------
    enabled
        False decodes plainly.
    prediction
        Tokens expected to come next.
    context
        What the drafter reads instead of the prompt: texts to draft from, the most relevant last, then the text in
        front of the completion. Empty: the prompt.
    session
        A `retrieve_spec.sources.session.SessionMemory` to draft from and to add the completion to, None for none.
    scope
        Whose text this is: what the model said to somebody else is not drafted from.
    """

    enabled: bool = True
    prediction: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    session: Any = None
    scope: str = ""


@dataclass(slots=True)
class PassFigures:
    """What decoding cost: forward passes, draft nodes, accepted draft tokens by source."""

    passes: int = 0
    drafted: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens of all sources."""
        return sum(self.accepted_by_source.values())


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

    def fingerprint(self) -> bytes:
        """Equal for tasks that must give the same text."""
        digest = hashlib.blake2b(array("q", self.prompt_ids).tobytes(), digest_size=16)
        how = (self.rules, self.sampling, self.warm, self.reuse, self.drafting, self.deadline_s)
        digest.update(repr((self.scope, self.typing, *how)).encode("utf-8", "surrogatepass"))
        return digest.digest()

    @property
    def rank(self) -> int:
        """What comes first: text at a cursor (0), other text (1), prompts that are only read ahead (2)."""
        return 2 if self.warm else 0 if self.typing else 1

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
    """Text that became certain with one pass, and the tokens of the pass."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Completion:
    """The end of a task.

    Attributes
    ----------
    outcome
        ``"superseded"`` when a newer task of the client, or its own age, made the answer useless.
    text, token_ids
        What was decoded.
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
    figures
        Passes and drafts.
    passes_after_cancel
        Passes that were still spent after the client had gone.
    error
        What failed, for the log.
    """

    outcome: Outcome = "done"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
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
    figures: PassFigures = field(default_factory=PassFigures)
    passes_after_cancel: int = 0
    error: str = ""

    @property
    def predicted(self) -> int:
        """Tokens that the model said and the client sees."""
        return len(self.token_ids) - self.surplus


Sink = Callable[[Delta | Completion], None]
"""Called from the queue's thread: any number of deltas, then one completion. It does not wait, and does not fail."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Somebody who waits for a job: the task as they asked for it, and where what comes of it goes."""

    task: Task
    sink: Sink


class Job:
    """A task under way and everyone who waits for it.

    Attributes
    ----------
    key
        The task's fingerprint.
    begun
        Its work so far, None before it begins (`retrieve_spec.server.decode.Decode`).
    forgotten
        Whether its user had everything forgotten meanwhile: nothing of it is kept.
    """

    def __init__(self, task: Task, key: bytes, sink: Sink, submitted: float) -> None:
        self.task = task
        self.key = key
        self.submitted = submitted
        self.waited = 0.0
        self.begun: Any = None
        self.cancel = Event()
        self.superseded = False
        self.forgotten = False
        self.waiters = [Waiter(task, sink)]
        self.text = ""
        self.token_ids: list[int] = []


def same_document(old: str, new: str) -> bool:
    """Whether two texts before a cursor look like one file a few keystrokes apart.

    The lines above the cursor's line do not change while somebody types; a window may have slid over them.
    """
    above = old[: old.rfind("\n") + 1][-200:]
    if above.strip():
        return above in new[-4000:]
    shared = min(len(old), len(new)) // 2
    return old[:shared] == new[:shared]
