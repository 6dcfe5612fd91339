"""Model state: what a recording depends on, recorded so that a later change is noticed.

It holds the modules with their classes, training modes, hooks and patched forwards, the attention implementation of
their configs, their plain attributes (numbers, texts, functions, methods and the like, and lists of these: adapters are
switched by them), and the identity, type, shape and device of every tensor. It does not hold the numbers in parameters
and buffers, as a recording reads the live tensors; other tensors are followed by their version counters. After any
other change call `invalidate()`.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_wide

_FOLLOWED = ("_modules", "_forward_hooks", "_forward_pre_hooks")
"""Attributes of every module in which torch keeps what it runs; a scripted module has them elsewhere than in `vars`."""
_UNREAD = frozenset({*vars(nn.Module()), "generate"})
"""Attributes that are not compared as values: torch's, which are compared by identity, and those that `accelerate`
replaces.
"""
_PLAIN = (
    str, bytes, int, float, complex, np.generic, types.NoneType, Enum, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial,
)  # fmt: skip
_NUMBERS = (int, float)
_LISTS = (list, tuple, set, frozenset, dict)
_LONGEST = 64
"""Most entries of a list that is followed."""
Attribute = tuple[type, str]
"""A class of modules, and the name of an attribute of these."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The state of a model at one time.

    Attributes
    ----------
    parts
        Modules, their classes, and what torch runs in them.
    values
        What plain attributes are compared by (`_comparable`), by the number of the module and the name.
    tensors
        Parameters, buffers, and tensors that are attributes, likewise.
    lists
        Plain attributes that have entries.
    """

    parts: list[Any]
    values: dict[tuple[int, str], Any]
    tensors: dict[tuple[int, str], torch.Tensor | None]
    lists: list[Any]


class ModelState:
    """What a model's forward depends on, as far as it is followed.

    Parameters
    ----------
    model
        The model as it is now.
    unfollowed
        Attributes that its forward replaces: what it keeps of a text, or counts.
    """

    def __init__(self, model: nn.Module, unfollowed: Collection[Attribute] = ()) -> None:
        self._model, self._unfollowed = model, frozenset(unfollowed)
        self._modules = list(model.modules())
        self._classes = list(map(type, self._modules))
        self._slots = {cls: _slots_of(cls) for cls in self._classes}
        now = self._snapshot()
        parts = [copy.copy(part) if isinstance(part, (dict, list)) else part for part in now.parts]
        self._seen = replace(now, parts=parts)
        self._tensors = list({id(tensor): tensor for tensor in now.tensors.values() if tensor is not None}.values())
        weights = set(map(id, (*model.parameters(), *model.buffers())))
        self._others = [tensor for tensor in self._tensors if id(tensor) not in weights]
        self._versions = list(map(version_of, self._others))
        self._kinds, self._places = list(map(kind, self._tensors)), list(map(place, self._tensors))
        replaced = {name for _, name in self._unfollowed}
        self._partly = [m for m in self._modules if self._slots[type(m)] or not replaced.isdisjoint(vars(m))]
        self._lives = [*self._containers(), *now.lists]
        own = [vars(module) for module in self._modules]
        numbers = [(d, name) for d in own for name in d if name not in _UNREAD and isinstance(d[name], _NUMBERS)]
        self._numbers = [list(column) for column in zip(*numbers, strict=True)] or [[], []]
        self._lists = now.lists
        self._take_copies()

    def _take_copies(self) -> None:
        """Copy what decides whether the next snapshot has to be taken."""
        self._copies = list(map(copy.copy, self._lives))
        self._attributes = list(map(self._attributes_of, self._partly))
        self._types = self._types_now()

    def _types_now(self) -> list[type]:
        """Return the types of attributes whose values may equal those of another type, as `True` equals 1."""
        lists = (entries.values() if isinstance(entries, dict) else entries for entries in self._lists)
        return list(map(type, chain(map(operator.getitem, *self._numbers), *lists)))

    def _containers(self) -> Iterator[Any]:
        """Yield the dictionaries that every snapshot reads; of modules in `_partly` only a part is read."""
        yield from (torch_wide._global_forward_hooks, torch_wide._global_forward_pre_hooks)
        partly = set(map(id, self._partly))
        configs = {}
        for module in self._modules:
            own = vars(module)
            if id(module) not in partly:
                yield own
            yield from (getattr(module, name) for name in (*_FOLLOWED, "_parameters", "_buffers"))
            config = own.get("config")
            configs[id(config)] = getattr(config, "__dict__", {})
        yield from configs.values()

    def _attributes_of(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's attributes, without those that its forward replaces."""
        cls = type(module)
        attributes = vars(module) | {name: getattr(module, name, None) for name in self._slots.get(cls, ())}
        return {name: value for name, value in attributes.items() if (cls, name) not in self._unfollowed}

    def _snapshot(self) -> _Snapshot:
        """Return the model's state now."""
        modules = list(self._model.modules())
        now = _Snapshot([modules, torch_wide._global_forward_hooks, torch_wide._global_forward_pre_hooks], {}, {}, [])
        for number, module in enumerate(modules):
            own, cls = vars(module), type(module)
            attention = getattr(own.get("config"), "_attn_implementation", None)
            now.parts.extend((cls, module.training, own.get("forward"), attention))
            now.parts.extend(getattr(module, name) for name in _FOLLOWED)
            for name, value in self._attributes_of(module).items():
                if name in _UNREAD:
                    continue
                if isinstance(value, torch.Tensor):
                    now.tensors[number, name] = value
                elif _is_plain(value):
                    now.values[number, name] = _comparable(value)
                    if isinstance(value, _LISTS):
                        now.lists.append(value)
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if (cls, name) not in self._unfollowed:
                    now.tensors[number, name] = tensor
        return now

    def holds(self) -> bool:
        """Whether the model's forward still reads what it read, even if its tensors have moved."""
        return (
            (self._is_untouched() or self._is_alike())
            and list(map(kind, self._tensors)) == self._kinds
            and list(map(version_of, self._others)) == self._versions
        )

    def _is_untouched(self) -> bool:
        """Whether nothing has changed where a snapshot would read; this takes a seventh of its time."""
        try:
            same = self._lives == self._copies and list(map(type, self._modules)) == self._classes
            same = same and list(map(self._attributes_of, self._partly)) == self._attributes
            return same and self._types_now() == self._types
        except Exception:  # comparing tensors or arrays gives no truth value
            return False

    def _is_alike(self) -> bool:
        now, seen = self._snapshot(), self._seen
        alike = now.parts == seen.parts and now.values == seen.values and not _changed(now.tensors, seen.tensors)
        if alike:  # the change is ignored, and needs no second snapshot
            self._take_copies()
        return alike

    def replaced(self) -> tuple[set[Attribute], set[Attribute]]:
        """Return the tensors and plain attributes that were replaced, removed or added since.

        Returns
        -------
        replaced, kept_of_texts
            All of them, and those in modules whose tensors were replaced, such as a table and its length.
        """
        now, seen = self._snapshot(), self._seen
        tensors = _changed(now.tensors, seen.tensors)
        every = tensors | _changed(now.values, seen.values, operator.eq)
        modules = {number for number, _ in tensors}
        named = [(number, (type(self._modules[number]), name)) for number, name in every]
        return {one for _, one in named}, {one for number, one in named if number in modules}

    def has_moved(self) -> bool:
        """Whether a tensor has another storage than before, so that kept addresses are invalid."""
        before, self._places = self._places, list(map(place, self._tensors))
        return before != self._places

    def keeps(self, other: ModelState) -> bool:
        """Whether every tensor of another state is in this one, so that it could be that state again."""
        known = {id(tensor) for tensor in self._tensors}
        return all(id(tensor) in known for tensor in other._tensors)


