"""Model state: everything a forward can read besides its inputs, noted so that a later change is noticed.

Modules, plain attributes, hooks, the code of their classes and where tensors lie are compared; the numbers inside
parameters and buffers are not, as a recording reads the live tensors.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig

from retrieve_spec.recorded.state_parts import (
    SMALL,
    different_keys,
    equal,
    holds_numbers,
    is_at,
    is_one_number,
    kept_of_texts,
    kind,
    place,
    read_function,
    read_slots,
    same_buffers,
    same_entries,
    same_entry,
    slots_of,
    storage_ref,
    version_of,
    without,
    without_ours,
)

OWN_ATTRIBUTES = frozenset(
    {"speculation", "generate", "_generate_before_speculation", "generation_config", "prepare_inputs_for_generation"}
)
"""Attributes of a model that its forward does not read: `generate` and what belongs to it."""
_UNREAD = (
    "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_non_persistent_buffers_set", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
"""Containers of a module that do not change what its forward gives as long as there are no hooks."""
MOST_VALUES = 1_000_000
"""Plain values that are followed at most."""
_LEAVES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, types.ModuleType)
_SKIPPED = (GenerationConfig, torch.Generator, logging.Logger)


class ModelState:
    """What a model's forward depends on, as far as Python shows it.

    Followed are all values that can be reached from the model's attributes: containers, objects with attributes,
    closures and what bound methods are bound to; of the classes of its modules the attributes, and of the files these
    come from the functions. State inside of extension types is not.

    Attributes
    ----------
    problem
        Why not everything can be followed; empty when it can.
    """

    def __init__(self, model: Any) -> None:
        self.problem = ""
        self._values = 0
        self._seen: set[int] = {id(model)}
        self._alive: list[Any] = []  # what was seen, so that no id is used again
        self._names: list[str] = []
        self._lives: list[Any] = []
        self._copies: list[Any] = []
        self._objects: list[Any] = []
        self._parts: list[tuple[str, Callable[[], bool]]] = []  # whether each is what it was
        self._tensors: list[torch.Tensor] = []
        self._type = type(model)
        self._ignored: frozenset[str] = OWN_ATTRIBUTES
        self._root = self._own(model)
        self._walk(model)
        self._types = [type(each) for each in self._objects]
        self._kinds = [kind(tensor) for tensor in self._tensors]
        self._storages = [storage_ref(tensor) for tensor in self._tensors]  # an address is not used again meanwhile
        self._places = [place(tensor) for tensor in self._tensors]
        self._seen.clear()
        self._alive.clear()

    def holds(self, model: Any) -> bool:
        """Whether the model's forward still reads what it read, wherever its tensors lie now."""
        try:
            return bool(
                type(model) is self._type
                and self._own(model) == self._root
                and (self._lives == self._copies or all(map(same_entries, self._lives, self._copies)))
                and list(map(type, self._objects)) == self._types
                and list(map(kind, self._tensors)) == self._kinds
                and all(is_same() for _, is_same in self._parts)
            )
        except Exception:  # whatever a comparison of changed values raises: they are not what they were
            return False

    def has_moved(self) -> bool:
        """Whether a tensor has another storage than before; then what kept its address must not use it."""
        places = list(map(place, self._tensors))
        moved = places != self._places
        if moved:
            self._places = places
            self._storages = [storage_ref(tensor) for tensor in self._tensors]
        return moved

    def changes(self, model: Any) -> list[str]:
        """Names of what is not what it was, as "Class.attribute"."""
        found = [] if type(model) is self._type else ["the model's class"]
        found += different_keys(self._type.__name__, self._own(model), self._root)
        for name, live, copy in zip(self._names, self._lives, self._copies, strict=True):
            if not same_entries(live, copy):
                found += different_keys(name, live, copy)
        found += [f"the class of {then.__name__}" for each, then in self._retyped()]
        found += [name for name, is_same in self._parts if not is_same()]
        if list(map(kind, self._tensors)) != self._kinds:
            found.append("the type, shape or device of a weight")
        return found

    def settle(self, model: Any) -> list[str]:
        """Stop following what is not what it was; its names."""
        if self.holds(model):
            return []
        found = self.changes(model)
        self._keep_same()
        before, now = self._root, self._own(model)
        changed = {key for key in before.keys() | now.keys() if not same_entry(now.get(key), before.get(key))}
        self._ignored |= changed
        self._root = self._own(model)
        self._types = [type(each) for each in self._objects]
        self._kinds = [kind(tensor) for tensor in self._tensors]
        self._parts = [part for part in self._parts if part[1]()]
        return found

    def _keep_same(self) -> list[tuple[str, Any, Any]]:
        """Keep the containers that are what they were; the others, with what they held."""
        entries = list(zip(self._names, self._lives, self._copies, strict=True))
        same = [same_entries(live, copy) for _, live, copy in entries]
        kept = list(itertools.compress(entries, same))
        self._names, self._lives, self._copies = ([entry[i] for entry in kept] for i in range(3))
        return [entry for entry, is_same in zip(entries, same, strict=True) if not is_same]

    def let_go(self, model: Any) -> list[str]:
        """Stop following what the model's own methods keep of texts, if nothing else has changed; its names.

        Those are attributes that hold a tensor or nothing and that a method of its modules sets.
        """
        changed = self.changes(model)
        names = frozenset(name.rpartition(".")[2] for name in changed)
        if not changed or not names <= kept_of_texts(model):
            return []
        self._parts = [part for part in self._parts if part[0].rpartition(".")[2] not in names]
        for name, live, copy in self._keep_same():
            self._follow(name, functools.partial(without, live, names), without(copy, names))
        self._ignored |= names
        self._root = self._own(model)
        return changed if self.holds(model) else []

    def keeps(self, other: ModelState) -> bool:
        """Whether every tensor that another state knows is known here: it could be that state again."""
        known = {id(tensor) for tensor in self._tensors}
        return all(id(tensor) in known for tensor in other._tensors)

    def _own(self, model: Any) -> dict[str, Any]:
        """A model's attributes, without those that its forward does not read or that are not followed."""
        return {key: value for key, value in model.__dict__.items() if key not in self._ignored}

    def _retyped(self) -> list[tuple[Any, type]]:
        pairs = zip(self._objects, self._types, strict=True)
        return [(each, then) for each, then in pairs if type(each) is not then]

    def _walk(self, model: Any) -> None:
        todo: deque[tuple[str, Any]] = deque()
        name = type(model).__name__
        self._add_code(type(model))
        self._add_module(name, model, todo)
        todo.extend((f"{name}.{key}", value) for key, value in self._root.items())
        for hooks in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            todo.append(("torch", getattr(torch.nn.modules.module, hooks)))
        while todo:
            name, value = todo.popleft()
            if isinstance(value, _LEAVES) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            if self._values > MOST_VALUES:
                self.problem = f"more than {MOST_VALUES:,} values can be reached from its attributes"
                return
            self._visit(name, value, todo)

    def _visit(self, name: str, value: Any, todo: deque[tuple[str, Any]]) -> None:
        """Note one value, and put what can be reached from it on the list."""
        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value, todo)
        elif isinstance(value, dict):
            self._add(name, value, dict(value))
            todo.extend((f"{name}[{key!r}]", each) for key, each in value.items())
            self._follow_ones(value, value)
        elif isinstance(value, (list, deque)):
            self._add(name, value, value.copy())
            todo.extend((f"{name}[{i}]", each) for i, each in enumerate(value))
        elif isinstance(value, (set, bytearray)):
            self._add(name, value, value.copy())
        elif isinstance(value, (tuple, frozenset)):
            todo.extend((name, each) for each in value)
        elif isinstance(value, np.ndarray):
            self._follow(name, value.tobytes, value.tobytes())
        elif isinstance(value, types.FunctionType):
            self._add_function(name, value, todo)
        elif isinstance(value, types.MethodType):
            todo.extend([(name, value.__self__), (name, value.__func__)])
        elif isinstance(value, functools.partial):
            todo.extend([(name, value.func), (name, value.args), (name, value.keywords)])
        elif not isinstance(value, _SKIPPED):
            self._add_object(value, todo)

    def _add(self, name: str, live: Any, copy: Any) -> None:
        self._names.append(name)
        self._lives.append(live)
        self._copies.append(copy)
        self._values += len(copy)

    def _follow(self, name: str, read: Callable[[], Any], then: Any) -> None:
        """Note what can be read, and that it is to stay as it was `then`."""
        self._parts.append((name, lambda: equal(read(), then)))

    def _follow_ones(self, live: Any, then: dict[Any, Any]) -> None:
        """Note tensors of one number in a container, which compare equal to others: they are to stay the same ones."""
        for key, one in then.items():
            if is_one_number(one):
                self._parts.append((str(key), functools.partial(is_at, live, key, one)))

    def _add_object(self, value: Any, todo: deque[tuple[str, Any]]) -> None:
        """Note an object's attributes: those in its dictionary, and those in slots."""
        name = type(value).__name__
        slots = [slot for cls in type(value).__mro__ for slot in slots_of(cls)]
        attributes = getattr(value, "__dict__", None)
        if attributes is None and not slots:
            return
        self._objects.append(value)
        if isinstance(value, nn.Module):
            self._add_code(type(value))
            self._add_module(name, value, todo)
        if isinstance(attributes, dict):
            self._add(name, attributes, others := without_ours(attributes))
            todo.extend((f"{name}.{key}", each) for key, each in others.items())
            self._follow_ones(attributes, others)
        if slots:
            read = functools.partial(read_slots, value, slots)
            self._follow(name, read, read())
            todo.extend((name, each) for each in read())

    def _add_module(self, name: str, module: nn.Module, todo: deque[tuple[str, Any]]) -> None:
        """Note a module's buffers, which may be replaced by equal ones, apart from its other attributes."""
        self._seen.update(id(getattr(module, name, None)) for name in ("_buffers", *_UNREAD))
        if buffers := module._buffers:
            self._parts.append((f"a buffer of {name}", functools.partial(same_buffers, buffers, dict(buffers))))
        else:
            self._add(f"a buffer of {name}", buffers, {})
        for kind_of_hook, hooks in (("a hook", module._forward_hooks), ("a pre-hook", module._forward_pre_hooks)):
            self._seen.add(id(hooks))
            self._add(f"{kind_of_hook} of {name}", hooks, others := without_ours(hooks))
            todo.extend((f"{name}.{key}", each) for key, each in others.items())
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._seen:
                self._seen.add(id(buffer))
                self._tensors.append(buffer)
                todo.append((f"{name}.{key}", getattr(buffer, "__dict__", None)))
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self._tensors.append(parameter)
                todo.append((f"{name}.{key}", getattr(parameter, "__dict__", None)))

    def _add_tensor(self, name: str, tensor: torch.Tensor, todo: deque[tuple[str, Any]]) -> None:
        """Note a tensor that is no parameter and no buffer: recording may have read numbers from it."""
        self._tensors.append(tensor)
        copy = tensor.detach().clone() if tensor.numel() <= SMALL and not tensor.is_meta else None
        self._parts.append((name, functools.partial(holds_numbers, tensor, copy, version_of(tensor))))
        todo.append((name, getattr(tensor, "__dict__", None)))

    def _add_function(self, name: str, function: types.FunctionType, todo: deque[tuple[str, Any]]) -> None:
        """Note a function's code, its defaults and what it closes over."""
        read = functools.partial(read_function, function)
        self._follow(name, read, read())
        todo.extend((name, each) for each in read())
        todo.append((name, function.__dict__))

    def _add_code(self, cls: type) -> None:
        """Note the attributes of a module's class and its bases, and the functions of the files they come from."""
        for base in cls.__mro__:
            file = base.__module__
            if id(base) in self._seen or base in (object, nn.Module) or file.startswith(("torch.", "builtins")):
                continue
            self._seen.add(id(base))
            self._add(base.__name__, base.__dict__, dict(base.__dict__))
            code = next((f for f in vars(base).values() if isinstance(f, types.FunctionType)), None)
            if code is not None and id(code.__globals__) not in self._seen and file != "__main__":
                self._seen.add(id(code.__globals__))
                names = [key for key, value in code.__globals__.items() if isinstance(value, _CODE)]
                read = functools.partial(operator.itemgetter(*names), code.__globals__)
                self._follow(f"a function of {file}", read, read())


_CODE = (types.FunctionType, type)
