"""Verifies draft trees with any Hugging Face decoder, through its public forward, cache and mask arguments only."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from retrieve_spec.config import MAX_NODES
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.treemask import fill_inputs, fill_tree_mask
from retrieve_spec.verify.cache import decoder_cache, record_past, recording, same_rows, set_recording
from retrieve_spec.verify.extras import SET_EACH_PASS, Extras
from retrieve_spec.verify.interface import ModelInterface, cache_mode, catch_hidden, input_device, weaker
from retrieve_spec.verify.kept_rows import KeptRows
from retrieve_spec.verify.positions import DerivedPositions
from retrieve_spec.verify.recurrent import RecurrentState
from retrieve_spec.verify.verifier import Mode, PassKind, VerifierInputs, VerifierOutput

_NO_TREE = DraftTree()


class HFVerifier:
    """A `Verifier` on top of a model's own forward and a `DynamicCache`.

    Trees go in as a 4-D mask (a dict of masks where layers differ) and position ids; chains and single tokens leave
    the mask to the model. Kept rows never move except on the accepted path.
    """

    def __init__(self, model: Any, interface: ModelInterface, mode: Mode = "tree", reason: str = "") -> None:
        self.model = model
        self.interface = interface
        self.mode: Mode = mode
        self.reason = reason
        self._ignores_state = interface.recurrence is not None and interface.recurrence.way == "steps"
        self.whole_prompts = self._ignores_state
        self.pass_kind: PassKind = "model's own"
        self.pass_reason = ""
        self._device = input_device(model)
        self._on_host = self._device.type == "cpu"
        self._model_mode: tuple[Mode, str] = (mode, reason)
        self._state = RecurrentState(interface.recurrence) if interface.recurrence is not None else None
        self._derived = DerivedPositions(interface.places) if interface.places else None
        self._take_cache(None)
        self._was_recording: list[bool] = []
        self._records = self._dirty = False

    @property
    def takes_back(self) -> bool:
        """Whether rows are all that a pass leaves behind (`Verifier.takes_back`)."""
        reads_more = bool(self._extras.kind) and self._fed < self._uncached  # what belongs to the prompt goes on once
        return self._kept is not None and self._kept.grows_by_rows and not reads_more

    @property
    def past(self) -> int:
        """Tokens that were committed."""
        return self._past

    @property
    def cache(self) -> Any:
        """The cache in use: the caller's, or one that the model put in its place (LongRoPE models do)."""
        return self._cache

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation; the mode may weaken when the caller's cache cannot be rolled back."""
        kwargs = dict(inputs.model_kwargs)
        self._take_cache(kwargs.pop(self.interface.cache_name, None))
        self.mode, self.reason = weaker(self._model_mode, cache_mode(self._cache))
        self._attention_mask = kwargs.pop(self.interface.mask_name, None)
        self._position_ids = kwargs.pop(self.interface.positions_name, None)
        kwargs.pop("logits_to_keep", None)
        kwargs.pop("use_cache", None)
        self._extras = Extras(self.model, kwargs)
        self.whole_prompts = self._ignores_state or bool(self._extras.kind)
        self._prompt = inputs.input_ids
        self._past = inputs.past_length
        self._fed = 0  # tokens given to forward since start
        self._uncached = inputs.input_ids.shape[1] - (inputs.past_length if inputs.holds_past else 0)
        self._length = self._past + self._uncached  # of the prompt
        self._template: dict[str, Any] | None = None
        self._was_recording = recording(self._rows) if self._rows is not None else []
        self._records = any(self._was_recording)
        self._pending = (0, 0, self._past, 0)  # root tokens and nodes of the last pass, and what was fed before it
        self._dirty = False  # whether a pass may have left rows that were not committed
        self._reserve()
        for hooked in (self._state, self._derived):
            if hooked is not None:
                hooked.attach()

    def _take_cache(self, cache: Any) -> None:
        """Keep to a cache: `_rows` is the part of it that grows with the text."""
        self._cache, self._rows = cache, decoder_cache(cache)
        self._kept = KeptRows(self._rows) if isinstance(self._rows, DynamicCache) else None

    def _reserve(self) -> None:
        """Make the buffers that every pass slices: ids, positions, the 2-D mask when the row is padded."""
        self._ids = torch.empty((1, self._uncached + 2 * MAX_NODES), dtype=torch.long)
        self._ids_view = self._ids.numpy()[0]
        self._positions = torch.empty_like(self._ids)
        self._positions_view = self._positions.numpy()[0]
        self._mask_buffer = np.empty(0, np.bool_)
        self._padded = np.empty(0, np.bool_)
        self._left_padding = 0
        self._shift = 0  # position of a token minus its slot
        self._masks_padding = False
        self._axes: torch.Tensor | None = None  # (…, 1) the same on every axis, where positions have several
        if self._attention_mask is not None:
            row = self._attention_mask[0].cpu().numpy() == 0
            self._padded = row
            self._left_padding = int(np.argmin(row)) if len(row) else 0
            self._long_mask = self._attention_mask

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run one pass (`Verifier.forward`)."""
        nodes = 0 if tree is None else len(tree)
        if self._kept is not None:
            self._kept.begin(self._dirty)
        reading = self._fed < self._uncached
        by_rows = self._kept is not None and self._kept.grows_by_rows
        if not self._records and self._rows is not None and (nodes or (by_rows and not reading)):
            record_past(self._rows)
            self._records = True
        self._dirty = True
        kwargs = self._prefill_inputs(len(root_ids), keep) if reading else self._decode_inputs(root_ids, tree, keep)
        with catch_hidden(self.model, want_hidden) as hidden, self._draft(len(root_ids), tree):
            outputs = self.model(**kwargs, return_dict=True)
        cache = getattr(outputs, self.interface.cache_name, self._cache)
        if cache is not self._cache:
            self._take_cache(cache)
        if reading and self._fed + len(root_ids) == self._uncached:
            self._extras.went_on(outputs)
        self._pending = (len(root_ids), nodes, self._past, self._fed)
        rows = keep + nodes
        logits = outputs.logits[0]
        states = hidden[-1][0, -rows:] if hidden else None
        return VerifierOutput(logits if logits.shape[0] == rows else logits[-rows:], states)

    def _draft(self, roots: int, tree: DraftTree | None) -> contextlib.AbstractContextManager[None]:
        """Keep recurrent state as it is while a draft is verified, or tell a model the nodes' positions."""
        if tree is None or not len(tree) or (self._state is None and self._derived is None):
            return contextlib.nullcontext()
        if self._state is None:
            assert self._derived is not None
            return self._derived.verifying(self._past, roots, tree, self._device)
        return self._state.verifying(self._rows, roots, tree, self._device)

    def commit(self, path: NDArray[np.int32]) -> None:
        """Keep the root tokens and the nodes of `path` (`Verifier.commit`)."""
        roots, nodes, past, fed = self._pending
        if self._rows is not None:
            if nodes and self._state is not None:
                self._state.commit(self._rows, path)
            if self._kept is not None and (nodes or self._records):
                self._kept.commit(path, nodes)
        self._past, self._fed = past + roots + len(path), fed + roots + len(path)
        self._dirty = False
        if self.interface.scale_step and self._model_mode[0] == "tree":
            room = -self._past % self.interface.scale_step
            self.mode = "chain" if room <= MAX_NODES + 1 else weaker(self._model_mode, cache_mode(self._cache))[0]

    @property
    def shift(self) -> int:
        """Position of a token minus its slot, where positions have one axis."""
        return 0 if self._position_ids is None else int(self._position_ids[0, -1]) + 1 - self._length

    def lend(self) -> tuple[Any, int]:
        """The cache between two passes, and how many tokens it has seen; `resume` when it has seen more."""
        if self._kept is not None and self._dirty:
            self._kept.settle()
        self._pending, self._dirty = (0, 0, self._past, self._fed), False
        return self._cache, self._past

    def resume(self, past: int) -> None:
        """Go on behind `past` tokens, whose rows the cache holds by now."""
        self._fed, self._past = self._fed + past - self._past, past
        self._kept = KeptRows(self._cache)

    def copy_rows(self) -> DynamicCache | None:
        """What the cache holds, in another of the same tensors, which nothing writes to; None where it is not rows."""
        if self._kept is None or not self._kept.grows_by_rows or self._state is not None:
            return None
        return same_rows(self._cache)

    def finish(self) -> Any:
        """Return the cache as plain `generate` leaves it."""
        if self._kept is not None and self._dirty:
            self._kept.settle()
        for hooked in (self._state, self._derived):
            if hooked is not None:
                hooked.detach()
        if self._rows is not None and self._records:
            set_recording(self._rows, self._was_recording)
        cache = self._cache
        self._take_cache(None)
        return cache

    def _prefill_inputs(self, num_tokens: int, keep: int) -> dict[str, Any]:
        """Arguments of a pass over prompt tokens, made by the model itself as in plain `generate`."""
        stop = self._prompt.shape[1] - self._uncached + self._fed + num_tokens
        slots = self._past + num_tokens
        mask, positions = self._attention_mask, self._position_ids
        extras = self._extras.up_to(stop, self._prompt.shape[1])
        if positions is not None:
            extras[self.interface.positions_name] = positions[..., :slots]
        extras[self.interface.mask_name] = None if mask is None else mask[:, :slots]
        extras[self.interface.cache_name] = self._cache
        kwargs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            self._prompt[:, :stop], next_sequence_length=num_tokens, is_first_iteration=True, use_cache=True, **extras
        )
        if self.interface.takes_logits_to_keep:
            kwargs["logits_to_keep"] = keep
        return kwargs

    def _decode_inputs(self, root_ids: NDArray[np.int32], tree: DraftTree | None, keep: int) -> dict[str, Any]:
        """Arguments of a pass over root tokens and nodes."""
        roots, nodes = len(root_ids), 0 if tree is None else len(tree)
        length = roots + nodes
        self._make_room(self._past + length + 1)
        if self._template is None:
            self._template = self._make_template()
        kwargs = dict(self._template)
        if self._extras.by_rows:
            kwargs = self._settings(self._prepared(length))
        kwargs[self.interface.cache_name] = self._cache
        drafted = _NO_TREE if tree is None else tree
        fill_inputs(
            self._ids_view, self._positions_view, root_ids, drafted.token_ids, drafted.depth, self._past + self._shift
        )
        kwargs[self.interface.ids_name] = self._to_device(self._ids[:, :length])
        if self.interface.takes_position_ids:
            positions = self._positions[:, :length]
            positions = positions if self._axes is None else positions + self._axes
            kwargs[self.interface.positions_name] = self._to_device(positions)
        if self.interface.takes_logits_to_keep:
            kwargs["logits_to_keep"] = keep + nodes
        if tree is not None and nodes and self.mode == "tree":
            kwargs[self.interface.mask_name] = self._tree_masks(tree, roots)
        elif self._masks_padding:
            kwargs[self.interface.mask_name] = self._long_mask[:, : self._past + length]
        return kwargs

    def _make_room(self, slots: int) -> None:
        """Let the 2-D mask of a padded row reach as far as a text of `slots` tokens."""
        if self._attention_mask is not None and self._long_mask.shape[1] < slots:
            more = self._long_mask.new_ones((1, slots))
            self._long_mask = torch.cat([self._long_mask, more], dim=1)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._on_host else tensor.to(self._device)

    def _make_template(self) -> dict[str, Any]:
        """What the model itself would add to a decoding pass besides what is set for each pass; its next position."""
        kwargs = self._prepared(1)
        self._read_positions(kwargs.get(self.interface.positions_name))
        self._masks_padding = self._attention_mask is not None and kwargs.get(self.interface.mask_name) is not None
        template = self._settings(kwargs)
        if self._extras.kind:
            self._make_room(self._past + 2)
            self._extras.see_rows(template, self._settings(self._prepared(2)))
        return template

    def _prepared(self, rows: int) -> dict[str, Any]:
        """What the model itself prepares for a pass over `rows` tokens behind the cached ones."""
        extras = self._extras.ahead(self._past + rows - self._length)
        if self._position_ids is not None:
            ahead = torch.arange(self._past + 1 - self._length, self._past + 1 - self._length + rows)
            extras[self.interface.positions_name] = self._position_ids[..., -1:] + self._to_device(ahead)
        mask = None if self._attention_mask is None else self._long_mask[:, : self._past + rows]
        extras |= {self.interface.mask_name: mask, self.interface.cache_name: self._cache}
        prepared: dict[str, Any] = self.model.prepare_inputs_for_generation(
            self._prompt[:, -1:].expand(-1, rows), next_sequence_length=rows, use_cache=True, **extras
        )
        return prepared

    def _settings(self, prepared: dict[str, Any]) -> dict[str, Any]:
        """Of what a model prepared, all that is not set for each pass."""
        unset = {name: value for name, value in prepared.items() if name not in SET_EACH_PASS}
        unset.pop(self.interface.mask_name, None)
        return {**unset, "use_cache": True}

    def _read_positions(self, position_ids: torch.Tensor | None) -> None:
        """Where the next token stands; models that are given no positions count slots, padding included."""
        if position_ids is None:
            return
        if position_ids.ndim == 2:
            self._shift = int(position_ids[0, -1]) - self._past
        else:
            self._axes = position_ids[..., -1:].cpu() - self._past

    def _tree_masks(self, tree: DraftTree, roots: int) -> Any:
        """One mask per layer type in the form the attention implementation takes."""
        rows = roots + len(tree)
        masks: dict[str, Any] = {}
        for layer_type, view in self.interface.masks.items():
            if view is None:
                masks[layer_type] = None
                continue
            kv_length, kv_offset = self._rows.get_mask_sizes(rows, view.layer_idx)
            if self._mask_buffer.size < rows * kv_length:
                self._mask_buffer = np.empty(2 * rows * kv_length, np.bool_)
            buffer = self._mask_buffer if len(self.interface.masks) == 1 else np.empty(rows * kv_length, np.bool_)
            mask = buffer[: rows * kv_length].reshape(rows, kv_length)
            fill_tree_mask(
                mask,
                tree.parent,
                tree.depth,
                roots,
                self._past,
                kv_offset,
                view.window,
                view.chunk,
                self._left_padding,
                self._padded,
            )
            masks[layer_type] = self._as_mask(torch.from_numpy(mask)[None, None])
        return masks.get("", masks) if self.interface.attends else None

    def _as_mask(self, visible: torch.Tensor) -> Any:
        """Turn (1, 1, q, kv) bool into what the attention implementation takes."""
        visible = self._to_device(visible)
        if self.interface.mask_form == "bool":
            return visible
        if self.interface.mask_form == "float":
            dtype = self.model.dtype
            return torch.zeros(visible.shape, dtype=dtype, device=self._device).masked_fill_(
                ~visible, torch.finfo(dtype).min
            )
        from torch.nn.attention.flex_attention import create_block_mask

        seen = visible[0, 0]
        rows, columns = seen.shape
        device = str(self._device)
        return create_block_mask(lambda batch, head, q, kv: seen[q, kv], 1, None, rows, columns, device=device)
