"""A sequence: one text that is being generated, with all that is its own: sampler, stopping criteria, drafter, cache.

An `Engine` opens it, takes it from pass to pass and at last ends it (`engine.py`). What a pass made visible waits
until its reader takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.datastore.store import SourcedRun
from retrieve_spec.drafting.forced import Guide
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.errors import PositionError
from retrieve_spec.sampling.acceptance import PassLogits, RowText, Sampler, Stopper, Walk
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.verify.verifier import PassKind, Verifier, VerifierInputs, VerifierOutput

if TYPE_CHECKING:
    from retrieve_spec.engine.joining import SharedPrompt
    from retrieve_spec.engine.text_drafter import TextDrafter


@dataclass(slots=True)
class GenerationReport:
    """Facts about one generation, as found in `model.speculation.last`.

    Attributes
    ----------
    mode
        `"tree"`, `"chain"` or `"plain"` (decoded here), or `"delegated"` (the original `generate` ran).
    reason
        Why the mode is not `"tree"`; empty when it is.
    pass_kind
        What ran the model: its `"recorded"` pass, the `"model's own"` forward over drafts, or its forward token by
        token (`"plain"`).
    pass_reason
        Why nothing faster did; empty for the recorded pass.
    new_tokens
        Tokens emitted.
    passes
        Forward passes of the target, the prompt's not counted among them beyond the first.
    ran
        How many passes, the prompt's among them, were replayed as CUDA graphs (`"replayed"`), captured as such
        (`"captured"`) or run operation by operation (`"eager"`, as all are on a CPU).
    eager_reason
        Why the last pass on a GPU that was not replayed was not.
    threads
        Threads that the last passes used on a CPU, chosen by their times (the user's setting or fewer); 0 elsewhere.
    rows
        Rows of text decoded together; all other figures count the tokens and passes of all rows together, `per_pass`
        lists one row's passes after the other's, and `origins` and `provenance` stay empty when there are several.
    nodes
        Draft nodes verified, over all passes.
    accepted_by_source
        Accepted draft tokens by name of the source credited with them.
    prefill_ms, draft_ms, verify_ms, commit_ms, learn_ms
        Where the time went, summed over the generation, in milliseconds.
    began, seconds
        When it started, by `time.perf_counter`, and its wall time.
    per_pass
        (nodes, accepted, expected to be accepted, verify ms) of every pass after the prompt's, in order.
    origins
        With `provenance=True`: (index of the first token among the new ones, number of tokens, origin of the first) of
        every accepted drafted run that a source read in one piece.
    provenance
        The same runs with the documents they stand in.
    """

    mode: Literal["tree", "chain", "plain", "delegated"] = "plain"
    reason: str = ""
    pass_kind: PassKind = "plain"
    pass_reason: str = ""
    ran: dict[str, int] = field(default_factory=dict)
    eager_reason: str = ""
    threads: int = 0
    new_tokens: int = 0
    passes: int = 0
    rows: int = 1
    nodes: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    learn_ms: float = 0.0
    began: float = 0.0
    seconds: float = 0.0
    per_pass: list[tuple[int, int, float, float]] = field(default_factory=list)
    origins: list[tuple[int, int, int]] = field(default_factory=list)
    provenance: list[SourcedRun] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens emitted per forward pass, the bonus token included."""
        return self.new_tokens / self.passes if self.passes else 0.0

    def note(self, tree: DraftTree, walked: Walk, seconds: Many[float], provenance: bool = False) -> None:
        """Enter a pass behind the prompt's, and what it took to draft, verify, commit and learn.

        With `provenance`, note where accepted drafts came from.
        """
        self.passes += 1
        self.per_pass.append((len(tree), len(walked.path), tree.expected_accepted, seconds[1] * 1e3))
        self.nodes += len(tree)
        for name, took in zip(("draft_ms", "verify_ms", "commit_ms", "learn_ms"), seconds, strict=True):
            setattr(self, name, getattr(self, name) + took * 1e3)
        for number in tree.source[walked.path].tolist():
            name = SOURCE_NAMES[number] if number < len(SOURCE_NAMES) else f"source {number}"
            self.accepted_by_source[name] = self.accepted_by_source.get(name, 0) + 1
        if provenance:
            self.origins += origin_runs(tree.origin[walked.path], self.new_tokens)
        self.new_tokens += len(walked.emitted)


def together(parts: Many[GenerationReport], passes: int) -> GenerationReport:
    """Reports of sequences that shared `passes` passes as one."""
    first = parts[0]
    whole = GenerationReport(first.mode, first.reason, first.pass_kind, first.pass_reason)
    whole.rows, whole.passes, whole.threads = len(parts), passes, parts[-1].threads
    longest = max(parts, key=lambda part: sum(part.ran.values()))  # the others shared its passes
    whole.ran, whole.eager_reason = longest.ran, longest.eager_reason
    whole.began = min(part.began for part in parts)
    whole.seconds = max(part.began + part.seconds for part in parts) - whole.began
    for part in parts:
        for name in ("new_tokens", "nodes", "prefill_ms", "draft_ms", "verify_ms", "commit_ms", "learn_ms"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.per_pass += part.per_pass
        for source, count in part.accepted_by_source.items():
            whole.accepted_by_source[source] = whole.accepted_by_source.get(source, 0) + count
    return whole


def origin_runs(origins: NDArray[np.int64], first: int) -> list[tuple[int, int, int]]:
    """Cut accepted tokens (a,) with known origin into (index, length, origin) runs that a source read in one piece.

    `first` is the index of the first of them among the new tokens.
    """
    runs: list[tuple[int, int, int]] = []
    for i, origin in enumerate(origins.tolist()):
        if origin < 0:
            continue
        if runs:
            index, length, begin = runs[-1]
            if index + length == first + i and begin + length == origin:
                runs[-1] = (index, length + 1, begin)
                continue
        runs.append((first + i, 1, origin))
    return runs


RUN_AHEAD = 2
"""Passes that a sequence is ahead of its reader at most, when other sequences' passes take it along."""


class Reader:
    """The reader of one sequence.

    Parameters
    ----------
    goes_along
        Passes come only while the reader asks for one: the cache is the caller's and never runs ahead.

    Attributes
    ----------
    asking
        Calls that wait for the sequence.
    """

    def __init__(self, goes_along: bool = False) -> None:
        self._goes_along = goes_along
        self._pieces: deque[NDArray[np.int32]] = deque()
        self.asking = 0

    @property
    def has_pieces(self) -> bool:
        """Whether there is something to take."""
        return len(self._pieces) > 0

    @property
    def is_near(self) -> bool:
        """Whether the next pass may come."""
        return self.asking > 0 and not self._pieces if self._goes_along else len(self._pieces) < RUN_AHEAD

    def show(self, token_ids: NDArray[np.int32]) -> None:
        """Show what a pass made visible, (t,) int32; none of a prompt's piece."""
        self._pieces.append(token_ids)

    def take(self) -> NDArray[np.int32]:
        """The visible tokens of the oldest pass that was not taken."""
        return self._pieces.popleft()


@dataclass(slots=True)
class SeenPass:
    """One pass, as one sequence sees it.

    Attributes
    ----------
    tree
        What was drafted.
    output
        What the model computed; None once it was learned from.
    first_row
        Row of it that follows the root.
    is_committed
        Whether the cache keeps what it keeps of the pass; there is nothing to keep before the first one.
    path
        Nodes that were walked, also of a walk that failed.
    logits
        What of the pass's was brought over, once it was.
    walked
        Where the walk went, once it did.
    """

    tree: DraftTree
    output: VerifierOutput | None = None
    first_row: int = 0
    is_committed: bool = True
    path: list[int] = field(default_factory=list)
    logits: PassLogits = field(init=False)
    walked: Walk = field(init=False)

    @property
    def every_logit(self) -> torch.Tensor:
        """(rows, vocab) of the pass."""
        assert self.output is not None
        return self.output.logits


@dataclass(slots=True)
class Limits:
    """How much one pass of a sequence may draft, and what its cache takes.

    Attributes
    ----------
    nodes
        Draft nodes at most; None leaves it to the drafter and the measured cost.
    max_depth
        Longest drafted path.
    max_length
        Tokens the text may grow to.
    draft_end
        Length of the text that no drafted token may reach beyond (position limit, rotary switch); 0 for no limit.
    slot_end
        Tokens of the text and nodes of a draft together, at most; 0 for no limit.
    prefill_chunk
        Prompt tokens per pass at most; 0 feeds the prompt in one pass.
    prompt_logits
        Positions at the end of the prompt whose top tokens the drafter sees.
    provenance
        Note where accepted drafts came from.
    most_nodes
        Draft nodes at most, however many `nodes` leaves to the drafter and the measured cost.
    positions
        Positions that the model was made for; 0 where it does not say.
    padding
        Tokens in front of the text that take no positions.
    bytes_per_token
        Memory that keys and values of a token take.
    vocabulary
        Tokens that the model has: what is remembered of others, of before it lost them, is not drafted.
    """

    nodes: int | None
    max_depth: int
    max_length: int
    draft_end: int = 0
    slot_end: int = 0
    prefill_chunk: int = 0
    prompt_logits: int = 0
    provenance: bool = False
    most_nodes: int = MAX_NODES
    positions: int = 0
    padding: int = 0
    bytes_per_token: int = 0
    vocabulary: int = 1 << 31


class Sequence:
    """One text under way.

    Parameters
    ----------
    inputs
        What the generation starts from.
    verifier
        What runs the model for it.
    drafter
        What drafts for it.
    sampler, stopper
        Which token is the target's next, and after which it ends.
    limits
        How much one pass may draft, and what its cache takes.
    ids
        (1, L) long, the text as processors and criteria see it, where it has more than `inputs`: padding in front.
    documents_of
        Finds the documents of the report's `origins` when the sequence has ended.
    waits_for_reader
        Takes part in passes only while its reader asks for one: its cache is the caller's and never runs ahead.
    prompt
        Its prompt, where other sequences may have the same.
    guide
        Knows where the text has no choice, or None.

    Attributes
    ----------
    text
        Prompt and emitted tokens.
    reader
        Who it is decoded for.
    tree
        What the next pass verifies.
    seen
        The pass under way, or the last.
    unread
        (m,) int32 what is to be read of the prompt.
    read_before
        The pass over the prompt that another sequence ran, and the row of it that follows the prompt, where that is so.
    steps
        Numbers of the engine's steps it took part in behind its prompt.
    ended, error, cache
        Whether it is over, what it failed with, and the cache as plain `generate` leaves it.
    """

    def __init__(
        self,
        inputs: VerifierInputs,
        verifier: Verifier,
        drafter: TextDrafter,
        sampler: Sampler,
        stopper: Stopper,
        limits: Limits,
        *,
        ids: torch.Tensor | None = None,
        documents_of: Callable[[list[tuple[int, int, int]]], list[SourcedRun]] | None = None,
        waits_for_reader: bool = False,
        prompt: SharedPrompt | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.text = RowText(inputs.input_ids if ids is None else ids)
        self.report = GenerationReport()
        self.reader = Reader(waits_for_reader)
        self.cancelled = self.stopped = self.ended = False
        self.error: BaseException | None = None
        self.cache: Any = None
        self.verifier, self.drafter, self.limits = verifier, drafter, limits
        self.sampler, self.stopper = sampler, stopper
        self._inputs, self._documents_of = inputs, documents_of
        self.autocast_key = autocast_key()
        self.steps: list[int] = []
        self.unread = inputs.uncached_ids
        self.tree = NO_DRAFT
        self.seen: SeenPass = SeenPass(NO_DRAFT)
        self._drafts_at_once = False
        self.prompt, self.guide = prompt, guide
        self.read_before: tuple[VerifierOutput, int] | None = None  # the prompt's pass that another sequence ran
        self._started = False

    @property
    def is_reading(self) -> bool:
        """Whether some of the prompt is still to be read before anything is drafted."""
        return len(self.unread) > 0 and not self._drafts_at_once

    @property
    def root_ids(self) -> NDArray[np.int32]:
        """(m,) int32 what the next draft stands behind: the last token, or the rest of a prompt."""
        return self.unread if len(self.unread) else self.text.last_ids

    @property
    def is_open(self) -> bool:
        """Whether it has started, and has some of its prompt to read."""
        return self._started and self.is_reading

    @property
    def is_over(self) -> bool:
        """Whether no pass takes it along any more."""
        return self.stopped or self.cancelled or self.ended or self.error is not None

    @property
    def is_schedulable(self) -> bool:
        """Whether the next pass may take it along: its reader is not too far behind."""
        return not self.is_over and self.reader.is_near

    @property
    def has_news(self) -> bool:
        """Whether its reader has something to take, or nothing to wait for."""
        return self.reader.has_pieces or self.ended

    @property
    def may_draft_at_once(self) -> bool:
        """Whether `draft_at_once` is to be asked: it has not begun, and its prompt is its own."""
        return self.is_reading and not self._started and self.prompt is None and not self.is_over

    def _still_reads(self) -> bool:
        """Whether others that have its prompt may wait until it has read it."""
        return self.is_reading and not self.is_over

    def open(self) -> None:
        """Take over the cache and let the drafter read the text, unless another sequence is reading its prompt.

        What that one has read is not read again.
        """
        self.report.began = self.report.began or perf_counter()
        if not self._started:
            if self.prompt is not None and self.prompt.must_wait(self._still_reads):
                return
            inputs = self._inputs
            if self.prompt is not None:
                inputs, self.read_before = self.prompt.taken(inputs)
            self._started = True
            self.verifier.start(inputs)
            self.report.mode, self.report.reason = self.verifier.mode, self.verifier.reason
            if self.verifier.mode != "plain" and (why_none := self.drafter.start()):
                self.report.mode, self.report.reason = "plain", why_none

    def draft_at_once(self, most: int) -> None:
        """Start, and where no more than `most` tokens of the prompt are left, let the first draft stand behind them.

        Reading them takes a pass, which can verify as well.
        """
        self.open()
        left, verifier = len(self.unread), self.verifier
        self._drafts_at_once = left <= most and verifier.reads_rest(left)

    def piece(self, most: int = 0) -> NDArray[np.int32]:
        """(m,) int32 what to read of the prompt in the next pass, `most` tokens at most (0: no limit).

        Models whose forward over several tokens takes no notice of their state read their prompt in one piece.
        """
        size = min(self.limits.prefill_chunk or len(self.unread), most or len(self.unread))
        return self.unread if self.verifier.whole_prompts else self.unread[:size]

    def keeps(self, piece: NDArray[np.int32]) -> int:
        """Positions at the end of a piece of the prompt whose logits are looked at."""
        learns = self.drafter.top_k > 0
        ends = len(piece) == len(self.unread)
        return min(max(self.limits.prompt_logits, 1), len(piece)) if learns and ends else 1

    def commit(self) -> None:
        """Let the cache keep the nodes of the pass that were walked so far."""
        if not self.seen.is_committed:
            self.seen.is_committed = True
            self.verifier.commit(np.array(self.seen.path, np.int32))

    def fail(self, error: BaseException) -> None:
        """Take down what it failed with; where the model has no position for its last token, that is what is said."""
        most, length = self.limits.positions, self.text.length - self.limits.padding
        if isinstance(error, IndexError) and 0 < most < length and "index out of range" in str(error):
            said = PositionError(
                f"a text of at most {most} tokens, for which the model has positions",
                f"{length}, of which {self.text.prompt_length - self.limits.padding} are the prompt's",
                "Shorten the prompt, or let max_new_tokens end the text earlier.",
            )
            said.__cause__ = error
            error = said
        self.error = self.error or error

    def end(self) -> None:
        """End the sequence, however far it got: the cache is handed back, the drafter keeps what it may keep."""
        if self.ended:
            return
        try:
            if self._started:
                self.commit()  # a walk that failed had got so far
                self.report.pass_kind, self.report.pass_reason = self.verifier.pass_kind, self.verifier.pass_reason
                self.cache = self.verifier.finish()
        except Exception as error:
            self.error = self.error or error
        try:
            self.drafter.finish(failed=self.error is not None)
            if self._started and self.stopped and self.error is None:
                self.drafter.keep_answer(self.text.new_ids)
        except Exception as error:
            self.error = self.error or error
        self.report.seconds = perf_counter() - self.report.began if self.report.began else 0.0
        if self._documents_of is not None:
            self.report.provenance = self._documents_of(self.report.origins)
        self.ended = True


def autocast_key() -> tuple[object, ...]:
    """What else of this thread a model's arithmetic depends on: sequences of one key share steps."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
