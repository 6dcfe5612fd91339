"""Padded batch: several texts in one pass of a model's own forward, over one cache that is padded to the longest text.

A row's tokens stand in the first columns of the cache, holes follow, and what a pass computes comes behind them: masks
by row hide the holes and all that is none of the row's own, positions are the row's own. Accepted tokens then move to
the end of their row, and the columns of the pass go. So a text is never padded by more than the longest text beside it,
and the cache takes as many bytes as that many rows of the longest text, whatever was drafted. Layers with windows keep
all rows; what is beyond a window is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.treemask import fill_inputs, fill_tree_mask
from retrieve_spec.verify.cache import same_rows
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, catch_hidden, input_device
from retrieve_spec.verify.verifier import Mode, PassKind, VerifierInputs, VerifierOutput

_NO_COLUMNS = np.empty(0, np.int64)
_NOBODY = np.empty(0, np.bool_)
_KNOWN = {"attention_mask", "position_ids", "logits_to_keep", "use_cache"}


def why_not_padded(interface: ModelInterface) -> str:
    """Say why texts of a model cannot share passes of its own forward, as far as the interface tells; else empty."""
    if interface.mode != "tree" or not interface.attends:
        return "it verifies no trees"
    if interface.recurrent or None in interface.masks.values():
        return "it keeps recurrent state"
    if interface.mask_form not in ("bool", "float"):
        return "its attention takes no mask by row"
    if not interface.takes_position_ids:
        return "it counts positions itself"
    if interface.rope_switch or interface.scale_step:
        return "what it computes depends on how long its longest text is"
    return ""


class PaddedRow:
    """A `Verifier` whose passes others may share: alone it is an `HFVerifier`.

    Parameters
    ----------
    own
        Verifies while it is alone.
    batch
        What its rows move to for a shared pass.
    """

    def __init__(self, own: HFVerifier, batch: PaddedBatch) -> None:
        self.own, self.batch = own, batch
        self.alone = ""
        """Why this generation shares no passes; empty when it may."""
        self.whole_prompts = own.whole_prompts

    @property
    def mode(self) -> Mode:
        """What `forward` accepts now."""
        return self.own.mode

    @property
    def reason(self) -> str:
        """Why that is no tree."""
        return self.own.reason

    @property
    def takes_back(self) -> bool:
        """Whether a pass can begin again (`Verifier.takes_back`)."""
        return self.own.takes_back

    @property
    def pass_kind(self) -> PassKind:
        """What runs the model."""
        return self.own.pass_kind

    @property
    def pass_reason(self) -> str:
        """Why nothing faster does."""
        return self.own.pass_reason

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation."""
        self.own.start(inputs)
        self._returns_cache = inputs.returns_cache
        kwargs, name = inputs.model_kwargs, self.own.interface.cache_name
        self.whole_prompts = self.own.whole_prompts
        self.alone = self.own.reason if self.own.mode != "tree" else ""
        extras = [key for key, value in kwargs.items() if key not in _KNOWN | {name} and value is not None]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if extras:
            self.alone = f"the model is given {', '.join(extras)}"
        elif type(self.own.cache) is not DynamicCache:
            self.alone = f"the cache is a {type(self.own.cache).__name__}"
        elif mask is not None and (mask.ndim != 2 or not bool(mask.all())):
            self.alone = "the prompt is padded"
        elif positions is not None and positions.ndim != 2:
            self.alone = "positions have more than one axis"
        self._in_a_row = positions is None or bool((positions.diff() == 1).all())

    @property
    def packs_prompts(self) -> bool:
        """Whether its prompt can be read in passes with those of others."""
        return not (self.alone or self.whole_prompts) and self._in_a_row

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run one pass alone (`Verifier.forward`)."""
        self.batch.give_back(self)
        return self.own.forward(root_ids, tree, keep=keep, want_hidden=want_hidden)

    def commit(self, path: NDArray[np.int32]) -> None:
        """Keep the root tokens of the last pass and the nodes of `path` (`Verifier.commit`)."""
        if not self.batch.commit(self, path):
            self.own.commit(path)

    def copy_rows(self) -> DynamicCache | None:
        """What the cache holds, in another one (`HFVerifier.copy_rows`)."""
        return self.batch.copy_of(self) or self.own.copy_rows()

    def finish(self) -> Any:
        """End the generation and hand back the cache; None when nobody asks for it."""
        if self._returns_cache:
            self.batch.hand_over(self)
        self.batch.drop(self)
        cache = self.own.finish()
        return cache if self._returns_cache else None


@dataclass(slots=True)
class _Moves:
    """What a commit does to the cache: the same if it is done again."""

    rows: NDArray[np.int64]  # (moved,), where they go
    columns: NDArray[np.int64]
    copies: list[tuple[torch.Tensor, torch.Tensor] | None]  # by layer, (moved, heads, width) keys and values
    lengths: list[int]


@dataclass(slots=True)
class _Held:
    """The cache, whose rows it holds, and how many tokens of each."""

    cache: DynamicCache
    owners: list[PaddedRow | None] = field(default_factory=list)  # None: has ended
    lengths: list[int] = field(default_factory=list)
    columns: int = 0
    width: int = 0  # columns of the last pass
    nodes: list[tuple[int, int]] = field(default_factory=list)  # root tokens and nodes of each row in it
    accepted: dict[int, NDArray[np.int64]] = field(default_factory=dict)  # by row, columns of the pass that stay
    moves: _Moves | None = None


class PaddedBatch:
    """The texts of a model that share passes of its own forward.

    Whatever instant an exception hits, the next call finishes commits that were begun and drops what was not committed.
    """

    def __init__(self, model: Any, interface: ModelInterface) -> None:
        self.model, self.interface = model, interface
        self._device = input_device(model)
        self._held = _Held(DynamicCache())

    def forward(
        self,
        rows: Sequence[PaddedRow],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        want_hidden: Layer | None = None,
        keeps: Sequence[int] | None = None,
    ) -> list[VerifierOutput]:
        """Verify the trees of several texts, or read their prompts, in one pass.

        Parameters
        ----------
        rows
            By text; they read what they have read through `forward`, alone or together.
        roots, trees
            By text: tokens that are not in the cache yet, (m,), the last one being the root, and the draft below it.
        want_hidden
            Return the hidden states of this layer too.
        keeps
            By text, how many of its last root tokens to return logits for; None for the root alone.

        Returns
        -------
        list
            By text, what its own `forward` would have returned.
        """
        self._settle()
        self._hold(rows)
        held = self._held
        place = {id(row): i for i, row in enumerate(held.owners)}
        order = [place[id(row)] for row in rows]
        sizes = [(len(root), len(tree)) for root, tree in zip(roots, trees, strict=True)]
        lasts = [min(keep, m) + n for keep, (m, n) in zip(keeps or [1] * len(rows), sizes, strict=True)]
        kwargs = self._inputs(rows, order, roots, trees, max(m + n for m, n in sizes))
        if self.interface.takes_logits_to_keep:
            kwargs["logits_to_keep"] = max(lasts)
        by_place = dict(zip(order, sizes, strict=True))
        held.nodes, held.width = [by_place[at] for at in range(len(order))], kwargs["input_ids"].shape[1]
        with catch_hidden(self.model, want_hidden) as hidden:
            logits = self.model(**kwargs, return_dict=True).logits
        return [
            VerifierOutput(logits[at, -last:], hidden[-1][at, -last:] if hidden else None)
            for at, last in zip(order, lasts, strict=True)
        ]

    def _inputs(
        self,
        rows: Sequence[PaddedRow],
        order: list[int],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        width: int,
    ) -> dict[str, Any]:
        """Arguments of a pass; a row's tokens stand at the right end of it."""
        held = self._held
        ids = np.zeros((len(order), width), np.int64)
        positions = np.zeros_like(ids)
        for row, at, root, tree in zip(rows, order, roots, trees, strict=True):
            first, position = width - len(root) - len(tree), held.lengths[at] + row.own.shift
            fill_inputs(ids[at, first:], positions[at, first:], root, tree.token_ids, tree.depth, position)
        kwargs: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids).to(self._device),
            "position_ids": torch.from_numpy(positions).to(self._device),
            "attention_mask": self._masks(order, roots, trees, width),
            "use_cache": True,
            self.interface.cache_name: held.cache,
        }
        return kwargs

    def _masks(
        self, order: list[int], roots: Sequence[NDArray[np.int32]], trees: Sequence[DraftTree], width: int
    ) -> Any:
        """One mask per layer type: every row sees its own tokens, its ancestors in the pass, and itself."""
        held = self._held
        masks: dict[str, Any] = {}
        for layer_type, view in self.interface.masks.items():
            assert view is not None
            mask = np.zeros((len(order), width, held.columns + width), np.bool_)
            mask[:, np.arange(width), held.columns + np.arange(width)] = True  # a token that nobody sees sees itself
            for at, root, tree in zip(order, roots, trees, strict=True):
                length, size = held.lengths[at], len(root) + len(tree)
                seen = np.empty((size, length + size), np.bool_)
                fill_tree_mask(
                    seen, tree.parent, tree.depth, len(root), length, 0, view.window, view.chunk, 0, _NOBODY
                )  # fmt: skip
                mask[at, width - size :, :length] = seen[:, :length]
                mask[at, width - size :, held.columns + width - size :] = seen[:, length:]
            visible = torch.from_numpy(mask)[:, None].to(self._device)
            if self.interface.mask_form == "float":
                least = torch.finfo(self.model.dtype).min
                masks[layer_type] = torch.zeros(
                    visible.shape, dtype=self.model.dtype, device=self._device
                ).masked_fill_(~visible, least)  # fmt: skip
            else:
                masks[layer_type] = visible
        return masks.get("", masks)

    def commit(self, row: PaddedRow, path: NDArray[np.int32]) -> bool:
        """Keep a row's root tokens of the last pass and the nodes of `path`; False if the pass was none of these."""
        held = self._held
        if not held.nodes or not self._holds(row):
            return False
        at = self._place(row)
        roots, nodes = held.nodes[at]
        first = held.columns + held.width - roots - nodes
        kept = np.concatenate([np.arange(roots), roots + path.astype(np.int64)])
        held.accepted[at] = first + kept
        return True

    def copy_of(self, row: PaddedRow) -> DynamicCache | None:
        """What a row holds, what it has committed included, in a cache of its own; None if it is not here.

        Rows that have not committed yet lose nothing.
        """
        if not self._holds(row):
            return None
        twin = same_rows(row.own.cache)
        self._copy(row, twin)
        return twin

    def hand_over(self, row: PaddedRow) -> None:
        """Put what a row holds into its own cache; rows that have not committed yet lose nothing."""
        if self._holds(row):
            row.own.resume(self._copy(row, row.own.cache))

    def _copy(self, row: PaddedRow, target: DynamicCache) -> int:
        """Let a cache hold what a row holds, what it has committed included; how many tokens that are."""
        held, at = self._held, self._place(row)
        if held.moves is not None:  # a commit was cut short: all have committed
            self._settle()
        kept = np.concatenate([np.arange(held.lengths[at]), held.accepted.get(at, _NO_COLUMNS)])
        _copy_row(held.cache, target, at, kept)
        return len(kept)

    def give_back(self, row: PaddedRow) -> None:
        """Let a row go on alone, with its part of the cache; nothing if it has none here."""
        if self._holds(row):
            self._settle()
            self._release([self._place(row)])

    def drop(self, row: PaddedRow) -> None:
        """Forget a row; the next pass closes ranks."""
        if self._holds(row):
            self._held.owners[self._place(row)] = None
            if not any(self._held.owners):
                self._held = _Held(DynamicCache())

    def _holds(self, row: PaddedRow) -> bool:
        return any(owner is row for owner in self._held.owners)

    def _place(self, row: PaddedRow) -> int:
        return next(i for i, owner in enumerate(self._held.owners) if owner is row)

    def _settle(self) -> None:
        """Finish the commits of the last pass, and drop what was not committed."""
        held = self._held
        if held.moves is None:
            held.moves = self._moves()
        moves = held.moves
        columns = max(moves.lengths, default=0)
        for layer, copies in zip(held.cache.layers, moves.copies, strict=True):
            if copies is None:
                continue
            for name, copy in zip(("keys", "values"), copies, strict=True):
                part = getattr(layer, name)
                if len(moves.rows):
                    rows, places = (torch.from_numpy(index).to(part.device) for index in (moves.rows, moves.columns))
                    part[rows, :, places] = copy
                setattr(layer, name, part.narrow(-2, 0, min(columns, part.shape[-2])))
        held.lengths, held.columns = moves.lengths, columns
        held.accepted, held.nodes = {}, []
        held.moves = None

    def _moves(self) -> _Moves:
        """Copies of what was accepted in the last pass, and where it goes."""
        held = self._held
        lengths, rows, sources, places = list(held.lengths), [], [], []
        for at, kept in held.accepted.items():
            rows.append(np.full(len(kept), at, np.int64))
            sources.append(kept)
            places.append(np.arange(lengths[at], lengths[at] + len(kept)))
            lengths[at] += len(kept)
        whole = [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in (rows, sources, places)]
        copies: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for layer in held.cache.layers:
            if not _holds(layer):
                copies.append(None)
                continue
            row, column = (torch.from_numpy(index).to(layer.keys.device) for index in whole[:2])
            copies.append((layer.keys[row, :, column], layer.values[row, :, column]))
        return _Moves(whole[0], whole[2], copies, lengths)

    def _hold(self, rows: Sequence[PaddedRow]) -> None:
        """Hold the parts of exactly these rows."""
        staying = {id(row) for row in rows}
        if leaving := [i for i, owner in enumerate(self._held.owners) if id(owner) not in staying]:
            self._release(leaving)
        here = {id(owner) for owner in self._held.owners}
        if coming := [row for row in rows if id(row) not in here]:
            self._take_over(coming)

    def _take_over(self, rows: Sequence[PaddedRow]) -> None:
        """Take over what rows have read; the cache of a text that has read nothing is empty."""
        held = self._held
        caches, lengths = zip(*(row.own.lend() for row in rows), strict=True)
        columns = max(held.columns, *lengths)
        parts = [(held.cache, 0, len(held.owners))] if held.owners else []
        parts += [(cache, len(held.owners) + i, 1) for i, cache in enumerate(caches)]
        whole = DynamicCache()
        for index in range(max(len(cache.layers) for cache, *_ in parts)):
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
        self._held = _Held(whole, [*held.owners, *rows], [*held.lengths, *lengths], columns)

    def _release(self, places: list[int]) -> None:
        """Put rows into caches of their own, unless they have ended, and close ranks."""
        held = self._held
        for at in places:
            if (row := held.owners[at]) is not None:
                _copy_row(held.cache, row.own.cache, at, np.arange(held.lengths[at]))
                row.own.resume(held.lengths[at])
        staying = [i for i in range(len(held.owners)) if i not in places]
        lengths = [held.lengths[i] for i in staying]
        columns, cache = max(lengths, default=0), DynamicCache()
        for layer in held.cache.layers if staying else []:
            kept = DynamicLayer()
            cache.layers.append(kept)
            if _holds(layer):
                kept.lazy_initialization(layer.keys, layer.values)
                index = torch.tensor(staying, device=layer.keys.device)
                kept.keys, kept.values = (part[index, :, :columns] for part in (layer.keys, layer.values))
        self._held = _Held(cache, [held.owners[i] for i in staying], lengths, columns)


def _holds(layer: Any) -> bool:
    """Whether a layer of a cache holds keys."""
    return isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel() > 0


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
