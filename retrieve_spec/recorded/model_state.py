"""Model state: what a recording stands for, noted so that a later change is noticed.

Noted are the modules with their classes, training modes, hooks and patched forwards, the attention implementation of
their configs, what `peft` keeps of adapters, and of every tensor which it is, its type, shape and device. The numbers
inside parameters and buffers are not, as a recording reads the live tensors; those of other tensors are by their
version counters. Whatever else is changed, `invalidate()` is told of.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_wide

_ENTRIES = ("_modules", "_forward_hooks", "_forward_pre_hooks")
_OF_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes in which a layer of `peft` has what it does with its weights."""


class ModelState:
    """What a model's forward depends on, as far as it is noted.

    Parameters
    ----------
    model
        The model as it is now.
    unfollowed
        Names of tensors that its forward replaces: what it keeps of a text.
    """

    def __init__(self, model: nn.Module, unfollowed: Collection[str] = ()) -> None:
        self._model, self._unfollowed = model, frozenset(unfollowed)
        self._parts = self._look()
        self._tensors = self._find()
        weights = set(map(id, (*model.parameters(), *model.buffers())))
        self._others = [tensor for tensor in self._tensors.values() if id(tensor) not in weights]
        self._versions = list(map(version_of, self._others))
        self._kinds, self._places = self._each(kind), self._each(place)

    def _look(self) -> list[Any]:
        """The modules, and what they are beside their tensors."""
        modules = list(self._model.modules())
        found: list[Any] = [modules]
        found += [dict(torch_wide._global_forward_hooks), dict(torch_wide._global_forward_pre_hooks)]
        for module in modules:
            own = vars(module)
            found += [type(module), module.training, own.get("forward")]
            found += [getattr(own.get("config"), "_attn_implementation", None)]
            found += [dict(own[name]) for name in _ENTRIES]
            found += [copy.copy(own.get(name)) for name in _OF_ADAPTERS]
        return found

    def _find(self) -> dict[tuple[int, str], torch.Tensor]:
        """Tensors of modules, by the number of the module and their names."""
        return {
            (number, name): value
            for number, module in enumerate(self._model.modules())
            for entries in (vars(module), vars(module)["_parameters"], vars(module)["_buffers"])
            for name, value in entries.items()
            if isinstance(value, torch.Tensor) and name not in self._unfollowed
        }

    def _each(self, tell: Any) -> list[Any]:
        """What there is to tell of the tensors, each once."""
        return [tell(tensor) for tensor in {id(tensor): tensor for tensor in self._tensors.values()}.values()]

    def holds(self) -> bool:
        """Whether the model's forward still reads what it read, wherever its tensors lie now."""
        return (
            self._look() == self._parts
            and not self.replaced()
            and self._each(kind) == self._kinds
            and list(map(version_of, self._others)) == self._versions
        )

    def replaced(self) -> set[str]:
        """Names of tensors that are others than they were, that went, or that were not there."""
        now, then = self._find(), self._tensors
        return {key[1] for key in now.keys() | then.keys() if now.get(key) is not then.get(key)}

    def has_moved(self) -> bool:
        """Whether a tensor has another storage than before; then what kept its address must not use it."""
        before, self._places = self._places, self._each(place)
        return before != self._places

    def keeps(self, other: ModelState) -> bool:
        """Whether every tensor that another state knows is known here: it could be that state again."""
        known = {id(tensor) for tensor in self._tensors.values()}
        return all(id(tensor) in known for tensor in other._tensors.values())


def kind(tensor: torch.Tensor) -> Any:
    """Type, device, shape and strides of a tensor, as far as it has them."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return tensor.dtype, tensor.device, tensor.shape
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Which storage a tensor lies in, and its address; zeros for a tensor that is made of others."""
    try:
        return tensor.untyped_storage()._cdata, tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0, 0


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version
