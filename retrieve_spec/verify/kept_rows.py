"""Kept rows: which rows of a cache stay after a pass, so that an exception at any instant can be made good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicSlidingWindowLayer

from retrieve_spec.verify.cache import HOLD_STATE, TAKE_TREES, crop, trim

_Rows = tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _Commit:
    """What a commit does to one layer: the same if it is done again."""

    rows: int  # before it
    dropped: int
    seen: int  # tokens of the text afterwards
    moved: _Rows | None  # copies of the accepted rows that do not lie right, keys and values
    place: int  # where they go


class KeptRows:
    """Which rows of a cache stay, so that what an exception at any instant leaves can be made good.

    A pass appends rows to every layer. `commit` keeps those of the accepted path, and may be called again until the
    next pass begins; `settle` finishes a commit that was cut short, or takes every layer back to where it was before a
    pass that was not committed. Recurrent state beside the rows is none of its business, and layers that grow in
    another way are cropped as they do it themselves.

    Parameters
    ----------
    cache
        The cache as it is before the first pass.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._commits: list[_Commit] = []
        self._at_rest = self._before()

    def _before(self) -> list[tuple[int, int, _Rows | None]]:
        """By layer, rows held, tokens seen, and the rows themselves where a pass drops those that leave a window."""
        slides = [
            isinstance(x, DynamicSlidingWindowLayer) and not getattr(x, "record_past", False)
            for x in self._cache.layers
        ]
        return [
            (*held, (layer.keys, layer.values) if slides and held[0] else None)
            for held, slides, layer in zip(self._held(), slides, self._cache.layers, strict=True)
        ]

    def _held(self) -> list[tuple[int, int]]:
        """By layer, rows held and tokens seen."""
        return [(_rows(layer), int(getattr(layer, "cumulative_length", 0))) for layer in self._cache.layers]

    @property
    def grows_by_rows(self) -> bool:
        """Whether rows are all that every layer holds."""
        return self._has_only(TAKE_TREES)

    def _has_only(self, kinds: tuple[type, ...]) -> bool:
        return all(type(layer) in kinds for layer in self._cache.layers)

    def begin(self, cut_short: bool) -> None:
        """Take the rows for kept that are there, but for those of a pass that was `cut_short`."""
        if cut_short:
            self.settle()
        self._at_rest, self._commits = self._before(), []

    def commit(self, path: NDArray[np.int32], nodes: int) -> None:
        """Keep the rows of the last pass but those of its last `nodes` nodes that are not on `path`, (a,) int32."""
        if not self._has_only(TAKE_TREES + HOLD_STATE):  # layers that are cropped as they do it themselves
            if dropped := nodes - len(path):  # they take chains, so what stays comes first
                crop(self._cache, -dropped)
            else:
                trim(self._cache)
            return
        self._commits = self._commits or self._planned(path, nodes)
        self.settle()

    def _planned(self, path: NDArray[np.int32], nodes: int) -> list[_Commit]:
        """What a commit does to each layer."""
        stay = int((np.append(path, -1) != np.arange(len(path) + 1)).argmax())  # accepted rows that lie right
        commits = []
        for i, ((rows, seen), layer) in enumerate(zip(self._held(), self._cache.layers, strict=True)):
            if nodes and i < len(self._at_rest) and rows == self._at_rest[i][0]:
                rows = 0  # a layer that the pass did not write to: what it holds is a picture's
            moved = None
            if stay < len(path) and rows:
                index = torch.as_tensor(path[stay:].astype(np.int64) + rows - nodes, device=layer.keys.device)
                moved = tuple(part.index_select(-2, index) for part in (layer.keys, layer.values))
            commits.append(_Commit(rows, nodes - len(path), seen - nodes + len(path), moved, rows - nodes + stay))
        return commits

    def settle(self) -> None:
        """Finish a commit that was begun, or forget a pass that was not committed; done twice it is the same."""
        if self._commits:
            for layer, commit in zip(self._cache.layers, self._commits, strict=True):
                _finish(layer, commit)
        elif self.grows_by_rows:
            for i, layer in enumerate(self._cache.layers):
                _take_back(layer, *(self._at_rest[i] if i < len(self._at_rest) else (0, 0, None)))


def _rows(layer: Any) -> int:
    """Rows a layer holds."""
    keys = getattr(layer, "keys", None)
    return int(keys.shape[-2]) if isinstance(keys, torch.Tensor) and keys.numel() else 0


def _finish(layer: Any, commit: _Commit) -> None:
    """Keep what a commit keeps of a layer; a part that has fewer rows than before it is done."""
    if not commit.rows:
        return
    parts: _Rows = (layer.keys, layer.values)
    for i, part in enumerate(parts if commit.moved else ()):
        assert commit.moved is not None
        if part.shape[-2] == commit.rows:
            part.narrow(-2, commit.place, commit.moved[i].shape[-2]).copy_(commit.moved[i])
    last = commit.rows - commit.dropped
    kept = [part.narrow(-2, 0, last) if part.shape[-2] == commit.rows and commit.dropped else part for part in parts]
    if isinstance(layer, DynamicSlidingWindowLayer):
        kept = [part[..., -layer.sliding_window + 1 :, :] for part in kept]
    _hold(layer, kept[0], kept[1], commit.seen)


def _take_back(layer: Any, rows: int, seen: int, before: _Rows | None) -> None:
    """Let a layer hold its first `rows` rows only, of `seen` tokens, or those that it held `before`."""
    if not getattr(layer, "is_initialized", False) or getattr(layer, "keys", None) is None:
        return
    if not rows:
        layer.reset()
        return
    keys, values = before or (part.narrow(-2, 0, min(rows, part.shape[-2])) for part in (layer.keys, layer.values))
    _hold(layer, keys, values, seen)


def _hold(layer: Any, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
    """Let a layer hold these rows, of `seen` tokens."""
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = seen
