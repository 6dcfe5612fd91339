"""Model state: what a recording stands for, noted so that a later change is noticed.

Noted are the modules with their classes, training modes, hooks and patched forwards, the attention implementation of
their configs, what `peft` keeps of adapters, and of every tensor which it is, its type, shape and device. The numbers
inside parameters and buffers are not, as a recording reads the live tensors; those of other tensors are by their
version counters. Whatever else is changed, `invalidate()` is told of.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_wide

_FOLLOWED = (
    "_modules", "_forward_hooks", "_forward_pre_hooks",
    "_active_adapter", "_disable_adapters", "merged_adapters", "scaling",
)  # fmt: skip
"""Attributes of modules in which torch has what they run, and layers of `peft` what they do with their weights."""


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
        parts, self._names, self._found = self._look()
        self._parts = [copy.copy(part) if isinstance(part, (dict, list)) else part for part in parts]
        self._tensors = list({id(tensor): tensor for tensor in self._found if tensor is not None}.values())
        weights = set(map(id, (*model.parameters(), *model.buffers())))
        self._others = [tensor for tensor in self._tensors if id(tensor) not in weights]
        self._versions = list(map(version_of, self._others))
        self._kinds, self._places = list(map(kind, self._tensors)), list(map(place, self._tensors))
        self._modules = list(model.modules())
        self._classes = list(map(type, self._modules))
        self._lives = list(self._containers())
        self._copies = list(map(copy.copy, self._lives))

    def _containers(self) -> Iterator[Any]:
        """The dictionaries and lists that a look reads."""
        yield from (torch_wide._global_forward_hooks, torch_wide._global_forward_pre_hooks)
        for module in self._modules:
            own = vars(module)
            yield own
            kept = (own.get(name) for name in (*_FOLLOWED, "_parameters", "_buffers"))
            yield from (container for container in kept if isinstance(container, (dict, list)))
            yield getattr(own.get("config"), "__dict__", {})

    def _look(self) -> tuple[list[Any], list[tuple[int, str]], list[torch.Tensor | None]]:
        """What modules are beside their tensors; the numbers of modules that have a tensor, with its name; these."""
        modules = list(self._model.modules())
        parts: list[Any] = [modules, torch_wide._global_forward_hooks, torch_wide._global_forward_pre_hooks]
        names, tensors = list[tuple[int, str]](), list[torch.Tensor | None]()
        for number, module in enumerate(modules):
            own = vars(module)
            attention = getattr(own.get("config"), "_attn_implementation", None)
            parts += (type(module), own["training"], own.get("forward"), attention)
            parts += [own[name] for name in _FOLLOWED if name in own]
            attributes = [entry for entry in own.items() if isinstance(entry[1], torch.Tensor)]
            for name, tensor in (*own["_parameters"].items(), *own["_buffers"].items(), *attributes):
                if name not in self._unfollowed:
                    names.append((number, name))
                    tensors.append(tensor)
        return parts, names, tensors

    def holds(self) -> bool:
        """Whether the model's forward still reads what it read, wherever its tensors lie now."""
        return (
            (self._is_untouched() or self._is_alike())
            and list(map(kind, self._tensors)) == self._kinds
            and list(map(version_of, self._others)) == self._versions
        )

    def _is_untouched(self) -> bool:
        """Whether nothing has changed where a look would read, which takes a seventh of the time of a look."""
        try:
            return self._lives == self._copies and list(map(type, self._modules)) == self._classes
        except Exception:  # what compares two tensors or arrays has no truth value
            return False

    def _is_alike(self) -> bool:
        parts, names, found = self._look()
        alike = parts == self._parts and names == self._names and all(map(operator.is_, found, self._found))
        if alike:  # what changed is not followed, and need not be looked into again
            self._copies = list(map(copy.copy, self._lives))
        return alike

    def replaced(self) -> set[str]:
        """Names of tensors that are others than they were, that went, or that were not there."""
        _, names, found = self._look()
        now, then = dict(zip(names, found, strict=True)), dict(zip(self._names, self._found, strict=True))
        return {key[1] for key in now.keys() | then.keys() if now.get(key) is not then.get(key)}

    def has_moved(self) -> bool:
        """Whether a tensor has another storage than before; then what kept its address must not use it."""
        before, self._places = self._places, list(map(place, self._tensors))
        return before != self._places

    def keeps(self, other: ModelState) -> bool:
        """Whether every tensor that another state knows is known here: it could be that state again."""
        known = {id(tensor) for tensor in self._tensors}
        return all(id(tensor) in known for tensor in other._tensors)


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
