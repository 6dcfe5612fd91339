"""A sequence: one text that is being generated, with all that is its own: sampler, stopping criteria, drafter, cache.

An `Engine` opens it, takes it from pass to pass and at last ends it (`engine.py`). What a pass made visible waits
until its reader takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.datastore.store import OriginRun, SourcedRun
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.engine.limits import Limits
from retrieve_spec.engine.reader import Reader
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.scheduler import Turn
from retrieve_spec.errors import PositionError
from retrieve_spec.sampling.acceptance import PassLogits, RowText, Sampler, Stopper, Walk
from retrieve_spec.verify.verifier import Verifier, VerifierInputs, VerifierOutput

if TYPE_CHECKING:
    from retrieve_spec.engine.joining import SharedPrompt
    from retrieve_spec.engine.text_drafter import TextDrafter


class PromptPass(NamedTuple):
    """Pass that read the end of a prompt: what the model computed, and the row of it that follows the prompt."""

    output: VerifierOutput
    first_row: int


@dataclass(slots=True)
class SeenPass:
    """One pass, as one sequence sees it; its fields are set one after the other, as the step goes on.

    Attributes
    ----------
    tree
        The draft.
    output
        What the model computed; None after the drafter has learned from it.
    first_row
        Row of the output that follows the root.
    is_committed
        Whether the cache was told which rows to keep; true before the first pass, of which it keeps none.
    path
        Accepted nodes so far, also where the walk failed.
    logits
        The output's logits on the host.
    walked
        The result of the walk.
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


