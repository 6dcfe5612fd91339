"""Model state: what torch shows of a model that a recording stands for, noted so that a later change is noticed.

Noted are the modules, their classes, training modes, hooks and attributes, with what stands in a container that is an
attribute (as adapters keep theirs), the attributes of configs (the attention implementation), and of every tensor which
it is, its type, shape and device. The numbers inside parameters and buffers are not, as a recording reads the live
tensors; those of other tensors are by their version counters.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_wide

_UNREAD = frozenset(
    {"speculation", "generate", "_generate_before_speculation", "generation_config", "prepare_inputs_for_generation"}
)
"""Attributes of a model that its forward does not read: `generate` and what belongs to it."""
_ENTRIES = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
"""What torch keeps of a module in containers that a forward reads …"""
_OF_TORCH = frozenset(vars(nn.Module()))
"""… among others."""
_SMALL = 4096
"""Entries of a tensor that may be replaced by an equal one."""
_OURS = ("retrieve_spec.verify.", "retrieve_spec.recorded.row_layers")


class ModelState:
    """What a model's forward depends on, as far as torch shows it.

    Parameters
    ----------
    model
        The model as it is now.
    unfollowed
        Names of attributes that may change: its forward sets them.
    """

    def __init__(self, model: nn.Module, unfollowed: Collection[str] = ()) -> None:
        self._unfollowed = _UNREAD | set(unfollowed)
        modules = list(model.modules())
        configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
        self._owners: list[Any] = [*modules, *configs.values()]
        self._types = list(map(type, self._owners))
        parts = [part for owner in self._owners for part in self._parts(owner)]
        parts += [("torch", torch_wide._global_forward_hooks), ("torch", torch_wide._global_forward_pre_hooks)]
        self._names = [name for name, _ in parts]
        self._lives = [live for _, live in parts]
        self._copies = [self._followed(live) for live in self._lives]
        held = [
            value for entries in self._lives if isinstance(entries, dict)
            for value in entries.values() if isinstance(value, torch.Tensor)
        ]  # fmt: skip
        self._tensors = list({id(tensor): tensor for tensor in held}.values())
        self._kinds, self._places = list(map(kind, self._tensors)), list(map(place, self._tensors))
        weights = set(map(id, (*model.parameters(), *model.buffers())))
        self._others = [tensor for tensor in self._tensors if id(tensor) not in weights]
        self._versions = list(map(version_of, self._others))

    def _parts(self, owner: Any) -> Iterator[tuple[str, Any]]:
        """What is noted of a module or a config, named."""
        name, attributes, others = type(owner).__name__, vars(owner), _OF_TORCH | self._unfollowed
        yield name, attributes
        if isinstance(owner, nn.Module):
            for key in _ENTRIES:
                yield name, attributes[key]
            for key, value in attributes.items():
                if isinstance(value, (dict, list, set)) and key not in others:
                    yield f"{name}.{key}", value

    def _followed(self, live: Any) -> Any:
        """A copy of what is followed of a container."""
        if not isinstance(live, dict):
            return copy.copy(live)
        return {key: value for key, value in without_ours(live).items() if key not in self._unfollowed}

    def holds(self) -> bool:
        """Whether the model's forward still reads what it read, wherever its tensors lie now."""
        same = _equal(self._lives[1:], self._copies[1:]) and self._is_same(self._lives[0], self._copies[0])
        return (
            (same or all(map(self._is_same, self._lives, self._copies)))
            and list(map(type, self._owners)) == self._types
            and list(map(kind, self._tensors)) == self._kinds
            and list(map(version_of, self._others)) == self._versions
        )

    def _is_same(self, live: Any, then: Any) -> bool:
        """Whether a container is what it was."""
        if _equal(live, then) or not isinstance(live, dict):
            return _equal(live, then)
        now = self._followed(live)
        return now.keys() == then.keys() and all(_same_value(now[key], then[key]) for key in now)

    def changes(self) -> dict[str, Any]:
        """What is not what it was, a replaced tensor that is equal included: by name as "Class.attribute", what it is.

        Attributes that went are None.
        """
        found: dict[str, Any] = {}
        for name, live, then in zip(self._names, self._lives, self._copies, strict=True):
            if "." in name:
                found |= {} if self._is_same(live, then) else {name: live}
                continue
            now = self._followed(live)
            for key in now.keys() | then.keys():
                value, before = now.get(key), then.get(key)
                tensor = isinstance(value, torch.Tensor) or isinstance(before, torch.Tensor)
                if value is not before and (tensor or not _equal(value, before)):
                    found[f"{name}.{key}"] = value
        return found

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


def storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """What keeps the name of a tensor's storage from being given to another one, without keeping its memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def without_ours(entries: dict[Any, Any]) -> dict[Any, Any]:
    """Hooks or attributes of a module, but those of verifiers under way, which act in their own passes alone."""
    return {
        key: value for key, value in dict(entries).items()  # other threads may change them
        if not str(getattr(value, "__module__", "")).startswith(_OURS)
    }  # fmt: skip


def _equal(live: Any, then: Any) -> bool:
    """Whether two values compare equal; what cannot be compared is not."""
    try:
        return bool(live == then)
    except Exception:  # tensors of several numbers have no truth value
        return False


def _same_value(now: Any, then: Any) -> bool:
    """Whether two values are one, or equal."""
    if now is then or not isinstance(now, torch.Tensor) or not isinstance(then, torch.Tensor):
        return now is then or _equal(now, then)
    return now.numel() <= _SMALL and kind(now) == kind(then) and torch.equal(now, then)
