"""Small random instances of every architecture in transformers' mappings, and prompts for them, pictures included."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from retrieve_spec.verify.shrink import randomise, small_config

MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": _AXES},
    "qwen2_5_vl": {"text_config": _AXES},
    "granitemoehybrid": {"layer_types": HYBRID, "num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4, "hidden_size": 32, "mamba_expand": 2},
    "big_bird": {"attention_type": "original_full", "is_decoder": True},
    **{name: {"is_decoder": True} for name in ("bert", "bert-generation", "camembert", "data2vec-text", "electra",
       "ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
       "xlm-roberta-xl", "xmod")},
}  # fmt: skip
"""What a default config needs so that every kind of its layers is there, and that it decodes at all."""
_PICTURE_SIZES = {"image_size": 56, "patch_size": 14, "spatial_patch_size": 14}


def names(mapping: str) -> list[str]:
    """Model types of a mapping."""
    return sorted(dict.fromkeys(config.model_type for config in MAPPINGS[mapping]))


def build(name: str, mapping: str, attention: str | None = None) -> Any:
    """A small random float32 instance of a model type."""
    config = small_config(AutoConfig.for_model(name, **EXTRA.get(name, {})))
    kind = MAPPINGS[mapping][type(config)]
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    torch.manual_seed(0)
    options = {"attn_implementation": attention} if attention else {}
    model = kind._from_config(config, dtype=torch.float32, **options).eval()
    randomise(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.use_cache = True
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 2
        model.generation_config.bos_token_id = 2
        model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def prompt(model: Any, length: int, step: int = 37) -> torch.Tensor:
    """(1, length) long, tokens that are special nowhere."""
    vocab = min(int(model.config.get_text_config(decoder=True).vocab_size), 256) - 16
    return torch.tensor([[8 + (i * step + 11) % (vocab - 8) for i in range(length)]])


def picture_prompt(model: Any, length: int = 30) -> dict[str, Any] | None:
    """Arguments of a call with a picture between words that the model's own `generate` takes and heeds; None without.

    Nothing here knows a family: every way in which models are given pictures is tried.
    """
    words = prompt(model, length)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for picture in _pictures(model):
        for given in _placed(model, words, picture):
            try:
                one = model.generate(**given, **options).logits[0]
                pixels = {**given, "pixel_values": given["pixel_values"].flip(-1) * 0.5}
                other = model.generate(**pixels, **options).logits[0]
            except Exception:
                continue
            if not torch.equal(one, other):
                return given
    return None


def _vision(model: Any) -> Any:
    names = ("vision_config", "vision_encoder_config", "vq_config")
    return next((getattr(model.config, n) for n in names if getattr(model.config, n, None) is not None), model.config)


def _number(config: Any, name: str, otherwise: int) -> int:
    value = getattr(config, name, None)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return int(value) if isinstance(value, (int, float)) else otherwise


def _pictures(model: Any) -> Iterator[dict[str, Any]]:
    """Ways to hand over one picture."""
    vision, takes = _vision(model), set(inspect.signature(model.forward).parameters)
    takes |= set(inspect.signature(getattr(model, "get_image_features", model.forward)).parameters)
    size, patch = _number(vision, "image_size", 56), _number(vision, "patch_size", 14)
    time, merge = _number(vision, "temporal_patch_size", 1), _number(vision, "spatial_merge_size", 2)
    channels = _number(vision, "num_channels", _number(vision, "in_channels", 3))
    noise = torch.Generator().manual_seed(7)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=noise)

    grid = 2 * merge
    for name in ("image_grid_thw", "grid_thw", "image_grid_hws"):
        if name in takes:
            whole = torch.tensor([[1, grid, grid]] if "thw" in name else [[grid, grid]])
            for rows in (time, 1):
                yield {"pixel_values": pixels(grid * grid, channels * rows * patch * patch), name: whole}
            yield {"pixel_values": pixels(grid * grid, channels, patch, patch), name: whole}
            yield {"pixel_values": pixels(1, grid * grid, channels, patch, patch), name: whole}
    if "image_position_ids" in takes:
        places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).reshape(1, 36, 2)
        for factor in (1, 3):
            rows = (patch * factor) ** 2 * channels
            yield {"pixel_values": pixels(1, 36, rows), "image_position_ids": places}
    if "spatial_shapes" in takes:
        yield {"pixel_values": pixels(1, 16, channels * patch * patch), "spatial_shapes": torch.tensor([[4, 4]]),
               "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}  # fmt: skip
    if "aspect_ratio_ids" in takes:
        tiles = _number(vision, "max_num_tiles", 4)
        seen = torch.zeros(1, 1, tiles, dtype=torch.long)
        seen[..., 0] = 1
        yield {"pixel_values": pixels(1, 1, tiles, channels, size, size), "aspect_ratio_ids": torch.ones(1, 1).long(),
               "aspect_ratio_mask": seen}  # fmt: skip
    sizes = {"image_sizes": torch.tensor([[size, size]])} if "image_sizes" in takes else {}
    for shape in ((1,), (1, 1), (1, 2), (1, 3), (1, 5)):
        yield {"pixel_values": pixels(*shape, channels, size, size), **sizes}
    mask = {"pixel_attention_mask": torch.ones(1, 1, size, size).long()} if "pixel_attention_mask" in takes else {}
    if mask:
        yield {"pixel_values": pixels(1, 1, channels, size, size), **mask}
    if "target_sizes" in takes:
        yield {"pixel_values": pixels(1, channels, patch, 16 * patch), "target_sizes": torch.tensor([[4, 4]])}


def _placed(model: Any, words: torch.Tensor, picture: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A picture and the words around it, with as many places for it as it takes."""
    takes = set(inspect.signature(model.forward).parameters)
    mark = next((getattr(model.config, name) for name in ("image_token_id", "image_token_index", "media_token_id",
                 "media_placeholder_token_id") if isinstance(getattr(model.config, name, None), int)), None)  # fmt: skip
    places = _rows_of(model, picture) if mark is not None else 0
    for count in dict.fromkeys((places, 1, 0) if places else (1, 0)):
        ids = torch.cat([words[:, :6], torch.full((1, count), mark or 0), words[:, 6:]], dim=1) if count else words
        kinds = (ids == mark).long() if count else torch.zeros_like(ids)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **picture}
        for name in ("mm_token_type_ids", "token_type_ids", "image_embeds_position_mask"):
            if name in takes:
                given[name] = kinds
        if "cross_attention_mask" in takes:
            tiles = picture["pixel_values"].shape[2] if picture["pixel_values"].ndim == 6 else 1
            given["cross_attention_mask"] = torch.ones(1, ids.shape[1], 1, tiles, dtype=torch.long)
        if "image_attention_mask" in takes:
            given["image_attention_mask"] = torch.ones(1, ids.shape[1], 1, dtype=torch.long)
        yield given


def _rows_of(model: Any, picture: dict[str, Any]) -> int:
    """Places that a picture takes among the tokens."""
    read = getattr(model, "get_image_features", None)
    if read is None:
        return 0
    takes = inspect.signature(read).parameters
    given = {name: value for name, value in picture.items() if name in takes}
    try:
        with torch.no_grad():
            found = read(**given)
        found = getattr(found, "pooler_output", found)
        parts = found if isinstance(found, (list, tuple)) else [found]
        return sum(int(part.numel() // part.shape[-1]) for part in parts)
    except Exception:
        return 0
