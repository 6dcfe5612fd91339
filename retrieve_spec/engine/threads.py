"""Threads: one at a time steps, and a pass on a CPU uses as many as past passes were fastest with."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from statistics import median
from types import FrameType
from typing import Any, Self

import torch

from retrieve_spec.errors import ConfigError
from retrieve_spec.openmp import libgomp_of


class DeferredInterrupt:
    """A block in which SIGINT waits for the end; a second one does not wait.

    Python handles signals in the main thread alone, so in other threads nothing changes. Whichever handler was set is
    called as it would have been, and is in place again behind the block. Where SIGINT is ignored, or ends the process
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
        """Let what came so far be handled now, as between two passes."""
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
    """Keeps all threads but one from stepping."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder = 0

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds it, as in the middle of a step."""
        return self._holder == threading.get_ident()

    @contextlib.contextmanager
    def held(self, unless: Callable[[], bool] = bool) -> Iterator[bool]:
        """Hold it; False if there was to wait, and `unless` came true meanwhile. Ctrl-C waits for the end of the block.

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
                while self._holder and not unless():
                    self._changed.wait(_PATIENCE)
                    interrupt.deliver()
                mine = not self._holder
                if mine:
                    self._holder = threading.get_ident()
            try:
                yield mine
            finally:
                if mine:
                    with self._changed:
                        self._holder = 0
                        self._changed.notify_all()


_PAIRS = 3
"""Passes with either number of threads that one comparison takes."""
_HOPELESS = 0.25
"""Logarithm of the ratio of two times from which one pair of passes is enough to give up on the other number."""
_PLAIN = 1.0
"""… from which one pair is enough to take it: a pass that waited for a taken core."""
_WORTH = 0.05
"""Logarithm of the ratio of two times that a change must gain."""
_FIRST_TRIAL, _NEXT_TRIAL, _LAST_TRIAL = 2, 64, 1024
"""Passes before the first comparison, after a change, and at most while nothing changes (doubled each time)."""
_TOLERATED, _ALARM = 0.15, 1.0
"""How much slower than expected a pass may be (logarithm), and the sum of what exceeds it that calls for a comparison.
"""
_SHARE = 1 / 32
"""Of the time of all passes, how much trials of more threads may lose: one pass that waits for a taken core can take as
long as a whole answer."""


class PassThreads:
    """How many threads passes use: the setting of the user, or fewer where passes turn out to be faster so.

    The number in use is compared with the user's setting, half of it, a quarter … in turn, pass by pass, so that a
    machine whose speed drifts favours neither; now and then, and at once when passes become slow.

    Parameters
    ----------
    most
        Threads at most: the user's setting. With 1 there is nothing to choose.
    set_threads
        Sets the number for the calling thread alone (OpenMP's own; `torch.set_num_threads` would reach every thread
        that computes for the first time meanwhile, and all of MKL for good).

    Attributes
    ----------
    chosen
        Threads of the next pass unless it is one of a comparison.
    """

    def __init__(self, most: int, set_threads: Callable[[int], object] = bool) -> None:
        self._set = set_threads
        self.most = self.chosen = self._challenged = max(most, 1)
        self._numbers = [self.most >> i for i in range(self.most.bit_length())]
        self._other = 0  # what `chosen` is compared with; 0 while nothing is compared
        self._scores: dict[int, list[float]] = {}
        self._times: dict[int, float] = {}  # of the passes of this comparison
        self._spent = 0.0  # by all passes
        self._not_before: dict[int, float] = {}  # when so many threads may be tried again, in time spent
        self._wait = self._interval = _FIRST_TRIAL
        self._excess = 0.0

    @property
    def comparing(self) -> bool:
        """Whether the next pass is one of a comparison: its time says nothing of passes to come."""
        return self._other != 0

    @property
    def next(self) -> int:
        """Threads of the next pass."""
        if self._other and len(self._scores[self._other]) <= len(self._scores[self.chosen]):
            return self._other
        return self.chosen

    @classmethod
    def of_torch(cls) -> Self | None:
        """The choice for passes on this machine's cores; None where torch's OpenMP runtime cannot be asked."""
        library = libgomp_of(os.path.dirname(torch.__file__))
        return None if library is None else cls(torch.get_num_threads(), library.omp_set_num_threads)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Run a pass of this thread with `next` threads; afterwards it has the user's setting again."""
        before = torch.get_num_threads()
        if before != self.most:  # set anew since
            self.__init__(before, self._set)  # type: ignore[misc]
        if self.next == before:
            yield
            return
        try:
            self._set(self.next)
            yield
        finally:  # also where Ctrl-C comes as soon as it is set
            self._set(before)

    def observe(self, seconds: float, expected: float) -> None:
        """Learn from the pass that ran with `next` threads.

        Parameters
        ----------
        seconds
            What it took.
        expected
            What a pass of its width and context was expected to take (any unit, the same from pass to pass).
        """
        if self.most == 1:
            return
        score = math.log(max(seconds, 1e-9) / max(expected, 1e-9))
        self._spent += seconds
        if self._other:
            self._compare(score, seconds)
            return
        self._wait -= 1
        self._excess = max(0.0, self._excess + min(score, 3 * _TOLERATED) - _TOLERATED)
        if self._wait <= 0 or self._excess > _ALARM:
            self._begin(self._challenger())

    def _challenger(self) -> int:
        """What to compare with: the other numbers in turn, the next smaller one first; 0 where none may be tried yet.

        Fewer threads may always be: they lose little, and are the way out when a core is taken.
        """
        place = self._numbers.index(self._challenged) + 1
        for number in self._numbers[place:] + self._numbers[:place]:
            allowed = number < self.chosen or self._spent >= self._not_before.get(number, 0.0)
            if number != self.chosen and allowed:
                self._challenged = number
                return number
        return 0

    def _begin(self, other: int) -> None:
        """Begin a comparison with another number, if there is one."""
        self._other, self._excess = other, 0.0
        self._wait = self._interval
        self._scores = {other: [], self.chosen: []}
        self._times = dict.fromkeys(self._scores, 0.0)

    def _compare(self, score: float, seconds: float) -> None:
        """Take in one pass of a comparison, and end it when it has said enough."""
        self._times[self.next] += seconds
        self._scores[self.next].append(score)
        others, own = self._scores[self._other], self._scores[self.chosen]
        if len(own) < len(others):
            return
        gain = median(b - a for a, b in zip(others, own, strict=True))
        if len(own) < _PAIRS and -_HOPELESS < gain < _PLAIN:
            return
        lost = self._times[self._other] - self._times[self.chosen]
        changed = gain > _WORTH
        self._not_before[self.chosen if changed else self._other] = self._spent + abs(lost) / _SHARE
        if changed:
            self.chosen = self._other
        self._other, self._scores = 0, {}
        self._interval = self._wait = _NEXT_TRIAL if changed else min(max(2 * self._interval, _NEXT_TRIAL), _LAST_TRIAL)


def using(threads: PassThreads | None) -> contextlib.AbstractContextManager[None]:
    """`PassThreads.used`; where there is nothing to choose, nothing changes."""
    return contextlib.nullcontext() if threads is None else threads.used()