_Key = TypeVar("_Key")


def _changed(
    now: Mapping[_Key, Any], then: Mapping[_Key, Any], same: Callable[[Any, Any], bool] = operator.is_
) -> set[_Key]:
    """Return the keys under which two mappings differ."""
    missing = object()
    return {key for key in now.keys() | then.keys() if not same(now.get(key, missing), then.get(key, missing))}


def plain_attributes(model: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """Yield the plain attributes of a model's modules: the number of the module, the name, and the value."""
    for number, module in enumerate(model.modules()):
        for name, value in vars(module).items():
            if name not in _UNREAD and _is_plain(value):
                yield number, name, value


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a function or the like, or a short list of these."""
    if isinstance(value, _LISTS):
        entries = value.values() if isinstance(value, dict) else value
        return len(entries) <= _LONGEST and all(isinstance(entry, _PLAIN) for entry in entries)
    return isinstance(value, _PLAIN)


def _comparable(value: Any) -> Any:
    """Return what a plain value is compared by: `True` differs from 1, and a NaN equals itself."""
    if isinstance(value, dict):
        return type(value), {name: (type(entry), entry) for name, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return type(value), {(type(entry), entry) for entry in value}
    if isinstance(value, (list, tuple)):
        return type(value), [(type(entry), entry) for entry in value]
    return type(value), value


def _slots_of(cls: type) -> list[str]:
    """Return the names of a class's attributes that are in slots rather than in the dictionary."""
    declared = (vars(base).get("__slots__", ()) for base in cls.__mro__)
    return [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]


def kind(tensor: torch.Tensor) -> Any:
    """Return type, device, shape and strides of a tensor, as far as it has them."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return tensor.dtype, tensor.device, tensor.shape
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the storage and address of a tensor; zeros for a tensor that is made of others."""
    try:
        return tensor.untyped_storage()._cdata, tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0, 0


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version
