"""Acceptance of drafts: how many tokens are accepted for each one that was expected of whole drafts, as two counts.

The probability of a token is calibrated where the text went, that of a path is a product over places where it may never
go. The difference is learned where the next draft is made (`kernels/step.py`, `kernels/batch.py`), and for drafts that
are judged elsewhere by `retrieve_spec.drafting.calibration.Calibration`.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner

DRAFT_PRIOR, DRAFT_MEMORY = 10.0, 300.0
"""Accepted tokens that the ratio of a new drafter counts for, and after how many the oldest fade."""
FIRST_MEMORY = 12.0
"""First tokens of drafts that were not made after which what drafts taught has faded to a third: few passes are looked
at while drafts do not pay."""
LEAST, MOST = 0.3, 1.3
"""The ratio at least and at most."""


@njit(cache=True, nogil=True)
def acceptance_ratio(counts: NDArray[np.float64]) -> float:
    """Tokens accepted for each one expected, of ``counts`` (2,): accepted and expected."""
    return min(max((counts[0] + DRAFT_PRIOR) / (counts[1] + DRAFT_PRIOR), LEAST), MOST)


@njit(cache=True, nogil=True)
def learn_draft(counts: NDArray[np.float64], expected: float, accepted: int) -> None:
    """Learn what became of a draft: tokens expected (the ratio is in them) and tokens accepted."""
    total = counts[1] + expected / acceptance_ratio(counts)
    fade = min(DRAFT_MEMORY / total, 1.0)
    counts[0] = (counts[0] + accepted) * fade
    counts[1] = total * fade


@inner
def learn_first(counts: NDArray[np.float64], p: float, right: int) -> None:
    """Learn whether the token that a draft would have begun with came (1) or not (0); its probability was `p`.

    Drafts that do not pay because they are not trusted are not made: trust would never be won back.
    """
    fade = 1.0 - p / acceptance_ratio(counts) / FIRST_MEMORY
    counts[0] *= fade
    counts[1] *= fade
    learn_draft(counts, p, right)
