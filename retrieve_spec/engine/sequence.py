"""A sequence: one text that is being generated, with all that is its own: sampler, stopping criteria, drafter, cache.

An `Engine` takes it from pass to pass with these verbs: `open`, `read` (a piece of the prompt), `draft`, `verify`,
`look`, `accept`, `learn`, and at last `end`. What a pass made visible waits until the sequence's reader takes it.

An interruption may cut any of them short. Each is made of parts that can be done twice, and `_stage` tells which part
was under way, so `recover` goes on from there and `end` leaves the cache whole.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Drafter, Layer, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.budget import Progress
from retrieve_spec.engine.lent_drafter import LentDrafter
from retrieve_spec.engine.limits import Limits
from retrieve_spec.engine.pass_log import PassLog
from retrieve_spec.engine.reader import Reader
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.seen_pass import SeenPass
from retrieve_spec.engine.shared_prompt import SharedPrompt
from retrieve_spec.errors import InterruptedPassError, PositionError, raise_interruption
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.sampling.acceptance import Sampler
from retrieve_spec.sampling.pass_logits import PassLogits
from retrieve_spec.sampling.stopping import Stopper
from retrieve_spec.sampling.text import RowText
from retrieve_spec.verify.batch_prompt import RowPrompt
from retrieve_spec.verify.verifier import Ran, Verifier, VerifierInputs, VerifierOutput

NO_DRAFT = DraftTree()
_NO_TIME = (0.0, 0.0, 0.0, 0.0)
_BETWEEN, _READING, _KEEPING, _DRAFTING, _VERIFYING, _WALKING, _COMMITTING, _LEARNING = range(8)
"""What a sequence is in the middle of; it matters when an interruption cuts a pass short."""


class Sequence:
    """One text under way.

    Parameters
    ----------
    inputs
        What the generation starts from.
    verifier
        What runs the model for it.
    lend
        Lends it a drafter when it starts, or says why it goes without.
    sampler, stopper
        Which token is the target's next, and after which it ends.
    limits
        How much one pass may draft.
    ids
        (1, L) long, the text as processors and criteria see it, where it has more than `inputs`: padding in front.
    prediction_ids
        (m,) int32 text the output is expected to follow.
    context_ids
        (n,) int32 what the drafter reads in place of the prompt.
    on_pass
        Called with what each pass showed the drafter, the prompt's first.
    on_end
        Called once, when the sequence has ended.
    waits_for_reader
        Takes part in passes only while its reader asks for one: its cache is the caller's and never runs ahead.
    bytes_per_token
        Memory that keys and values of a token take.
    prompt
        Its prompt, where other sequences may have the same.
    call
        Names the call that it is a row of, where that has several.
    may_wait
        Whether its drafter may come when the first draft is asked for.

    Attributes
    ----------
    text
        Prompt and emitted tokens.
    reader
        Who it is decoded for.
    lent
        What drafts for it.
    steps
        Numbers of the engine's steps it took part in behind its prompt.
    ended, error, cache
        Whether it is over, what it failed with, and the cache as plain `generate` leaves it.
    """

    def __init__(
        self,
        inputs: VerifierInputs,
        verifier: Verifier,
        lend: Callable[[], Drafter | str],
        sampler: Sampler,
        stopper: Stopper,
        limits: Limits,
        *,
        ids: torch.Tensor | None = None,
        prediction_ids: NDArray[np.int32] | None = None,
        context_ids: NDArray[np.int32] | None = None,
        on_pass: Callable[[VerifiedPass], None] | None = None,
        on_end: Callable[[Sequence], None] | None = None,
        waits_for_reader: bool = False,
        bytes_per_token: int = 0,
        prompt: SharedPrompt | RowPrompt | None = None,
        call: str | None = None,
        may_wait: bool = False,
    ) -> None:
        self.text = RowText(inputs.input_ids if ids is None else ids)
        self.report = GenerationReport()
        self.log = PassLog(self.report, self.text.prompt_length, limits.provenance)
        self.reader = Reader(waits_for_reader)
        self.cancelled = self.stopped = self.ended = False
        self.error: BaseException | None = None
        self.cache: Any = None
        self.verifier = verifier
        read = inputs.input_ids[0].cpu().numpy().astype(np.int32) if context_ids is None else context_ids
        self.lent = LentDrafter(lend, read, prediction_ids, on_pass, may_wait)
        self.limits = limits
        self.sampler, self._stopper = sampler, stopper
        self._inputs, self._on_end = inputs, on_end
        self.bytes_per_token = bytes_per_token
        self.climate = climate()
        self.steps: list[int] = []
        self.unread = inputs.uncached_ids
        self._drafts_at_once = False
        self._prompt = prompt
        self._read_before: tuple[VerifierOutput, int] | None = None  # the prompt's pass that another sequence ran
        self._call = call
        self._stage = _BETWEEN
        self._started = self._ready = False  # whether the verifier's start has begun, and all of it is done
        self._seen: SeenPass | None = None

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
        return self._ready and self.is_reading

    @property
    def is_over(self) -> bool:
        """Whether no pass takes it along any more."""
        return self.stopped or self.cancelled or self.ended or self.error is not None

    @property
    def may_go_on(self) -> bool:
        """Whether the next pass may take it along: its reader is not too far behind."""
        return not self.is_over and self.reader.is_near

    @property
    def only_decodes(self) -> bool:
        """Whether all it needs is its next pass: the prompt is read, nothing was cut short, its reader is near."""
        return self._ready and not len(self.unread) and self._stage == _BETWEEN and self.may_go_on

    @property
    def progress(self) -> Progress:
        """How far it is."""
        length, begun = self.text.length, self.text.prompt_length
        return Progress(self._call, self.limits.max_length - length, length - begun, len(self.steps))

    @property
    def was_cut_short(self) -> bool:
        """Whether an interruption left it in the middle of a pass."""
        return self._stage != _BETWEEN

    @property
    def has_news(self) -> bool:
        """Whether its reader has something to take, or nothing to wait for."""
        return self.reader.has_pieces or self.ended

    @property
    def may_draft_at_once(self) -> bool:
        """Whether `draft_at_once` is to be asked: it has not begun, and its prompt is its own."""
        return self.is_reading and not self._ready and self._prompt is None and not self.is_over

    def _still_reads(self) -> bool:
        """Whether others that have its prompt may wait until it has read it."""
        return self.is_reading and not (self.cancelled or self.ended or self.error is not None)

    def _start(self) -> None:
        """Take over the cache, or one that holds the prompt already, and let the drafter read the text."""
        inputs = self._inputs
        if self._prompt is not None:
            inputs, self._read_before = self._prompt.taken(inputs)
        self._started = True
        self.verifier.start(inputs)
        self.report.mode, self.report.reason = self.verifier.mode, self.verifier.reason
        if self.verifier.mode != "plain" and (why_none := self.lent.start()):
            self.report.mode, self.report.reason = "plain", why_none
        self._ready = True

    def open(self) -> None:
        """Start, unless another sequence is reading its prompt; what that one has read is not read again."""
        self.report.began = self.report.began or perf_counter()
        if not self._ready:
            if self._prompt is not None and self._prompt.must_wait(self._still_reads):
                return
            self._stage = _READING
            self._start()
        if self._read_before is not None:
            self._stage = _READING
            self._first_choice(*self._read_before, borrowed=True)
        self._stage = _BETWEEN

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
        learns = self.lent.top_k > 0
        ends = len(piece) == len(self.unread)
        return min(max(self.limits.prompt_logits, 1), len(piece)) if learns and ends else 1

    def read(self, piece: NDArray[np.int32]) -> None:
        """Read a piece of the prompt in a pass of its own; the last one brings a token."""
        self._stage = _READING
        self.has_read(piece, self.verifier.forward(piece, keep=self.keeps(piece), want_hidden=self.wants_hidden))

    def has_read(self, piece: NDArray[np.int32], output: VerifierOutput) -> None:
        """Take over what a pass computed for a piece of the prompt."""
        if len(piece) < len(self.unread):
            self._rest = self.unread[len(piece) :]
            self._stage = _KEEPING
            self._keep_piece()
        else:
            self._first_choice(output, self.keeps(piece) - 1)

    def _keep_piece(self) -> None:
        """Let the cache keep the piece of the prompt that was read; what is read is not shown."""
        self.verifier.commit(NO_DRAFT.parent)
        self.unread = self._rest
        self.reader.show(NO_DRAFT.token_ids, self.reader.shown)
        self._stage = _BETWEEN

    def _first_choice(self, output: VerifierOutput, first_row: int, borrowed: bool = False) -> None:
        """Choose the first token by the prompt's last pass, whose row `first_row` follows the prompt."""
        prompt = self.unread
        self.saw(NO_DRAFT, output, first_row, borrowed)
        self.look()
        self.accept()
        self.lent.read(prompt, self.seen.logits)
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
        if not self.lent.drafts or self.verifier.mode == "plain":
            return NO_DRAFT
        self._stage = _DRAFTING
        noise = self.sampler.noise_at(self.text)
        tree = self.lent.propose(self.limits, self.text.length, most, cost, noise)
        self._stage = _BETWEEN
        return tree.first_branch() if self.verifier.mode == "chain" and not tree.is_chain else tree

    def verify(self, tree: DraftTree) -> None:
        """Run the model over the last token and a draft, in a pass of its own."""
        self._stage = _VERIFYING
        given = tree if len(tree) else None
        self.saw(tree, self.verifier.forward(self.root_ids, given, want_hidden=self.wants_hidden))

    def saw(self, tree: DraftTree, output: VerifierOutput, first_row: int = 0, borrowed: bool = False) -> None:
        """Take over what a pass computed for a draft; row `first_row` of it follows the root.

        A pass that is `borrowed` from another sequence has left nothing in the cache.
        """
        self._seen = SeenPass(tree, output, first_row, self.text.length, self.reader.shown, borrowed)
        self._stage = _WALKING
        self.report.ran[output.ran.value] = self.report.ran.get(output.ran.value, 0) + 1
        graphs = getattr(self.verifier, "graphs", None)
        if graphs is not None and output.ran is Ran.EAGER:
            self.report.eager_reason = graphs.problem

    @property
    def seen(self) -> SeenPass:
        """The pass under way, or the last."""
        assert self._seen is not None
        return self._seen

    @property
    def wants_hidden(self) -> Layer | None:
        """The layer whose hidden states its drafter is shown."""
        return self.lent.wants_hidden

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens of every row it looks at."""
        return self.lent.top_k if self.lent.drafter is not None else 1

    def look(self, read: PassLogits | None = None) -> None:
        """Bring over what the walk and the drafter need of the pass's logits, unless they are `read` already.

        Waits for the device.
        """
        self.seen.look(self.sampler, self.text, self.top_k, read)

    def accept(self) -> None:
        """Follow the target's choices down the tree, keep what was walked and show it."""
        self.seen.walk(self.sampler, self.text, self._stopper)
        self._stage = _COMMITTING
        self._keep()

    def _keep(self) -> None:
        """Let the cache keep the nodes that were walked, and show them; done twice it is the same."""
        seen, walked = self.seen, self.seen.walked
        self._commit(walked.path)
        if self._prompt is not None and seen.output is not None:
            self._prompt.keep(self.verifier, seen.output, seen.first_row)
            self._prompt = None
        self.stopped = walked.stopped
        if self.is_reading:  # the prompt's pass
            self.report.passes, self.report.new_tokens = 1, len(walked.emitted)
            if self.lent.drafts and self.verifier.reason != self.report.reason:  # what the prompt showed
                self.report.mode, self.report.reason = self.verifier.mode, self.verifier.reason
        self.unread = self.unread[:0]
        self.reader.show(walked.emitted, seen.place)
        self._read_before = None
        self._stage = _LEARNING

    def _commit(self, path: NDArray[np.int32]) -> None:
        """Let the cache keep the nodes of a path."""
        if not self.seen.borrowed:
            self.verifier.commit(path)

    def learn(self, prompt: bool = False) -> None:
        """Tell the drafter what the pass showed; of the `prompt` it has seen the top tokens."""
        self.lent.observe(self.seen, prompt)
        self.seen.output = None
        self._stage = _BETWEEN

    def fail(self, error: Exception) -> None:
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
        self.error = error

    def recover(self) -> None:
        """Make good a pass that was cut short: what the model has computed is used, else the pass begins again.

        Raises
        ------
        InterruptedPassError
            It was cut where the model's state cannot be taken back.
        """
        stage = self._stage
        if stage in (_DRAFTING, _LEARNING):
            self.lent.spoil()
        elif stage == _KEEPING:
            self._keep_piece()
        elif stage in (_WALKING, _COMMITTING):
            if stage == _WALKING:
                self.look()
                self.accept()
            else:
                self._keep()
            self.learn()
            self.log.note(self.seen.tree, self.seen.walked, _NO_TIME, self.text.length)
        elif self._ready and not self.verifier.takes_back:
            raise InterruptedPassError(
                "to go on",
                "another generation's interruption cut short the pass that this one shared",
                "Start this generation again.",
            )
        self._stage = _BETWEEN

    def end(self, error: BaseException | None = None) -> None:
        """End the sequence, however far it got: the cache is handed back, the drafter keeps what it may keep.

        Where this is interrupted, it is to be called again.
        """
        if self.ended:
            return
        self.error = self.error or error
        try:
            self._wind_up()
        except Exception as failed:
            raise_interruption(failed)
            self.error = self.error or failed
        self.report.seconds = perf_counter() - self.report.began if self.report.began else 0.0
        self.log.summary()
        if self._on_end is not None:
            self._on_end(self)
        self.ended = True

    def _wind_up(self) -> None:
        """Finish what the last pass began with the cache, and hand it and the drafter back."""
        stage = self._stage
        if self._started:
            if stage in (_WALKING, _COMMITTING):
                self._commit(np.array(self.seen.path, np.int32))
            elif stage == _KEEPING:
                self.verifier.commit(NO_DRAFT.parent)
            self.report.pass_kind, self.report.pass_reason = self.verifier.pass_kind, self.verifier.pass_reason
            self.cache = self.verifier.finish()
        if stage in (_DRAFTING, _LEARNING) or (stage == _READING and not self.lent.started):
            self.lent.spoil()
        self._stage = _LEARNING  # the drafter takes in the text as a whole, or is not used again
        self.lent.finish()
        self._stage = _BETWEEN


def climate() -> tuple[object, ...]:
    """What else of this thread a model's arithmetic depends on: sequences of one climate share steps."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
