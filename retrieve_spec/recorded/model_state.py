"""A model in, a note of what it is made of out, which tells later whether a recording still stands for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SMALL = 4096
"""Entries of a buffer that is compared by value."""
_PROBED = (torch.float32, torch.bfloat16, torch.float16)
_PROBES = 8
"""Entries of a weight that are compared by value."""


class ModelState:
    """What a model's forward depends on: modules, forwards set on them, weights, buffers, hooks, training mode.

    Weights are known by address and by how often they were changed in place. That misses edits through `.data`, as
    adapters are merged; on the CPU, where a recording reads copies of weights, a few entries of each are compared too.
    """

    def __init__(self, model: Any) -> None:
        modules = _all_modules(model)
        self._parts = modules[1:]  # not the model, which would never be freed then
        self._probes = _probe_weights(model)
        self._stamps, self._contents = _read_stamps(modules), self._read_contents(modules)

    def holds(self, model: Any) -> bool:
        """Whether the model still is what it was, and can be recorded."""
        modules = _all_modules(model)
        if _why_not_modules(model, modules) or len(modules) != len(self._parts) + 1:
            return False
        if any(a is not b for a, b in zip(modules[1:], self._parts, strict=True)):
            return False
        if self._stamps != _read_stamps(modules):
            return False
        contents = self._read_contents(modules)
        return len(contents) == len(self._contents) and all(map(torch.equal, contents, self._contents))

    def _read_contents(self, modules: list[nn.Module]) -> list[torch.Tensor]:
        """What no stamp tells: edits through `.data`, and buffers, which models replace by equal ones."""
        contents = [torch.cat(self._probes)] if self._probes else []
        for module in modules:
            contents += [b.clone() for b in module._buffers.values() if b is not None and b.numel() <= _SMALL]
        return contents


def why_not_recordable(model: Any) -> str:
    """Why a recording would not stand for the model's forward; empty when it would."""
    return _why_not_modules(model, _all_modules(model))


def _why_not_modules(model: Any, modules: list[nn.Module]) -> str:
    """`why_not_recordable` for modules that are listed already."""
    if model.training:
        return "the model is in training mode"
    if not model._supports_attention_backend:
        return "its layers do not use transformers' attention interface"
    for module in modules:
        if not module._forward_hooks and not module._forward_pre_hooks:
            continue
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own hooks stay behind after output_hidden_states=True and do nothing unless it is asked for
            if not getattr(hook, "__module__", "").startswith("transformers."):
                return f"{type(module).__name__} has forward hooks"
    return ""


def _all_modules(model: Any) -> list[nn.Module]:
    """A model and all modules in it, shared ones as often as they are used; `modules()` takes three times as long."""
    found: list[nn.Module] = [model]
    for module in found:
        found.extend(child for child in module._modules.values() if child is not None)
    return found


def _read_stamps(modules: list[nn.Module]) -> list[tuple[int, ...]]:
    """Weights and how often they were changed in place; forwards set on a module."""
    stamps: list[tuple[int, ...]] = []
    for module in modules:
        for p in module._parameters.values():
            if p is not None:
                stamps.append((id(p), p.data_ptr(), 0 if p.is_inference() else p._version))
        if (own := module.__dict__.get("forward")) is not None:
            stamps.append((id(own),))
    return stamps


def _probe_weights(model: Any) -> list[torch.Tensor]:
    """Views of a few entries of every weight on the CPU."""
    weights = [p.detach().view(-1) for p in model.parameters() if p.is_contiguous() and p.dtype in _PROBED]
    return [w[:: max(len(w) // _PROBES, 1)] for w in weights if w.device.type == "cpu" and len(w)]
