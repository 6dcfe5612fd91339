"""Delegation: the calls that are left to the original `generate`, as three tables of cases.

A call is examined as it was made, then as the original `generate` prepared it, then, where it has several rows, as a
batch. A case returns why the call is left to the original, or an empty text where it does not apply; the first one that
applies decides. What is decoded here although it is rare (weights spread over processes, encoders, prompts of
embeddings, a caller's cache) is a property of the sequence that is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from retrieve_spec.engine.joining import Prepared, padding_in_front
from retrieve_spec.sampling.guides import GrammarProcessor
from retrieve_spec.verify.cache import decoder_cache, seq_length
from retrieve_spec.verify.interface import ModelInterface
from retrieve_spec.verify.pass_inputs import TOKEN_TYPES
from retrieve_spec.verify.steps import Captured
from retrieve_spec.verify.tensor_parallel import why_in_step
from retrieve_spec.verify.verifier import OF_TEXT, is_absent

_Examined = TypeVar("_Examined")


def _first_reason(cases: Sequence[Callable[[_Examined], str]], examined: _Examined) -> str:
    """The reason of the first case that applies; empty where none does."""
    return next(filter(None, (case(examined) for case in cases)), "")


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


TOO_MANY = "batches of more than one row are decoded by generate"


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was made.

    Attributes
    ----------
    why_single
        Why a call of several rows is left to the original `generate`; empty where it is not.
    """

    model: Any
    arguments: dict[str, Any]
    why_single: str

    @property
    def ids(self) -> Any:
        """The prompt, whatever it is."""
        return prompt_of(self.arguments)

    def setting(self, name: str) -> Any:
        """Value of a generation setting."""
        return setting(self.model, self.arguments, name)


_MODES: dict[str, str] = {
    "assistant_model": "an assistant model drafts",
    "custom_generate": "custom_generate decodes",
    "synced_gpus": "GPUs generate in step (synced_gpus)",
    "negative_prompt_ids": "a negative prompt needs a second model call per token",
}
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "beams are searched"),
    "prompt_lookup_num_tokens": ((), "transformers' prompt lookup drafts"),
    "penalty_alpha": ((), "contrastive search decodes"),
    "dola_layers": ((), "DoLa decodes"),
    "use_cache": ((True,), "the cache is switched off"),
    "cache_implementation": (("dynamic", "hybrid"), "a cache implementation is asked for"),
    "output_attentions": ((False,), "attentions are returned"),
    "output_hidden_states": ((False,), "hidden states are returned"),
    "prefill_chunk_size": ((), "the prompt is fed in chunks by generate"),
    "token_healing": ((False,), "the prompt's last token is healed"),
    "guidance_scale": ((1, 1.0), "classifier-free guidance needs a second model call per token"),
    "constraints": ((), "constrained beams are searched"),
    "force_words_ids": ((), "constrained beams are searched"),
    "low_memory": ((), "contrastive search decodes"),
}
"""By setting: the values besides None with which this library decodes, and why any other is left to `generate`."""


def _is_in_step(call: Call) -> str:
    return why_in_step(call.model)


def _has_inputs_prepared_elsewhere(call: Call) -> str:
    preparing = getattr(call.model.__dict__.get("prepare_inputs_for_generation"), "__self__", call.model)
    return "" if preparing is call.model else f"a {type(preparing).__name__} prepares the model's inputs"


def _decodes_in_another_mode(call: Call) -> str:
    for name, reason in _MODES.items():
        value = call.arguments.get(name)
        if value is not None and value is not False:
            return reason
    return ""


def _has_another_setting(call: Call) -> str:
    for name, (here, reason) in SETTINGS.items():
        value = call.setting(name)
        if value is not None and value not in here:
            return reason
    return ""


def _returns_several(call: Call) -> str:
    several = call.why_single and (call.setting("num_return_sequences") or 1) > 1
    return f"several sequences are returned: {call.why_single}" if several else ""


def _has_two_prompts(call: Call) -> str:
    twice = call.arguments.get("inputs") is not None and call.arguments.get("input_ids") is not None
    return "the prompt is given twice" if twice else ""


def _is_no_batch_of_ids(call: Call) -> str:
    odd = isinstance(call.ids, torch.Tensor) and call.ids.ndim != 2
    return "the prompt is not a batch of token ids" if odd else ""


def _has_rows(call: Call) -> str:
    return call.why_single if isinstance(call.ids, torch.Tensor) and len(call.ids) > 1 else ""


_CALLS = (
    _is_in_step, _has_inputs_prepared_elsewhere, _decodes_in_another_mode, _has_another_setting, _returns_several,
    _has_two_prompts, _is_no_batch_of_ids, _has_rows,
)  # fmt: skip


def why_call_delegated(call: Call) -> str:
    """Why the original `generate` decodes a call, as far as its arguments tell; empty where it does not."""
    return _first_reason(_CALLS, call)


