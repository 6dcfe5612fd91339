"""Calls of an accelerated model's `generate`: decoded by the engine, or left to the original.

Some classes override `generate`: speech models prepare prompts, or switch adapters, around the inherited one. Theirs
runs unchanged, with a decoding method (`custom_generate`) that transformers calls in place of its own. Where a class
leaves decoding to transformers, this library does that part.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from retrieve_spec.engine.joining import CallOptions, DelegatedCall, Prepared, sequences_of
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.errors import ConfigError, in_a_line
from retrieve_spec.generation.delegation import setting
from retrieve_spec.generation.request import (
    CALL_OPTIONS,
    check_arguments,
    check_arguments_decoded,
    from_captured,
    is_one_row,
    original,
    own_generate,
    pop_options,
    prepare,
    prepare_call,
    row_predictions,
    speculation_of,
)
from retrieve_spec.sampling.acceptance import RowText
from retrieve_spec.sampling.samplers import LogProbSampler, whole_seed
from retrieve_spec.verify.interface import ModelInterface
from retrieve_spec.verify.steps import Captured, capture, sample_tokens


@dataclass
class DecoderOnlyOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `generate(…, return_dict_in_generate=True, return_logprobs=True)` returns.

    Attributes
    ----------
    logprobs
        (rows, new) float32, log-probability of every new token under the distribution it was chosen by: softmax of the
        scores after all logits processors (temperature and truncation too, where tokens are sampled). 0 after the
        end of a row; the end-of-text token itself has one.
    raw_logprobs
        (rows, new) float32, the same under softmax of the model's own logits.
    """

    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


@dataclass
class EncoderDecoderOutput(GenerateEncoderDecoderOutput):  # type: ignore[misc]
    """Output of an encoder–decoder; fields as of `DecoderOnlyOutput`."""

    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


def log_probs_of(sequence: Sequence, first: int = 0, count: int | None = None) -> NDArray[np.float32] | None:
    """(2, n) float32 of a sequence's new tokens from `first` on, processed and raw; None where not asked for."""
    sampler = sequence.sampler
    return sampler.log_probs(first, count) if isinstance(sampler, LogProbSampler) else None


def log_prob_fields(sequences: Many[Sequence], device: torch.device) -> dict[str, torch.Tensor]:
    """Fields of the output of a call, (rows, new) float32 each; none where they were not asked for."""
    rows = [row for row in map(log_probs_of, sequences) if row is not None]
    if not rows:
        return {}
    whole = torch.zeros((2, len(rows), max(row.shape[1] for row in rows)))
    for i, row in enumerate(rows):
        whole[:, i, : row.shape[1]] = torch.from_numpy(row)
    return dict(zip(("logprobs", "raw_logprobs"), whole.to(device), strict=True))


def call_original(model: Any, arguments: dict[str, Any]) -> Any:
    """Call the original `generate`; compute log-probabilities from the scores and logits that it keeps.

    Raises
    ------
    ConfigError
        The call searches beams, or keeps no scores.
    """
    kept = dict.fromkeys(("output_scores", "output_logits", "return_dict_in_generate"), True)
    output = original(model)(**arguments | kept)
    kind = {GenerateDecoderOnlyOutput: DecoderOnlyOutput, GenerateEncoderDecoderOutput: EncoderDecoderOutput}
    if type(output) not in kind or not output.scores:
        raise ConfigError(
            "a decoder of one text with return_logprobs=True",
            type(output).__name__,
            f"Leave it out: {model.speculation.last.reason}.",
        )
    shown = _shown(model, arguments, output.sequences[:, -len(output.scores) :])
    both = (
        model.compute_transition_scores(output.sequences, steps, normalize_logits=True).float().where(shown, 0.0)
        for steps in (output.scores, output.logits)
    )
    fields = dict(output) | dict(zip(("logprobs", "raw_logprobs"), both, strict=True))
    for name in ("scores", "logits"):
        if not setting(model, arguments, f"output_{name}"):
            del fields[name]
    return kind[type(output)](**fields)


def _shown(model: Any, arguments: dict[str, Any], new: torch.Tensor) -> torch.Tensor:
    """(rows, new) bool: which tokens come before the padding and no later than the first end-of-text token."""
    ends, pad = setting(model, arguments, "eos_token_id"), setting(model, arguments, "pad_token_id")
    is_end = torch.isin(new, torch.as_tensor([] if ends is None else ends, device=new.device, dtype=new.dtype))
    is_padding = new == pad if pad is not None else torch.zeros_like(is_end)
    padding = (is_padding & ~is_end).flip(1).cumprod(dim=1).flip(1).bool()
    shown: torch.Tensor = (is_end.cumsum(dim=1) - is_end.long() == 0) & ~padding
    return shown


