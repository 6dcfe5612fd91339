"""Requests: from the arguments of a call to its sequence, unless the call is left to `generate` (`DelegatedCall`).

The original `generate` prepares: it merges generation configs, builds masks, positions, cache, processors and stopping
criteria, then hands them to our callable (`custom_generate`), which only takes them down.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import (
    StoppingCriteriaList,
    StopStringCriteria,
)

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.engine.joining import CallOptions, DelegatedCall, Prepared
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.errors import ConfigError, PromptError, UnknownTokenError, nearest
from retrieve_spec.generation.delegation import (
    TOO_MANY,
    Batch,
    Call,
    PreparedCall,
    extras_of,
    past_length,
    prompt_of,
    setting,
    why_batch_delegated,
    why_call_delegated,
    why_prepared_delegated,
)
from retrieve_spec.model_layers import embedded_tokens
from retrieve_spec.verify.interface import ModelInterface, input_device
from retrieve_spec.verify.steps import Captured, capture
from retrieve_spec.verify.verifier import CACHE_NAMES, VerifierInputs

_ROWS = "a prompt of token ids, a tensor of shape (rows, tokens)"
_ELSEWHERE = frozenset(["datastores", "drafter", "config", *(field.name for field in fields(SpeculationConfig))])
"""Options of `accelerate`."""
BEFORE = "_generate_before_speculation"
"""Where an accelerated model keeps a `generate` that was set on it before."""
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
CALL_OPTIONS = frozenset(field.name for field in fields(CallOptions)) - {"session"}
"""Arguments of a call that are this library's own."""


def pop_options(arguments: dict[str, Any], model: Any) -> CallOptions:
    """Take this library's own options out of the arguments of a call."""
    own = {name: arguments.pop(name) for name in CALL_OPTIONS if name in arguments}
    if own.get("context_ids") is not None:
        own["context_ids"] = known_ids(own["context_ids"], "context_ids", model)
    return CallOptions(**own)


def check_arguments(model: Any, arguments: dict[str, Any]) -> None:
    """Refuse a prompt that is none, options of `accelerate` and mistyped options of a call, before anything runs.

    Raises
    ------
    ConfigError
        An option is out of place or mistyped.
    PromptError
        The prompt is no tensor of token ids in rows.
    """
    ids = arguments.get("input_ids", arguments.get("inputs"))
    if ids is not None and model.main_input_name == "input_ids":
        if hasattr(ids, "items"):
            raise PromptError(_ROWS, type(ids).__name__, "Unpack it: generate(**inputs).")
        if not hasattr(ids, "shape"):
            remedy = "Encode the text: generate(**tokenizer(text, return_tensors='pt'))."
            raise PromptError(_ROWS, f"{type(ids).__name__}, {repr(ids)[:40]}", remedy)
        if isinstance(ids, torch.Tensor) and (ids.ndim != 2 or ids.is_floating_point()):
            got = f"a tensor of shape {tuple(ids.shape)} and {str(ids.dtype).removeprefix('torch.')}"
            raise PromptError(_ROWS, got, "Give one row as ids[None], and whole numbers.")
    for name in arguments.keys() - CALL_OPTIONS:
        if name in _ELSEWHERE and "custom_generate" not in arguments:  # which may be ours, and takes some
            raise ConfigError(
                f"{name} as an option of accelerate", "it in generate", f"Call accelerate(model, {name}=…)."
            )
        if hint := nearest(name, CALL_OPTIONS, cutoff=0.85):
            raise ConfigError("a known option of generate", repr(name), hint)


def prediction_ids(prediction: Any, tokenizer: Any, model: Any) -> NDArray[np.int32] | None:
    """(m,) int32 ids of an expected text, given as text, ids or a tensor; None without one."""
    if prediction is None:
        return None
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ConfigError(
                "a tokenizer to encode the prediction", "none", "Pass tokenizer= to accelerate, or give token ids."
            )
        prediction = tokenizer(prediction, add_special_tokens=False)["input_ids"]
    return known_ids(prediction, "prediction", model)


def known_ids(given: Any, name: str, model: Any) -> NDArray[np.int32]:
    """(n,) int32 token ids, given as a sequence or a tensor.

    Raises
    ------
    ConfigError
        They are no numbers, or the model has no such tokens.
    """
    try:
        ids = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given)
        if not ids.ndim:
            raise TypeError("one number alone")
        whole = (ids := ids.ravel()).astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"token ids as {name}", repr(given)[:60], "Give one list of whole numbers.") from None
    known = embedded_tokens(model)
    if len(ids) and not ((whole == ids).all() and whole.min() >= 0 and whole.max() < known):
        wrong = ids[(whole != ids) | (whole < 0) | (whole >= known)][0]
        raise ConfigError(
            f"{name} of token ids 0 … {known - 1}, which the model has",
            str(wrong),
            "Encode it with the model's own tokenizer.",
        )
    return whole.astype(np.int32)