def past_length(kwargs: dict[str, Any]) -> int:
    """Tokens that the cache of a prepared call holds."""
    caches = [kwargs[name] for name in ("past_key_values", "cache") if kwargs.get(name) is not None]
    return seq_length(caches[0]) if caches else 0


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call as the original `generate` prepared it, with `past` tokens in its cache; `why_single` as of `Call`."""

    model: Any
    captured: Captured
    interface: ModelInterface
    past: int
    why_single: str

    @property
    def ids(self) -> torch.Tensor:
        """(rows, L) the prompt."""
        return self.captured.input_ids

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of the model's forward."""
        return self.captured.model_kwargs

    @property
    def cache(self) -> Any:
        """The cache, if there is one."""
        return self.kwargs.get(self.interface.cache_name)

    @property
    def mask(self) -> Any:
        """The mask over the text, if there is one."""
        return self.kwargs.get(self.interface.mask_name)

    @property
    def positions(self) -> Any:
        """Positions of the prompt, where the model is given them."""
        return self.kwargs.get(self.interface.positions_name)

    @property
    def holds_past(self) -> bool:
        """Whether `ids` includes the cached tokens, by the rule of plain `generate`: it is as long as the mask."""
        unmasked = getattr(self.captured.generation_config, "_mask_length", -1)
        return bool((unmasked if self.mask is None else self.mask.shape[1]) == self.ids.shape[1])

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, cached ones included."""
        return self.ids.shape[1] + (0 if self.holds_past else self.past)


_WHOLE = (torch.int32, torch.int64)


def _has_prepared_rows(call: PreparedCall) -> str:
    several = call.ids.ndim != 2 or (len(call.ids) > 1 and call.why_single)
    return (call.why_single or TOO_MANY) if several else ""


def _has_other_numbers(call: PreparedCall) -> str:
    return "" if call.ids.dtype in _WHOLE else f"token ids are {call.ids.dtype}"


def _has_another_mask(call: PreparedCall) -> str:
    mask = call.mask
    if mask is None:
        fits = getattr(call.captured.generation_config, "_mask_length", call.tokens) == call.tokens
    else:
        fits = mask.shape[-1] == call.tokens and len(mask) == len(call.ids) and mask.device == call.ids.device
    return "" if fits else "the attention mask is not that of the prompt"


def _has_other_token_types(call: PreparedCall) -> str:
    given = (call.kwargs.get(name) for name in TOKEN_TYPES)
    odd = any(len(types) != len(call.ids) for types in given if isinstance(types, torch.Tensor))
    return "token types are not those of the prompt" if odd else ""


def _has_uneven_layers(call: PreparedCall) -> str:
    uneven = call.past and len(set(_held(call.cache))) > 1
    return "layers of the cache hold different texts" if uneven else ""


def _has_other_positions(call: PreparedCall) -> str:
    positions = call.positions
    if positions is None:
        return ""
    own = type(call.model)._prepare_position_ids_for_generation
    has_axes = own is not GenerationMixin._prepare_position_ids_for_generation
    fits = positions.ndim == 2 or (positions.ndim == 3 and has_axes)
    fits = fits and positions.shape[-1] in (call.tokens, call.tokens - call.past)
    fits = fits and positions.shape[-2] in (1, len(call.ids))
    fits = fits and positions.dtype in _WHOLE and positions.device == call.ids.device
    return "" if fits else "positions are not those of the prompt"


def _has_no_cache(call: PreparedCall) -> str:
    parts = call.model.modules() if call.model.training else ()
    checkpoints = any(getattr(part, "gradient_checkpointing", False) for part in parts)
    return "the cache is switched off" if call.kwargs.get("use_cache") is False or checkpoints else ""


def _has_embeddings(call: PreparedCall) -> str:
    refused = call.past or call.interface.has_encoder or call.interface.rope_rescans
    given = call.kwargs.get("inputs_embeds") is not None
    return "the prompt is given as embeddings" if given and refused else ""


def _slides_over_padding(call: PreparedCall) -> str:
    slides = call.mask is not None and _slides_in_its_own_way(call.cache)
    return "the window of the model's cache slides over the padding" if slides else ""


def _has_nothing_to_read(call: PreparedCall) -> str:
    whole = call.past and call.holds_past and call.past >= call.ids.shape[1]
    return "the cache already holds the whole prompt" if whole else ""


def _crosses_rope_switch(call: PreparedCall) -> str:
    """LongRoPE: `generate` recomputes a cache that was begun with the short factors when the text becomes long."""
    length, switch = call.ids.shape[1], call.interface.rope_switch
    reached = length if call.positions is None else min(length, int(call.positions.flatten()[-1]) + 1)  # no padding
    begins = min(call.past or reached, reached)  # a cache with fewer tokens is read again
    crosses = call.interface.rope_rescans and begins <= switch < call.captured.generation_config.max_length
    return f"the model recomputes its cache at {switch} tokens" if crosses else ""


_PREPARED_CALLS = (
    _has_prepared_rows, _has_other_numbers, _has_another_mask, _has_other_token_types, _has_uneven_layers,
    _has_other_positions, _has_no_cache, _has_embeddings, _slides_over_padding, _has_nothing_to_read,
    _crosses_rope_switch,
)  # fmt: skip
"""`generate` refuses most calls whose parts do not fit the prompt, and answers some by the rules of one model."""


def why_prepared_delegated(call: PreparedCall) -> str:
    """Why the original `generate` decodes a call that it prepared; empty where it does not."""
    return _first_reason(_PREPARED_CALLS, call)


def _held(cache: Any) -> Iterator[int]:
    """Yield the number of tokens in each layer of a cache, empty layers left out."""
    for layer in decoder_cache(cache).layers:
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            yield layer.get_seq_length()


def _slides_in_its_own_way(cache: Any) -> bool:
    """Whether a cache has layers of a model's own kind that slide a window over the rows and over their mask.

    There each single step sees different padding from the step before; all tokens of one pass see the same.
    """
    layers = getattr(decoder_cache(cache), "layers", ())
    slide = [type(layer) for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    return any(kind is not DynamicSlidingWindowLayer for kind in slide)


@dataclass(frozen=True, slots=True)
class Batch:
    """A prepared call of several rows."""

    prepared: Prepared
    interface: ModelInterface

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments of the model's forward."""
        return self.prepared.inputs.model_kwargs


