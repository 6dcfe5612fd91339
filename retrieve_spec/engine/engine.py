"""The engine: one step of all sequences that can continue. A step is draft → verify → accept and commit → learn.

A step includes every sequence that can continue, whoever reads it, so readers in several threads, or streams that one
thread reads in turn, share passes without knowing of each other. A sequence is at most two passes ahead of its reader,
so an unread one costs no more than that. `driving.py` decides who steps when. An exception ends the sequence that
raised it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import FEW_ROOTS, MAX_NODES, PASS
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.forced import forced_run, with_forced
from retrieve_spec.drafting.tree import NO_DRAFT, DraftTree
from retrieve_spec.engine.budget import Backoff, Costs, PassThreads, keep_best, using, within
from retrieve_spec.engine.draft_batch import BatchBudget, draft_batch
from retrieve_spec.engine.driving import Driver
from retrieve_spec.engine.report import PassSeconds
from retrieve_spec.engine.scheduler import Scheduler
from retrieve_spec.engine.sequence import SeenPass, Sequence, Status, autocast_key
from retrieve_spec.sampling.acceptance import PassLogits, read_side_by_side, walk
from retrieve_spec.sampling.samplers import DeviceSampler, read_sampled
from retrieve_spec.verify.verifier import Ran, SharedPasses, VerifierOutput

logger = logging.getLogger(__name__)


class Engine(Driver):
    """Takes the sequences of one model from pass to pass.

    Parameters
    ----------
    in_step
        Whether other processes must run the same passes, so that what they hold is not decided by a clock here.

    Attributes
    ----------
    steps
        Taken so far.
    costs
        What passes cost; sizes drafts where sequences leave it open, and learns.
    threads
        How many threads passes use; None where no CPU runs them.
    scheduler
        Decides whose turn it is.
    """

    def __init__(self, in_step: bool) -> None:
        super().__init__()
        self.costs, self.scheduler = Costs(), Scheduler()
        self.threads: PassThreads | None = None
        self.steps = 0
        self._in_step, self._backoff = in_step, Backoff()

    def step(self, own: Many[Sequence] = ()) -> None:
        """Run one pass for every sequence that can continue; the caller waits for `own`."""
        self.steps += 1
        here = autocast_key()
        going = [s for s in self._sequences if s.is_schedulable and (s.autocast_key == here or s in own)]
        going = self.scheduler.next_pass(going)
        try:
            with torch.inference_mode(False), torch.no_grad():
                reading, decoding = self._schedule(going)
                read_all(reading, PASS.prompt_piece if decoding else 0, self.threads)
                for batch in passes_over(decoding):
                    self._pass(batch)
        except BaseException as error:  # from a shared pass, after which the caches' contents are unknown
            for sequence in going:
                if not sequence.is_over:
                    sequence.fail(error)
            raise

    def _schedule(self, going: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences of a step that read their prompts, and those that decode."""
        if self._backoff.samples(len(going)):
            run_each([s for s in going if s.is_reading], lambda sequence: sequence.drafter.defer())
        run_each([s for s in going if s.may_draft_at_once], lambda sequence: sequence.draft_at_once(FEW_ROOTS))
        going = [s for s in going if not s.is_over]
        return [s for s in going if s.is_reading], [s for s in going if not s.is_reading]

    def _pass(self, batch: list[Sequence]) -> None:
        """Run one pass of the model over a batch: draft(all) → verify(all) → for each: accept, commit, learn."""
        times = [perf_counter()]
        batch = self._draft(batch)
        roots = sum(len(sequence.root_ids) for sequence in batch)
        times.append(perf_counter())
        padded = pads(batch)
        with using(self.threads):
            batch, usual = verify_all(batch)
            batch = read_logits_all(batch)  # waits for the device, so that its time counts for the pass
        times.append(perf_counter())
        batch = run_each(batch, accept)
        times.append(perf_counter())
        batch = run_each(batch, learn)
        times.append(perf_counter())
        if batch:
            self._record(batch, usual, PassSeconds(*np.diff(times).tolist()), roots - len(batch), padded)

    def _draft(self, batch: list[Sequence]) -> list[Sequence]:
        """Draft a tree for every sequence within one budget; return the sequences whose drafters did not fail."""
        for sequence in batch:
            sequence.tree = NO_DRAFT
        if not any(sequence.drafter.drafts for sequence in batch):
            return batch
        count, padded, seconds = len(batch), pads(batch), self._seconds(batch)
        most = max(min(sequence.verifier.most_rows for sequence in batch) - count, 0) // (count if padded else 1)
        backoff = self._backoff if count > 1 and seconds is not None else None
        trees = draft_batch(batch, BatchBudget(seconds, most, padded), draft_or_fail, backoff)
        for sequence, tree in zip(batch, trees, strict=True):
            sequence.tree = tree
        return [sequence for sequence in batch if not sequence.is_over]

    def _seconds(self, batch: list[Sequence]) -> NDArray[np.float32] | None:
        """Return (MAX_NODES + 1,) seconds of a pass by drafted nodes; None where cost does not decide their number."""
        if any(sequence.limits.nodes is not None for sequence in batch) or (self._in_step and len(batch) > 1):
            return None
        return self.costs.seconds(len(batch), sum(sequence.text.length for sequence in batch))

    def _record(self, batch: list[Sequence], usual: bool, seconds: PassSeconds, extra_roots: int, padded: bool) -> None:
        """Record a pass in reports and costs.

        Parameters
        ----------
        usual
            Whether it took as long as such passes do.
        seconds
            What it took.
        extra_roots
            Root tokens beyond one for each sequence.
        padded
            Whether each sequence took as many rows as the widest.
        """
        share = PassSeconds(*(part / len(batch) for part in seconds))
        for sequence in batch:
            sequence.steps.append(self.steps)
            sequence.report.threads = 0 if self.threads is None else self.threads.chosen
            sequence.report.add_pass(sequence.seen.tree, sequence.seen.walked, share, sequence.limits.provenance)
        chooses_threads = self.threads is not None and self.threads.most > 1
        asked = chooses_threads or any(sequence.drafter.drafts for sequence in batch)
        if usual and asked:  # other passes are not comparable, or the time is not needed
            trees = [sequence.seen.tree for sequence in batch]
            nodes = extra_roots + (len(batch) * max(map(len, trees)) if padded else sum(map(len, trees)))
            context = sum(sequence.text.length for sequence in batch)
            self.costs.learn(len(batch), nodes, context, sum(seconds), self.threads)