def row_predictions(prediction: Any, tokenizer: Any, rows: int, model: Any) -> list[NDArray[np.int32] | None]:
    """Return the prediction of each row: a list has one for each, anything else is that of all rows."""
    if rows > 1 and isinstance(prediction, (list, tuple)) and not all(isinstance(entry, int) for entry in prediction):
        if len(prediction) != rows:
            raise ConfigError(
                f"a prediction for each of {rows} rows", str(len(prediction)), "Use None for a row without."
            )
        return [prediction_ids(entry, tokenizer, model) for entry in prediction]
    return [prediction_ids(prediction, tokenizer, model)] * rows


def as_inputs(inputs: Any, tokenizer: Any, model: Any) -> dict[str, Any]:
    """Prompt as arguments of `generate`."""
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ConfigError("a tokenizer to encode the prompt", "none", "Pass tokenizer=, or give token ids.")
        if not inputs:
            raise PromptError("a prompt of at least one character", "an empty one", "Give some text to continue.")
        inputs = tokenizer(inputs, return_tensors="pt", return_token_type_ids=False)
    if not hasattr(inputs, "items"):
        inputs = {"input_ids": inputs}
    device = input_device(model)
    return {name: _as_rows(value, device) if name in _PER_TOKEN else value for name, value in inputs.items()}


def _as_rows(value: Any, device: torch.device) -> torch.Tensor:
    """(rows, L) on a device, of a tensor, an array or lists; one row may come without its own axis."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        raise ConfigError(
            "rows of one length", "rows of different length, or no numbers", "Let the tokenizer pad, or give one row."
        ) from None
    if not tensor.ndim:
        raise ConfigError("text or token ids as prompt", repr(value)[:60], "Give a text, or one row of ids.")
    return (tensor if tensor.ndim > 1 else tensor[None]).to(device)


def prepare_call(model: Any, arguments: dict[str, Any], why_single: str = TOO_MANY) -> Prepared | str:
    """Return the prepared call, or why the original `generate` decodes it; other parameters as of `prepare`."""
    if why_own := own_generate(model):
        return why_own
    if model.speculation.engine.is_stepping:
        return "it is asked for in the middle of another generation"
    try:
        return prepare(model, original(model), model.speculation.interface, arguments, why_single)
    except DelegatedCall as why:
        return str(why)


def own_generate(model: Any) -> str:
    """Why a model's `generate` is not that of transformers: its class overrides it; empty where it does not."""
    kind = type(model)
    if kind._sample is not GenerationMixin._sample:
        return f"{kind.__name__} has a way of decoding of its own"
    return "" if kind.generate is GenerationMixin.generate else f"{kind.__name__} has a generate of its own"


def speculation_of(model: Any) -> Speculation:
    """Return the `Speculation` of an accelerated model.

    Raises
    ------
    ConfigError
        The model is not accelerated.
    """
    speculation = getattr(model, "speculation", None)
    if not isinstance(speculation, Speculation):
        raise ConfigError("an accelerated model", type(model).__name__, "Call retrieve_spec.accelerate(model) first.")
    return speculation


def original(model: Any) -> Any:
    """Return `generate` as it was before the model was accelerated."""
    original = model.__dict__.get(BEFORE)
    return original if original is not None else types.MethodType(type(model).generate, model)


Generate = Callable[..., Any]

_FIXED = ("static", "sliding_window", "hybrid_chunked")
"""Caches of a fixed size, by the names that calls give them."""


def prepare(
    model: Any, generate: Generate, interface: ModelInterface, arguments: dict[str, Any], why_single: str = TOO_MANY
) -> Prepared:
    """Let the original `generate` prepare a call.

    Parameters
    ----------
    model, generate
        The model and its original `generate`.
    arguments
        The call's arguments by name; `streamer` and `tokenizer` are left to the caller.
    why_single
        Why a call of several rows is left to `generate`; empty where it is not.

    Raises
    ------
    DelegatedCall
        The original `generate` has to decode the call, too.
    PromptError
        The prompt has no tokens.
    UnknownTokenError
        The prompt has a token that the model does not embed.
    """
    arguments = dict(arguments)
    if _is_all_text(model, arguments):
        del arguments["mm_token_type_ids"]
    if _is_fixed_and_unseen(model, arguments):
        arguments["cache_implementation"] = "dynamic"
    check_arguments_decoded(model, arguments, why_single)
    tokenizer = arguments.pop("tokenizer", None)
    streamer = arguments.pop("streamer", None)
    stop_strings = setting(model, arguments, "stop_strings")
    if stop_strings is not None and tokenizer is not None:
        arguments["stop_strings"] = None
        arguments["stopping_criteria"] = StoppingCriteriaList(
            [*(arguments.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stop_strings)]
        )
    captured = generate(**{**arguments, "custom_generate": capture})
    if streamer is not None and len(captured.input_ids) > 1:
        raise DelegatedCall("a streamer gets tokens of several rows")
    return from_captured(model, captured, interface, arguments, why_single)


