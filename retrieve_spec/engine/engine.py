"""The engine: sequences join, step together, and leave. One step is draft → verify → accept and commit → learn.

Who drives it: nobody but its callers. A reader that waits for its sequence finds either that nobody is stepping, and
steps, or that another reader is, and waits for the end of that step. A step takes along every sequence that may go on,
whoever reads it, so readers in several threads, or streams that one thread reads in turn, share passes without knowing
of each other; a sequence is at most two passes ahead of its reader, so one that nobody reads costs no more.
An exception ends the sequence it came from. Ctrl-C waits for the end of the step, and ends what its thread reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Many
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import FEW_ROOTS, PASS
from retrieve_spec.engine.batches import each, kept_bytes, pads, passes_over, read_logits_all, verify_all
from retrieve_spec.engine.budget import Backoff, fewer_paths, gain, room, row_cost, share_evenly, share_out, worth
from retrieve_spec.engine.cost import Costs
from retrieve_spec.engine.reading import read_all
from retrieve_spec.engine.sequence import NO_DRAFT, Sequence, autocast_key
from retrieve_spec.engine.step_lock import StepLock
from retrieve_spec.engine.threads import PassThreads, using


class Engine:
    """Takes the sequences of one model from pass to pass.

    Parameters
    ----------
    costs
        What passes cost; sizes drafts where sequences leave it open, and learns.

    Attributes
    ----------
    steps
        Taken so far.
    in_step
        Whether other processes must run the same passes, so that what they hold is not decided by a clock here.
    threads
        How many threads passes use; None where no CPU runs them.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self.threads: PassThreads | None = None
        self.steps = 0
        self.in_step = False
        self._sequences: list[Sequence] = []
        self._backoff = Backoff()
        self._lock, self._process = StepLock(), os.getpid()

    def step(self, own: Many[Sequence] = ()) -> None:
        """One pass for every sequence that may go on; `own` are those that the caller waits for."""
        self.steps += 1
        here = autocast_key()
        going = [s for s in self._sequences if s.is_schedulable and (s.autocast_key == here or s in own)]
        try:
            with torch.inference_mode(False), torch.no_grad():
                if self._backoff.samples(len(going)):
                    each([s for s in going if s.is_reading], lambda sequence: sequence.lent.wait())
                each([s for s in going if s.may_draft_at_once], lambda sequence: sequence.draft_at_once(FEW_ROOTS))
                decoding = [s for s in going if not s.is_reading and not s.is_over]
                reading = [s for s in going if s.is_reading and not s.is_over]
                read_all(reading, PASS.prompt_piece if decoding else 0, self.threads)
                for batch in passes_over(decoding):
                    self._pass(batch)
        except BaseException as error:  # from what they share: nobody knows what their caches hold
            for sequence in going:
                if not sequence.is_over:
                    sequence.fail(error)
            raise

    def _pass(self, batch: list[Sequence]) -> None:
        """One pass of the model over a batch: draft(all) → verify(all) → for each: accept, commit, learn."""
        times = [perf_counter()]
        batch = self._draft(batch)
        roots = sum(len(sequence.root_ids) for sequence in batch)
        times.append(perf_counter())
        with using(self.threads):
            batch, usual = verify_all(batch)
            batch = read_logits_all(batch)  # waits for the device: its time is the pass's
        times.append(perf_counter())
        batch = each(batch, Sequence.accept)
        times.append(perf_counter())
        batch = each(batch, Sequence.learn)
        times.append(perf_counter())
        if batch:
            self._note(batch, usual, np.diff(times).tolist(), roots - len(batch))

    def _draft(self, batch: list[Sequence]) -> list[Sequence]:
        """Give every sequence a tree within one budget for all; those whose drafters did not fail."""
        for sequence in batch:
            sequence.tree = NO_DRAFT
        if not any(sequence.lent.drafts for sequence in batch):
            return batch
        count, padded, seconds = len(batch), pads(batch), self._seconds(batch)
        shares = count > 1 and seconds is not None
        if shares and self._backoff.rests():
            return batch
        began = perf_counter()
        most = room(count, PASS.max_rows) // (count if padded else 1)
        cost = None if seconds is None else row_cost(seconds, count, padded)
        asked = self._backoff.sample(batch) if shares else batch
        each(asked, lambda sequence: sequence.draft(most, cost))
        batch = [sequence for sequence in batch if not sequence.is_over]
        trees = [sequence.tree for sequence in batch]
        if cost is not None and self.costs.path_share:
            trees = [fewer_paths(tree, cost, self.costs.path_seconds) for tree in trees]
        worths = worth([sequence.progress for sequence in batch], seconds)
        trees = (share_evenly if padded else share_out)(trees, seconds, most, worths)
        for sequence, tree in zip(batch, trees, strict=True):
            sequence.tree = tree
        if len(batch) > 1 and seconds is not None:
            took = perf_counter() - began
            self._backoff.looked(gain(trees, seconds, worths, padded) > took, took / float(seconds[0]))
        return batch

    def _seconds(self, batch: list[Sequence]) -> NDArray[np.float32] | None:
        """(MAX_NODES + 1,) seconds of a pass over a batch by drafted nodes; None where these are not chosen by cost."""
        if any(sequence.limits.nodes is not None for sequence in batch) or (self.in_step and len(batch) > 1):
            return None
        return self.costs.seconds(len(batch), sum(sequence.text.length for sequence in batch))

    def _note(self, batch: list[Sequence], usual: bool, seconds: list[float], more: int) -> None:
        """Enter a pass in logs and costs, by the seconds of drafting, verifying, committing and learning.

        It had so many `more` rows than a last token of each and the drafts.
        """
        drafted_before = batch[0].log.drafted
        share = tuple(each_of / len(batch) for each_of in seconds)
        for sequence in batch:
            sequence.steps.append(self.steps)
            sequence.report.threads = 0 if self.threads is None else self.threads.chosen
            sequence.log.note(sequence.seen.tree, sequence.seen.walked, share, sequence.text.length)
        threads = self.threads if self.threads is not None and self.threads.most > 1 else None
        if not usual or (threads is None and not any(sequence.lent.drafts for sequence in batch)):
            return  # it says nothing of such passes, or nobody asks
        trees = [sequence.seen.tree for sequence in batch]
        nodes = more + (len(batch) * max(map(len, trees)) if pads(batch) else sum(map(len, trees)))
        context = sum(sequence.text.length for sequence in batch)
        if threads is not None:
            is_trial, chosen = threads.comparing, threads.chosen
            threads.observe(sum(seconds), self.costs.expected(len(batch), nodes, context))
            if threads.chosen != chosen:
                self.costs.doubt()
            if is_trial:
                return  # it says nothing of passes to come
        self.costs.learn(trees, nodes, context, seconds, drafted_before)

    def run(
        self, sequences: Iterable[Sequence], rows: int = 0
    ) -> Generator[tuple[Sequence, NDArray[np.int32] | None], None, None]:
        """Take sequences to their ends, as many at a time as `config.PASS.batch_bytes` holds caches of.

        Parameters
        ----------
        sequences
            Taken one by one, when there is room for them.
        rows
            Under way at a time at most; 0 for `config.PASS.batch_rows`.

        Yields
        ------
        tuple
            A sequence and what became visible of it, (t,) int32, or None once, when it has ended.
        """
        waiting = iter(sequences)
        following = next(waiting, None)
        live: list[Sequence] = []
        try:
            while live or following is not None:
                while following is not None and _has_room(live, following, rows or PASS.batch_rows):
                    live.append(following)
                    self.join(following)
                    following = next(waiting, None)
                self.advance(live)
                for sequence in list(live):
                    while sequence.reader.has_pieces:
                        yield sequence, sequence.reader.take()
                    if sequence.ended:
                        live.remove(sequence)
                        yield sequence, None
        finally:
            self.leave(*live)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence take part from the next step on."""
        self._survive_fork()
        self._sequences.append(sequence)

    def leave(self, *sequences: Sequence) -> None:
        """End sequences, however far they got; safe to call more than once, from any thread."""
        for sequence in sequences:
            sequence.cancelled = True
        if sequences and not self.is_stepping:  # from inside a step: its end ends them
            with self.alone():
                pass

    def advance(self, sequences: list[Sequence]) -> None:
        """Return when one of these sequences has news or has ended, stepping as long as nobody else does.

        Raises
        ------
        ConfigError
            The call comes from inside a step.
        """
        for sequence in sequences:
            sequence.reader.asking += 1
        try:
            while not any(sequence.has_news for sequence in sequences):
                with self.alone(unless=lambda: any(sequence.has_news for sequence in sequences)) as mine:
                    if mine:
                        self.step(sequences)
        finally:
            for sequence in sequences:
                sequence.reader.asking -= 1

    @property
    def is_stepping(self) -> bool:
        """Whether this thread keeps others from stepping, as in the middle of a step."""
        return self._lock.is_mine

    @contextlib.contextmanager
    def alone(self, unless: Callable[[], bool] = bool) -> Iterator[bool]:
        """Keep others from stepping; False if there was to wait, and `unless` came true meanwhile."""
        self._survive_fork()
        with self._lock.held(unless) as mine:
            try:
                yield mine
            finally:
                if mine:
                    self._end_leaving()

    def _end_leaving(self) -> None:
        """End the sequences that have stopped, failed or were cancelled."""
        for sequence in [sequence for sequence in self._sequences if sequence.is_over]:
            sequence.end()
            self._sequences.remove(sequence)

    def _survive_fork(self) -> None:
        """In a forked child nobody is left who steps, and what others had begun is over."""
        if self._process != os.getpid():
            for sequence in self._sequences:
                sequence.cancelled = True
            self._lock, self._process = StepLock(), os.getpid()


def _has_room(live: list[Sequence], another: Sequence, rows: int) -> bool:
    """Whether one more sequence may begin beside those of a call that are under way; one always may."""
    if not live:
        return True
    return len(live) < rows and kept_bytes([*live, another]) <= PASS.batch_bytes
