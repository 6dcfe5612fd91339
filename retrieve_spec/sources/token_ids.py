"""Token ids: what a caller gave as those of one text, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import PromptError

_LARGEST = 2**31 - 1
_FEW = 64
"""So many numbers Python looks through in less time than NumPy takes to begin."""


def token_ids_of(token_ids: NDArray[Any] | Sequence[int], what: str) -> NDArray[np.int32]:
    """(n,) int32, a copy: whoever gave them may go on writing to their own.

    Raises
    ------
    PromptError
        They are no whole numbers, or no token has such a number; `what` names them.
    """
    ids = np.asarray(token_ids)
    if ids.size == 0 and ids.ndim == 1:
        return np.empty(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise PromptError(f"{what} of token ids from 0, (n,)", f"{ids.dtype} of shape {ids.shape}", "Give one text.")
    few = ids.tolist() if ids.size <= _FEW else (ids.min(), ids.max())
    if min(few) < 0 or max(few) > _LARGEST:
        raise PromptError(f"{what} of token ids from 0", f"{ids.min()} … {ids.max()}", "Leave out placeholders.")
    return ids.astype(np.int32)