def from_captured(
    model: Any, captured: Captured, interface: ModelInterface, arguments: dict[str, Any], why_single: str
) -> Prepared:
    """Return what the sequences of a call start from, given the call as `generate` prepared it.

    Raises
    ------
    DelegatedCall
        The original `generate` has to decode it.
    """
    given_ids = _stand_in_for_embeddings(captured)
    call = PreparedCall(model, captured, interface, past_length(captured.model_kwargs), why_single)
    if reason := why_prepared_delegated(call):
        raise DelegatedCall(reason)
    callers_cache = any(arguments.get(name) is not None for name in CACHE_NAMES)
    config, past, holds = captured.generation_config, call.past, call.holds_past
    inputs = VerifierInputs(
        input_ids=captured.input_ids,
        model_kwargs=captured.model_kwargs,
        past_length=past,
        holds_past=holds,
        max_length=math.ceil(config.max_length) + captured.added + (0 if holds else past),
        returns_cache=callers_cache or bool(config.return_dict_in_generate),  # the caller gave it, or gets it
    )
    prepared = Prepared(inputs, captured.logits_processor, captured.stopping_criteria, config, callers_cache)
    if given_ids is not None:
        prepared.ids = given_ids
        prepared.context_ids = given_ids[0].cpu().numpy().astype(np.int32)
    if interface.has_encoder:
        prepared.context_ids = _encoded_ids(model, arguments, captured.input_ids)
    if not extras_of(prepared, interface.cache_name):  # else placeholders of images may have no embedding
        check_embedded(model, prepared.inputs)
    if len(call.ids) > 1 and (reason := why_batch_delegated(Batch(prepared, interface))):
        raise DelegatedCall(reason)
    return prepared


def _is_all_text(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether the token types of a prompt mark all of it as text; processors of vision models always give them."""
    types, ids = arguments.get("mm_token_type_ids"), prompt_of(arguments)
    if not isinstance(types, torch.Tensor) or types.shape != getattr(ids, "shape", None) or bool(types.any()):
        return False
    return "mm_token_type_ids" in inspect.signature(model.forward).parameters


def _is_fixed_and_unseen(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call asks for a cache of fixed size that it does not return, where nothing is compiled for it.

    Models that transformers does not mark as fit for such a cache may attend to other keys with it (GPT-Neo's windows).
    """
    if setting(model, arguments, "cache_implementation") not in _FIXED or model.device.type != "cpu":
        return False
    if not getattr(model, "_can_compile_fullgraph", False):
        return False
    others = ("return_dict_in_generate", "max_cache_len", "compile_config")
    return not any(setting(model, arguments, name) for name in others)


def is_one_row(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call asks for one row, as far as its arguments tell."""
    ids = prompt_of(arguments)
    one = isinstance(ids, torch.Tensor) and ids.ndim == 2 and len(ids) == 1
    return one and (setting(model, arguments, "num_return_sequences") or 1) == 1


def check_arguments_decoded(model: Any, arguments: dict[str, Any], why_single: str) -> None:
    """Raise `DelegatedCall` where the arguments of a call tell that it is not decoded here.

    Raises
    ------
    DelegatedCall
        The call is left to the original `generate`.
    PromptError
        The prompt has no tokens.
    """
    if reason := why_call_delegated(Call(model, arguments, why_single)):
        raise DelegatedCall(reason)
    ids = prompt_of(arguments)
    if isinstance(ids, torch.Tensor) and ids.shape[1] == 0:
        raise PromptError("a prompt of at least one token", "an empty one", "Give some text to continue.")


def _stand_in_for_embeddings(captured: Captured) -> torch.Tensor | None:
    """Give a prompt of embeddings a token id of 0 for each position; return the ids it had, None if nothing changed."""
    embeds = captured.model_kwargs.get("inputs_embeds")
    ids = captured.input_ids
    if embeds is None or ids.ndim != 2 or ids.shape[1] == embeds.shape[1]:
        return None
    captured.input_ids = ids.new_zeros(embeds.shape[:2])
    captured.added = embeds.shape[1] - ids.shape[1]
    return ids


def _encoded_ids(model: Any, arguments: dict[str, Any], ids: torch.Tensor) -> NDArray[np.int32] | None:
    """Return the encoder's input followed by the decoder's first tokens, where both have one vocabulary."""
    given = prompt_of(arguments)
    if model.main_input_name != "input_ids" or not isinstance(given, torch.Tensor) or given.ndim != 2:
        return None
    try:
        read, written = model.get_encoder().get_input_embeddings(), model.get_decoder().get_input_embeddings()
    except (AttributeError, NotImplementedError):  # parts that do not say
        return None
    if getattr(read, "num_embeddings", None) != getattr(written, "num_embeddings", -1):
        return None
    both: NDArray[np.int32] = torch.cat([given[0], ids[0].to(given.device)]).cpu().numpy().astype(np.int32)
    return both


def check_embedded(model: Any, inputs: VerifierInputs) -> None:
    """Refuse a prompt that has, among the tokens still to be read, one without an embedding."""
    unread = inputs.input_ids[:, inputs.past_length if inputs.holds_past else 0 :]
    known = embedded_tokens(model)
    least, most = (int(end) for end in unread.aminmax())
    if least < 0 or most >= known:
        raise UnknownTokenError(
            f"token ids below {known}, as many as the model embeds",
            str(least if least < 0 else most),
            "Encode the prompt with the model's own tokenizer.",
        )
