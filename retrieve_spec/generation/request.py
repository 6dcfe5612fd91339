"""Requests: what the original `generate` prepares for decoding, unless the call is left to it (`DelegatedCall`).

The original `generate` prepares: it merges generation configs, builds masks, positions, cache, processors and stopping
criteria, then hands them to our callable (`custom_generate`), which only takes them down.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.engine.joining import DelegatedCall, Prepared, padding_in_front
from retrieve_spec.errors import ConfigError, PromptError, UnknownTokenError, nearest
from retrieve_spec.model_layers import embedded_tokens
from retrieve_spec.sampling.guides import GrammarProcessor
from retrieve_spec.verify.cache import decoder_cache, seq_length
from retrieve_spec.verify.interface import ModelInterface, input_device
from retrieve_spec.verify.pass_inputs import TOKEN_TYPES
from retrieve_spec.verify.steps import Captured, capture
from retrieve_spec.verify.tensor_parallel import why_in_step
from retrieve_spec.verify.verifier import CACHE_NAMES, OF_TEXT, VerifierInputs, says_nothing

_ROW_BY_ROW = (
    hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor, hf.NoBadWordsLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensLogitsProcessor, hf.SuppressTokensAtBeginLogitsProcessor, hf.ForcedEOSTokenLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor, hf.ExponentialDecayLengthPenalty, hf.InfNanRemoveLogitsProcessor,
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.TopHLogitsWarper, hf.LogitNormalization,
    hf.PrefixConstrainedLogitsProcessor, GrammarProcessor,
)  # fmt: skip
"""Processors that say the same of a row alone as in company; others may count rows or calls."""
_STOPS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, MaxTimeCriteria)


def extras_of(prepared: Prepared, cache_name: str) -> list[str]:
    """What a batch is given besides text; what is whose only the model knows."""
    kwargs = prepared.inputs.model_kwargs
    parts = {name: value for name, value in kwargs.items() if isinstance(value, (torch.Tensor, dict))}
    return [name for name, value in parts.items() if name not in OF_TEXT | {cache_name} and not says_nothing(value)]


def check_batch(prepared: Prepared, cache_name: str) -> None:
    """Look whether the rows of a prepared batch can be decoded together.

    Raises
    ------
    DelegatedCall
        They cannot.
    """
    kwargs, criteria = prepared.inputs.model_kwargs, list(prepared.criteria)
    if extras := extras_of(prepared, cache_name):
        raise DelegatedCall(f"a batch is given {', '.join(extras)}")
    if prepared.callers_cache:
        raise DelegatedCall("a batch goes on from a cache that was given")
    if (positions := kwargs.get("position_ids")) is not None and positions.shape[-2] != len(prepared.inputs.input_ids):
        raise DelegatedCall("a batch brings its own positions")
    if type(kwargs.get(cache_name)) is not DynamicCache or kwargs[cache_name].offloading:
        raise DelegatedCall(f"a batch is kept in a {type(kwargs.get(cache_name)).__name__}")
    others = [p for p in prepared.processors if type(p) not in _ROW_BY_ROW]
    others += [c for c in criteria if type(c) not in _STOPS]
    if others:
        kind = type(others[0]).__name__
        raise DelegatedCall(f"a {kind} may tell the rows of a batch apart: generate_many calls it for each request")
    kinds = {type(criterion) for criterion in criteria}
    if kinds & {StopStringCriteria, MaxTimeCriteria} and EosTokenCriteria not in kinds:
        raise DelegatedCall("rows of a batch go on behind where they stop: there is no end-of-text token")
    if padding_in_front(prepared.inputs) is None:
        raise DelegatedCall("a row of a batch has no text")


_ROWS = "a prompt of token ids, a tensor of shape (rows, tokens)"
_ELSEWHERE = frozenset(["datastores", "drafter", "config", *(field.name for field in fields(SpeculationConfig))])
"""Options of `accelerate`."""
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def check_arguments(model: Any, arguments: dict[str, Any], own: Collection[str]) -> None:
    """Refuse what is no prompt, options of `accelerate`, and mistyped ones of our own (`own`), before anything runs.

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
    for name in arguments.keys() - own:
        if name in _ELSEWHERE and "custom_generate" not in arguments:  # which may be ours, and takes some of them
            raise ConfigError(
                f"{name} as an option of accelerate", "it in generate", f"Call accelerate(model, {name}=…)."
            )
        if hint := nearest(name, own, cutoff=0.85):
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
    """Predictions of a batch's rows: a list has one for every row, anything else is that of all rows."""
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
    return {name: _as_rows(value, model) if name in _PER_TOKEN else value for name, value in inputs.items()}


