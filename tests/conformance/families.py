"""Tiny random instances of model families: just large enough for every attention pattern to show."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 199

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GPT2_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48, "n_ctx": 256}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True, eq=False)
class Family:
    """One family: its model type, what its config needs beyond the common sizes, and how it is expected to decode."""

    model_type: str
    mode: str = "tree"
    extra: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    attention: tuple[str, ...] = ("sdpa", "eager")
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.model_type


FAMILIES = [
    Family("llama"),
    Family(
        "llama",
        title="llama-dynamic-ntk",
        extra={
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            "max_position_embeddings": 48,
        },
    ),
    Family("qwen2"),
    Family(
        "qwen2", title="qwen2-sliding", extra={"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    ),
    Family("qwen3"),
    Family("qwen2_moe", extra={**_MOE, "shared_expert_intermediate_size": 24}),
    Family("qwen3_moe", extra=_MOE),
    Family("mistral", extra={"sliding_window": 8}),
    Family("mixtral", extra=_MOE),
    Family("gemma"),
    Family("gemma2", extra={"sliding_window": 8, "num_hidden_layers": 4}, attention=("eager",)),
    Family("gemma3_text", extra={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    Family("phi"),
    Family("phi3"),
    Family("phi3", title="phi3-sliding", extra={"sliding_window": 8}),
    Family(
        "phi3",
        title="phi3-longrope",
        extra={
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [3.0] * 4,
                "original_max_position_embeddings": 32,
            },
            "original_max_position_embeddings": 32,
        },
    ),
    Family("phimoe", extra=_MOE),
    Family("gpt2", extra=_GPT2_NAMES),
    Family(
        "gpt_neo",
        mode="chain",
        extra={"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        attention=("eager",),
    ),
    Family("gpt_neox"),
    Family("gptj", extra={**_GPT2_NAMES, "rotary_dim": 4}, attention=("eager",)),
    Family("opt", extra={"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    Family("falcon", without=("head_dim",), extra={"new_decoder_architecture": True, "num_kv_heads": 2}),
    Family("falcon", title="falcon-alibi", without=("head_dim",), extra={"alibi": True}),
    Family("bloom", extra={"n_layer": 2, "n_head": 4}, attention=("eager",)),
    Family(
        "mpt",
        extra={"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 256},
        attention=("eager",),
    ),
    Family("starcoder2", extra={"sliding_window": 8}),
    Family("gpt_bigcode", extra=_GPT2_NAMES),
    Family("codegen", extra={**_GPT2_NAMES, "rotary_dim": 4}, attention=("eager",)),
    Family("stablelm"),
    Family("olmo"),
    Family("olmo2"),
    Family("olmo3", extra={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    Family("olmoe", extra=_MOE),
    Family("cohere", extra={"logit_scale": 1.0}),
    Family(
        "cohere2",
        extra={"logit_scale": 1.0, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Family("granite"),
    Family("granitemoe", extra=_MOE),
    Family(
        "deepseek_v2",
        extra={
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
        },
    ),
    Family(
        "deepseek_v3",
        extra={
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": 4,
        },
    ),
    Family("glm"),
    Family("glm4"),
    Family("smollm3"),
    Family(
        "gpt_oss",
        extra={**_MOE, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        attention=("eager",),
    ),
    Family("persimmon"),
    Family("exaone4", extra={"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    Family(
        "llama4_text",
        extra={
            **_MOE,
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "moe_layers": [1, 3],
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        },
    ),
    Family("nemotron"),
    Family("helium"),
    Family("ernie4_5"),
    Family("seed_oss"),
    Family("arcee"),
    Family("biogpt", extra={"scale_embedding": False}),
    Family("xglm", extra={"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}, attention=("eager",)),
    Family(
        "dbrx",
        extra={
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    Family("lfm2", extra={"layer_types": ["conv", "full_attention"]}),
    Family("mamba", extra={"state_size": 4}, attention=("eager",)),
    Family(
        "mamba2",
        extra={"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
        attention=("eager",),
    ),
    Family(
        "falcon_h1",
        extra={"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    Family(
        "jamba",
        extra={
            **_MOE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
        },
    ),
    Family(
        "qwen3_next",
        extra={
            **_MOE,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    Family(
        "recurrent_gemma",
        mode="plain",
        extra={"attention_window_size": 16, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    ),
]


def build(family: Family, attention: str = "sdpa") -> Any:
    """A float32 instance with fixed weights, in evaluation mode."""
    settings = {key: value for key, value in _SMALL.items() if key not in family.without} | family.extra
    config = AutoConfig.for_model(family.model_type, **settings)
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0, use_cache=True)  # which MPT switches off
    return model