class Status(Enum):
    """State of a sequence, from the first to one of the last three."""

    WAITING = "waiting"
    """Its cache and drafter are not opened yet."""
    READING = "reading"
    """The next pass reads a piece of its prompt."""
    DECODING = "decoding"
    """The next pass verifies a draft, and may read the last few tokens of its prompt too."""
    COMPLETE = "complete"
    """Its text is complete; the end of the step hands back its cache."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDED = (Status.FINISHED, Status.FAILED, Status.CANCELLED)


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
    on_demand
        Takes part in passes only while its reader asks for one: its cache is the caller's and never runs ahead.
    prompt
        Its prompt, where other sequences may have the same.

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
        The last pass over the prompt, where another sequence has read it.
    steps
        Numbers of the engine's steps it took part in after its prompt.
    status
        How far it has got.
    turn
        What the scheduler knows of it; `turn.cancelled` ends it.
    error, cache
        What it failed with, and the cache as plain `generate` leaves it.
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
        documents_of: Callable[[list[OriginRun]], list[SourcedRun]] | None = None,
        on_demand: bool = False,
        prompt: SharedPrompt | None = None,
    ) -> None:
        self.text = RowText(inputs.input_ids if ids is None else ids)
        self.report = GenerationReport()
        self.reader = Reader(on_demand)
        self.status = Status.WAITING
        self.turn = Turn()
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
        self.prompt = prompt
        self.read_before: PromptPass | None = None

    @property
    def ended(self) -> bool:
        """Whether it has ended and handed back its cache."""
        return self.status in _ENDED

    @property
    def is_reading(self) -> bool:
        """Whether more of the prompt must be read before anything is drafted."""
        return self.status in (Status.WAITING, Status.READING)

    @property
    def root_ids(self) -> NDArray[np.int32]:
        """(m,) int32 tokens that the next draft follows: the last token, or the rest of a prompt."""
        return self.unread if len(self.unread) else self.text.last_ids

    @property
    def is_over(self) -> bool:
        """Whether no further pass includes it."""
        return self.status is Status.COMPLETE or self.turn.cancelled or self.ended or self.error is not None

    @property
    def is_schedulable(self) -> bool:
        """Whether the next pass may include it: its reader is not too far behind."""
        return not self.is_over and self.reader.is_near

    @property
    def has_news(self) -> bool:
        """Whether its reader has tokens to take, or nothing to wait for."""
        return self.reader.has_pieces or self.ended

    @property
    def may_draft_at_once(self) -> bool:
        """Whether `draft_at_once` is to be asked: it has not begun, and its prompt is its own."""
        return self.status is Status.WAITING and self.prompt is None and not self.is_over

    def _still_reads(self) -> bool:
        """Whether sequences with the same prompt may wait until it has read it."""
        return self.is_reading and not self.is_over

    def open(self) -> None:
        """Take over the cache and let the drafter read the text, unless another sequence is reading its prompt.

        What that one has read is not read again.
        """
        self.report.began = self.report.began or perf_counter()
        if self.status is Status.WAITING:
            if self.prompt is not None and self.prompt.must_wait(self._still_reads):
                return
            inputs = self._inputs
            if self.prompt is not None:
                inputs, self.read_before = self.prompt.taken(inputs)
            self.status = Status.READING
            self.verifier.start(inputs)
            self.report.mode, self.report.reason = self.verifier.mode, self.verifier.reason
            if self.verifier.mode != "plain" and (why_none := self.drafter.start()):
                self.report.mode, self.report.reason = "plain", why_none

    def draft_at_once(self, most: int) -> None:
        """Start, and where no more than `most` tokens of the prompt are left, let the first draft stand after them.

        Reading them takes a pass, which can verify as well.
        """
        self.open()
        left, verifier = len(self.unread), self.verifier
        if left <= most and verifier.reads_rest(left):
            self.status = Status.DECODING

    def piece(self, most: int = 0) -> NDArray[np.int32]:
        """(m,) int32 what to read of the prompt in the next pass, `most` tokens at most (0: no limit).

        Models whose forward over several tokens takes no notice of their state read their prompt in one piece.
        """
        size = min(limit for limit in (most, self.piece_limit, len(self.unread)) if limit)
        return self.unread if self.verifier.whole_prompts else self.unread[:size]

    @property
    def piece_limit(self) -> int:
        """Prompt tokens of it that the next pass may read; 0 for no limit."""
        limits = [limit for limit in (self.limits.prefill_chunk, self.turn.most_piece) if limit]
        return min(limits, default=0)

    def keeps(self, piece: NDArray[np.int32]) -> int:
        """Number of positions at the end of a piece of the prompt whose logits are read."""
        learns = self.drafter.top_k > 0
        ends = len(piece) == len(self.unread)
        return min(max(self.limits.prompt_logits, 1), len(piece)) if learns and ends else 1

    def commit(self) -> None:
        """Keep the rows of the nodes that were walked so far in the cache."""
        if not self.seen.is_committed:
            self.seen.is_committed = True
            self.verifier.commit(np.array(self.seen.path, np.int32))

    def fail(self, error: BaseException) -> None:
        """Record the error; where the model has no position for the last token, the error says so."""
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
        """End the sequence at any point: hand back the cache, and let the drafter keep what it may keep."""
        if self.ended:
            return
        started, is_complete = self.status is not Status.WAITING, self.status is Status.COMPLETE
        try:
            if started:
                self.commit()  # keep the rows of a failed walk
                self.report.pass_kind, self.report.pass_reason = self.verifier.pass_kind, self.verifier.pass_reason
                self.cache = self.verifier.finish()
        except Exception as error:
            self.error = self.error or error
        try:
            self.drafter.finish(failed=self.error is not None)
            if is_complete and self.error is None:
                self.drafter.keep_answer(self.text.new_ids)
        except Exception as error:
            self.error = self.error or error
        self.report.seconds = perf_counter() - self.report.began if self.report.began else 0.0
        if self._documents_of is not None:
            self.report.provenance = self._documents_of(self.report.origins)
        if self.error is not None:
            self.status = Status.FAILED
        else:
            self.status = Status.FINISHED if is_complete else Status.CANCELLED


def autocast_key() -> tuple[object, ...]:
    """Return the autocast settings of this thread; only sequences with the same settings share steps."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