def _as_rows(value: Any, model: Any) -> torch.Tensor:
    """(rows, L) on the model's device, of a tensor, an array or lists; one row may come without its own axis."""
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        raise ConfigError(
            "rows of one length", "rows of different length, or no numbers", "Let the tokenizer pad, or give one row."
        ) from None
    if not tensor.ndim:
        raise ConfigError("text or token ids as prompt", repr(value)[:60], "Give a text, or one row of ids.")
    return (tensor if tensor.ndim > 1 else tensor[None]).to(input_device(model))


Generate = Callable[..., Any]

_OTHER_MODES: dict[str, str] = {
    "assistant_model": "an assistant model drafts",
    "custom_generate": "custom_generate decodes",
    "synced_gpus": "GPUs generate in step (synced_gpus)",
    "negative_prompt_ids": "a negative prompt needs a second model call per token",
}
_OTHER_SETTINGS: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "beams are searched"),
    "prompt_lookup_num_tokens": (None, "transformers' prompt lookup drafts"),
    "penalty_alpha": (None, "contrastive search decodes"),
    "dola_layers": (None, "DoLa decodes"),
    "use_cache": (True, "the cache is switched off"),
    "cache_implementation": (None, "a cache implementation is asked for"),
    "output_attentions": (False, "attentions are returned"),
    "output_hidden_states": (False, "hidden states are returned"),
    "prefill_chunk_size": (None, "the prompt is fed in chunks by generate"),
    "token_healing": (False, "the prompt's last token is healed"),
    "guidance_scale": (None, "classifier-free guidance needs a second model call per token"),
    "constraints": (None, "constrained beams are searched"),
    "force_words_ids": (None, "constrained beams are searched"),
    "low_memory": (None, "contrastive search decodes"),
}
_TOO_MANY = "batches of more than one row are decoded by generate"
_NEUTRAL: dict[str, tuple[Any, ...]] = {"cache_implementation": ("dynamic", "hybrid"), "guidance_scale": (1, 1.0)}
_WHOLE = (torch.int32, torch.int64)
_FIXED = ("static", "sliding_window", "hybrid_chunked")
"""Caches of a fixed size, by the names that calls give them."""


def prepare(
    model: Any, generate: Generate, interface: ModelInterface, arguments: dict[str, Any], alone: str = _TOO_MANY
) -> Prepared:
    """Let the original `generate` prepare a call.

    Parameters
    ----------
    model, generate
        The model and its original `generate`.
    arguments
        The call's arguments by name; `streamer` and `tokenizer` are left to the caller.
    alone
        Why more than one row are left to `generate`; empty when they are not.

    Raises
    ------
    DelegatedCall
        It should also decode it.
    PromptError
        The prompt has no tokens.
    UnknownTokenError
        It has one that the model does not embed.
    """
    arguments = dict(arguments)
    if _is_all_text(model, arguments):
        del arguments["mm_token_type_ids"]
    if _is_fixed_and_unseen(model, arguments):
        arguments["cache_implementation"] = "dynamic"
    check_arguments_decoded(model, arguments, alone)
    tokenizer = arguments.pop("tokenizer", None)
    streamer = arguments.pop("streamer", None)
    stop_strings = setting(model, arguments, "stop_strings")
    if stop_strings is not None and tokenizer is not None:
        arguments["stop_strings"] = None
        arguments["stopping_criteria"] = StoppingCriteriaList(
            [*(arguments.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stop_strings)]
        )
    captured: Captured = generate(**{**arguments, "custom_generate": capture})
    if streamer is not None and len(captured.input_ids) > 1:
        raise DelegatedCall("a streamer gets tokens of several rows")
    return from_captured(model, captured, interface, arguments, alone)


def from_captured(
    model: Any, captured: Captured, interface: ModelInterface, arguments: dict[str, Any], alone: str
) -> Prepared:
    """What sequences of a call start from, given what `generate` prepared of it.

    Raises
    ------
    DelegatedCall
        It should decode it.
    """
    given_ids = _stand_in_for_embeddings(captured)
    if reason := _reason_from_captured(model, captured, interface, alone):
        raise DelegatedCall(reason)
    callers_cache = any(arguments.get(name) is not None for name in CACHE_NAMES)
    config, past, holds = (
        captured.generation_config,
        _past_length(captured.model_kwargs),
        _holds_past(captured, interface),
    )
    inputs = VerifierInputs(
        input_ids=captured.input_ids,
        model_kwargs=captured.model_kwargs,
        past_length=past,
        holds_past=holds,
        max_length=math.ceil(config.max_length) + captured.added + (0 if holds else past),
        returns_cache=callers_cache or bool(config.return_dict_in_generate),  # it is seen by who gave it, or in those
    )
    prepared = Prepared(inputs, captured.logits_processor, captured.stopping_criteria, config, callers_cache)
    if not extras_of(prepared, interface.cache_name):  # else places of images may have tokens that nobody embeds
        _check_embedded(model, prepared.inputs)
    if given_ids is not None:
        prepared.ids = given_ids
        prepared.context_ids = given_ids[0].cpu().numpy().astype(np.int32)
    if interface.has_encoder:
        prepared.context_ids = _encoded_ids(model, arguments, captured.input_ids)
    if len(prepared.inputs.input_ids) > 1:
        check_batch(prepared, interface.cache_name)
        positions = captured.model_kwargs.get(interface.positions_name)
        if positions is not None and positions.ndim != 2 and bool((positions[..., -1] != positions[:1, ..., -1]).any()):
            raise DelegatedCall("positions of a batch differ from axis to axis")
    return prepared