_ROW_BY_ROW = (
    hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor, hf.NoBadWordsLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensLogitsProcessor, hf.SuppressTokensAtBeginLogitsProcessor, hf.ForcedEOSTokenLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor, hf.ExponentialDecayLengthPenalty, hf.InfNanRemoveLogitsProcessor,
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.TopHLogitsWarper, hf.LogitNormalization,
    hf.PrefixConstrainedLogitsProcessor, GrammarProcessor,
)  # fmt: skip
"""Processors that treat a row in a batch as they treat it alone; others may count rows or calls."""
_STOPS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, MaxTimeCriteria)


def extras_of(prepared: Prepared, cache_name: str) -> list[str]:
    """Return the inputs of a batch besides text; only the model knows which row they belong to."""
    kwargs = prepared.inputs.model_kwargs
    parts = {name: value for name, value in kwargs.items() if isinstance(value, (torch.Tensor, dict))}
    return [name for name, value in parts.items() if name not in OF_TEXT | {cache_name} and not is_absent(value)]


def _has_extras(batch: Batch) -> str:
    extras = extras_of(batch.prepared, batch.interface.cache_name)
    return f"a batch is given {', '.join(extras)}" if extras else ""


def _has_callers_cache(batch: Batch) -> str:
    return "a batch goes on from a cache that was given" if batch.prepared.callers_cache else ""


def _has_own_positions(batch: Batch) -> str:
    positions = batch.kwargs.get("position_ids")
    own = positions is not None and positions.shape[-2] != len(batch.prepared.inputs.input_ids)
    return "a batch brings its own positions" if own else ""


def _has_another_cache(batch: Batch) -> str:
    cache: Any = batch.kwargs.get(batch.interface.cache_name)
    fits = type(cache) is DynamicCache and not cache.offloading
    return "" if fits else f"a batch is kept in a {type(cache).__name__}"


def _may_tell_rows_apart(batch: Batch) -> str:
    others = [p for p in batch.prepared.processors if type(p) not in _ROW_BY_ROW]
    others += [c for c in batch.prepared.criteria if type(c) not in _STOPS]
    if not others:
        return ""
    return f"a {type(others[0]).__name__} may tell the rows of a batch apart: generate_many calls it for each request"


def _continues_stopped_rows(batch: Batch) -> str:
    kinds = {type(criterion) for criterion in batch.prepared.criteria}
    continues = kinds & {StopStringCriteria, MaxTimeCriteria} and EosTokenCriteria not in kinds
    return "rows of a batch continue past their end: there is no end-of-text token" if continues else ""


def _has_an_empty_row(batch: Batch) -> str:
    return "a row of a batch has no text" if padding_in_front(batch.prepared.inputs) is None else ""


def _has_differing_axes(batch: Batch) -> str:
    positions: Any = batch.kwargs.get(batch.interface.positions_name)
    differ = positions is not None and positions.ndim != 2
    differ = differ and bool((positions[..., -1] != positions[:1, ..., -1]).any())
    return "positions of a batch differ from axis to axis" if differ else ""


_BATCHES = (
    _has_extras, _has_callers_cache, _has_own_positions, _has_another_cache, _may_tell_rows_apart,
    _continues_stopped_rows, _has_an_empty_row, _has_differing_axes,
)  # fmt: skip


def why_batch_delegated(batch: Batch) -> str:
    """Why the original `generate` decodes a batch; empty where it does not."""
    return _first_reason(_BATCHES, batch)
