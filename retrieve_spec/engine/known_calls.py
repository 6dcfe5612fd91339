"""Known calls: what the original `generate` prepares for a row of text, made of what it prepared for another one.

Preparing takes as long as a pass of a small model: configs are copied, signatures are read. Yet of two calls with the
same settings all is the same but the prompt and how long the text may become. So what came of a call is kept, and once
what is made of it for a prompt of another length was found to be what `generate` made, `generate` is not asked again.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from retrieve_spec.verify.steps import Captured, capture

_MOST = 64
"""Kinds of calls that are remembered."""
_LISTS = ("logits_processor", "stopping_criteria")
_OF_A_CALL = (
    "input_ids", "inputs", "attention_mask", "past_key_values", "max_new_tokens", "generation_config", *_LISTS,
)  # fmt: skip
"""Arguments that are no part of a call's kind."""
_METHODS = tuple(name for name, value in vars(GenerationMixin).items() if inspect.isfunction(value))
_LATER = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods that are called only behind what is prepared: a class may have its own."""
_KEEP_NOTHING = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.RepetitionPenaltyLogitsProcessor, hf.NoRepeatNGramLogitsProcessor,
    hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor, hf.LogitNormalization, EosTokenCriteria,
)  # fmt: skip
"""What knows nothing of a text and keeps nothing of it: one serves all calls."""
_BY_IDENTITY: Any = object.__hash__
_PLAIN = (bool, int, float, str, type(None))


class KnownCalls:
    """Kinds of calls of one model, and what its original `generate` prepared for one of each."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[Any, _Known | None]] = OrderedDict()

    def captured(self, model: Any, generate: Callable[..., Any], arguments: dict[str, Any]) -> Captured:
        """What `generate` prepares for a call with these arguments."""
        if (kind := _kind_of(generate, arguments)) is None:
            return _asked(generate, arguments)
        settings, known = self._known.get(kind, (None, None))
        seen = settings is not None and _are_equal(_settings_of(model, arguments), settings)
        if seen and known is not None and known.is_trusted and (made := known.make(arguments)) is not None:
            return made
        captured = _asked(generate, arguments)
        if not seen:
            self._known[kind] = _copied(_settings_of(model, arguments)), _known_from(model, arguments, captured)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        elif known is not None and not known.agrees(arguments, captured):
            self._known[kind] = settings, None
        return captured


def _asked(generate: Callable[..., Any], arguments: dict[str, Any]) -> Captured:
    """What `generate` prepares, asked for it."""
    captured: Captured = generate(**{**arguments, "custom_generate": capture})
    return captured


@dataclass(slots=True)
class _Known:
    """What calls of a kind are made of.

    Attributes
    ----------
    config, kwargs
        The merged generation config, and what goes to the model.
    lists
        Processors and criteria: each one that serves all calls, the number of one that a call brings along, or one
        that ends at a length.
    cache_config
        What caches are made by.
    pad
        Token whose places would be left out of the mask, None where none would.
    length
        Tokens of the prompt that this was prepared for.
    is_trusted
        Whether a prompt of another length was prepared as it would have been made.
    """

    config: Any
    kwargs: dict[str, Any]
    lists: dict[str, tuple[type, list[Any]]]
    cache_config: Any
    pad: int | None
    length: int
    is_trusted: bool = False

    def agrees(self, arguments: dict[str, Any], captured: Captured) -> bool:
        """Whether a call is made as `generate` prepared it; one of another length is trusted to tell of all."""
        made = self.make(arguments)
        if made is None:
            return True
        same = (
            made.input_ids is captured.input_ids
            and _same_entries(vars(made.generation_config), vars(captured.generation_config))
            and _same_entries(made.model_kwargs, captured.model_kwargs)
            and all(_same_lists(getattr(made, name), getattr(captured, name)) for name in _LISTS)
        )
        self.is_trusted |= same and captured.input_ids.shape[1] != self.length
        return same

    def make(self, arguments: dict[str, Any]) -> Captured | None:
        """A call of the kind; None where its mask depends on its tokens."""
        ids, mask, cache = _ids_of(arguments), arguments.get("attention_mask"), arguments.get("past_key_values")
        if mask is None and self.pad is not None and bool((ids == self.pad).any()):
            return None
        if mask is not None and not (mask.shape == ids.shape and bool((mask == 1).all())):
            return None
        config, length = copy.copy(self.config), ids.shape[1]
        config.max_new_tokens = arguments["max_new_tokens"]
        config.max_length = length + config.max_new_tokens
        if "_mask_length" in vars(config):
            config._mask_length = length
        kwargs = {**self.kwargs, "past_key_values": DynamicCache(config=self.cache_config) if cache is None else cache}
        if "position_ids" in kwargs:
            kwargs["position_ids"] = torch.arange(length, device=ids.device)[None]
        processors, criteria = (self._list(name, arguments.get(name), config.max_length) for name in _LISTS)
        return Captured(ids, processors, criteria, config, kwargs)

    def _list(self, name: str, given: Any, max_length: int) -> Any:
        """Processors or criteria of a call, those that were `given` among them."""
        kind, entries = self.lists[name]
        made = kind()
        for entry in entries:
            if type(entry) is MaxLengthCriteria:
                entry = MaxLengthCriteria(max_length, entry.max_position_embeddings)
            made.append(given[entry] if type(entry) is int else entry)
        return made