def result_of(sequences: list[Sequence], prepared: Prepared) -> Any:
    """Put the output together as `generate` returns it.

    Scores and logits are zero after the end of a row, where plain `generate` continues with padding. The output of a
    batch has no cache: each row had its own.
    """
    ids = prepared.inputs.input_ids  # narrower prompts become int64, as in plain decoding
    pad = prepared.config._pad_token_tensor
    output = _padded([sequence.text for sequence in sequences], pad).to(ids.device)
    if not prepared.config.return_dict_in_generate:
        return output
    encoded = prepared.inputs.model_kwargs.get("encoder_outputs")
    logprobs = log_prob_fields(sequences, output.device)
    kind: Any = GenerateDecoderOnlyOutput if encoded is None else GenerateEncoderDecoderOutput
    if logprobs:
        kind = DecoderOnlyOutput if encoded is None else EncoderDecoderOutput
    return kind(
        sequences=output,
        scores=_by_step([sequence.sampler.scores for sequence in sequences]),
        logits=_by_step([sequence.sampler.raw for sequence in sequences]),
        past_key_values=sequences[0].cache if len(sequences) == 1 else None,
        **logprobs,
    )


def _padded(texts: Many[RowText], pad: Any) -> torch.Tensor:
    """(rows, longest) long: texts of one prompt length, ended ones filled up with the padding token."""
    longest = max(text.length for text in texts)
    whole = torch.full((len(texts), longest), int(pad) if pad is not None else 0, dtype=torch.long)
    for row, text in zip(whole, texts, strict=True):
        row[: text.length] = torch.from_numpy(text.ids)
    return whole


def _by_step(rows: Many[list[torch.Tensor] | None]) -> tuple[torch.Tensor, ...] | None:
    """Return (rows, vocab) of each step, given (1, vocab) of each row and step; None where they were not requested."""
    kept = [row for row in rows if row is not None]
    if len(kept) < len(rows):
        return None
    none = torch.zeros_like(kept[0][0])
    longest = max(map(len, kept))
    return tuple(torch.cat([row[step] if step < len(row) else none for row in kept]) for step in range(longest))


_NOT_PASSED_ON = ("streamer", "assistant_model", "custom_generate")
"""Arguments that are not passed on to the decoding method inside."""


