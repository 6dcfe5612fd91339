"""Denormal numbers, taken for zero while a pass runs: a CPU multiplies them many times slower than others.

Recurrences over several rows make many: decays over a few rows are products that fall below 1e-38. Single steps meet
them for a step or two, then they are zero. What they add is far below what rounding leaves of any logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LEAST, _HALF = 2.3e-308, 0.5
"""The product of both is denormal."""


def are_flushed() -> bool:
    """Whether this thread takes denormal numbers for zero."""
    return _LEAST * _HALF == 0.0


@contextmanager
def flushed() -> Iterator[None]:
    """Take denormal numbers for zero on this thread inside of the block; torch's other threads go on as they were."""
    before = are_flushed()
    try:
        if not before:
            torch.set_flush_denormal(True)
        yield
    finally:
        if not before:
            torch.set_flush_denormal(False)