def passes_over(sequences: Many[Sequence]) -> Iterator[list[Sequence]]:
    """Divide sequences into batches for one pass each, of `config.PASS.batch_rows` at most."""
    shared: dict[object, list[Sequence]] = {}
    for sequence in sequences:
        passes = _passes_of(sequence)
        if passes is None:
            yield [sequence]
        else:
            shared.setdefault((passes, sequence.drafter.wants_hidden), []).append(sequence)
    for together in shared.values():
        for first in range(0, len(together), PASS.batch_rows):
            yield together[first : first + PASS.batch_rows]


def pads(batch: Many[Sequence]) -> bool:
    """Whether a pass over a batch takes as many rows for each sequence as for the one that needs most."""
    passes = _shared_by(batch)
    return passes is not None and passes.pads


def _shared_by(batch: Many[Sequence]) -> SharedPasses | None:
    """Return the passes that a batch shares; None for one sequence alone, or where each needs passes of its own."""
    return _passes_of(batch[0]) if len(batch) > 1 else None


def _passes_of(sequence: Sequence) -> SharedPasses | None:
    return sequence.verifier.shared_passes(sequence.is_reading, sequence.drafter.wants_hidden)


def _together(
    batch: list[Sequence], roots: Many[NDArray[np.int32]], trees: Many[DraftTree], keeps: Many[int] | None = None
) -> list[VerifierOutput] | None:
    """Run one pass over a batch and return its outputs; None where each sequence needs a pass of its own."""
    passes = _shared_by(batch)
    if passes is None:
        return None
    try:
        verifiers = [sequence.verifier for sequence in batch]
        return passes.forward_all(verifiers, roots, trees, batch[0].drafter.wants_hidden, keeps)
    except Exception:
        logger.debug("a pass over %d sequences failed; each is tried alone", len(batch), exc_info=True)
    return None


