"""Parts of a model's state: how tensors, buffers, containers, functions and slots are read and compared."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

SMALL = 4096
"""Entries of a tensor that is compared by value."""
_DECODING = ("forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods that decoding calls."""
_OWN = ("retrieve_spec.verify.", "retrieve_spec.recorded.packed_layers")
_Method = tuple[frozenset[str], frozenset[str]]


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


def storage_ref(tensor: torch.Tensor) -> StorageWeakRef | None:
    """What keeps the name of a tensor's storage from being given to another one, without keeping its memory."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):
        return None


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def holds_numbers(tensor: torch.Tensor, copy: torch.Tensor | None, version: int) -> bool:
    """Whether a tensor that numbers may have been read from holds them still."""
    return version_of(tensor) == version and (copy is None or torch.equal(tensor.detach(), copy))


def same_buffers(live: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether buffers are the same ones, or small ones were replaced by equal ones."""
    if live.keys() != then.keys():
        return False
    for now, before in zip(live.values(), map(then.get, live), strict=True):
        if now is before:
            continue
        if now is None or before is None or now.numel() > SMALL or kind(now) != kind(before):
            return False
        if not torch.equal(now, before):
            return False
    return True


def is_one_number(value: Any) -> bool:
    """Whether a value is a tensor that compares to a single truth value."""
    return isinstance(value, torch.Tensor) and value.numel() <= 1


def is_at(entries: dict[Any, Any], key: Any, value: Any) -> bool:
    """Whether a value still stands where it stood."""
    return entries.get(key) is value


def slots_of(cls: type) -> tuple[str, ...]:
    """Names of the slots that a class adds."""
    names = cls.__dict__.get("__slots__", ())
    return tuple(name for name in ((names,) if isinstance(names, str) else names) if not name.startswith("__"))


def read_slots(value: Any, slots: list[str]) -> tuple[Any, ...]:
    """What stands in an object's slots."""
    return tuple(getattr(value, slot, None) for slot in slots)


def read_function(function: types.FunctionType) -> tuple[Any, ...]:
    """A function's code, its defaults and what it closes over."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # still empty
            cells.append(None)
    return (function.__code__, function.__defaults__, function.__kwdefaults__, *cells)


def equal(live: Any, copy: Any) -> bool:
    """Whether two values compare equal; what cannot be compared is not."""
    try:
        return bool(live == copy)
    except Exception:  # tensors of several numbers have no truth value
        return False


def different_keys(name: str, live: Any, copy: Any) -> list[str]:
    """Names of the entries that two containers differ in."""
    if not isinstance(live, (dict, types.MappingProxyType)):
        return [] if equal(live, copy) else [name]
    keys = [*copy, *(key for key in live if key not in copy)]
    missing = object()
    return [f"{name}.{key}" for key in keys if not same_entry(live.get(key, missing), copy.get(key, missing))]


def same_entry(live: Any, copy: Any) -> bool:
    """Whether two entries of containers are one object, or equal."""
    return live is copy or equal(live, copy)


def is_ours(value: Any) -> bool:
    """Whether a hook, or a module's `forward`, is one of a verifier under way, which acts in its own passes alone."""
    return str(getattr(value, "__module__", "")).startswith(_OWN)


def without_ours(entries: dict[Any, Any]) -> dict[Any, Any]:
    """Hooks or attributes of a module, those of verifiers under way left out."""
    return {key: value for key, value in dict(entries).items() if not is_ours(value)}  # other threads may change them


def same_entries(live: Any, copy: Any) -> bool:
    """Whether a container, or a module's attributes, are what they were."""
    return equal(live, copy) or (isinstance(live, dict) and equal(without_ours(live), copy))


def without(entries: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The entries that have other names."""
    return {name: value for name, value in entries.items() if name not in names}


def kept_of_texts(model: nn.Module) -> frozenset[str]:
    """Names of attributes that hold tensors, or nothing, and that a model's modules set while it decodes."""
    modules = list(model.modules())
    stored = _stored_in_decoding(set(map(type, modules)))
    held = [(name, value) for module in modules for name, value in vars(module).items() if name in stored]
    others = {name for name, value in held if value is not None and not isinstance(value, torch.Tensor)}
    weights = {name for module in modules for own in _registered(module) for name in own}
    return frozenset(name for name, _ in held) - others - weights


def _registered(module: nn.Module) -> tuple[Iterable[str], ...]:
    """Names of what a module holds as children, parameters and buffers."""
    return module._modules, module._parameters, module._buffers


def _stored_in_decoding(classes: set[Any]) -> set[str]:
    """Names of attributes that methods set which a forward may come to; what a user calls may set any."""
    methods: dict[str, list[_Method]] = {}
    for cls in classes:
        for name, method in _methods(cls):
            methods.setdefault(name, []).append(method)
    reached, stored = set(_DECODING), set[str]()
    following = list(_DECODING)
    while following:
        for named, own in methods.get(following.pop(), ()):
            stored |= own
            following += (named & methods.keys()) - reached
            reached |= named
    return stored


@functools.cache
def _methods(cls: Any) -> tuple[tuple[str, _Method], ...]:
    """By name, the methods of a class but the one that makes it: names that they mention, attributes that they set."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    functions = [(name, inspect.unwrap(f)) for base in bases for name, f in vars(base).items() if name != "__init__"]
    return tuple((name, _looked_at(f.__code__)) for name, f in functions if isinstance(f, types.FunctionType))


def _looked_at(code: types.CodeType) -> _Method:
    """Names that code mentions, and attributes that it sets, functions inside of it included."""
    codes = [code]
    for outer in codes:  # grows meanwhile
        codes += [const for const in outer.co_consts if isinstance(const, types.CodeType)]
    steps = [step for each in codes for step in dis.get_instructions(each)]
    return (
        frozenset(name for each in codes for name in each.co_names),
        frozenset(step.argval for step in steps if step.opname == "STORE_ATTR"),
    )
