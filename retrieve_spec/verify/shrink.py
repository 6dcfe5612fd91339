"""Small copies of a model to judge its passes on, in float32, where rounding hides no fault.

Random copies of its architecture have windows that are short enough to read beyond them; its first layers have its own
weights.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from retrieve_spec.model_layers import decoder_blocks
from retrieve_spec.verify.interface import attention_of, input_device

logger = logging.getLogger(__name__)

WINDOW, CHUNK = 8, 16
_HEAD = 8
_LENGTHS = {
    "sliding_window": WINDOW, "attention_chunk_size": CHUNK, "window_size": WINDOW, "attention_window_size": WINDOW,
    "local_attention_window": WINDOW, "index_topk": WINDOW,
}  # fmt: skip
"""What a config calls the lengths at which layers begin to see less or otherwise, and what they are in a small copy."""
_LONGER = 8
CHOICES = frozenset({"index_topk"})
"""Those from which on layers choose among what they see."""
_SIZES = {
    "hidden_size": 32, "d_model": 32, "encoder_hidden_size": 32, "n_embd": 32, "embed_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48,
    "n_inner": 48, "ffn_hidden_size": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "intermediate_size_mlp": 48, "shared_intermediate_size": 24, "head_dim": _HEAD, "global_head_dim": _HEAD,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_head_dim": 16, "index_n_heads": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "top_k_experts": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "word_embed_proj_dim": 32, "query_pre_attn_scalar": _HEAD, "rotary_dim": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "depth": 2, "out_hidden_size": 32,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "lru_width": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "mamba_d_ssm": 64,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_head_dim": 8, "mamba_num_heads": 8, "n_mamba_heads": 2,
    "mamba_n_groups": 1, "n_groups": 1, "mamba_ngroups": 1, "n_mamba_groups": 1, "mamba_headdim": 8,
    "mamba_dt_rank": 4, "time_step_rank": 4, "attention_hidden_size": 64, "attention_head_dim": 16, "adapter_rank": 4,
    "moe_shared_expert_intermediate_size": 24, "num_mem_blocks": 1, "block_ff_dim": 48, "linear_head_dim": 8,
    "decoder_layers": 2, "encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "d_ff": 48, "d_kv": 8, "cross_attention_hidden_size": 32,
    "expert_ffn_hidden_size": 24,
    "linear_num_heads": 4, "expand_ratio": 2, "mlp_hidden_size": 48, "max_seq_len": 4096, "kv_channels": 8,
}  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_VOCAB = 256


def lengths_of(config: Any) -> dict[str, int]:
    """Lengths, in tokens, at which layers of the decoder begin to see less or otherwise, by their names."""
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    unused = set()
    if types is not None and not any("sliding" in kind for kind in types):
        unused.add("sliding_window")
    if types is not None and "chunked_attention" not in types:
        unused.add("attention_chunk_size")
    found = {name: getattr(text, name, None) for name in _LENGTHS if name not in unused}
    return {name: int(length) for name, length in found.items() if isinstance(length, (int, float)) and length > 0}


def float32_copy(model: Any) -> Any:
    """The first layers of a model in float32, or a small copy with random weights; None where neither can be made."""
    try:
        return first_layers(model)
    except Exception:  # a config may refuse values, or weights cannot be cast
        logger.debug("a small copy stands for its first layers", exc_info=True)
        return shrunk(model, lengths_of(model.config))


def shrunk(model: Any, longer: Collection[str] = ()) -> Any:
    """A random float32 copy of a model with small layers and short windows, None where none can be made.

    Lengths whose names are in `longer` are longer than the others.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = small_config(model.config, longer)
            small = type(model)._from_config(config, dtype=torch.float32, attn_implementation=attention_of(model))
            randomise(small)
        return small.to(input_device(model)).eval()
    except Exception:  # a config may refuse values
        logger.debug("no small copy can be made", exc_info=True)
        return None


def small_config(config: Any, longer: Collection[str] = ()) -> Any:
    """A config of the same shape with small numbers in it, those of its parts too; lengths as of `shrunk`."""
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    layered = {id(part): part for part in (small, text, *parts_of(small))}.values()
    differing = {id(part): _take_differences(part) for part in layered}
    for part in layered:
        if part is text or (part is small and small.is_encoder_decoder):
            differing[id(part)] = _shrink_layers(part, differing[id(part)])
    for part in layered:
        _shrink_widths(part)
        if layers := differing[id(part)]:
            part.per_layer_config = {
                i: {name: _smaller(name, value) for name, value in layer.items()} for i, layer in layers.items()
            }
    for name, length in _LENGTHS.items():
        if _is_number(getattr(text, name, None)) and getattr(text, name) > 0:
            _set(text, name, length * (_LONGER if name in longer else 1))
    return small


def parts_of(config: Any) -> list[Any]:
    """Configs inside a config, and those inside of them."""
    names = getattr(config, "sub_configs", {})
    parts = [part for name in names if (part := getattr(config, name, None)) is not None]
    return parts + [inner for part in parts for inner in parts_of(part)]


