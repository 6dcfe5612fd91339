"""Reading of prompts: passes over pieces of them, each over pieces of several prompts where they can share it."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import PASS
from retrieve_spec.engine.batches import each, pads, passes_over, read_together
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.engine.threads import PassThreads, using

_FEW = 32
"""Tokens for which a longer prompt does not join a pass."""


def read_all(sequences: list[Sequence], most: int = 0, threads: PassThreads | None = None) -> None:
    """Let sequences read their prompts.

    Parameters
    ----------
    sequences
        They are reading; those that came first are served first.
    most
        Tokens of all of them at most, where others wait for the next pass; 0 reads all there is, but for sequences
        whose pieces are limited (`Limits.prefill_chunk`): each of these reads one.
    threads
        How many threads these passes use; None where no CPU runs them.
    """
    left = most
    while True:
        sequences = each([s for s in sequences if not s.is_over], Sequence.open)
        opened = [s for s in sequences if s.is_open and not s.is_over]
        if not opened or (most and left <= 0):
            return
        for batch in passes_over(opened):
            if not most or left > 0:
                left -= _read(batch, left if most else 0, threads)
        sequences = [s for s in sequences if s.is_reading and not (s.is_open and s.limits.prefill_chunk)]


def _read(batch: list[Sequence], most: int, threads: PassThreads | None) -> int:
    """One pass over pieces of the prompts of some of a batch; how many tokens that were."""
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
    """Pieces of the prompts of the first few of a batch that fit in one pass; no prompt takes more than its half."""
    if len(batch) == 1:
        return [batch[0].piece(most)]
    room = min(most or PASS.max_rows, PASS.max_rows)
    pieces: list[NDArray[np.int32]] = []
    used = widest = 0
    for sequence in batch:
        free = room // (len(pieces) + 1) if pads(batch) else room - used
        if pieces and (widest > free if pads(batch) else free < min(_FEW, len(sequence.unread))):
            break
        pieces.append(sequence.piece(max(min(free, room // 2), 1)))
        used, widest = used + len(pieces[-1]), max(widest, len(pieces[-1]))
    return pieces