def _is_all_text(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether token types say that all of a prompt is text, as processors of vision models always say."""
    types, ids = arguments.get("mm_token_type_ids"), prompt_of(arguments)
    if not isinstance(types, torch.Tensor) or types.shape != getattr(ids, "shape", None) or bool(types.any()):
        return False
    return "mm_token_type_ids" in inspect.signature(model.forward).parameters


def _is_fixed_and_unseen(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call asks for a cache of a fixed size that it does not hand back, where nothing is compiled for one.

    Models that transformers does not claim to be fit for one may see other keys in it (GPT-Neo's windows).
    """
    if setting(model, arguments, "cache_implementation") not in _FIXED or model.device.type != "cpu":
        return False
    if not getattr(model, "_can_compile_fullgraph", False):
        return False
    others = ("return_dict_in_generate", "max_cache_len", "compile_config")
    return not any(setting(model, arguments, name) for name in others)


def setting(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """Value of a generation setting: argument, then the config passed, then the model's own."""
    if arguments.get(name) is not None:
        return arguments[name]
    for config in (arguments.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def prompt_of(arguments: dict[str, Any]) -> Any:
    """What a call gives as its prompt."""
    return arguments.get("input_ids") if arguments.get("inputs") is None else arguments["inputs"]


def is_one_row(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call asks for one row, as far as its arguments tell."""
    ids = prompt_of(arguments)
    one = isinstance(ids, torch.Tensor) and ids.ndim == 2 and len(ids) == 1
    return one and (setting(model, arguments, "num_return_sequences") or 1) == 1


def check_arguments_decoded(model: Any, arguments: dict[str, Any], alone: str) -> None:
    """Look whether a call asks for what is decoded here, as far as its arguments tell.

    Raises
    ------
    DelegatedCall
        It does not.
    PromptError
        The prompt has no tokens.
    """
    if why := why_in_step(model):
        raise DelegatedCall(why)
    preparing = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", model)
    if preparing is not model:
        raise DelegatedCall(f"a {type(preparing).__name__} prepares the model's inputs")
    for name, reason in _OTHER_MODES.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise DelegatedCall(reason)
    for name, (neutral, reason) in _OTHER_SETTINGS.items():
        value = setting(model, arguments, name)
        if value is not None and value != neutral and value not in _NEUTRAL.get(name, ()):
            raise DelegatedCall(reason)
    if alone and (setting(model, arguments, "num_return_sequences") or 1) > 1:
        raise DelegatedCall(f"several sequences are returned: {alone}")
    ids = prompt_of(arguments)
    if arguments.get("inputs") is not None and arguments.get("input_ids") is not None:
        raise DelegatedCall("the prompt is given twice")
    if isinstance(ids, torch.Tensor):
        if ids.ndim != 2:
            raise DelegatedCall("the prompt is not a batch of token ids")
        if ids.shape[0] > 1 and alone:
            raise DelegatedCall(alone)
        if ids.shape[1] == 0:
            raise PromptError("a prompt of at least one token", "an empty one", "Give some text to continue.")


def _stand_in_for_embeddings(captured: Captured) -> torch.Tensor | None:
    """Give a prompt of embeddings as many tokens as it has places, 0 everywhere; the ids there were, if it changed."""
    embeds = captured.model_kwargs.get("inputs_embeds")
    ids = captured.input_ids
    if embeds is None or ids.ndim != 2 or ids.shape[1] == embeds.shape[1]:
        return None
    captured.input_ids = ids.new_zeros(embeds.shape[:2])
    captured.added = embeds.shape[1] - ids.shape[1]
    return ids


def _encoded_ids(model: Any, arguments: dict[str, Any], ids: torch.Tensor) -> NDArray[np.int32] | None:
    """What an encoder reads and what the decoder begins with, where both have one vocabulary."""
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


def _reason_from_captured(model: Any, captured: Captured, interface: ModelInterface, alone: str) -> str:
    """Why a prepared call must be delegated."""
    kwargs = captured.model_kwargs
    if captured.input_ids.ndim != 2 or (captured.input_ids.shape[0] > 1 and alone):
        return alone or _TOO_MANY
    if why := _why_not_shaped(model, captured, interface):
        return why
    checkpoints = model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    if kwargs.get("use_cache") is False or checkpoints:
        return "the cache is switched off"
    takes_embeddings = not (_past_length(kwargs) or interface.has_encoder or interface.rope_rescans)
    if kwargs.get("inputs_embeds") is not None and not takes_embeddings:
        return "the prompt is given as embeddings"
    return _reason_from_cache(captured, interface)


def _reason_from_cache(captured: Captured, interface: ModelInterface) -> str:
    """Why a prepared call must be delegated because of its cache, or of how long its text may become."""
    kwargs = captured.model_kwargs
    if kwargs.get(interface.mask_name) is not None and _slides_in_its_own_way(kwargs.get(interface.cache_name)):
        return "the window of the model's cache slides over the padding"
    length, past, positions = captured.input_ids.shape[1], _past_length(kwargs), kwargs.get(interface.positions_name)
    if past and _holds_past(captured, interface) and past >= length:
        return "the cache already holds the whole prompt"
    reached = length if positions is None else min(length, int(positions.flatten()[-1]) + 1)  # without padding
    begins = min(past or reached, reached)  # a cache of no more tokens than that is read anew, however long the prompt
    if interface.rope_rescans and begins <= interface.rope_switch < captured.generation_config.max_length:
        return f"the model recomputes its cache at {interface.rope_switch} tokens"
    return ""


def _why_not_shaped(model: Any, captured: Captured, interface: ModelInterface) -> str:
    """Why `generate` is to say what it makes of a call: what it was given has no place for each token of the prompt.

    It refuses most of such calls, and answers some by the rules of one model's forward.
    """
    ids, kwargs = captured.input_ids, captured.model_kwargs
    rows, length = ids.shape
    past = _past_length(kwargs)
    tokens = length if _holds_past(captured, interface) else length + past
    mask, positions = kwargs.get(interface.mask_name), kwargs.get(interface.positions_name)
    if ids.dtype not in _WHOLE:
        return f"token ids are {ids.dtype}"
    covered = getattr(captured.generation_config, "_mask_length", tokens) if mask is None else mask.shape[-1]
    if covered != tokens or (mask is not None and (len(mask) != rows or mask.device != ids.device)):
        return "the attention mask is not that of the prompt"
    if any(len(kwargs[name]) != rows for name in TOKEN_TYPES if isinstance(kwargs.get(name), torch.Tensor)):
        return "token types are not those of the prompt"
    if past and len(set(_held(kwargs[interface.cache_name]))) > 1:
        return "layers of the cache hold different texts"
    if positions is None:
        return ""
    axes = type(model)._prepare_position_ids_for_generation is not GenerationMixin._prepare_position_ids_for_generation
    fits = positions.ndim == 2 or (positions.ndim == 3 and axes)
    fits = fits and positions.shape[-1] in (tokens, tokens - past) and positions.shape[-2] in (1, rows)
    if not fits or positions.dtype not in _WHOLE or positions.device != ids.device:
        return "positions are not those of the prompt"
    return ""


def _held(cache: Any) -> Iterator[int]:
    """Tokens that each layer of a cache holds, of those that hold any."""
    for layer in decoder_cache(cache).layers:
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            yield layer.get_seq_length()


def _slides_in_its_own_way(cache: Any) -> bool:
    """Whether a cache has layers of a model's own kind that slide a window over the rows and over their mask.

    There each single step sees other padding than the one before it; a pass over several tokens sees one.
    """
    layers = getattr(decoder_cache(cache), "layers", ())
    slide = [type(layer) for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    return any(kind is not DynamicSlidingWindowLayer for kind in slide)


def _check_embedded(model: Any, inputs: VerifierInputs) -> None:
    """Refuse a prompt with tokens that the model has no vectors for, of those that it is to read."""
    unread = inputs.input_ids[:, inputs.past_length if inputs.holds_past else 0 :]
    known = embedded_tokens(model)
    least, most = (int(end) for end in unread.aminmax())
    if least < 0 or most >= known:
        raise UnknownTokenError(
            f"token ids below {known}, as many as the model embeds",
            str(least if least < 0 else most),
            "Encode the prompt with the model's own tokenizer.",
        )


def _past_length(kwargs: dict[str, Any]) -> int:
    caches = [kwargs[name] for name in ("past_key_values", "cache") if kwargs.get(name) is not None]
    return seq_length(caches[0]) if caches else 0


def _holds_past(captured: Captured, interface: ModelInterface) -> bool:
    """Whether `input_ids` includes the cached tokens, by the rule of plain `generate`: it is as long as the mask."""
    mask = captured.model_kwargs.get(interface.mask_name)
    covered = mask.shape[1] if mask is not None else getattr(captured.generation_config, "_mask_length", -1)
    return bool(covered == captured.input_ids.shape[1])
