"""Hybrid models of random weights with 100 to 130 million parameters, with layers like released ones'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

_VOCABULARY = 32_000
_NO_END = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "vocab_size": _VOCABULARY}


def _qwen3_5(context: int) -> Any:
    """Three layers of gated delta nets to one of gated attention, as in Qwen3.5-0.8B."""
    config = transformers.Qwen3_5TextConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=8, linear_num_value_heads=8, max_position_embeddings=context,
        tie_word_embeddings=True, **_NO_END,
    )  # fmt: skip
    return transformers.Qwen3_5ForCausalLM(config)


def _nemotron_h(context: int) -> Any:
    """Mamba-2 and feed-forward layers in turn, attention in place of two, as in Nemotron-H."""
    kinds = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
    config = transformers.NemotronHConfig(
        hidden_size=768, intermediate_size=3072, layers_block_type=[kinds[each] for each in "M-M-M*-M-M-M*-M-M-"],
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, mamba_num_heads=24, mamba_head_dim=64,
        ssm_state_size=128, n_groups=8, max_position_embeddings=context, **_NO_END,
    )  # fmt: skip
    return transformers.NemotronHForCausalLM(config)


def _mamba2(_context: int) -> Any:
    """The layers of mamba2-130m."""
    config = transformers.Mamba2Config(
        hidden_size=768, num_hidden_layers=24, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        tie_word_embeddings=True, **_NO_END,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


def _granite4(context: int) -> Any:
    """Mamba-2 with a shared feed-forward part, attention in place of one in ten, as in granite-4.0-h-350m."""
    config = transformers.GraniteMoeHybridConfig(
        hidden_size=768, num_hidden_layers=10, layer_types=["linear_attention"] * 7 + ["full_attention"]
        + ["linear_attention"] * 2, num_attention_heads=12, num_key_value_heads=4, num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=2048, mamba_n_heads=48, mamba_d_head=32, mamba_d_state=128,
        mamba_n_groups=1, max_position_embeddings=context, tie_word_embeddings=True, **_NO_END,
    )  # fmt: skip
    return transformers.GraniteMoeHybridForCausalLM(config)


HYBRIDS: dict[str, Callable[[int], Any]] = {
    "qwen3_5": _qwen3_5, "nemotron_h": _nemotron_h, "mamba2": _mamba2, "granite4": _granite4,
}  # fmt: skip


def build_hybrid(name: str, context: int) -> Any:
    """A float32 model on the CPU that has room for `context` tokens and an answer."""
    torch.manual_seed(0)
    model = HYBRIDS[name](context + 2048).eval()
    model.generation_config.pad_token_id = 0
    return model
