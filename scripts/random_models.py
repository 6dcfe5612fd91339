"""Models of random weights by size or shape: what their passes cost is real, what they say is not."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512),
    "0.1b": (768, 2048, 12, 12, 4, 32_000),
    "0.4b": (1024, 2816, 24, 16, 4, 32_000),
    "1b": (2048, 8192, 16, 32, 8, 128_256),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
}
"""Llamas: hidden and intermediate size, layers, heads, heads of keys and values, vocabulary."""
_KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {  # three layers of gated delta nets to one of gated attention, as in Qwen3.5-0.8B
        "model_type": "qwen3_5_text", "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 8, "linear_num_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {  # Mamba-2 and feed-forward layers in turn, attention in place of two, as in Nemotron-H
        "model_type": "nemotron_h", "intermediate_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 4,
        "layers_block_type": [_KINDS[each] for each in "M-M-M*-M-M-M*-M-M-"], "head_dim": 64, "mamba_num_heads": 24,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
    },
    "mamba2": {  # the layers of mamba2-130m
        "model_type": "mamba2", "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128,
        "n_groups": 1, "tie_word_embeddings": True,
    },
    "granite4": {  # Mamba-2 with a shared feed-forward part, attention in place of one in ten: granite-4.0-h-350m
        "model_type": "granitemoehybrid", "num_hidden_layers": 10, "num_attention_heads": 12, "num_key_value_heads": 4,
        "layer_types": ["full_attention" if layer == 7 else "linear_attention" for layer in range(10)],
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 2048, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes of 100 to 130 million parameters, with layers like released models'."""


def build(size: str, context: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A model of a size or shape, made on the device, with room for `context` tokens and an answer."""
    if size in HYBRIDS:
        shape: dict[str, Any] = {"hidden_size": 768, "vocab_size": 32_000, **HYBRIDS[size]}
        shape |= {} if size == "mamba2" else {"max_position_embeddings": context + 2048}
    else:
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        shape = {"model_type": "llama", **dict(zip((*sizes, "vocab_size"), SHAPES[size], strict=True))}
        shape |= {"max_position_embeddings": context + 2048}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shape, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.pad_token_id = 0
    return model
