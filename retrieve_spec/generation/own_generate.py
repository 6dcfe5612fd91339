"""Own `generate`: a class that has one runs it as it is; where it hands decoding on to transformers, that part is ours.

Speech models prepare their prompts, or switch adapters, around a call of the inherited `generate`. It takes a decoding
method (`custom_generate`) along, which is called where the model's own would be: inside everything the class does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationMixin

from retrieve_spec.engine.rows import DelegatedCall, Prepared
from retrieve_spec.generation.request import check_arguments_decoded, from_captured, setting
from retrieve_spec.verify.steps import capture, sample_tokens

Decode = Callable[[Prepared], Any]
_UNHEARD = ("streamer", "assistant_model", "custom_generate")
"""Arguments of which what decodes inside does not hear."""


def own_generate(model: Any) -> str:
    """Why calls of a model are no ordinary ones: its class decodes in its own manner; empty when it does not."""
    kind = type(model)
    if kind._sample is not GenerationMixin._sample:
        return f"{kind.__name__} has a way of decoding of its own"
    return "" if kind.generate is GenerationMixin.generate else f"{kind.__name__} has a generate of its own"


def why_not_inside(model: Any) -> str:
    """Why the decoding inside a `generate` of its own is not ours either; empty where it is, or there is none."""
    why = own_generate(model)
    if not why or type(model)._sample is not GenerationMixin._sample:
        return why
    taken: list[Any] = []

    def take(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        taken.extend((model, answer := capture(model, input_ids, **kwargs)))
        return answer

    try:
        given = type(model).generate(model, sample_tokens(model, 4), max_new_tokens=1, custom_generate=take)
    except Exception:  # whatever a model says to a prompt without what it is made for
        return why
    return "" if len(taken) == 2 and taken[0] is model and given is taken[1] else why


def decode_inside(
    model: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], decode: Decode
) -> Any:
    """Let a class's own `generate` run with another way of decoding inside; what it returns.

    Parameters
    ----------
    own
        The class's `generate`, as it was before.
    decode
        Decodes a prepared call and returns what `generate` would.

    Raises
    ------
    DelegatedCall
        The class has to decode by itself.
    """
    speculation = model.speculation
    arguments = _by_name(own, args, kwargs)
    _check_decoded_inside(model, arguments)
    decoded: list[bool] = []

    def inside(model_inside: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        if model_inside is not model:
            raise DelegatedCall(f"{type(model).__name__} lets a {type(model_inside).__name__} decode")
        captured = capture(model, input_ids, **prepared)
        check_arguments_decoded(model, {"generation_config": captured.generation_config}, "")
        alone = "" if len(input_ids) == 1 else speculation.batching_blocker()
        found = from_captured(model, captured, speculation.interface, arguments, alone)
        decoded.append(True)
        return decode(found)

    drawn = _noise(model)
    try:
        output = own(*args, **kwargs, custom_generate=inside)
    except DelegatedCall:
        for device, state in drawn.items():  # the class begins again
            torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state, device)
        raise
    if not decoded:
        raise DelegatedCall(own_generate(model))
    return output


def _noise(model: Any) -> dict[str, torch.Tensor]:
    """States of the generators that a call may draw from, by device."""
    states = {"cpu": torch.get_rng_state()}
    if model.device.type == "cuda":
        states[str(model.device)] = torch.cuda.get_rng_state(model.device)
    return states


def _by_name(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, as far as they have names."""
    bound = inspect.signature(own).bind(*args, **kwargs)
    inherited = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    found: dict[str, Any] = {}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found |= dict(zip(inherited, bound.arguments.get(name, ()), strict=False))
        elif parameter.kind is parameter.VAR_KEYWORD:
            found |= bound.arguments.get(name, {})
        elif name in bound.arguments:
            found[name] = bound.arguments[name]
    return found


def _check_decoded_inside(model: Any, arguments: dict[str, Any]) -> None:
    """Look whether the decoding inside of a call is ours, as far as its arguments tell; else raise `DelegatedCall`."""
    if model.speculation.mode == "delegated":
        raise DelegatedCall(model.speculation.reason)
    if model.speculation.engine.is_stepping:
        raise DelegatedCall("it is asked for in the middle of another generation")
    unheard = any(arguments.get(name) is not None for name in _UNHEARD)
    if unheard or setting(model, arguments, "stop_strings") is not None:
        raise DelegatedCall(own_generate(model))
    check_arguments_decoded(model, arguments, "")
