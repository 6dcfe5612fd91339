"""The engine: sequences join, step together, and leave. One step is draft → verify → accept and commit → learn.

Who drives it: nobody but its callers. A reader that waits for its sequence finds either that nobody is stepping, and
steps, or that another reader is, and waits for the end of that step. A step takes along every sequence that may go on,
whoever reads it, so readers in several threads, or streams that one thread reads in turn, share passes without knowing
of each other; a sequence is at most two passes ahead of its reader, so one that nobody reads costs no more.
An exception ends the sequence it came from, and an interruption (Ctrl-C) the sequences of the thread that got it; the
next step first makes good what it cut short of others.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Many
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import FEW_ROOTS, MAX_NODES, PASS
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.batches import each, kept_bytes, look_all, pads, passes_over, verify_all
from retrieve_spec.engine.budget import Costs, Rest, fewer_paths, gain, room, row_cost, share_evenly, share_out, worth
from retrieve_spec.engine.reading import read_all
from retrieve_spec.engine.sequence import NO_DRAFT, Sequence, climate
from retrieve_spec.engine.threads import PassThreads, PromptThreads, using
from retrieve_spec.errors import ConfigError

_PATIENCE = 1.0
"""Seconds after which a thread that waits looks for itself, should an interruption have kept it from being told."""


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
    prompt_threads
        The same for passes that read prompts.
    """

    def __init__(self, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self.threads: PassThreads | None = None
        self.prompt_threads: PromptThreads | None = None
        self.steps = 0
        self.in_step = False
        self._sequences: list[Sequence] = []
        self._rest = Rest()
        self._process = 0
        self._belong_here()

    def _belong_here(self) -> None:
        """Let this process step; in a forked child nobody is left who does, and what others had begun is over."""
        if self._process == os.getpid():
            return
        for sequence in self._sequences:
            sequence.cancelled = True
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._driver = 0  # the thread that steps
        self._holder: types.FrameType | None = None  # and its call that does
        self._process = os.getpid()

    def step(self, own: Many[Sequence] = ()) -> None:
        """One pass for every sequence that may go on; `own` are those that the caller waits for."""
        self.steps += 1
        with torch.inference_mode(False), torch.no_grad():
            batch = list(self._sequences)  # looked at once: others join meanwhile
            if len(batch) == 1 and batch[0] in own and batch[0].only_decodes:
                self._pass(batch)
                return
            here = climate()
            # All of them, before a pass without them takes what they share with others.
            each([s for s in self._sequences if s.was_cut_short and not s.is_over], Sequence.recover)
            going = [s for s in self._sequences if s.may_go_on and (s.climate == here or s in own)]
            if self._rest.samples(len(going)):
                each([s for s in going if s.is_reading], lambda sequence: sequence.lent.wait())
            each([s for s in going if s.may_draft_at_once], lambda sequence: sequence.draft_at_once(FEW_ROOTS))
            going = [s for s in going if not s.is_over]
            decoding = [sequence for sequence in going if not sequence.is_reading]
            reading = [sequence for sequence in going if sequence.is_reading]
            read_all(reading, PASS.prompt_piece if decoding else 0, self.prompt_threads)
            for batch in passes_over(decoding):
                self._pass(batch)

    def _pass(self, batch: list[Sequence]) -> None:
        """One pass of the model over a batch: draft(all) → verify(all) → for each: accept, commit, learn."""
        began = perf_counter()
        batch, trees = self._draft(batch)
        drafted, roots = perf_counter(), sum(len(sequence.root_ids) - 1 for sequence in batch)
        with using(self.threads):
            batch, usual = verify_all(batch, trees)
            batch = look_all(batch)  # waits for the device: its time is the pass's
        checked = perf_counter()
        batch = each(batch, Sequence.accept)
        committed = perf_counter()
        batch = each(batch, Sequence.learn)
        self._note(batch, usual, (began, drafted, checked, committed, perf_counter()), roots)

    def _draft(self, batch: list[Sequence]) -> tuple[list[Sequence], list[DraftTree]]:
        """A tree for every sequence within one budget for all, and the sequences whose drafters did not fail."""
        if not any(sequence.lent.drafts for sequence in batch):
            return batch, [NO_DRAFT] * len(batch)
        if len(batch) == 1:
            return self._draft_alone(batch[0])
        seconds, padded, asked = None, pads(batch), batch
        if not self.in_step and all(sequence.limits.nodes is None for sequence in batch):
            context = sum(sequence.text.length for sequence in batch)
            seconds = self.costs.seconds(len(batch), context)
            if self._rest.takes():
                return batch, [NO_DRAFT] * len(batch)
            asked = self._rest.sample(batch)
        cost = None if seconds is None else row_cost(seconds, len(batch), padded)
        most = room(len(batch), PASS.max_rows) // (len(batch) if padded else 1)
        began, own = perf_counter(), dict.fromkeys(map(id, batch), NO_DRAFT)
        failed = set(map(id, asked)) - set(map(id, each(asked, lambda s: own.update({id(s): s.draft(most, cost)}))))
        drafted = [sequence for sequence in batch if id(sequence) not in failed]
        trees = self._narrowed([own[id(sequence)] for sequence in drafted], cost)
        worths = worth([sequence.progress for sequence in drafted], seconds)
        trees = (share_evenly if padded else share_out)(trees, seconds, most, worths)
        if len(drafted) > 1 and seconds is not None:
            took = perf_counter() - began
            self._rest.looked(gain(trees, seconds, worths, padded) > took, took / float(seconds[0]))
        return drafted, trees

    def _draft_alone(self, only: Sequence) -> tuple[list[Sequence], list[DraftTree]]:
        """The same of one sequence: its drafter sizes the tree."""
        trees: list[DraftTree] = []
        cost = self.costs.seconds(1, only.text.length) if only.limits.nodes is None else None
        drafted = each([only], lambda sequence: trees.append(sequence.draft(room(1, PASS.max_rows), cost)))
        return drafted, self._narrowed(trees, cost)

    def _narrowed(self, trees: list[DraftTree], cost: NDArray[np.float32] | None) -> list[DraftTree]:
        """Trees without the paths that do not pay."""
        if cost is None or not self.costs.path_share:
            return trees
        return [fewer_paths(tree, cost, self.costs.path_seconds) for tree in trees]

    def _note(
        self, batch: list[Sequence], usual: bool, at: tuple[float, float, float, float, float], more: int
    ) -> None:
        """Enter a pass, begun, drafted, verified, committed and learned `at` these times, in logs and costs.

        It had so many `more` rows than a last token of each and the drafts.
        """
        if not batch:
            return
        drafted, forward, committed, learned = (later - earlier for earlier, later in itertools.pairwise(at))
        share = tuple(seconds / len(batch) for seconds in (drafted, forward, committed, learned))
        nodes, context = more, 0
        drafted_before = batch[0].log.drafted
        for sequence in batch:
            sequence.steps.append(self.steps)
            sequence.report.threads = 0 if self.threads is None else self.threads.chosen
            sequence.log.note(sequence.seen.tree, sequence.seen.walked, share, sequence.text.length)
            nodes, context = nodes + len(sequence.seen.tree), context + sequence.text.length
        if pads(batch):
            nodes = len(batch) * max(len(sequence.seen.tree) for sequence in batch)
        if self.costs.path_share is not None:  # what a commit takes is the price of the draft
            forward, committed = forward + committed, 0.0
        if not usual or not (self._chooses_threads or any(sequence.lent.drafts for sequence in batch)):
            return  # it says nothing new of such passes, or nobody asks
        if len(batch) > 1 or self.costs.is_plain(nodes, drafted_before, context, forward):
            forward = self.costs.without_paths([sequence.seen.tree for sequence in batch], nodes, context, forward)
            self._learn_cost(len(batch), nodes, context, forward, drafted + committed + learned)

    @property
    def _chooses_threads(self) -> bool:
        """Whether times of passes decide how many threads the next ones use."""
        return self.threads is not None and self.threads.most > 1

    def _learn_cost(self, sequences: int, nodes: int, context: int, forward: float, around: float) -> None:
        """Enter a pass over so many sequences with `nodes` drafted nodes behind `context` tokens, in seconds."""
        used = self.costs.threads
        if self.threads is not None:
            used = self.threads.lowered_to(self.threads.next)
            if self._chooses_threads:
                curve = self.costs.of(sequences).seconds(context, MAX_NODES)
                self.threads.observe(forward + around, float(curve[min(nodes, MAX_NODES)]))
            self.costs.threads = self.threads.lowered_to(self.threads.chosen)
        self.costs.of(sequences, used).observe(nodes, context, forward, around)

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
                while following is not None and self._has_room(live, following, rows or PASS.batch_rows):
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

    @staticmethod
    def _has_room(live: list[Sequence], another: Sequence, rows: int) -> bool:
        """Whether one more sequence may begin beside those of a call that are under way; one always may."""
        if not live:
            return True
        return len(live) < rows and kept_bytes([*live, another]) <= PASS.batch_bytes

    def join(self, sequence: Sequence) -> None:
        """Let a sequence take part from the next step on."""
        self._belong_here()
        with self._mutex:
            self._sequences.append(sequence)

    def leave(self, *sequences: Sequence) -> None:
        """End sequences, however far they got; safe to call more than once, from any thread."""
        for sequence in sequences:
            sequence.cancelled = True
        if self.is_stepping or not sequences:  # from inside a step: its end ends them
            return
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
                with self.alone(unless=lambda: any(sequence.has_news for sequence in sequences)) as turn:
                    if turn:
                        self.step(sequences)
        finally:
            for sequence in sequences:
                sequence.reader.asking -= 1

    @property
    def is_stepping(self) -> bool:
        """Whether this thread keeps others from stepping, as in the middle of a step.

        Ctrl-C may come between the last of what it did alone and the note that it is over: its calls tell.
        """
        if self._driver != threading.get_ident():
            return False
        frame = inspect.currentframe()
        while frame is not None and frame is not self._holder:
            frame = frame.f_back
        return frame is not None

    @contextlib.contextmanager
    def alone(self, unless: Callable[[], bool] = bool) -> Iterator[bool]:
        """Keep others from stepping; False if there was to wait, and `unless` came true meanwhile."""
        self._belong_here()
        me = threading.get_ident()
        if self.is_stepping:
            raise ConfigError(
                "to do this inside a pass of the same model", "others wait for it", "Do it when the pass is over."
            )
        if self._driver == me:  # an interruption came when all was done
            self._driver, self._holder = 0, None
        mine = sys._getframe(2)  # behind contextlib's own
        try:
            with self._mutex:
                while self._driver and not unless():
                    self._changed.wait(_PATIENCE)
                if not self._driver:
                    self._driver, self._holder = me, mine
            yield self._holder is mine
        finally:
            if self._holder is mine:
                try:
                    self._end_leaving()
                finally:
                    self._driver, self._holder = 0, None
                    with self._mutex:
                        self._changed.notify_all()

    def _end_leaving(self) -> None:
        """End the sequences that have stopped, failed or were cancelled."""
        leaving = [s for s in self._sequences if s.stopped or s.cancelled or s.error is not None]
        for sequence in leaving:
            sequence.end()
            self._sequences.remove(sequence)
