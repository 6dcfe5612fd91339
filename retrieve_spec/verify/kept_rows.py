"""Kept rows: which rows of a cache stay when a pass has been accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicSlidingWindowLayer

from retrieve_spec.verify.cache import HOLD_STATE, TAKE_TREES, crop, trim


class KeptRows:
    """Keeps the rows of accepted nodes in a cache, to every layer of which a pass appends rows.

    Recurrent state beside the rows is none of its business, and layers that grow in another way are cropped as they do
    it themselves.

    Parameters
    ----------
    cache
        The cache as it is before the first pass.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.begin()

    def begin(self) -> None:
        """Note the rows that are there before a pass."""
        self._before = [_rows(layer) for layer in self._cache.layers]

    @property
    def grows_by_rows(self) -> bool:
        """Whether rows are all that every layer holds."""
        return self._has_only(TAKE_TREES)

    def _has_only(self, kinds: tuple[type, ...]) -> bool:
        return all(type(layer) in kinds for layer in self._cache.layers)

    def commit(self, path: NDArray[np.int32], nodes: int) -> None:
        """Keep the rows of the last pass but those of its last `nodes` nodes that are not on `path`, (a,) int32."""
        if not self._has_only(TAKE_TREES + HOLD_STATE):  # layers that are cropped as they do it themselves
            if dropped := nodes - len(path):  # they take chains, so what stays comes first
                crop(self._cache, -dropped)
            else:
                trim(self._cache)
            return
        stay = int((np.append(path, -1) != np.arange(len(path) + 1)).argmax())  # accepted rows that lie right
        for i, layer in enumerate(self._cache.layers):
            rows = _rows(layer)
            # A layer that the pass did not write to holds what belongs to a picture.
            unwritten = nodes > 0 and i < len(self._before) and rows == self._before[i]
            if rows and not unwritten:
                _keep(layer, rows - nodes, path, nodes, stay)


def _rows(layer: Any) -> int:
    """Rows a layer holds."""
    keys = getattr(layer, "keys", None)
    return int(keys.shape[-2]) if isinstance(keys, torch.Tensor) and keys.numel() else 0


def _keep(layer: Any, first: int, path: NDArray[np.int32], nodes: int, stay: int) -> None:
    """Keep the rows of a path of a layer, whose nodes begin at row `first`; the first `stay` of them lie right."""
    kept = []
    for part in (layer.keys, layer.values):
        if stay < len(path):
            index = torch.as_tensor(path[stay:].astype(np.int64) + first, device=part.device)
            part.narrow(-2, first + stay, len(path) - stay).copy_(part.index_select(-2, index))
        kept.append(part.narrow(-2, 0, first + len(path)) if len(path) < nodes else part)
    if isinstance(layer, DynamicSlidingWindowLayer):
        kept = [part[..., -layer.sliding_window + 1 :, :] for part in kept]
        layer.cumulative_length += len(path) - nodes
    layer.keys, layer.values = kept
