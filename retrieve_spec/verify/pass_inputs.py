"""Pass inputs: the arguments of a model's forward in each pass of one generation: ids, positions, masks and extras."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention import row_depths
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.kernels.treemask import fill_tree_mask
from retrieve_spec.verify.interface import LayerView, MaskForm, ModelInterface
from retrieve_spec.verify.sequence_cache import SequenceCache
from retrieve_spec.verify.verifier import CACHE_NAMES

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Arguments that give the type of every token."""
SET_EACH_PASS = {
    "input_ids", "decoder_input_ids", "inputs_embeds", "position_ids", "decoder_position_ids", "logits_to_keep",
    "use_cache",
}  # fmt: skip
"""Arguments that are set for each pass."""


def kwargs_after(model: Any, outputs: Any, kwargs: dict[str, Any], tokens: int = 1) -> dict[str, Any]:
    """Return the arguments of the next pass, over `tokens` tokens, as `generate` makes them."""
    more = {} if tokens == 1 else {"num_new_tokens": tokens}  # some models' own methods lack this argument
    after: dict[str, Any] = model._update_model_kwargs_for_generation(
        outputs, kwargs, is_encoder_decoder=model.config.is_encoder_decoder, **more
    )
    return after


def describing(name: str, value: Any) -> Iterator[str]:
    """Yield the name of an argument, or the names of its parts, that describe the prompt rather than set something."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from describing(f"{name}.{key}", part)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield name


class PassInputs:
    """Arguments of the passes of one generation.

    Trees go in as a 4-D mask (a dict of masks where layers differ) and position ids; chains and single tokens leave
    the mask to the model.

    Parameters
    ----------
    model, interface
        The model, and what its forward takes.
    device
        Where token ids go to.
    prompt
        (1, L) long.
    given
        Keyword arguments that `generate` prepared, without the cache.
    past, uncached
        Tokens that the cache holds at first, and how many of the prompt follow them.

    Attributes
    ----------
    names
        Of the arguments besides ids, positions and masks that describe the prompt, and of their parts where they have
        some.
    length
        Tokens of the prompt, cached ones included.
    """

    def __init__(
        self,
        model: Any,
        interface: ModelInterface,
        device: torch.device,
        prompt: torch.Tensor,
        given: dict[str, Any],
        past: int,
        uncached: int,
    ) -> None:
        self._model, self._interface, self._prompt = model, interface, prompt
        self._device, self._on_host = device, device.type == "cpu"
        given = dict(given)
        self._attention_mask = given.pop(interface.mask_name, None)
        self._position_ids = given.pop(interface.positions_name, None)
        given.pop("logits_to_keep", None)
        given.pop("use_cache", None)
        self._take(given)
        self._extras_by_rows = False  # whether extra inputs have an entry per row, and are made for each pass
        self._growing: dict[str, int] = {}  # extra inputs that grow by an entry per token, and their axis
        self.length = past + uncached
        self._template: dict[str, Any] | None = None
        self._padded = np.empty(0, np.bool_)
        self._left_padding = 0
        self._slot_shift = 0  # position of a token minus its slot
        self._masks_padding = False
        self._axes: torch.Tensor | None = None  # (…, 1) position on every axis, if there are several
        if self._attention_mask is not None:
            row = self._attention_mask[0].cpu().numpy() == 0
            self._padded = row
            self._left_padding = int(np.argmin(row)) if len(row) else 0
            self._long_mask = self._attention_mask

    @property
    def shift(self) -> int:
        """Position of a token minus its slot, where that is the same on every axis."""
        return 0 if self._position_ids is None else int(self._position_ids.flatten()[-1]) + 1 - self.length

    @property
    def shifts_alike(self) -> bool:
        """Whether the shift is the same on every axis that positions have."""
        positions = self._position_ids
        return positions is None or positions.ndim == 2 or len(positions[..., -1].unique()) == 1

    @property
    def is_padded(self) -> bool:
        """Whether the prompt is padded."""
        return bool(self._padded.any())

    def is_reading(self, past: int) -> bool:
        """Whether a pass after `past` tokens reads the prompt."""
        return past < self.length

    def reading(self, cache: Any, past: int, num_tokens: int, keep: int) -> dict[str, Any]:
        """Return arguments of a pass over prompt tokens after `past` others, made by the model as for `generate`."""
        slots = past + num_tokens
        unread = self.length - slots
        stop = self._prompt.shape[1] - unread
        mask, positions = self._attention_mask, self._position_ids
        extras = dict(self._extras)
        for name in TOKEN_TYPES:
            if isinstance(value := extras.get(name), torch.Tensor):
                extras[name] = value[..., :stop]
        if positions is not None:  # of all tokens, or of those not in the cache
            extras[self._interface.positions_name] = positions[..., : positions.shape[-1] - unread]
        extras[self._interface.mask_name] = None if mask is None else mask[:, :slots]
        extras[self._interface.cache_name] = cache
        kwargs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            self._prompt[:, :stop], next_sequence_length=num_tokens, is_first_iteration=True, use_cache=True, **extras
        )
        if self._interface.takes_logits_to_keep:
            kwargs["logits_to_keep"] = keep
        return kwargs

    def update_after_prompt(self, outputs: Any) -> None:
        """Let the model update the arguments after the prompt, which it has just read."""
        before = dict(self._extras)
        after = kwargs_after(self._model, outputs, {**before, "use_cache": True})
        unnamed = {*CACHE_NAMES, "use_cache"} - before.keys()
        self._take({name: value for name, value in after.items() if name not in unnamed})
        for name, value in self._extras.items():
            if isinstance(value, torch.Tensor) and isinstance(old := before.get(name), torch.Tensor):
                more = [new - was for was, new in zip(old.shape, value.shape, strict=False)]
                if 1 in more:
                    self._growing[name] = more.index(1)

    def _take(self, extras: dict[str, Any]) -> None:
        self._extras = extras
        self.names = frozenset(name for argument in extras.items() for name in describing(*argument))

    def after_prompt(self, cache: Any, past: int) -> None:
        """Record what the model adds to a decoding pass after `past` cached tokens, and its next position.

        Some models keep the end of the text that they read last, so call this before another text is read.
        """
        kwargs = self._prepared(cache, past, 1)
        positions = kwargs.get(self._interface.positions_name)  # without position ids, models count slots
        if positions is not None and positions.ndim == 2:
            self._slot_shift = int(positions[0, -1]) - past
        elif positions is not None:
            self._axes = positions[..., -1:].cpu() - past
        self._masks_padding = self._attention_mask is not None and kwargs.get(self._interface.mask_name) is not None
        self._template = self._settings(kwargs)
        if self.names:
            self._make_room(past + 2)
            two = self._settings(self._prepared(cache, past, 2))
            pairs = ((value, two.get(name)) for name, value in self._template.items())
            tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)]
            self._extras_by_rows = bool(self._growing) or any(a.shape != b.shape for a, b in tensors)

    def decoding(
        self,
        cache: SequenceCache,
        past: int,
        root_ids: NDArray[np.int32],
        tree: DraftTree,
        keep: int,
        masked: bool,
    ) -> dict[str, Any]:
        """Return the arguments of a pass over root tokens and nodes after `past` cached tokens.

        Parameters
        ----------
        masked
            Whether the tree goes in as a mask; else it is a chain.
        """
        roots, nodes = len(root_ids), len(tree)
        length = roots + nodes
        self._make_room(past + length + 1)
        if self._template is None:
            self.after_prompt(cache.whole, past)
        assert self._template is not None
        kwargs = dict(self._template)
        if self._extras_by_rows:
            kwargs = self._settings(self._prepared(cache.whole, past, length))
        kwargs[self._interface.cache_name] = cache.whole
        ids = np.concatenate([root_ids, tree.token_ids]).astype(np.int64)
        kwargs[self._interface.ids_name] = self._to_device(torch.from_numpy(ids)[None])
        if self._interface.takes_position_ids:
            positions = torch.from_numpy(row_depths(roots, tree) + past + self._slot_shift)[None]
            positions = positions if self._axes is None else positions + self._axes
            kwargs[self._interface.positions_name] = self._to_device(positions)
        if self._interface.takes_logits_to_keep:
            kwargs["logits_to_keep"] = keep + nodes
        if nodes and masked:
            kwargs[self._interface.mask_name] = self._tree_masks(tree, roots, past, cache.decoder)
        elif self._masks_padding:
            kwargs[self._interface.mask_name] = self._long_mask[:, : past + length]
        return kwargs

    def _make_room(self, slots: int) -> None:
        """Extend the 2-D mask of a padded row to a text of `slots` tokens."""
        if self._attention_mask is not None and self._long_mask.shape[1] < slots:
            more = self._long_mask.new_ones((1, slots))
            self._long_mask = torch.cat([self._long_mask, more], dim=1)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._on_host else tensor.to(self._device)

    def _prepared(self, cache: Any, past: int, rows: int) -> dict[str, Any]:
        """Return what the model itself prepares for a pass over `rows` tokens after the cached ones."""
        extras = dict(self._extras)
        for name, axis in self._growing.items():  # tokens after the prompt repeat its last entry
            given = extras[name]
            last = given.narrow(axis, given.shape[axis] - 1, 1)
            more = last.repeat_interleave(past + rows - self.length - 1, dim=axis)
            extras[name] = torch.cat([given, more], dim=axis)
        if self._position_ids is not None:
            ahead = torch.arange(past + 1 - self.length, past + 1 - self.length + rows)
            extras[self._interface.positions_name] = self._position_ids[..., -1:] + self._to_device(ahead)
        self._make_room(past + rows)
        mask = None if self._attention_mask is None else self._long_mask[:, : past + rows]
        extras |= {self._interface.mask_name: mask, self._interface.cache_name: cache}
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(
            self._prompt[:, -1:].expand(-1, rows), next_sequence_length=rows, use_cache=True, **extras
        )
        return prepared

    def _settings(self, prepared: dict[str, Any]) -> dict[str, Any]:
        """Return what a model prepared, without the arguments that each pass sets."""
        unset = {name: value for name, value in prepared.items() if name not in SET_EACH_PASS}
        unset.pop(self._interface.mask_name, None)
        return {**unset, "use_cache": True}

    def _tree_masks(self, tree: DraftTree, roots: int, past: int, cached: Any) -> Any:
        """Return which keys each row of a pass over one text sees."""
        rows = roots + len(tree)

        def visible(view: LayerView) -> torch.Tensor:
            kv_length, kv_offset = cached.get_mask_sizes(rows, view.layer_idx)
            mask = np.empty((rows, kv_length), np.bool_)
            fill_tree_mask(
                mask, tree.parent, tree.depth, roots, past, kv_offset, view.window, view.chunk, self._left_padding,
                self._padded,
            )  # fmt: skip
            return self._to_device(torch.from_numpy(mask)[None, None])

        return masks_by_type(self._interface, self._model.dtype, visible)


def masks_by_type(interface: ModelInterface, dtype: torch.dtype, visible: Callable[[LayerView], torch.Tensor]) -> Any:
    """One mask per layer type in the form the attention implementation takes; None where no layer attends.

    `visible`: (rows, 1, q, kv) bool, what layers of a type may see.
    """
    masks = {
        layer_type: None if view is None else as_mask(visible(view), interface.mask_form, dtype)
        for layer_type, view in interface.masks.items()
    }
    return masks.get("", masks) if interface.attends else None


def as_mask(visible: torch.Tensor, form: MaskForm, dtype: torch.dtype) -> Any:
    """Convert a (rows, 1, q, kv) bool mask to the form that an attention takes; flex attention's is of one row."""
    if form == "bool":
        return visible
    if form == "float":
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    from torch.nn.attention.flex_attention import create_block_mask

    seen, (rows, columns), device = visible[0, 0], visible.shape[2:], str(visible.device)
    return create_block_mask(lambda batch, head, q, kv: seen[q, kv], 1, None, rows, columns, device=device)