def why_not_inside(model: Any) -> str:
    """Why the decoding inside an overridden `generate` is the model's own too; empty where it is not."""
    why = own_generate(model)
    if not why or type(model)._sample is not GenerationMixin._sample:
        return why
    taken: list[Any] = []

    def take(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        taken.extend((model, answer := capture(model, input_ids, **kwargs)))
        return answer

    try:
        given = type(model).generate(model, sample_tokens(model, 4), max_new_tokens=1, custom_generate=take)
    except Exception:  # models may raise anything without their usual inputs
        return why
    return "" if len(taken) == 2 and taken[0] is model and given is taken[1] else why


def decode_inside(
    model: Any,
    generate: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
) -> Any:
    """Run a class's own `generate` with this library's decoding inside, and return what it returns.

    Parameters
    ----------
    generate
        The class's, as it was before; `args` and `kwargs` are its arguments.
    options
        This library's own.

    Raises
    ------
    DelegatedCall
        The class has to decode by itself.
    """
    arguments = _named_arguments(generate, args, kwargs)
    _check_decoded_inside(model, arguments)
    decoded: list[bool] = []

    def inside(model_inside: Any, input_ids: torch.Tensor, **prepared: Any) -> Any:
        if model_inside is not model:
            raise DelegatedCall(f"{type(model).__name__} lets a {type(model_inside).__name__} decode")
        answer = decode_captured(model, capture(model, input_ids, **prepared), arguments, options)
        decoded.append(True)
        return answer

    output = generate(*args, **kwargs, custom_generate=inside)
    if not decoded:
        raise DelegatedCall(own_generate(model))
    return output


def decode_captured(model: Any, captured: Captured, arguments: dict[str, Any], options: CallOptions) -> Any:
    """Decode a call that transformers has prepared from its `arguments`, and return what the call returns.

    Raises
    ------
    DelegatedCall
        Transformers has to decode it.
    """
    speculation = model.speculation
    check_arguments_decoded(model, {"generation_config": captured.generation_config}, "")
    why_single = "" if len(captured.input_ids) == 1 else speculation.batching_blocker()
    prepared = from_captured(model, captured, speculation.interface, arguments, why_single)
    return decode_prepared(model, prepared, options, {})


def _named_arguments(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that have names, by name."""
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
    """Raise `DelegatedCall` where the arguments of a call tell that the decoding inside is not this library's."""
    if model.speculation.mode == "delegated":
        raise DelegatedCall(model.speculation.reason)
    if model.speculation.engine.is_stepping:
        raise DelegatedCall("it is asked for in the middle of another generation")
    not_passed_on = any(arguments.get(name) is not None for name in _NOT_PASSED_ON)
    if not_passed_on or setting(model, arguments, "stop_strings") is not None:
        raise DelegatedCall(own_generate(model))
    check_arguments_decoded(model, arguments, "")


_SIGNATURE = inspect.signature(GenerationMixin.generate)
_SEEDING = threading.RLock()
"""Held while torch's generators, which all threads draw from, follow the seed of a call."""


@functools.wraps(GenerationMixin.generate)
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of an accelerated model."""
    if getattr(self, "speculation", None) is None and not CALL_OPTIONS & kwargs.keys():
        return original(self)(*args, **kwargs)  # a copy of an accelerated model
    speculation = speculation_of(self)
    options = pop_options(kwargs, self)
    if reason := own_generate(self):  # its signature may differ, too
        try:
            with seeded(options.seed, self):
                return decode_inside(self, original(self), args, kwargs, options)
        except DelegatedCall as why:
            reason, arguments = str(why), _named_arguments(original(self), args, kwargs)
    else:
        arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
        arguments.pop("self")
        arguments |= arguments.pop("kwargs", {})
        check_arguments(self, arguments)
        if options.store is None:
            speculation.drafter(options.draft)  # an unknown preset is an error
        why_single = "" if is_one_row(self, arguments) else speculation.batching_blocker()
        prepared = prepare_call(self, arguments, why_single)
        if isinstance(prepared, Prepared):
            return decode_prepared(self, prepared, options, arguments)
        reason = prepared
    speculation.delegated(reason)
    with seeded(options.seed, self):
        if options.return_logprobs:
            return call_original(self, arguments)
        return original(self)(*args, **kwargs)


def decode_prepared(model: Any, prepared: Prepared, options: CallOptions, arguments: dict[str, Any]) -> Any:
    """Decode a prepared call and return what it returns; `arguments` are those of `generate`."""
    speculation = model.speculation
    if options.return_logprobs and not prepared.config.return_dict_in_generate:
        raise ConfigError(
            "return_dict_in_generate=True with return_logprobs=True",
            "an output of token ids alone",
            "Ask for the output as a whole: log-probabilities are its fields logprobs and raw_logprobs.",
        )
    tokenizer = arguments.get("tokenizer") or speculation.tokenizer
    predictions = row_predictions(options.prediction, tokenizer, len(prepared.inputs.input_ids), model)
    sequences = sequences_of(speculation, prepared, predictions, options)
    _run(speculation, sequences, prepared, arguments.get("streamer"))
    return result_of(sequences, prepared)


@contextlib.contextmanager
def seeded(seed: int | None, model: Any) -> Iterator[None]:
    """Let the original `generate` draw from a seed, one call at a time, and leave torch's generators as they were."""
    seed = whole_seed(seed)
    if seed is None:
        yield
        return
    device = model.device
    with _SEEDING, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _run(speculation: Speculation, sequences: list[Sequence], prepared: Prepared, streamer: Any) -> None:
    """Run the sequences of a call to their ends; the first that fails ends all.

    A `streamer` (of one row, or None) receives what plain decoding sends it: the prompt, each token, and the end.
    """
    running = speculation.engine.run(sequences)
    try:
        if streamer is not None:
            streamer.put((prepared.inputs.input_ids if prepared.ids is None else prepared.ids).cpu())
        for sequence, visible in running:
            if visible is None and sequence.error is not None:
                raise sequence.error
            if streamer is not None and visible is not None:
                for token in visible.tolist():
                    streamer.put(torch.tensor([token]))
    finally:
        running.close()
        if streamer is not None:
            streamer.end()
        speculation.ended(*sequences)


def why_delegated(model: Any, interface: ModelInterface) -> str:
    """Why a plain call with text alone is left to the original `generate`; empty when it is not."""
    if reason := why_not_inside(model):
        return reason
    ids = sample_tokens(model, 4)
    try:
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1}
        # not a `generate` that was set on the model, which may do anything
        of_class = types.MethodType(GenerationMixin.generate, model)
        prepare(model, of_class, interface, arguments)
    except DelegatedCall as why:
        return str(why)
    except Exception as error:  # models may raise anything without their usual inputs
        return f"a prompt of text alone fails ({in_a_line(error)})"
    return ""


def delegate(
    model: Any, arguments: dict[str, Any], reason: str, options: CallOptions
) -> tuple[GenerationReport, torch.Tensor, torch.Tensor | None]:
    """Let the original `generate` answer a call, for a `reason`.

    Returns
    -------
    tuple
        The report, (rows, new) long without the prompt, and (rows, 2, new) float32 log-probabilities where requested.
    """
    report = model.speculation.delegated(reason)
    with seeded(options.seed, model):
        output = call_original(model, arguments) if options.return_logprobs else original(model)(**arguments)
    whole: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
    given = 1 if model.config.is_encoder_decoder else arguments["input_ids"].shape[1]
    both = torch.stack([output.logprobs, output.raw_logprobs], dim=1) if options.return_logprobs else None
    return report, whole[:, given:], both
