"""A call of `generate` in, either everything one decoding of ours needs or the reason to leave it to the original out.

The original `generate` prepares: it merges generation configs, builds masks, positions, cache, processors and stopping
criteria, then hands them to our callable (`custom_generate`), which only takes them down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from retrieve_spec.errors import PromptError
from retrieve_spec.verify.interface import ModelInterface, seq_length
from retrieve_spec.verify.tensor_parallel import why_in_step
from retrieve_spec.verify.verifier import VerifierInputs

Generate = Callable[..., Any]

_OTHER_MODES: dict[str, str] = {
    "assistant_model": "an assistant model drafts",
    "custom_generate": "custom_generate decodes",
    "synced_gpus": "GPUs generate in step (synced_gpus)",
    "negative_prompt_ids": "a negative prompt needs a second model call per token",
    "inputs_embeds": "the prompt is given as embeddings",
    "token_type_ids": "token types are given per token",
    "mm_token_type_ids": "token types are given per token",
}
_OTHER_SETTINGS: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "beams are searched"),
    "num_return_sequences": (1, "several sequences are returned"),
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
_NEUTRAL: dict[str, tuple[Any, ...]] = {"cache_implementation": ("dynamic", "hybrid"), "guidance_scale": (1, 1.0)}


@dataclass(slots=True)
class Prepared:
    """What `generate` prepared for decoding.

    Attributes
    ----------
    inputs
        Where the verifier starts from.
    processors
        Logits processors in order, warpers included when sampling.
    criteria
        Stopping criteria in order.
    config
        The merged generation config.
    """

    inputs: VerifierInputs
    processors: Any
    criteria: Any
    config: Any


@dataclass(slots=True)
class _Captured:
    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]


def _capture(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> _Captured:
    """Stand in for a decoding method: take down what `generate` prepared."""
    return _Captured(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)


def prepare(
    model: Any, generate: Generate, interface: ModelInterface, arguments: dict[str, Any], max_rows: int = 1
) -> Prepared | str:
    """Let the original `generate` prepare a call; return why it should also decode it where ours cannot.

    Parameters
    ----------
    model, generate
        The model and its original `generate`.
    arguments
        The call's arguments by name; `streamer` and `tokenizer` are left to the caller.
    max_rows
        Rows of a batch that the caller decodes at most.

    Raises
    ------
    PromptError
        The prompt has no tokens.
    """
    reason = _reason_from_arguments(model, arguments, max_rows)
    if reason:
        return reason
    arguments = dict(arguments)
    tokenizer = arguments.pop("tokenizer", None)
    arguments.pop("streamer", None)
    stop_strings = _setting(model, arguments, "stop_strings")
    if stop_strings is not None and tokenizer is not None:
        arguments["stop_strings"] = None
        arguments["stopping_criteria"] = StoppingCriteriaList(
            [*(arguments.get("stopping_criteria") or []), StopStringCriteria(tokenizer, stop_strings)]
        )
    captured = generate(**{**arguments, "custom_generate": _capture})
    reason = _reason_from_captured(captured, interface, max_rows)
    return reason or _as_prepared(captured, arguments.get(interface.cache_name) is not None)


def _setting(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """Value of a generation setting: argument, then the config passed, then the model's own."""
    if arguments.get(name) is not None:
        return arguments[name]
    for config in (arguments.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _reason_from_arguments(model: Any, arguments: dict[str, Any], max_rows: int) -> str:
    """Why a call must be delegated, as far as its arguments tell."""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are not drafted for"
    if why := why_in_step(model):
        return why
    preparing = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", model)
    if preparing is not model:
        return f"a {type(preparing).__name__} prepares the model's inputs"
    for name, reason in _OTHER_MODES.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            return reason
    for name, (neutral, reason) in _OTHER_SETTINGS.items():
        value = _setting(model, arguments, name)
        if value is not None and value != neutral and value not in _NEUTRAL.get(name, ()):
            return reason
    ids = arguments.get("inputs") if arguments.get("inputs") is not None else arguments.get("input_ids")
    if isinstance(ids, torch.Tensor):
        if ids.ndim != 2:
            return "the prompt is not a batch of token ids"
        if ids.shape[0] > max_rows:
            return _too_many(max_rows)
        if ids.shape[1] == 0:
            raise PromptError("a prompt of at least one token", "an empty one", "Give some text to continue.")
    return ""


def _reason_from_captured(captured: _Captured, interface: ModelInterface, max_rows: int) -> str:
    """Why a prepared call must be delegated."""
    kwargs = captured.model_kwargs
    if captured.input_ids.ndim != 2 or captured.input_ids.shape[0] > max_rows:
        return _too_many(max_rows)
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim != 2 and len(captured.input_ids) > 1:
        return "positions of a batch have more than one axis"
    if kwargs.get("use_cache") is False:
        return "the cache is switched off"
    length, past = captured.input_ids.shape[1], _past_length(kwargs)
    if past and _holds_past(captured) and past >= length:
        return "the cache already holds the whole prompt"
    reached = (
        length if positions is None else min(length, int(positions.flatten()[-1]) + 1)
    )  # padding takes no positions
    if interface.rope_rescans and reached <= interface.rope_switch < captured.generation_config.max_length:
        return f"the model recomputes its cache at {interface.rope_switch} tokens"
    return ""


def _too_many(max_rows: int) -> str:
    return f"batches of more than {'one row' if max_rows == 1 else f'{max_rows} rows'} are decoded by generate"


def _past_length(kwargs: dict[str, Any]) -> int:
    cache = kwargs.get("past_key_values")
    return 0 if cache is None else seq_length(cache)


def _holds_past(captured: _Captured) -> bool:
    """Whether `input_ids` includes the cached tokens, by the rule of plain `generate`: it is as long as the mask."""
    mask = captured.model_kwargs.get("attention_mask")
    covered = mask.shape[1] if mask is not None else getattr(captured.generation_config, "_mask_length", -1)
    return bool(covered == captured.input_ids.shape[1])


def _as_prepared(captured: _Captured, given_cache: bool) -> Prepared:
    """What a decoding of ours starts from; the cache is seen by who gave it, or in what is returned."""
    past = _past_length(captured.model_kwargs)
    holds = _holds_past(captured)
    inputs = VerifierInputs(
        input_ids=captured.input_ids,
        model_kwargs=captured.model_kwargs,
        past_length=past,
        holds_past=holds,
        max_length=captured.generation_config.max_length + (0 if holds else past),
        returns_cache=given_cache or bool(captured.generation_config.return_dict_in_generate),
    )
    return Prepared(inputs, captured.logits_processor, captured.stopping_criteria, captured.generation_config)
