"""Threads and generations that want one model in, one of them at a time out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TypeVar

import torch

from retrieve_spec.errors import SupersededError

T = TypeVar("T")


class Turns:
    """Whose turn it is to decode with a model: drafter and passes serve one generation, and one thread, at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._latest = 0
        self._decoder = 0  # the thread that decodes

    def begin(self) -> int:
        """Number of a generation that begins now and ends the turn of those before."""
        with self.lock:
            self._latest += 1
            return self._latest

    def step(self, turn: int, passes: Iterator[T]) -> T | None:
        """What the next pass of a generation yields, None at its end.

        Raises
        ------
        SupersededError
            Another generation has begun since.
        """
        with self.decoding():
            if turn != self._latest:
                raise SupersededError(
                    "one generation of a model at a time",
                    "another one started since",
                    "Finish or close a stream before starting the next generation.",
                )
            return next(passes, None)

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Decode while other threads wait; what is called meanwhile sees `is_decoding` and records no gradients."""
        with self.lock, torch.no_grad():
            before, self._decoder = self._decoder, threading.get_ident()
            try:
                yield
            finally:
                self._decoder = before

    @property
    def is_decoding(self) -> bool:
        """Whether this thread decodes already: drafter and passes then serve no other generation."""
        return self._decoder == threading.get_ident()
