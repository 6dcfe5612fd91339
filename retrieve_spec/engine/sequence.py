"""A sequence: one text that is being generated, with all that is its own: sampler, stopping criteria, drafter, cache.

An `Engine` takes it from pass to pass with these verbs: `open`, `read` (a piece of the prompt), `draft`, `verify`,
`read_logits`, `accept`, `learn`, and at last `end`. What a pass made visible waits until its reader takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Budget, Layer, VerifiedPass
from retrieve_spec.drafting.forced import Guide, forced_run, with_forced
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.engine.budget import Progress, keep_best, within
from retrieve_spec.engine.drafters import DrafterLease
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.rows import SharedPrompt
from retrieve_spec.errors import PositionError
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.sampling.acceptance import Sampler, Walk, walk
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.text import RowText, Stopper
from retrieve_spec.verify.verifier import Ran, Verifier, VerifierInputs, VerifierOutput

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
    lease
        What drafts for it.
    sampler, stopper
        Which token is the target's next, and after which it ends.
    limits
        How much one pass may draft, and what its cache takes.
    ids
        (1, L) long, the text as processors and criteria see it, where it has more than `inputs`: padding in front.
    on_end
        Called once, when the sequence has ended.
    waits_for_reader
        Takes part in passes only while its reader asks for one: its cache is the caller's and never runs ahead.
    prompt
        Its prompt, where other sequences may have the same.
    call
        Names the call that it is a row of, where that has several.
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
    steps
        Numbers of the engine's steps it took part in behind its prompt.
    ended, error, cache
        Whether it is over, what it failed with, and the cache as plain `generate` leaves it.
    """

    def __init__(
        self,
        inputs: VerifierInputs,
        verifier: Verifier,
        lease: DrafterLease,
        sampler: Sampler,
        stopper: Stopper,
        limits: Limits,
        *,
        ids: torch.Tensor | None = None,
        on_end: Callable[[Sequence], None] | None = None,
        waits_for_reader: bool = False,
        prompt: SharedPrompt | None = None,
        call: str | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.text = RowText(inputs.input_ids if ids is None else ids)
        self.report = GenerationReport()
        self.reader = Reader(waits_for_reader)
        self.cancelled = self.stopped = self.ended = False
        self.error: BaseException | None = None
        self.cache: Any = None
        self.verifier, self.lease, self.limits = verifier, lease, limits
        self.sampler, self._stopper = sampler, stopper
        self._inputs, self._on_end = inputs, on_end
        self.autocast_key = autocast_key()
        self.steps: list[int] = []
        self.unread = inputs.uncached_ids
        self.tree = NO_DRAFT
        self.seen: SeenPass = SeenPass(NO_DRAFT)
        self._drafts_at_once = False
        self._prompt, self._call, self._guide = prompt, call, guide
        self._read_before: tuple[VerifierOutput, int] | None = None  # the prompt's pass that another sequence ran
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
    def progress(self) -> Progress:
        """How far it is."""
        length, begun = self.text.length, self.text.prompt_length
        return Progress(self._call, self.limits.max_length - length, length - begun, len(self.steps))

    @property
    def has_news(self) -> bool:
        """Whether its reader has something to take, or nothing to wait for."""
        return self.reader.has_pieces or self.ended

    @property
    def may_draft_at_once(self) -> bool:
        """Whether `draft_at_once` is to be asked: it has not begun, and its prompt is its own."""
        return self.is_reading and not self._started and self._prompt is None and not self.is_over

    def _still_reads(self) -> bool:
        """Whether others that have its prompt may wait until it has read it."""
        return self.is_reading and not self.is_over

    def open(self) -> None:
        """Take over the cache and let the drafter read the text, unless another sequence is reading its prompt.

        What that one has read is not read again.
        """
        self.report.began = self.report.began or perf_counter()
        if not self._started:
            if self._prompt is not None and self._prompt.must_wait(self._still_reads):
                return
            inputs = self._inputs
            if self._prompt is not None:
                inputs, self._read_before = self._prompt.taken(inputs)
            self._started = True
            self.verifier.start(inputs)
            self.report.mode, self.report.reason = self.verifier.mode, self.verifier.reason
            if self.verifier.mode != "plain" and (why_none := self.lease.start()):
                self.report.mode, self.report.reason = "plain", why_none
        if self._read_before is not None:
            self._first_choice(*self._read_before, borrowed=True)

    def draft_at_once(self, most: int) -> None:
        """Start, and where no more than `most` tokens of the prompt are left, let the first draft stand behind them.

        Reading them takes a pass, which can verify as well.
        """
        self.open()
        left, verifier = len(self.unread), self.verifier
        self._drafts_at_once = left <= most and isinstance(verifier, RecordedVerifier) and verifier.reads_rest(left)

    def piece(self, most: int = 0) -> NDArray[np.int32]:
        """(m,) int32 what to read of the prompt in the next pass, `most` tokens at most (0: no limit).

        Models whose forward over several tokens takes no notice of their state read their prompt in one piece.
        """
        size = min(self.limits.prefill_chunk or len(self.unread), most or len(self.unread))
        return self.unread if self.verifier.whole_prompts else self.unread[:size]

    def keeps(self, piece: NDArray[np.int32]) -> int:
        """Positions at the end of a piece of the prompt whose logits are looked at."""
        learns = self.lease.top_k > 0
        ends = len(piece) == len(self.unread)
        return min(max(self.limits.prompt_logits, 1), len(piece)) if learns and ends else 1

    def read(self, piece: NDArray[np.int32]) -> None:
        """Read a piece of the prompt in a pass of its own; the last one brings a token."""
        self.has_read(piece, self.verifier.forward(piece, keep=self.keeps(piece), want_hidden=self.wants_hidden))

    def has_read(self, piece: NDArray[np.int32], output: VerifierOutput) -> None:
        """Take over what a pass computed for a piece of the prompt."""
        if len(piece) == len(self.unread):
            self._first_choice(output, self.keeps(piece) - 1)
            return
        self.verifier.commit(NO_DRAFT.parent)
        self.unread = self.unread[len(piece) :]
        self.reader.show(NO_DRAFT.token_ids)

    def _first_choice(self, output: VerifierOutput, first_row: int, borrowed: bool = False) -> None:
        """Choose the first token by the prompt's last pass, whose row `first_row` follows the prompt."""
        prompt = self.unread
        self.tree = NO_DRAFT
        self.saw(output, first_row, borrowed)
        self.read_logits()
        self.accept()
        self.lease.read_prompt(prompt, self.seen.logits)
        self.learn(prompt=True)

    def draft(self, most: int = MAX_NODES, cost: NDArray[np.float32] | None = None) -> DraftTree:
        """Ask the drafter for a tree that fits everything the text may still become.

        Parameters
        ----------
        most
            Nodes at most.
        cost
            (n + 1,) seconds of a pass over 0 … n drafted nodes, or None.
        """
        self.tree = NO_DRAFT
        if self.lease.drafts and self.verifier.mode != "plain":
            budget = self._budget(most, cost)
            tree = self.lease.propose(budget)
            if self._guide is not None and budget.max_nodes:
                most_deep = len(budget.ahead) + budget.max_depth
                tree = with_forced(tree, self._guide, self.text.ids, budget.ahead, most_deep)
                tree = keep_best(tree, budget.cost, budget.max_nodes)
            tree = within(tree, self.limits.vocabulary)
            self.tree = tree.first_branch() if self.verifier.mode == "chain" and not tree.is_chain else tree
        return self.tree

    def _budget(self, most: int, cost: NDArray[np.float32] | None) -> Budget:
        """What a draft may take: it fits everything that the text may still become."""
        limits, length = self.limits, self.text.length
        left = limits.max_length - length - 1
        if limits.draft_end:
            left = min(left, limits.draft_end - length)
        nodes = min(most if limits.nodes is None else limits.nodes, most, limits.most_nodes)
        if limits.slot_end:
            nodes = min(nodes, max(limits.slot_end - length, 0))
        if left < 1:
            nodes, left, cost = 0, 0, None
        budget = Budget(nodes, min(limits.max_depth, left), cost, self.sampler.noise_at(self.text))
        if self._guide is not None:
            run = forced_run(self._guide, self.text.ids, min(nodes, left))
            budget.ahead = keep_best(run, cost, nodes)
            budget.max_depth = min(limits.max_depth, left - len(budget.ahead))
        return budget

    def verify(self) -> None:
        """Run the model over the last token and the draft, in a pass of its own."""
        given = self.tree if len(self.tree) else None
        self.saw(self.verifier.forward(self.root_ids, given, want_hidden=self.wants_hidden))

    def saw(self, output: VerifierOutput, first_row: int = 0, borrowed: bool = False) -> None:
        """Take over what a pass computed for the draft; row `first_row` of it follows the root.

        A pass that is `borrowed` from another sequence has left nothing in the cache.
        """
        self.seen = SeenPass(self.tree, output, first_row, is_committed=borrowed)
        self.report.ran[output.ran.value] = self.report.ran.get(output.ran.value, 0) + 1
        graphs = getattr(self.verifier, "graphs", None)
        if graphs is not None and output.ran is Ran.EAGER:
            self.report.eager_reason = graphs.problem

    @property
    def wants_hidden(self) -> Layer | None:
        """The layer whose hidden states its drafter is shown."""
        return self.lease.wants_hidden

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens of every row it looks at."""
        return self.lease.top_k if self.lease.drafter is not None else 1

    def read_logits(self, read: PassLogits | None = None) -> None:
        """Bring over what the walk and the drafter need of the pass's logits, unless they are `read` already.

        Waits for the device.
        """
        seen = self.seen
        seen.logits = read or self.sampler.read(seen.every_logit, seen.first_row, seen.tree, self.text, self.top_k)

    def accept(self) -> None:
        """Follow the target's choices down the tree, keep what was walked and show it."""
        seen = self.seen
        seen.walked = walk(seen.tree, seen.logits, seen.first_row, self.sampler, self.text, self._stopper, seen.path)
        self._commit()
        if self._prompt is not None and seen.output is not None:
            self._prompt.keep(self.verifier, seen.output, seen.first_row)
            self._prompt = None
        self.stopped = seen.walked.stopped
        if self.is_reading:  # the prompt's pass
            self.report.passes, self.report.new_tokens = 1, len(seen.walked.emitted)
            if self.lease.drafts and self.verifier.reason != self.report.reason:  # what the prompt showed
                self.report.mode, self.report.reason = self.verifier.mode, self.verifier.reason
        self.unread, self._read_before = self.unread[:0], None
        self.reader.show(seen.walked.emitted)

    def _commit(self) -> None:
        """Let the cache keep the nodes that were walked so far."""
        if not self.seen.is_committed:
            self.seen.is_committed = True
            self.verifier.commit(np.array(self.seen.path, np.int32))

    def learn(self, prompt: bool = False) -> None:
        """Tell the drafter what the pass showed; of the `prompt` it has seen the top tokens."""
        seen, walked = self.seen, self.seen.walked
        last = seen.first_row + (int(walked.path[-1]) + 1 if len(walked.path) else 0)
        hidden = None if seen.output is None else seen.output.hidden
        shown = VerifiedPass(
            seen.tree,
            walked.path,
            walked.emitted,
            seen.logits.top_ids[seen.first_row :] if self.lease.top_k else None,
            seen.logits.top_logits[seen.first_row :] if self.lease.top_k else None,
            None if hidden is None else hidden[last].float().cpu().numpy(),
        )
        self.lease.observe(shown, prompt)
        seen.output = None

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
                self._commit()  # a walk that failed had got so far
                self.report.pass_kind, self.report.pass_reason = self.verifier.pass_kind, self.verifier.pass_reason
                self.cache = self.verifier.finish()
            if self.error is not None:
                self.lease.spoil()  # it may have failed amid its work
            self.lease.finish()
        except Exception as error:
            self.error = self.error or error
        self.report.seconds = perf_counter() - self.report.began if self.report.began else 0.0
        if self._on_end is not None:
            self._on_end(self)
        self.ended = True


def autocast_key() -> tuple[object, ...]:
    """What else of this thread a model's arithmetic depends on: sequences of one key share steps."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
