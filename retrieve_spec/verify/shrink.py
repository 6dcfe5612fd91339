"""A model in, a small random copy of its architecture out, whose windows are short enough to read beyond them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from retrieve_spec.errors import in_a_line
from retrieve_spec.verify.interface import attention_of, input_device

WINDOW, CHUNK = 8, 16
_HEAD = 8
_LENGTHS = {
    "sliding_window": WINDOW, "attention_chunk_size": CHUNK, "window_size": WINDOW, "attention_window_size": WINDOW,
    "local_attention_window": WINDOW, "index_topk": WINDOW,
}  # fmt: skip
"""What a config calls the lengths at which layers begin to see less or otherwise, and what they are in a small copy."""
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
    "mamba_dt_rank": 4, "time_step_rank": 4, "attention_hidden_size": 32, "attention_head_dim": 8, "adapter_rank": 4,
    "moe_shared_expert_intermediate_size": 24, "num_mem_blocks": 1, "block_ff_dim": 48, "linear_head_dim": 8,
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


def shrunk(model: Any) -> tuple[Any, str]:
    """A random float32 copy of a model with small layers and short windows, or None and why there is none."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = small_config(model.config)
            small = type(model)._from_config(config, dtype=torch.float32, attn_implementation=attention_of(model))
            randomise(small)
        return small.to(input_device(model)).eval(), ""
    except Exception as error:  # whatever a config does not take
        return None, in_a_line(error)


def small_config(config: Any) -> Any:
    """A config of the same shape with small numbers in it, those of its parts too."""
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    _shrink_layers(text)
    for part in {id(part): part for part in (small, text, *_parts(small))}.values():
        _shrink_widths(part)
    for name, length in _LENGTHS.items():
        if isinstance(getattr(text, name, None), int) and getattr(text, name) > 0:
            setattr(text, name, length)
    return small


def _parts(config: Any) -> list[Any]:
    names = getattr(config, "sub_configs", {})
    return [part for name in names if (part := getattr(config, name, None)) is not None]


def _shrink_layers(text: Any) -> None:
    """Keep two layers of every kind, in order, and what is said of them layer by layer."""
    name = next((name for name in _LAYERS if isinstance(getattr(text, name, None), int)), "")
    if not name:
        return
    count = getattr(text, name)
    types = getattr(text, "layer_types", None)
    kept: list[int] = []
    for i in range(count):
        kind = types[i] if types is not None else ""
        if sum((types[j] if types is not None else "") == kind for j in kept) < 2:
            kept.append(i)
    lists = {
        key: [value[i] for i in kept]
        for key, value in vars(text).items()
        if isinstance(value, list) and len(value) == count > len(kept)
    }
    setattr(text, name, len(kept))
    for key, value in lists.items():
        setattr(text, key, value)


def _shrink_widths(part: Any) -> None:
    """Small widths, heads, experts and vocabulary, wherever a config has them."""
    heads = next((getattr(part, name) for name in _HEADS if isinstance(getattr(part, name, None), int)), 0)
    for name in _HEADS:
        if isinstance(getattr(part, name, None), int):
            setattr(part, name, 4)
    for name in _KEY_HEADS:
        if isinstance(getattr(part, name, None), int) and heads:
            setattr(part, name, max(1, 4 * getattr(part, name) // heads))
    for name, size in _SIZES.items():
        if isinstance(value := getattr(part, name, None), (int, float)) and not isinstance(value, bool) and value > 0:
            setattr(part, name, type(value)(min(value, size)))
    if isinstance(vocab := getattr(part, "vocab_size", None), int):
        part.vocab_size = min(vocab, _VOCAB)
    for name, value in list(vars(part).items()):
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= _VOCAB:
            setattr(part, name, _VOCAB - 1)
        if name == "eos_token_id" and isinstance(value, list):
            part.eos_token_id = _VOCAB - 1
    if isinstance(positions := getattr(part, "max_position_embeddings", None), int):
        part.max_position_embeddings = min(positions, 4096)
    rope = getattr(part, "rope_parameters", None)
    for entry in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if isinstance(entry, dict):
            _shrink_rope(entry)


def _shrink_rope(parameters: dict[str, Any]) -> None:
    half = int(_HEAD * parameters.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if name in parameters:
            parameters[name] = list(parameters[name])[:half]
    if "mrope_section" in parameters:
        parameters["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def randomise(model: nn.Module) -> None:
    """Weights large enough for every layer to be heard."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.is_floating_point():
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
        embeddings.weight.normal_(0.0, 1.0)