def run_each(sequences: Many[Sequence], act: Callable[..., object], *given: Many[Any]) -> list[Sequence]:
    """Call `act` for every sequence with its own arguments; return the sequences for which it did not raise."""
    going = []
    for sequence, *own in zip(sequences, *given, strict=True):
        try:
            act(sequence, *own)
            going.append(sequence)
        except BaseException as error:
            sequence.fail(error)
    return going


def draft_or_fail(sequence: Sequence, most: int, cost: NDArray[np.float32] | None) -> DraftTree:
    """Return what `draft` does, or no draft where the sequence's drafter fails: then the sequence has failed."""
    try:
        return draft(sequence, most, cost)
    except BaseException as error:
        sequence.fail(error)
        return NO_DRAFT


def draft(sequence: Sequence, most: int = MAX_NODES, cost: NDArray[np.float32] | None = None) -> DraftTree:
    """Ask a sequence's drafter for a tree that fits everything the text may still become.

    Parameters
    ----------
    sequence
        The sequence.
    most
        Nodes at most.
    cost
        (n + 1,) seconds of a pass over 0 … n drafted nodes, or None.
    """
    if not sequence.drafter.drafts or sequence.verifier.mode == "plain":
        return NO_DRAFT
    budget = _budget_of(sequence, most, cost)
    tree = sequence.drafter.draft(budget)
    if (guide := sequence.drafter.guide) is not None and budget.max_nodes:
        most_deep = len(budget.ahead) + budget.max_depth
        tree = with_forced(tree, guide, sequence.text.ids, budget.ahead, most_deep)
        tree = keep_best(tree, budget.cost, budget.max_nodes)
    tree = within(tree, sequence.limits.vocabulary)
    return tree.first_branch() if sequence.verifier.mode == "chain" and not tree.is_chain else tree


def _budget_of(sequence: Sequence, most: int, cost: NDArray[np.float32] | None) -> Budget:
    """Return a budget that fits the rest of the text, whatever it becomes."""
    limits, length = sequence.limits, sequence.text.length
    left = limits.max_length - length - 1
    if limits.draft_end:
        left = min(left, limits.draft_end - length)
    nodes = min(most if limits.nodes is None else limits.nodes, most, sequence.turn.most_nodes)
    if limits.slot_end:
        nodes = min(nodes, max(limits.slot_end - length, 0))
    if left < 1:
        nodes, left, cost = 0, 0, None
    budget = Budget(nodes, min(limits.max_depth, left), cost, sequence.sampler.noise_at(sequence.text))
    if (guide := sequence.drafter.guide) is not None:
        run = forced_run(guide, sequence.text.ids, min(nodes, left))
        budget.ahead = keep_best(run, cost, nodes)
        budget.max_depth = min(limits.max_depth, left - len(budget.ahead))
    return budget


def verify_all(batch: list[Sequence]) -> tuple[list[Sequence], bool]:
    """Verify the trees of a batch in one pass.

    Returns
    -------
    verified
        The sequences that have been; the others have failed.
    usual
        Whether it took as long as such passes do: one whose graph was captured takes longer.
    """
    if len(batch) == 1:
        batch = run_each(batch, verify)
        return batch, not any(sequence.seen.output.ran is Ran.CAPTURED for sequence in batch if sequence.seen.output)
    roots = [sequence.root_ids for sequence in batch]
    keeps = [1] * len(batch) if any(len(ids) > 1 for ids in roots) else None
    outputs = _together(batch, roots, [sequence.tree for sequence in batch], keeps)
    if outputs is None:
        return run_each(batch, verify), False
    return run_each(batch, record_output, outputs), outputs[0].ran is not Ran.CAPTURED


def verify(sequence: Sequence) -> None:
    """Run the model over the last token and the draft, in a pass of its own."""
    given = sequence.tree if len(sequence.tree) else None
    record_output(
        sequence, sequence.verifier.forward(sequence.root_ids, given, want_hidden=sequence.drafter.wants_hidden)
    )


def record_output(sequence: Sequence, output: VerifierOutput, first_row: int = 0, borrowed: bool = False) -> None:
    """Record what a pass computed for the draft; row `first_row` of it follows the root.

    A pass that is `borrowed` from another sequence has left nothing in the cache.
    """
    sequence.seen = SeenPass(sequence.tree, output, first_row, is_committed=borrowed)
    report = sequence.report
    report.ran[output.ran.value] = report.ran.get(output.ran.value, 0) + 1
    graphs = getattr(sequence.verifier, "graphs", None)
    if graphs is not None and output.ran is Ran.EAGER:
        report.eager_reason = graphs.problem


