"""Padded batch: several texts in one pass of a model's own forward, over one cache that is padded to the longest text.

Masks by row hide the holes of the cache and all that is none of the row's own; positions are the row's own. Layers with
windows keep all rows; what is beyond a window is hidden. Recurrent state stays with each text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.treemask import fill_inputs, fill_tree_mask
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import ModelInterface, catch_hidden, input_device
from retrieve_spec.verify.padded_cache import PaddedCache
from retrieve_spec.verify.pass_inputs import as_mask
from retrieve_spec.verify.recurrent import state_of
from retrieve_spec.verify.verifier import OverAnother, VerifierInputs, VerifierOutput

_NOBODY = np.empty(0, np.bool_)


def why_not_padded(interface: ModelInterface) -> str:
    """Say why texts of a model cannot share passes of its own forward, as far as the interface tells; else empty."""
    if interface.mode != "tree" or not (interface.attends or interface.recurrent):
        return "it verifies no trees"
    if interface.recurrent and (interface.recurrence is None or interface.recurrence.way == "steps"):
        return "its recurrent state advances by single tokens"
    if interface.attends and interface.mask_form not in ("bool", "float"):
        return "its attention takes no mask by row"
    if interface.derives_positions:
        return "it counts positions itself"
    if interface.rope_switch or interface.scale_step:
        return "what it computes depends on how long its longest text is"
    return ""


class PaddedRow(OverAnother):
    """A `Verifier` whose passes others may share: alone it is an `HFVerifier`.

    Parameters
    ----------
    own
        Verifies while it is alone.
    batch
        What its rows move to for a shared pass.
    """

    def __init__(self, own: HFVerifier, batch: PaddedBatch) -> None:
        self.own: HFVerifier = own
        self.batch = batch
        self.alone = ""
        """Why this generation shares no passes; empty when it may."""
        self.axes: torch.Tensor | None = None
        """(axes, 1, 1) long, positions minus slots where they differ from axis to axis."""
        self._recurrent = own.interface.recurrent

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation."""
        self.own.start(inputs)
        self._returns_cache = inputs.returns_cache
        self.alone = self.own.reason if self.own.mode != "tree" else ""
        self.alone = self.alone or inputs.why_not_text(self.own.interface.cache_name)
        if not self.alone and (other := self.batch.rows.unheld(self.own.cache)):
            self.alone = f"the cache has a {other}"
        axes = self.own.inputs.axes
        self.axes = axes if axes is not None and bool((axes != axes.flatten()[0]).any()) else None
        self._in_a_row = inputs.in_a_row

    @property
    def packs_prompts(self) -> bool:
        """Whether its prompt can be read in passes with those of others."""
        return not (self.alone or self.whole_prompts or self._recurrent) and self._in_a_row

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run one pass alone (`Verifier.forward`)."""
        self.batch.rows.give_back(self)
        return self.own.forward(root_ids, tree, keep=keep, want_hidden=want_hidden)

    def commit(self, path: NDArray[np.int32]) -> None:
        """Keep the root tokens of the last pass and the nodes of `path` (`Verifier.commit`)."""
        if not self.batch.commit(self, path):
            self.own.commit(path)

    def copy_rows(self) -> DynamicCache | None:
        """What the cache holds, in another one (`HFVerifier.copy_rows`)."""
        return None if self._recurrent else self.batch.rows.copy_of(self) or self.own.copy_rows()

    def finish(self) -> Any:
        """End the generation and hand back the cache; None when nobody asks for it."""
        if self._returns_cache:
            self.batch.rows.hand_over(self)
        self.batch.rows.drop(self)
        cache = self.own.finish()
        return cache if self._returns_cache else None


class PaddedBatch:
    """The texts of a model that share passes of its own forward; `rows` is their cache."""

    def __init__(self, model: Any, interface: ModelInterface) -> None:
        self.model, self.interface = model, interface
        self.rows = PaddedCache()
        self._device = input_device(model)
        self._state = state_of(interface.recurrence)

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
        order = self.rows.hold(rows)
        sizes = [(len(root), len(tree)) for root, tree in zip(roots, trees, strict=True)]
        lasts = [min(keep, m) + n for keep, (m, n) in zip(keeps or [1] * len(rows), sizes, strict=True)]
        kwargs = self._inputs(rows, order, roots, trees, max(m + n for m, n in sizes))
        if self.interface.takes_logits_to_keep:
            kwargs["logits_to_keep"] = max(lasts)
        placed = dict(zip(order, sizes, strict=True))
        self.rows.begin([placed[at] for at in range(len(order))], kwargs["input_ids"].shape[1])
        by_place = {at: (row.own.cache, len(root), tree)
                    for at, row, root, tree in zip(order, rows, roots, trees, strict=True)}  # fmt: skip
        texts = [by_place[at] for at in range(len(order))]
        around = rows[0].own.around(kwargs["input_ids"].numel())
        with catch_hidden(self.model, want_hidden) as hidden, self._drafts(texts), around:
            logits = self.model(**kwargs, return_dict=True).logits
        return [
            VerifierOutput(logits[at, -last:], hidden[-1][at, -last:] if hidden else None)
            for at, last in zip(order, lasts, strict=True)
        ]

    def _drafts(self, texts: Sequence[tuple[Any, int, DraftTree]]) -> contextlib.AbstractContextManager[None]:
        """Keep recurrent states, each in the cache of its text, as they are while drafts are verified."""
        if self._state is None:
            return contextlib.nullcontext()
        caches, roots, trees = zip(*texts, strict=True)
        self._state.attach()
        return self._state.verifying(self.rows.held.cache, caches, roots, trees, self._device)

    def commit(self, row: PaddedRow, path: NDArray[np.int32]) -> bool:
        """Keep a row's root tokens of the last pass and the nodes of `path`; False if the pass was none of these."""
        if not self.rows.commit(row, path):
            return False
        if self._state is not None:
            self._state.commit(row.own.cache, path, self.rows.place(row))
        return True

    def _inputs(
        self,
        rows: Sequence[PaddedRow],
        order: list[int],
        roots: Sequence[NDArray[np.int32]],
        trees: Sequence[DraftTree],
        width: int,
    ) -> dict[str, Any]:
        """Arguments of a pass; a row's tokens stand at the right end of it."""
        held = self.rows.held
        ids = np.zeros((len(order), width), np.int64)
        positions = np.zeros_like(ids)
        by_axis = any(row.axes is not None for row in rows)
        for row, at, root, tree in zip(rows, order, roots, trees, strict=True):
            shift = 0 if by_axis else row.own.inputs.shift
            first, position = width - len(root) - len(tree), held.lengths[at] + shift
            fill_inputs(ids[at, first:], positions[at, first:], root, tree.token_ids, tree.depth, position)
        kwargs: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids).to(self._device),
            "attention_mask": self._masks(order, roots, trees, width) if self.interface.attends else None,
            "use_cache": True,
            self.interface.cache_name: held.cache,
        }
        if self.interface.takes_position_ids:
            placed = torch.from_numpy(positions)
            if by_axis:
                placed = self._by_axis(placed, dict(zip(order, rows, strict=True)))
            kwargs["position_ids"] = placed.to(self._device)
        return kwargs

    @staticmethod
    def _by_axis(placed: torch.Tensor, rows: dict[int, PaddedRow]) -> torch.Tensor:
        """(axes, rows, width) positions, given (rows, width) slots, where rows go on otherwise from axis to axis."""
        like = next(row.axes for row in rows.values() if row.axes is not None)
        shifts = []
        for _, row in sorted(rows.items()):
            axes = row.own.inputs.axes
            shifts.append(torch.full_like(like, row.own.inputs.shift) if axes is None else axes)
        return placed[None] + torch.cat(shifts, dim=-2)

    def _masks(
        self, order: list[int], roots: Sequence[NDArray[np.int32]], trees: Sequence[DraftTree], width: int
    ) -> Any:
        """One mask per layer type: every row sees its own tokens, its ancestors in the pass, and itself."""
        held = self.rows.held
        masks: dict[str, Any] = {}
        for layer_type, view in self.interface.masks.items():
            if view is None:
                masks[layer_type] = None
                continue
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
            masks[layer_type] = as_mask(visible, self.interface.mask_form, self.model.dtype)
        return masks.get("", masks)
