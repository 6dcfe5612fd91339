"""Small random instances of every architecture in transformers' mappings, and prompts for them, pictures included."""

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
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12],
                             "partial_rotary_factor": 0.5}}  # fmt: skip
_WORDS = {"<image>": 250, **{f"IMGIMG{letter}Z": 200 + i for i, letter in enumerate("ABCDEFGHIJ")}}
_OMNI = {"vision_start_token_id": 251, "image_token_id": 250, "video_token_id": 252, "audio_token_id": 253}
EXTRA: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": _AXES},
    "qwen2_5_vl": {"text_config": _AXES},
    **{name: {"text_config": _HALF} for name in ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga")},
    "hunyuan_vl": {"text_config": {"head_dim": 128, **_AXES}},
    "paddleocr_vl": {"text_config": _AXES},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                            "mrope_section": [22, 22, 20]}}},
    "chameleon": {"vocabulary_map": _WORDS, "vq_config": {"num_embeddings": 10}},
    "emu3": {"vocabulary_map": _WORDS},
    "granite4_vision": {"deepstack_layer_map": [[-2, 0], [-1, 1]], "downsample_rate": "1/2"},
    "aria": {"projector_patch_to_query_dict": {16: 4}, "image_token_index": 250},
    "cosmos3_edge": {"image_token_id": 250},
    **{name: {"image_token_id": 250} for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni")},
    **{name: {"vision_config": {"patch_size": 14}} for name in ("gemma4", "gemma4_unified")},
    "qwen2_5_omni_thinker": {"text_config": _AXES, **_OMNI},
    "qwen3_omni_moe_thinker": _OMNI,
    "idefics": {"alpha_initializer": "ones"},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "default",
                                                                              "rope_theta": 1e4}}}},
    "granitemoehybrid": {"layer_types": HYBRID, "num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4, "hidden_size": 32, "mamba_expand": 2,
               "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "hrm_text": {"num_hidden_layers": 16, "num_layers_per_stack": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8,
                       "indexer_compress_ratio": 4},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + ["sparse"] * 31,
                                      "num_experts_per_tok": 2}},
    "qwen4_exp": {"text_config": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256,
                                  "indexer_budget": 8, "indexer_compress_ratio": 4}},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    **{name: {"head_dim": 128} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "nemotron": {"num_key_value_heads": 48},
    "rwkv": {"attention_hidden_size": 32},
    "big_bird": {"attention_type": "original_full", "is_decoder": True},
    **{name: {"is_decoder": True} for name in ("bert", "bert-generation", "camembert", "data2vec-text", "electra",
       "ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
       "xlm-roberta-xl")},
}  # fmt: skip
"""What a default config needs so that every kind of its layers is there, and that it decodes at all."""


EXACT: dict[str, dict[str, Any]] = {
    "llama4": {"vision_config": {"intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32,
                                 "vision_output_dim": 32}},
    "mllama": {"vision_config": {"vision_output_dim": 192}, "text_config": {"cross_attention_layers": [1]}},
    **{name: {"out_hidden_size": 128, "projector_hidden_size": 32} for name in ("muse_glimmer", "muse_spark")},
    "hunyuan_vl": {"vision_config": {"text_hidden_size": 32}},
    "nemotron_h_omni": {"vision_hidden_size": 32},
    "minimax_m3_vl": {"projector_hidden_size": 32, "merged_hidden_size": 128},
    "kimi_k25": {"projection_hidden_size": 32},
    "mistral4": {"head_dim": 16},
    "unlimited_ocr": {"vision_config": {"sam_config": {"downsample_channels": [24, 32]}}},
    **{name: {"index_topk": 64} for name in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "dots3_note_text")},
    **{name: {"text_config": {"index_topk": 64}} for name in ("dots3_note", "glm5_next")},
    "mistral_large4": {"text_config": {"index_topk": 64, "kv_source_layers": [0, 1]}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "paligemma": {"projection_dim": 32, "vision_config": {"projection_dim": 32}},
}  # fmt: skip
"""Sizes that must fit others once these are small."""
_MARKS = ("image_token_id", "image_token_index", "media_token_id", "media_placeholder_token_id", "img_context_token_id")