def read_logits_all(batch: list[Sequence]) -> list[Sequence]:
    """Read the logits of a pass for its sequences, once for all that need the same of them."""
    alike: dict[bool | None, list[Sequence]] = {}  # whether rules truncate; None for plain reading
    for sequence in batch:
        sampler = sequence.sampler
        if sampler.reads_plainly:
            alike.setdefault(None, []).append(sequence)
        elif isinstance(sampler, DeviceSampler) and sampler.reads_along(sequence.text):
            alike.setdefault(sampler.truncates, []).append(sequence)
    read: dict[int, PassLogits] = {}
    for together in alike.values():
        if len(together) == 1:
            continue  # it is read by itself
        try:
            found = _read(together)
        except Exception:
            logger.debug("logits of %d sequences could not be read at once", len(together), exc_info=True)
            continue
        read.update(zip(map(id, together), found, strict=True))
    return run_each(batch, read_logits, [read.get(id(sequence)) for sequence in batch])


def _read(batch: list[Sequence]) -> list[PassLogits]:
    """Read from the logits of a pass what its sequences need, which is the same for all of them."""
    parts = [sequence.seen.every_logit for sequence in batch]
    needed = [max(sequence.drafter.top_k, 1) for sequence in batch]  # the walk needs one
    top_k = max(needed)
    drawing = [(s.seen, s.sampler.rules(s.text, s.seen.tree)) for s in batch if isinstance(s.sampler, DeviceSampler)]
    if drawing:
        found = read_sampled(parts, [seen.first_row for seen, _ in drawing], [rules for _, rules in drawing], top_k)
    else:
        found = read_side_by_side(parts, top_k)
    for read, few in zip(found, needed, strict=True):
        if few < top_k:  # each drafter gets as many as it asked for
            read.top_ids = np.ascontiguousarray(read.top_ids[:, :few])
            read.top_logits = np.ascontiguousarray(read.top_logits[:, :few])
    return found


def read_logits(sequence: Sequence, read: PassLogits | None = None) -> None:
    """Copy what the walk and the drafter need of a pass's logits to the host, unless they are `read` already.

    Waits for the device.
    """
    seen, text = sequence.seen, sequence.text
    if read is None:
        read = sequence.sampler.read(seen.every_logit, seen.first_row, seen.tree, text, sequence.drafter.top_k)
    seen.logits = read


def accept(sequence: Sequence) -> None:
    """Accept the nodes that the target chooses: walk down the tree, keep their rows and show their tokens."""
    seen, text = sequence.seen, sequence.text
    seen.walked = walk(seen.tree, seen.logits, seen.first_row, sequence.sampler, text, sequence.stopper, seen.path)
    sequence.commit()
    if sequence.prompt is not None and seen.output is not None:
        sequence.prompt.keep(sequence.verifier, seen.output, seen.first_row)
        sequence.prompt = None
    if sequence.is_reading:  # the prompt's pass
        report, verifier = sequence.report, sequence.verifier
        report.passes, report.new_tokens = 1, len(seen.walked.emitted)
        if sequence.drafter.drafts and verifier.reason != report.reason:  # the prompt's pass may have changed it
            report.mode, report.reason = verifier.mode, verifier.reason
    sequence.unread, sequence.read_before = sequence.unread[:0], None
    sequence.status = Status.COMPLETE if seen.walked.stopped else Status.DECODING
    sequence.reader.show(seen.walked.emitted)


def learn(sequence: Sequence, prompt: bool = False) -> None:
    """Let a sequence's drafter observe a pass; it has already observed the top tokens of the `prompt`."""
    seen, walked, top_k = sequence.seen, sequence.seen.walked, sequence.drafter.top_k
    hidden = None if seen.output is None else seen.output.hidden
    shown = VerifiedPass(
        seen.tree,
        walked.path,
        walked.emitted,
        seen.logits.top_ids[seen.first_row :] if top_k else None,
        seen.logits.top_logits[seen.first_row :] if top_k else None,
        None if hidden is None else hidden[seen.first_row :].float().cpu().numpy(),
    )
    sequence.drafter.observe(shown, prompt)
    seen.output = None


