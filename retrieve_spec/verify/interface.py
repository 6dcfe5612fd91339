"""Model interface: what a model's forward pass accepts: argument names, mask formats, windows and limits."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.model_layers import decoder_blocks, embedded_tokens, max_positions
from retrieve_spec.verify.mixers import Mixer
from retrieve_spec.verify.positions import Place
from retrieve_spec.verify.verifier import CACHE_NAMES, Mode

MaskForm = Literal["bool", "float", "block", "none"]

_MASK_FORMS: dict[str, MaskForm] = {"sdpa": "bool", "eager": "float", "flex_attention": "block"}
_ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_OTHER_TYPES = ("linear_attention", "conv", "moe", "mlp", "dummy")
DERIVES = "the model derives positions itself"
Way = Literal["rows", "steps"]
"""How mixers verify drafts: a scan of ours over the rows, or a step of their one-token path per depth."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """What the layers of one type may see, and which cache layer tells how much they hold."""

    layer_idx: int
    window: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The modules that keep recurrent state, and how they verify drafts."""

    mixers: tuple[Mixer, ...]
    way: Way


@dataclass(frozen=True, slots=True)
class ModelInterface:
    """What `HFVerifier` must know about a model; read once, by `read_interface`.

    Attributes
    ----------
    cache_name
        Name of the forward argument that carries the cache.
    takes_position_ids, takes_logits_to_keep
        Whether forward has these arguments.
    mask_form
        What the attention implementation takes as a tree mask: "bool", "float" (additive), "block" (flex attention's
        BlockMask) or "none".
    masks
        Masks by layer type; the single key "" when the model takes one mask for all layers. None for layers that take
        no mask over a cache; empty when no layer attends.
    mode, reason
        The best mode these facts allow, and what stands in the way of trees.
    rope_switch
        Length at which the rotary frequencies change (dynamic NTK, LongRoPE), 0 if they never do.
    rope_rescans
        Whether the model recomputes its whole cache at that length.
    max_positions
        Positions the model was made for, 0 if unknown.
    scale_step
        Queries are scaled anew at every multiple of so many tokens, counted by slot: siblings must not lie on both
        sides of one. 0 if they never are.
    recurrent
        Whether layers keep recurrent or convolution state.
    recurrence
        How that state is verified, once a probe has found out.
    has_encoder
        Whether an encoder reads the prompt, and ids, positions and masks are those of the decoder.
    places
        Where positions that the model derives itself are replaced, once a probe has found out.
    takes_padding
        Whether rows with padding in front are verified so, too; else they are decoded plainly.
    takes_pieces
        Whether a prompt that comes in pieces is read as one that comes at once.
    vocabulary
        Tokens that the model embeds.
    """

    cache_name: str
    takes_position_ids: bool
    takes_logits_to_keep: bool
    mask_form: MaskForm
    masks: dict[str, LayerView | None]
    mode: Mode
    reason: str
    rope_switch: int = 0
    rope_rescans: bool = False
    max_positions: int = 0
    scale_step: int = 0
    recurrent: bool = False
    recurrence: Recurrence | None = None
    has_encoder: bool = False
    places: tuple[Place, ...] = ()
    takes_padding: bool = True
    takes_pieces: bool = True
    vocabulary: int = 1 << 31

    @property
    def derives_positions(self) -> bool:
        """Whether the model is given no positions although its layers attend."""
        return self.attends and not self.takes_position_ids

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether a prompt must come in one piece: layers ignore what an earlier piece left, or leave padding out."""
        ignores_state = self.recurrence is not None and self.recurrence.way == "steps"
        counts = any(place.kind == "past" for place in self.places)
        return ignores_state or counts or not self.takes_pieces

    @property
    def masks_inside(self) -> bool:
        """Whether the mask of a tree goes to the layers, past a forward that takes none."""
        return any(place.kind == "mask" for place in self.places)

    @property
    def max_slots(self) -> int:
        """Tokens in the cache and in a pass together, nodes of all branches included, at most; 0 if unlimited."""
        return min((place.slots for place in self.places if place.slots), default=0)

    @property
    def ids_name(self) -> str:
        """Name of the forward argument that takes the text's ids."""
        return "decoder_input_ids" if self.has_encoder else "input_ids"

    @property
    def mask_name(self) -> str:
        """Name of the forward argument that takes the mask over the text."""
        return "decoder_attention_mask" if self.has_encoder else "attention_mask"

    @property
    def positions_name(self) -> str:
        """Name of the forward argument that takes the text's positions."""
        return "decoder_position_ids" if self.has_encoder else "position_ids"

    @property
    def attends(self) -> bool:
        """Whether any layer takes a mask over its cache."""
        return any(view is not None for view in self.masks.values())


