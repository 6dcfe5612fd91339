"""Recordable models: what keeps a recording from standing for a forward, as modes and hooks show it."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as torch_wide


def why_not_recordable(model: Any) -> str:
    """Why a recording would not stand for the model's forward; empty when it would."""
    if model.training:
        return "the model is in training mode"
    if not model._supports_attention_backend:
        return "its layers do not use transformers' attention interface"
    if torch_wide._global_forward_hooks or torch_wide._global_forward_pre_hooks:
        return "torch has forward hooks for all modules"
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own hooks stay behind after output_hidden_states=True and do nothing unless it is asked for
            if not getattr(hook, "__module__", "").startswith("transformers."):
                return f"{type(module).__name__} has forward hooks"
    return ""


def why_single_steps(model: Any) -> str:
    """Why a model has to be run token by token, as `generate` does: hooks of `peft` that belong to one call."""
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if getattr(getattr(hook, "func", hook), "__module__", "").startswith("peft."):  # they count rows of passes
                return "adapters are chosen for this call alone"
    return ""
