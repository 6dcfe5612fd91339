"""Driving: who takes the steps of an engine, and what interrupts them.

Nobody drives it but its callers. A reader that waits for its sequence finds either that nobody is stepping, and steps,
or that another reader is, and waits for the end of that step. Ctrl-C waits for the end of the step, and ends what its
thread reads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from collections.abc import Sequence as Many
from types import FrameType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import PASS
from retrieve_spec.engine.scheduler import has_room
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.errors import ConfigError


class DeferredInterrupt:
    """A block in which SIGINT waits for the end; a second one does not wait.

    Python handles signals in the main thread alone, so in other threads nothing changes. Whichever handler was set is
    called as it would have been, and is in place again after the block. Where SIGINT is ignored, or ends the process
    without Python, it stays so.
    """

    def __enter__(self) -> Self:
        self._pending: tuple[int, FrameType | None] | None = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._handler: Any = signal.getsignal(signal.SIGINT) if in_main_thread else None
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *raised: object) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
        self.deliver()

    def deliver(self) -> None:
        """Handle the interrupts received so far, as between two passes."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._handler(*pending)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        """Keep an interrupt for the end of the block, and hand on a second one."""
        is_second = self._pending is not None
        self._pending = number, frame
        if is_second:
            self._handler(number, frame)


_PATIENCE = 0.1
"""Seconds after which a thread that waits looks whether it was interrupted."""


class StepLock:
    """Keeps all threads but one from stepping.

    Whoever would take the next step lets those in first who need it for anything else, such as a call that begins: a
    thread that takes one step after another would not leave them time to wake up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder = self._going_first = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it, as in the middle of a step."""
        return self._holder == threading.get_ident()

    @contextlib.contextmanager
    def held(self, unless: Callable[[], bool] | None = None) -> Iterator[bool]:
        """Hold it during a block, for whose end Ctrl-C waits.

        Parameters
        ----------
        unless
            Given by those who take a step: they do not wait for it any longer when this is true.

        Yields
        ------
        bool
            Whether it is held.

        Raises
        ------
        ConfigError
            This thread holds it already.
        """
        if self.is_mine:
            raise ConfigError(
                "to do this inside a pass of the same model", "others wait for it", "Do it when the pass is over."
            )
        with DeferredInterrupt() as interrupt:
            with self._changed:
                mine = self._take(interrupt) if unless is None else self._take_step(interrupt, unless)
                if mine:
                    self._holder = threading.get_ident()
            try:
                yield mine
            finally:
                if mine:
                    with self._changed:
                        self._holder = 0
                        self._changed.notify_all()

    def _take(self, interrupt: DeferredInterrupt) -> bool:
        self._going_first += 1
        try:
            while self._holder:
                self._wait(interrupt)
        finally:
            self._going_first -= 1
        return True

    def _take_step(self, interrupt: DeferredInterrupt, unless: Callable[[], bool]) -> bool:
        while self._holder or self._going_first:
            if unless():
                return False
            self._wait(interrupt)
        return True

    def _wait(self, interrupt: DeferredInterrupt) -> None:
        self._changed.wait(_PATIENCE)
        interrupt.deliver()


class Driver:
    """Lets readers in any number of threads take the steps, whichever of them comes first."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._lock, self._process = StepLock(), os.getpid()

    def step(self, own: Many[Sequence] = ()) -> None:
        """Run one pass for every sequence that can continue; the caller waits for `own`."""
        raise NotImplementedError

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
        """Include a sequence from the next step on."""
        self._survive_fork()
        self._sequences.append(sequence)

    def leave(self, *sequences: Sequence) -> None:
        """End sequences at any point; safe to call more than once, from any thread."""
        for sequence in sequences:
            sequence.turn.cancelled |= not sequence.ended
        if sequences and not self.is_stepping:  # inside a step, the step's end does it
            with self.exclusive():
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
                with self.exclusive(unless=lambda: any(sequence.has_news for sequence in sequences)) as mine:
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
    def exclusive(self, unless: Callable[[], bool] | None = None) -> Iterator[bool]:
        """Hold the lock on stepping; yield False if `unless` became true while a step waited for it."""
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
        """Cancel, in a forked child, the sequences of threads that it does not have."""
        if self._process != os.getpid():
            for sequence in self._sequences:
                sequence.turn.cancelled = True
            self._lock, self._process = StepLock(), os.getpid()


def _has_room(live: list[Sequence], another: Sequence, rows: int) -> bool:
    """Whether one more sequence of a call can begin beside those that are running; the first always can."""
    held = [s.limits.bytes_per_token * (s.text.length + PASS.cache_block) for s in (*live, another)]
    return has_room(held[:-1], held[-1], rows, PASS.batch_bytes)