def read_interface(model: Any) -> ModelInterface:
    """Read what a model's forward accepts from its signature and config."""
    config = model.config.get_text_config(decoder=True)
    parameters = inspect.signature(model.forward).parameters
    masks, mode, reason = _read_masks(config)
    mask_form = _MASK_FORMS.get(attention_of(model), "none")
    recurrent = _keeps_state(model, config)
    attends = any(view is not None for view in masks.values())
    if mode == "tree" and attends and mask_form == "none":
        mode, reason = "chain", f"{attention_of(model)} takes no tree masks"
    positions = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
    if mode == "tree" and attends and recurrent and positions not in parameters:
        mode, reason = "chain", DERIVES
    named = bool(masks) and getattr(config, "layer_types", None) is not None
    every_layer_attends = named and all(view is not None for view in masks.values())  # Granite 4 without Mamba layers
    if getattr(model, "_is_stateful", False) and not recurrent and not every_layer_attends:
        mode, reason = "plain", "recurrent state outside of its cache cannot be rolled back"
    switch, rescans = _rope_switch(config)
    return ModelInterface(
        cache_name=cache_name_of(model),
        takes_position_ids=positions in parameters,
        takes_logits_to_keep="logits_to_keep" in parameters,
        mask_form=mask_form,
        masks=masks,
        mode=mode,
        reason=reason,
        rope_switch=switch,
        rope_rescans=rescans,
        max_positions=max_positions(model) if attends else 0,
        scale_step=int(getattr(config, "floor_scale", 0) or 0) if getattr(config, "attn_temperature_tuning", 0) else 0,
        recurrent=recurrent,
        has_encoder=bool(model.config.is_encoder_decoder),
        vocabulary=embedded_tokens(model),
    )


def cache_name_of(model: Any) -> str:
    """Return the name of a model's cache argument."""
    for takes in (model.forward, model.prepare_inputs_for_generation):
        for name in CACHE_NAMES:
            if name in inspect.signature(takes).parameters:
                return name
    return "past_key_values"


def new_cache(model: Any) -> DynamicCache:
    """Return an empty cache as `generate` makes it."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _keeps_state(model: Any, config: Any) -> bool:
    """Whether layers of a model's cache keep recurrent or convolution state."""
    if config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return False
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # the config does not tell what its layers keep
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def attention_of(model: Any) -> str:
    """Return the name of the attention implementation that a model uses now."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "_attn_implementation", None) or "eager"


@contextlib.contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Use a registered attention function in a model inside the block, then restore that of each part."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


def _configs(model: Any) -> list[Any]:
    """Return the configs of a model and of its parts, outer ones first."""
    found = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "sub_configs")]
    for config in found:  # grows during iteration
        found += [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
    return list({id(config): config for config in reversed(found)}.values())[::-1]


def _read_masks(config: Any) -> tuple[dict[str, LayerView | None], Mode, str]:
    """Return one mask per layer type, by the rule of transformers' `create_masks_for_generate`."""
    if not getattr(config, "is_causal", True):
        return {}, "plain", "the model is not causal"
    types = getattr(config, "layer_types", None)
    if types is None:
        window = getattr(config, "sliding_window", None) or 0
        chunk = 0 if window else (getattr(config, "attention_chunk_size", None) or 0)
        return {"": LayerView(0, window, chunk)}, "tree", ""
    sharing = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    masks: dict[str, LayerView | None] = {}
    for layer_idx, (layer_type, shared) in enumerate(zip(types, sharing, strict=False)):
        if layer_type in _OTHER_TYPES:
            masks.setdefault(layer_type, None)
            continue
        if layer_type == "hybrid":  # parallel attention and mixer
            masks.setdefault("linear_attention", None)
            layer_type = "full_attention"
        if layer_type not in _ATTENTION_TYPES:
            return {}, "chain", f"layers of type {layer_type!r} take no tree masks"
        if layer_type not in masks and shared != "reuse":
            window = config.sliding_window if layer_type == "sliding_attention" else 0
            chunk = config.attention_chunk_size if layer_type == "chunked_attention" else 0
            masks[layer_type] = LayerView(layer_idx, window or 0, chunk or 0)
    return masks, "tree", ""


def _rope_switch(config: Any) -> tuple[int, bool]:
    """Return the length at which rotary frequencies change, and whether the model then recomputes its cache."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    parameters: dict[str, Any] = given if isinstance(given, dict) else {}
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "longrope":
        own = getattr(config, "original_max_position_embeddings", None)
        return int(own or parameters.get("original_max_position_embeddings") or config.max_position_embeddings), True
    if kind == "dynamic":
        return int(config.max_position_embeddings), False
    return 0, False


def weaker(a: tuple[Mode, str], b: tuple[Mode, str]) -> tuple[Mode, str]:
    """Return the more limited of two modes with its reason, the first on a tie."""
    order = {"tree": 2, "chain": 1, "plain": 0}
    return a if order[a[0]] <= order[b[0]] else b


def input_device(model: Any) -> torch.device:
    """Return the device of token ids; for offloaded embeddings, the device on which they run."""
    embeddings = model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    device = weight.device if isinstance(weight, torch.Tensor) else torch.device(model.device)
    if device.type == "meta" and hasattr(embeddings, "_hf_hook"):
        return torch.device(embeddings._hf_hook.execution_device)
    return device


@contextlib.contextmanager
def catch_hidden(model: Any, layer: Layer | None) -> Iterator[list[torch.Tensor]]:
    """Catch the hidden states (1, rows, d) of one layer while the model runs; nothing is computed for it.

    Parameters
    ----------
    layer
        `"last"`: what goes into the output embeddings, nothing if the model names none. N: what the N-th block hands
        on. None: nothing.

    Yields
    ------
    list
        The caught tensors, one per forward.
    """
    caught: list[torch.Tensor] = []
    hook: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if layer == "last":
        head = model.get_output_embeddings()
        if head is not None:
            hook = head.register_forward_pre_hook(lambda _module, args: caught.append(args[0]))
    elif layer is not None:
        block = decoder_blocks(model)[layer - 1]
        hook = block.register_forward_hook(
            lambda _module, _args, out: caught.append(out[0] if isinstance(out, tuple) else out)
        )
    with hook:
        yield caught