def _known_from(model: Any, arguments: dict[str, Any], captured: Captured) -> _Known | None:
    """What others are made of, by what `generate` prepared; None where they cannot be."""
    kind, kwargs, config = type(model), captured.model_kwargs, captured.generation_config
    own = [name for name in _METHODS if getattr(kind, name) is not vars(GenerationMixin)[name] and name not in _LATER]
    cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask", 0)
    if own or captured.input_ids is not _ids_of(arguments) or type(cache) is not DynamicCache or mask is not None:
        return None
    if config.max_length != captured.input_ids.shape[1] + arguments["max_new_tokens"]:
        return None
    if not all(
        type(value) in _PLAIN for name, value in kwargs.items() if name not in ("past_key_values", "position_ids")
    ):
        return None
    lists = {}
    for name in _LISTS:
        given, whole = list(arguments.get(name) or ()), getattr(captured, name)
        places = {id(entry): number for number, entry in enumerate(given)}
        lists[name] = type(whole), [places.get(id(entry), entry) for entry in whole]
        if not all(type(entry) in (int, MaxLengthCriteria, *_KEEP_NOTHING) for entry in lists[name][1]):
            return None
    pad, ends = config._pad_token_tensor, config._eos_token_tensor
    hides = pad is not None and not (ends is not None and bool(torch.isin(ends, pad).any()))
    return _Known(
        copy.copy(config),
        {name: None if isinstance(value, (torch.Tensor, DynamicCache)) else value for name, value in kwargs.items()},
        lists,
        model.config.get_text_config(decoder=True),
        int(pad) if hides else None,
        captured.input_ids.shape[1],
    )


def _ids_of(arguments: dict[str, Any]) -> Any:
    """The prompt of a call."""
    ids = arguments.get("input_ids")
    return arguments.get("inputs") if ids is None else ids


def _settings_of(model: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What `generate` reads of the model, and of the generation config that a call brings along."""
    own, configs = vars(model), (model.config, model.generation_config, arguments.get("generation_config"))
    return (
        type(model),
        [getattr(type(model), name) for name in _METHODS],
        [own.get(name) for name in ("forward", *_LATER)],
        [(type(config), vars(config)) for config in configs if config is not None],
    )


def _copied(settings: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What was read, so that a change of it is seen; None where a config cannot be copied."""
    *of_model, configs = settings
    try:
        return (*of_model, copy.deepcopy(configs))
    except Exception:  # whatever a config holds
        return None


def _kind_of(generate: Any, arguments: dict[str, Any]) -> Hashable:
    """What calls that are prepared alike have in common; None for one that is prepared for itself."""
    ids, mask, cache = _ids_of(arguments), arguments.get("attention_mask"), arguments.get("past_key_values")
    if getattr(generate, "__func__", None) is not GenerationMixin.generate or torch.is_inference_mode_enabled():
        return None
    if type(ids) is not torch.Tensor or ids.dtype != torch.long or ids.ndim != 2 or len(ids) != 1:
        return None
    if cache is not None and type(cache) is not DynamicCache:
        return None
    if mask is not None and (type(mask) is not torch.Tensor or mask.device != ids.device):
        return None
    if type(most := arguments.get("max_new_tokens")) is not int or most < 1:
        return None
    brought = [arguments.get(name) or () for name in _LISTS]
    if not all(map(_are_told_apart, brought)):
        return None
    settings = []
    for name, value in arguments.items():
        if name not in _OF_A_CALL:
            values = tuple(value) if type(value) in (list, tuple) else (value,)
            if not all(type(each) in _PLAIN for each in values):
                return None
            settings.append((name, type(value), values, tuple(map(type, values))))
    types = tuple(tuple(map(type, entries)) for entries in brought)
    return ids.device, mask is None, cache is None, types, frozenset(settings)


def _are_told_apart(entries: Any) -> bool:
    """Whether processors or criteria that a call brings along are each an object of its own, as `generate` sees it."""
    if not isinstance(entries, (list, tuple)):
        return False
    plain = all(getattr(type(entry), "__hash__", None) is _BY_IDENTITY for entry in entries)  # none equals another
    return plain and len(set(entries)) == len(entries)


def _same_entries(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two dictionaries hold the same in the same order."""
    return list(ours) == list(theirs) and all(map(_same, ours.values(), theirs.values()))


def _same_lists(ours: Any, theirs: Any) -> bool:
    """Whether two lists hold the same objects, or such as do the same."""

    def same(one: Any, other: Any) -> bool:
        return one is other or (type(one) is type(other) and _same_entries(vars(one), vars(other)))

    return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))


def _same(one: Any, other: Any) -> bool:
    """Whether two values of a config or of what goes to the model are the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, DynamicCache):
        return one is other or list(map(type, one.layers)) == list(map(type, other.layers))
    return _are_equal(one, other)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values compare equal."""
    try:
        return one is other or bool(one == other)
    except Exception:  # values that have no truth value
        return False