def read_all(sequences: list[Sequence], most: int = 0, threads: PassThreads | None = None) -> None:
    """Read the prompts of sequences.

    Parameters
    ----------
    sequences
        Sequences with unread prompts, served in order.
    most
        Tokens of a pass at most, and of all sequences about as many, where others wait for the next pass; 0 reads whole
        prompts, except for sequences whose pieces are limited (`Sequence.piece_limit`), which read one piece each.
    threads
        How many threads these passes use; None where no CPU runs them.
    """
    left = most
    while True:
        sequences = run_each([s for s in sequences if not s.is_over], begin)
        opened = [s for s in sequences if s.status is Status.READING and not s.is_over]
        if not opened or (most and left <= 0):
            return
        for batch in passes_over(opened):
            if not most or left > 0:
                left -= _read_pieces(batch, most, threads)
        sequences = [s for s in sequences if s.is_reading and not (s.status is Status.READING and s.piece_limit)]


def _read_pieces(batch: list[Sequence], most: int, threads: PassThreads | None) -> int:
    """Run one pass over pieces of prompts of some of a batch; return the number of tokens read."""
    began = perf_counter()
    pieces = _pieces(batch, most)
    batch, tokens = batch[: len(pieces)], sum(map(len, pieces))
    with using(threads):
        read_together(batch, pieces)
    seconds = perf_counter() - began
    for sequence in batch:
        sequence.report.prefill_ms += seconds * 1e3 / len(batch)
    return tokens


def _pieces(batch: list[Sequence], most: int) -> list[NDArray[np.int32]]:
    """Return pieces of the first few prompts of a batch for one pass, of which no prompt takes more than half.

    None is cut to fill the pass, so that prompts are read in the same pieces as alone.
    """
    if len(batch) == 1:
        return [batch[0].piece(most)]
    pieces: list[NDArray[np.int32]] = []
    used = 0
    for sequence in batch:
        piece = sequence.piece(PASS.max_rows // 2)
        if pieces and used + len(piece) > PASS.max_rows:
            break
        pieces.append(piece)
        used += len(piece)
    return pieces


def read_together(batch: list[Sequence], pieces: Many[NDArray[np.int32]]) -> None:
    """Read pieces of prompts in one pass."""
    keeps = [sequence.keeps(piece) for sequence, piece in zip(batch, pieces, strict=True)]
    outputs = _together(batch, pieces, [NO_DRAFT] * len(batch), keeps)
    if outputs is None:
        run_each(batch, read, pieces)
    else:
        run_each(batch, record_piece, pieces, outputs)


def begin(sequence: Sequence) -> None:
    """Open a sequence if it can start; where another one has read its prompt, continue from there."""
    sequence.open()
    if (known := sequence.read_before) is not None:
        _first_choice(sequence, known.output, known.first_row, borrowed=True)


def read(sequence: Sequence, piece: NDArray[np.int32]) -> None:
    """Read a piece of a prompt in a pass of its own; the last piece yields a token."""
    keep = sequence.keeps(piece)
    record_piece(
        sequence, piece, sequence.verifier.forward(piece, keep=keep, want_hidden=sequence.drafter.wants_hidden)
    )


def record_piece(sequence: Sequence, piece: NDArray[np.int32], output: VerifierOutput) -> None:
    """Record what a pass computed for a piece of a prompt."""
    if len(piece) == len(sequence.unread):
        _first_choice(sequence, output, sequence.keeps(piece) - 1)
        return
    sequence.verifier.commit(NO_DRAFT.parent)
    sequence.unread = sequence.unread[len(piece) :]
    sequence.reader.show(NO_DRAFT.token_ids)


def _first_choice(sequence: Sequence, output: VerifierOutput, first_row: int, borrowed: bool = False) -> None:
    """Choose the first token from the prompt's last pass, whose row `first_row` follows the prompt."""
    prompt = sequence.unread
    sequence.tree = NO_DRAFT
    record_output(sequence, output, first_row, borrowed)
    read_logits(sequence)
    accept(sequence)
    sequence.drafter.observe_prompt(prompt, sequence.seen.logits)
    learn(sequence, prompt=True)
