"""Promise of drafts: how many tokens are accepted for each one that drafts made whole promised, as two counts.

Learned where the next draft is made (`kernels/step.py`, `kernels/many.py`), and for those that are judged elsewhere by
`retrieve_spec.drafting.calibration.Calibration`.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

DRAFT_PRIOR, DRAFT_MEMORY = 10.0, 300.0
"""Accepted tokens that the promise of a new drafter counts for, and after how many the oldest fade."""
HOPE_MEMORY = 12.0
"""Tokens that drafts would have begun with after which what drafts taught has faded to a third: few passes are looked
at while drafts do not pay."""
LEAST, MOST = 0.3, 1.3
"""What a promise is worth at least and at most."""


@njit(cache=True, nogil=True)
def promise(counts: NDArray[np.float64]) -> float:
    """Tokens accepted for each one promised, of ``counts`` (2,): accepted and expected."""
    return min(max((counts[0] + DRAFT_PRIOR) / (counts[1] + DRAFT_PRIOR), LEAST), MOST)


@njit(cache=True, nogil=True)
def drafted(counts: NDArray[np.float64], expected: float, accepted: int) -> None:
    """Learn what became of a draft; see `Calibration.drafted`."""
    total = counts[1] + expected / promise(counts)
    fade = min(DRAFT_MEMORY / total, 1.0)
    counts[0] = (counts[0] + accepted) * fade
    counts[1] = total * fade


@njit(cache=True, nogil=True)
def hoped(counts: NDArray[np.float64], p: float, right: int) -> None:
    """Learn whether the token was right that a draft would have begun with; see `Calibration.hoped`."""
    fade = 1.0 - p / promise(counts) / HOPE_MEMORY
    counts[0] *= fade
    counts[1] *= fade
    drafted(counts, p, right)