def names(mapping: str) -> list[str]:
    """Model types of a mapping."""
    return sorted(dict.fromkeys(config.model_type for config in MAPPINGS[mapping]))


def build(name: str, mapping: str, attention: str | None = None) -> Any:
    """A small random float32 instance of a model type."""
    whole = AutoConfig.for_model(name, **EXTRA.get(name, {}))
    config = small_config(_with_small_pictures(whole))
    _set_exactly(config, EXACT.get(name, {}))
    kind = MAPPINGS[mapping][type(config)]
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    if kind.config_class is not type(config) and isinstance(config.get_text_config(decoder=True), kind.config_class):
        config = config.get_text_config(decoder=True)
    torch.manual_seed(0)
    options = {"attn_implementation": attention} if attention else {}
    model = kind._from_config(config, dtype=torch.float32, **options).eval()
    randomise(model)
    model.generation_config.update(eos_token_id=None, pad_token_id=0, use_cache=True, num_beams=1)
    if model.config.is_encoder_decoder:
        ends = {"forced_bos_token_id": None, "forced_eos_token_id": None}
        model.generation_config.update(decoder_start_token_id=2, bos_token_id=2, **ends)
    return model


def _set_exactly(config: Any, sizes: dict[str, Any]) -> None:
    """Set sizes of a config and of its parts."""
    for name, value in sizes.items():
        part = getattr(config, name)
        if isinstance(part, dict):
            part.update(value)
        elif isinstance(value, dict):
            _set_exactly(part, value)
        else:
            setattr(config, name, value)


def _with_small_pictures(config: Any) -> Any:
    """Let pictures be a few patches wide."""
    for name in ("vision_config", "vision_encoder_config", "high_res_vision_config"):
        vision = getattr(config, name, None)
        patch = getattr(vision, "patch_size", None)
        if isinstance(patch, int) and isinstance(getattr(vision, "image_size", None), int):
            vision.image_size = 4 * patch
            if hasattr(config, "mm_tokens_per_image"):
                config.mm_tokens_per_image = 4
            if hasattr(config, "image_grid_pinpoints"):
                config.image_grid_pinpoints = [[4 * patch, 4 * patch]]
    return config


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
    for name in ("image_grid_thw", "grid_thw", "image_grid_hws", "image_grid_hw"):
        if name in takes:
            whole = torch.tensor([[1, grid, grid]] if "thw" in name else [[grid, grid]])
            merged = {"image_merge_sizes": torch.tensor([merge])} if "image_merge_sizes" in takes else {}
            for rows in dict.fromkeys((time, 1, 2)):
                yield {"pixel_values": pixels(grid * grid, channels * rows * patch * patch), name: whole, **merged}
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
    if "image_patches" in takes:
        yield {"pixel_values": pixels(1, 4, channels * patch * patch)}
    if "high_res_pixel_values" in takes:
        high = _number(model.config.high_res_vision_config, "image_size", 2 * size)
        yield {"pixel_values": pixels(1, channels, size, size),
               "high_res_pixel_values": pixels(1, channels, high, high)}  # fmt: skip
    if "tile_fine_mask" in takes:
        yield {"pixel_values": pixels(1, 1, channels, size, size), "pixel_attention_mask": torch.ones(1, 1).bool()}
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
    marks = [getattr(model.config, name, None) for name in _MARKS]
    mark = next((number for number in marks if isinstance(number, int)), None)
    places = _rows_of(model, picture) if mark is not None else 0
    for count in dict.fromkeys((places, 16, 10, 4, 1, 0) if places else (16, 10, 4, 1, 0)):
        ids = torch.cat([words[:, :6], torch.full((1, count), mark or 0), words[:, 6:]], dim=1) if count else words
        kinds = (ids == mark).long() if mark is not None else torch.zeros_like(ids)
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
