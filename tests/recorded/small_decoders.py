"""Random models of two layers, one family for each kind of attention and expert that recordings must know."""

from __future__ import annotations

from typing import Any

import torch
from batch_rows import small_model
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs

VOCAB = 199
_COMMON: dict[str, Any] = {"max_position_embeddings": 2048, "tie_word_embeddings": False}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": _SLIDING,
    "gpt_oss": {**_EXPERTS, **_SLIDING},
    "mixtral": _EXPERTS,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048, "n_inner": 48},
}


def build(model_type: str, dtype: torch.dtype = torch.float32, **extra: Any) -> Any:
    """The same random model at every call."""
    attention = "eager" if model_type in ("gemma2", "gpt_oss", "gptj") else "sdpa"
    settings = _COMMON | FAMILIES.get(model_type, {}) | extra
    return small_model(model_type, dtype, attn_implementation=attention, **settings)


def ids(length: int) -> torch.Tensor:
    """(1, length) prompt."""
    return torch.tensor([[3 + (i * 37 + 11) % (VOCAB - 3) for i in range(length)]])


OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}


def accelerate(
    model: Any, recorded_pass: str = "always", answer: Any = (5,) * 80, script: str = "branchy", **options: Any
) -> Any:
    """Let a model, or what `peft` puts around one, draft what is sometimes right."""
    drafter = ScriptedDrafter(answer, script, vocab=VOCAB)
    return rs.accelerate(model, drafter=drafter, recorded_pass=recorded_pass, **{"nodes": 6} | options)


def says(model: Any, prompt: torch.Tensor | None = None) -> torch.Tensor:
    """What an accelerated model says by itself."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    ours = base.__dict__.pop("generate")
    try:
        said: torch.Tensor = model.generate(input_ids=ids(20) if prompt is None else prompt, **OPTIONS)
        return said
    finally:
        base.__dict__["generate"] = ours


def check(model: Any, kind: str = "recorded") -> torch.Tensor:
    """What an accelerated model says, which is what it says by itself, through a pass of a kind."""
    ours: torch.Tensor = model.generate(input_ids=ids(20), **OPTIONS)
    report = model.speculation.last
    assert torch.equal(ours, says(model))
    assert report.pass_kind == kind, report.pass_reason
    assert bool(report.pass_reason) == (kind != "recorded")
    return ours
