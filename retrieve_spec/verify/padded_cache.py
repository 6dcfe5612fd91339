"""Padded cache: the keys and values of several texts in one cache, padded to the longest of them.

A row's tokens stand in the first columns, holes follow, and what a pass computes comes behind them. Accepted tokens
then move to the end of their row, and the columns of the pass go. So a text is never padded by more than the longest
text beside it, and the cache takes as many bytes as that many rows of the longest text, whatever was drafted.
Recurrent states stay in the caches of the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from retrieve_spec.verify.cache import TAKE_TREES, same_rows
from retrieve_spec.verify.hf import HFVerifier

_NO_COLUMNS = np.empty(0, np.int64)


class Owner(Protocol):
    """Whose row it is, with a verifier whose cache holds it elsewhere."""

    own: HFVerifier


@dataclass(slots=True)
class Held:
    """The cache, whose rows it holds, how many tokens of each, and columns of the longest."""

    cache: DynamicCache
    owners: list[Owner | None] = field(default_factory=list)  # None: has ended
    lengths: list[int] = field(default_factory=list)
    columns: int = 0
    width: int = 0  # columns of the last pass
    nodes: list[tuple[int, int]] = field(default_factory=list)  # root tokens and nodes of each row in it
    accepted: dict[int, NDArray[np.int64]] = field(default_factory=dict)  # by row, columns of the pass that stay


class PaddedCache:
    """The rows of texts that share passes.

    Attributes
    ----------
    held
        All rows, replaced as a whole where others come and go.
    """

    def __init__(self) -> None:
        self.held = Held(DynamicCache())

    def commit(self, row: Owner, path: NDArray[np.int32]) -> bool:
        """Keep a row's root tokens of the last pass and the nodes of `path`; False if the pass was none of these."""
        held = self.held
        if not held.nodes or not self._holds(row):
            return False
        at = self.place(row)
        roots, nodes = held.nodes[at]
        first = held.columns + held.width - roots - nodes
        kept = np.concatenate([np.arange(roots), roots + path.astype(np.int64)])
        held.accepted[at] = first + kept
        return True

    @staticmethod
    def unheld(cache: DynamicCache) -> str:
        """Name of the first kind of layer in a cache whose rows cannot be held here; empty where all can."""
        kinds = (type(layer) for layer in cache.layers)
        return next((kind.__name__ for kind in kinds if kind not in (*TAKE_TREES, LinearAttentionLayer)), "")

    def copy_of(self, row: Owner) -> DynamicCache | None:
        """What a row holds, what it has committed included, in a cache of its own; None if it is not here.

        Rows that have not committed yet lose nothing.
        """
        if not self._holds(row):
            return None
        twin = same_rows(row.own.cache)
        self._copy(row, twin)
        return twin

    def hand_over(self, row: Owner) -> None:
        """Put what a row holds into its own cache; rows that have not committed yet lose nothing."""
        if self._holds(row):
            row.own.resume(self._copy(row, row.own.cache))

    def _copy(self, row: Owner, target: DynamicCache) -> int:
        """Let a cache hold what a row holds, what it has committed included; how many tokens that are."""
        held, at = self.held, self.place(row)
        kept = np.concatenate([np.arange(held.lengths[at]), held.accepted.get(at, _NO_COLUMNS)])
        _copy_row(held.cache, target, at, kept)
        return len(kept)

    def give_back(self, row: Owner) -> None:
        """Let a row go on alone, with its part of the cache; nothing if it has none here."""
        if self._holds(row):
            self.settle()
            self._release([self.place(row)])

    def drop(self, row: Owner) -> None:
        """Forget a row; the next pass closes ranks."""
        if self._holds(row):
            self.held.owners[self.place(row)] = None
            if not any(self.held.owners):
                self.held = Held(DynamicCache())

    def _holds(self, row: Owner) -> bool:
        return any(owner is row for owner in self.held.owners)

    def place(self, row: Owner) -> int:
        """Which row is an owner's."""
        return next(i for i, owner in enumerate(self.held.owners) if owner is row)

    def settle(self) -> None:
        """Move what was accepted in the last pass to the ends of the rows, and drop the columns of the pass."""
        held = self.held
        rows, sources, places = [_NO_COLUMNS], [_NO_COLUMNS], [_NO_COLUMNS]
        for at, kept in held.accepted.items():
            rows.append(np.full(len(kept), at, np.int64))
            sources.append(kept)
            places.append(np.arange(held.lengths[at], held.lengths[at] + len(kept)))
            held.lengths[at] += len(kept)
        held.columns = max(held.lengths, default=0)
        for layer in held.cache.layers:
            if not _holds(layer):
                continue
            row, source, place = (
                torch.from_numpy(np.concatenate(index)).to(layer.keys.device) for index in (rows, sources, places)
            )
            for name in ("keys", "values"):
                part = getattr(layer, name)
                part[row, :, place] = part[row, :, source]
                setattr(layer, name, part.narrow(-2, 0, min(held.columns, part.shape[-2])))
        held.accepted, held.nodes = {}, []

    def hold(self, rows: Sequence[Owner]) -> list[int]:
        """Hold the parts of exactly these rows, without what they have not committed; where each of them is."""
        self.settle()
        staying = {id(row) for row in rows}
        if leaving := [i for i, owner in enumerate(self.held.owners) if id(owner) not in staying]:
            self._release(leaving)
        here = {id(owner) for owner in self.held.owners}
        if coming := [row for row in rows if id(row) not in here]:
            self._take_over(coming)
        place = {id(row): i for i, row in enumerate(self.held.owners)}
        return [place[id(row)] for row in rows]

    def begin(self, nodes: list[tuple[int, int]], width: int) -> None:
        """Let a pass of `width` columns begin, by row over so many root tokens and nodes."""
        self.held.nodes, self.held.width = nodes, width

    def _take_over(self, rows: Sequence[Owner]) -> None:
        """Take over what rows have read; the cache of a text that has read nothing is empty."""
        held = self.held
        caches, lengths = zip(*(row.own.lend() for row in rows), strict=True)
        columns = max(held.columns, *lengths)
        parts = [(held.cache, 0, len(held.owners))] if held.owners else []
        parts += [(cache, len(held.owners) + i, 1) for i, cache in enumerate(caches)]
        whole = DynamicCache()
        for index in range(max(len(cache.layers) for cache, *_ in parts)):
            recurrent = [one for cache, *_ in parts for one in cache.layers[index : index + 1] if _is_recurrent(one)]
            if recurrent:
                whole.layers.append(recurrent[0])  # says what it is; nobody writes to it in shared passes
                continue
            layer = DynamicLayer()
            whole.layers.append(layer)
            theirs = [(cache.layers[index], *at) for cache, *at in parts if index < len(cache.layers)]
            theirs = [(other, first, count) for other, first, count in theirs if _holds(other)]
            if not theirs:
                continue
            layer.lazy_initialization(theirs[0][0].keys, theirs[0][0].values)
            for name in ("keys", "values"):
                like = getattr(theirs[0][0], name)
                shape = (len(held.owners) + len(rows), like.shape[1], columns, like.shape[3])
                together = like.new_zeros(shape)
                for other, first, count in theirs:
                    part = getattr(other, name)
                    end = lengths[first - len(held.owners)] if first >= len(held.owners) else held.columns
                    together[first : first + count, :, end - part.shape[-2] : end] = part
                setattr(layer, name, together)
        self.held = Held(whole, [*held.owners, *rows], [*held.lengths, *lengths], columns)

    def _release(self, places: list[int]) -> None:
        """Put rows into caches of their own, unless they have ended, and close ranks."""
        held = self.held
        for at in places:
            if (row := held.owners[at]) is not None:
                _copy_row(held.cache, row.own.cache, at, np.arange(held.lengths[at]))
                row.own.resume(held.lengths[at])
        staying = [i for i in range(len(held.owners)) if i not in places]
        lengths = [held.lengths[i] for i in staying]
        columns, cache = max(lengths, default=0), DynamicCache()
        for layer in held.cache.layers if staying else []:
            kept = layer if _is_recurrent(layer) else DynamicLayer()
            cache.layers.append(kept)
            if _holds(layer):
                kept.lazy_initialization(layer.keys, layer.values)
                index = torch.tensor(staying, device=layer.keys.device)
                kept.keys, kept.values = (part[index, :, :columns] for part in (layer.keys, layer.values))
        self.held = Held(cache, [held.owners[i] for i in staying], lengths, columns)


def _holds(layer: Any) -> bool:
    """Whether a layer of a cache holds keys."""
    return isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel() > 0


def _is_recurrent(layer: Any) -> bool:
    """Whether a layer of a cache keeps a recurrent state, and nothing else."""
    return type(layer) is LinearAttentionLayer


def _copy_row(cache: DynamicCache, target: DynamicCache, at: int, columns: NDArray[np.int64]) -> None:
    """Let another cache hold the columns (n,) of one row of a cache."""
    for index, layer in enumerate(cache.layers):
        if not _holds(layer):
            continue
        kept = torch.from_numpy(columns).to(layer.keys.device)
        keys, values = (part[at : at + 1].index_select(2, kept) for part in (layer.keys, layer.values))
        if index >= len(target.layers):
            target.update(keys, values, index)
            continue
        theirs = target.layers[index]
        if not theirs.is_initialized:
            theirs.lazy_initialization(keys, values)
        if isinstance(theirs, DynamicSlidingWindowLayer):
            keys, values = (part[:, :, -theirs.sliding_window + 1 :] for part in (keys, values))
            theirs.cumulative_length = len(columns)
        theirs.keys, theirs.values = keys, values