def _take_differences(part: Any) -> dict[int, dict[str, Any]]:
    """Take the layers' own settings out of a config; they would hide the common ones."""
    layers = part.to_dict().get("per_layer_config") or {}
    if layers:
        part.per_layer_config = None
    return {int(i): dict(layer) for i, layer in layers.items()}


def _set(part: Any, name: str, value: Any) -> None:
    """Set the attributes that can be set: some are derived from others."""
    with contextlib.suppress(AttributeError, ValueError, TypeError, NotImplementedError):
        setattr(part, name, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _smaller(name: str, value: Any) -> Any:
    """Return a small value for a width, other values as they are."""
    if name in _HEADS and isinstance(value, int):
        return min(value, 4)
    if name in _SIZES and _is_number(value) and value > 0:
        return type(value)(min(value, _SIZES[name]))
    return value


def _shrink_layers(text: Any, differing: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Keep two layers of every kind, in order, and their entries in the lists of a config."""
    name = _counts_layers(text)
    if not name:
        return differing
    count = getattr(text, name)
    types = getattr(text, "layer_types", None) or vars(text).get("layers_block_type")
    sharing = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    kinds = [((types[i] if types is not None else ""), i >= count - sharing) for i in range(count)]
    kept: list[int] = []
    for i, kind in enumerate(kinds):
        if sum(kinds[j] == kind for j in kept) < 2:
            kept.append(i)
    if count - 1 not in kept:  # some configs determine the kind of the last layer
        kept[[j for j, i in enumerate(kept) if kinds[i] == kinds[-1]][-1]] = count - 1
        kept.sort()
    keep_layers(text, kept)
    if sharing:
        _set(text, "num_kv_shared_layers", sum(kinds[i][1] for i in kept))
    return {new: differing[i] for new, i in enumerate(kept) if i in differing}


def _counts_layers(text: Any) -> str:
    """Return the name of the config attribute that counts the decoder's layers; empty where there is none."""
    return next((name for name in _LAYERS if isinstance(getattr(text, name, None), int)), "")


def keep_layers(text: Any, kept: Sequence[int]) -> None:
    """Keep only some layers in a decoder's config, in this order."""
    name = _counts_layers(text)
    count = getattr(text, name)
    lists = layer_lists(text, count)
    _set(text, name, len(kept))
    for key, value in lists.items():
        _set(text, key, [value[i] for i in kept])


def layer_lists(text: Any, count: int) -> dict[str, list[Any]]:
    """Return the lists of a decoder's config with an entry for each layer, by name."""
    return {key: value for key, value in vars(text).items() if isinstance(value, list) and len(value) == count}


def _shrink_widths(part: Any) -> None:
    """Make widths, heads, experts and vocabulary small, wherever a config has them."""
    heads = next((getattr(part, name) for name in _HEADS if isinstance(getattr(part, name, None), int)), 0)
    for name in _HEADS:
        if isinstance(getattr(part, name, None), int):
            _set(part, name, 4)
    for name in _KEY_HEADS:
        if isinstance(getattr(part, name, None), int) and heads:
            _set(part, name, max(1, 4 * getattr(part, name) // heads))
    for name in _SIZES:
        value: Any = getattr(part, name, None)
        if _is_number(value) and value > 0:
            _set(part, name, _smaller(name, value))
    _make_consistent(part)
    shrink_vocabulary(part, _VOCAB)
    if isinstance(positions := getattr(part, "max_position_embeddings", None), int):
        _set(part, "max_position_embeddings", min(positions, 4096))
    rope = getattr(part, "rope_parameters", None)
    for entry in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if isinstance(entry, dict):
            _shrink_rope(entry)


def shrink_vocabulary(part: Any, most: int) -> None:
    """Keep the first tokens of a config's vocabulary; special tokens beyond become the last of these."""
    for name in ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"):
        if isinstance(vocab := getattr(part, name, None), int):
            _set(part, name, min(vocab, most))
    for name, value in list(vars(part).items()):
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= most:
            _set(part, name, most - 1)
        if name == "eos_token_id" and isinstance(value, list):
            part.eos_token_id = most - 1


_MIXER_HEADS = (
    ("num_heads", "head_dim", "expand"), ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"), ("mamba_num_heads", "mamba_head_dim", "expand"),
)  # fmt: skip
"""Heads, their width, and how many times wider than the model all of them are together."""


def _make_consistent(part: Any) -> None:
    """Make widths that derive from others consistent with them."""
    for heads, width, factor in _MIXER_HEADS:
        sizes: list[Any] = [getattr(part, name, None) for name in (width, factor, "hidden_size")]
        if hasattr(part, heads) and all(_is_number(size) and size > 0 for size in sizes):
            _set(part, heads, int(sizes[1] * sizes[2] // sizes[0]))
    parts: list[Any] = [getattr(part, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if _is_number(getattr(part, "qk_head_dim", None)) and all(map(_is_number, parts)):
        _set(part, "qk_head_dim", sum(parts))


def _shrink_rope(parameters: dict[str, Any]) -> None:
    half = int(_HEAD * parameters.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = list(parameters[name])[:half]
    if "mrope_section" in parameters:
        parameters["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def randomise(model: Any) -> None:
    """Draw weights large enough for every layer to change the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.is_floating_point():
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
            elif parameter.numel() == 1 and not bool(parameter.any()):
                parameter.fill_(0.5)  # opens gates that are initialised to 0
        embeddings: Any = model.get_input_embeddings()
        parts: list[Any] = list(embeddings) if isinstance(embeddings, nn.ModuleList) else [embeddings]
        for part in parts:
            part.weight.normal_(0.0, 1.0)


_MOST_LAYERS = 8
_MOST_BYTES = 8 << 30
_VOCABULARY = 4096
_NUMBERS_OF_LAYERS = {"layer_idx", "layer_id", "layer_num", "layer_number"}


def is_deep(model: Any) -> bool:
    """Whether a model has so many layers that trials on its first ones save much."""
    text = model.config.get_text_config(decoder=True)
    return int(getattr(text, _counts_layers(text), 0)) > _MOST_LAYERS


def first_layers(model: Any) -> Any:
    """A float32 copy of a model's first layers and tokens, with its own weights.

    It has two layers at least, and one of every kind that the model has.

    Raises
    ------
    ValueError, TypeError
        When that would be many layers, or weights are quantised.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if config.to_dict().get("per_layer_config") or text.to_dict().get("per_layer_config"):
        raise ValueError("its layers have configs of their own")
    keep_layers(text, range(_first_of_every_kind(model)))
    for part in {id(part): part for part in (config, text, *parts_of(config))}.values():
        shrink_vocabulary(part, _VOCABULARY)
    with torch.random.fork_rng(devices=[]), torch.device(input_device(model)):
        first = type(model)._from_config(config, dtype=torch.float32, attn_implementation=attention_of(model))
    _take_weights(first, model)
    return first.eval()


def _first_of_every_kind(model: Any) -> int:
    """Return how many of the first layers include one of every kind."""
    kinds, sharing = layer_kinds(model), _first_sharing(model)
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    if count > _MOST_LAYERS or count > sharing:
        raise ValueError(f"its first {_MOST_LAYERS} layers are not of every kind")
    if 4 * sum(p.numel() for block in decoder_blocks(model)[:count] for p in block.parameters()) > _MOST_BYTES:
        raise ValueError("its first layers are large")
    return min(count, len(kinds))


def layer_kinds(model: Any) -> list[str]:
    """Return the kind of each layer of a decoder: its modules with their settings, and the config's entries for it.

    Raises
    ------
    UnsupportedModelError
        The decoder has no list of layers.
    """
    blocks, sharing = decoder_blocks(model), _first_sharing(model)
    said = layer_lists(model.config.get_text_config(decoder=True), len(blocks))
    return [
        repr((_modules(block, i), [value[i] for value in said.values()], i >= sharing))
        for i, block in enumerate(blocks)
    ]


def _first_sharing(model: Any) -> int:
    """Return the index of the first layer that reads the keys and values of another one; the number of layers where
    none does.
    """
    shared = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    return len(decoder_blocks(model)) - int(shared or 0)


def _modules(block: nn.Module, number: int) -> list[tuple[str, type, list[Any], list[Any]]]:
    return [
        (name, type(module), [(p.shape, p.dtype) for p in module.parameters(recurse=False)], _settings(module, number))
        for name, module in block.named_modules()
    ]


def _settings(module: nn.Module, number: int) -> list[tuple[str, Any]]:
    """Return a module's settings without its weights; the index of its layer as a distance from where it is."""
    return [
        (name, value - number if name in _NUMBERS_OF_LAYERS else value)
        for name, value in sorted(vars(module).items())
        if _is_setting(value)
    ]


def _is_setting(value: Any) -> bool:
    """Whether a value is a number, a name, a function, a sequence of these, or numbers by name, as the scales of
    adapters are.
    """
    if isinstance(value, dict):
        return all(isinstance(entry, (int, float)) for entry in value.values())
    return isinstance(value, (bool, int, float, str, tuple, list)) or callable(value)


def _take_weights(first: nn.Module, model: nn.Module) -> None:
    """Cast the weights of the kept layers and tokens."""
    given = {
        name.replace(".base_layer.", "."): tensor  # an adapter's wrapper
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    with torch.no_grad():
        for name, parameter in first.named_parameters(remove_duplicate=False):
            tensor = given[name]
            if type(tensor) not in (nn.Parameter, torch.Tensor) or not tensor.is_floating_point():
                raise TypeError(f"{name} is quantised")
            parameter.copy_(tensor[: len(parameter)])
        for name, buffer in first.named_buffers(remove_duplicate=False):
            if name in given and given[name].shape == buffer.shape:
                buffer.copy_(given[name])
