"""Calls of an accelerated model's `generate`: decoded by the engine, or left to the original."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationMixin

from retrieve_spec.engine.joining import sequences_of
from retrieve_spec.engine.rows import Prepared
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.engine.streaming import StreamerFeed
from retrieve_spec.errors import ConfigError, in_a_line, interruptions_as_they_are
from retrieve_spec.generation.arguments import check_arguments, row_predictions
from retrieve_spec.generation.logprobs import check_call, of_original
from retrieve_spec.generation.outputs import result_of
from retrieve_spec.generation.own_generate import decode_inside, own_generate, why_not_inside
from retrieve_spec.generation.request import is_one_row, prepare
from retrieve_spec.sampling.samplers import whole_seed
from retrieve_spec.verify.steps import sample_tokens

BEFORE = "_generate_before_speculation"
"""Where an accelerated model keeps a `generate` that was set on it before."""
_SIGNATURE = inspect.signature(GenerationMixin.generate)
_OWN_OPTIONS = ("draft", "nodes", "prediction", "seed", "siblings", "scope", "return_logprobs")
_SEEDING = threading.RLock()
"""Held while torch's generators, which all threads draw from, follow the seed of a call."""


@functools.wraps(GenerationMixin.generate)
@interruptions_as_they_are()
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of an accelerated model."""
    own = {name: kwargs.pop(name, None) for name in _OWN_OPTIONS}
    if getattr(self, "speculation", None) is None and not any(value is not None for value in own.values()):
        return original(self)(*args, **kwargs)  # a copy of an accelerated model
    speculation = speculation_of(self)
    if reason := own_generate(self):  # its arguments are its own, too
        if own["return_logprobs"]:
            raise ConfigError("to return log-probabilities", reason, "Leave out return_logprobs=True.")
        with seeded(own["seed"], self):
            output, reason = decode_inside(
                self, original(self), args, kwargs, lambda prepared: decode_prepared(self, prepared, own, {})
            )
        if not reason:
            return output
        speculation.delegated(reason)
        with seeded(own["seed"], self):
            return original(self)(*args, **kwargs)
    arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
    arguments.pop("self")
    arguments |= arguments.pop("kwargs", {})
    check_arguments(self, arguments, _OWN_OPTIONS)
    speculation.drafter(own["draft"])  # an unknown preset is an error
    if own["return_logprobs"]:
        check_call(self, arguments)
    prepared = _prepared(self, arguments, "" if is_one_row(self, arguments) else speculation.why_alone())
    if isinstance(prepared, str):
        speculation.delegated(prepared)
        with seeded(own["seed"], self):
            if own["return_logprobs"]:
                return of_original(self, original(self), arguments)
            return original(self)(*args, **kwargs)
    return decode_prepared(self, prepared, own, arguments)


def decode_prepared(model: Any, prepared: Prepared, own: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """What a prepared call returns, given the options that are ours (`own`) and the others."""
    speculation = model.speculation
    tokenizer = arguments.get("tokenizer") or speculation.tokenizer
    options = {name: value for name, value in own.items() if name != "prediction"}
    predictions = row_predictions(own["prediction"], tokenizer, len(prepared.inputs.input_ids), model)
    sequences = sequences_of(speculation, prepared, predictions, **options)
    pad = prepared.config._pad_token_tensor
    feed = StreamerFeed(arguments.get("streamer"), len(sequences), 0 if pad is None else int(pad))
    _run(speculation, sequences, prepared, feed)
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


def prepare_call(model: Any, arguments: dict[str, Any], alone: str = "it asks for more than one row") -> Prepared | str:
    """Prepare a call, or say why the original `generate` decodes it; `alone`: why more than one row would be."""
    return own_generate(model) or _prepared(model, arguments, alone)


def _prepared(model: Any, arguments: dict[str, Any], alone: str) -> Prepared | str:
    """The same of a model whose class has no `generate` of its own."""
    if model.speculation.engine.is_stepping:
        return "it is asked for in the middle of another generation"
    return prepare(model, original(model), model.speculation.interface, arguments, alone)


def _run(speculation: Speculation, sequences: list[Sequence], prepared: Prepared, feed: StreamerFeed) -> None:
    """Run the sequences of a call to their ends; the first that fails ends all. The streamer hears of the end."""
    running = speculation.engine.run(sequences)
    row = {id(sequence): i for i, sequence in enumerate(sequences)}
    try:
        feed.prompt(prepared.inputs.input_ids if prepared.ids is None else prepared.ids)
        for sequence, visible in running:
            if visible is None and sequence.error is not None:
                raise sequence.error
            feed.put(row[id(sequence)], visible)
    finally:
        running.close()
        feed.end()
        speculation.ended(*sequences)


def why_delegated(model: Any) -> str:
    """Why a plain call with text alone is left to the original `generate`; empty when it is not."""
    if reason := why_not_inside(model):
        return reason
    ids = sample_tokens(model, 4)
    try:
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1}
        # One that was set on the model is not ours to call.
        of_class = types.MethodType(GenerationMixin.generate, model)
        prepared = prepare(model, of_class, model.speculation.interface, arguments)
    except Exception as error:  # whatever a model says to a prompt without what it is made for
        return f"a prompt of text alone fails ({in_a_line(error)})"
    return prepared if isinstance(prepared, str) else ""


def speculation_of(model: Any) -> Speculation:
    """What an accelerated model carries.

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
    """`generate` as it was before."""
    original = model.__dict__.get(BEFORE)
    return original if original is not None else types.MethodType(type(model).generate, model)


def delegate(
    model: Any, arguments: dict[str, Any], seed: int | None, return_logprobs: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the original `generate` says: (rows, new) long without the prompt, (rows, 2, new) log-probabilities."""
    with seeded(seed, model):
        decode = original(model)
        output = of_original(model, decode, arguments) if return_logprobs else decode(**arguments)
    whole: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
    given = 1 if model.config.is_encoder_decoder else arguments["input_ids"].shape[1]
    both = torch.stack([output.logprobs, output.raw_logprobs], dim=1) if return_logprobs else None
    return whole[:, given:], both
