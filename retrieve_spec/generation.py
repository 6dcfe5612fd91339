"""Turns a call of an accelerated model's `generate`, or of `generate_stream`, into the model's own tokens."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.engine.batch import generate_batch
from retrieve_spec.engine.request import Prepared, prepare
from retrieve_spec.engine.running import Running
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.engine.streaming import Piece, StreamerFeed, TextDecoder
from retrieve_spec.errors import ConfigError, PromptError, in_a_line
from retrieve_spec.model_layers import base_model
from retrieve_spec.verify.interface import input_device

BEFORE = "_generate_before_speculation"
"""Where an accelerated model keeps a `generate` that was set on it before."""
_SIGNATURE = inspect.signature(GenerationMixin.generate)
_OWN_OPTIONS = ("draft", "nodes", "prediction", "seed")


def generate_stream(
    model: Any,
    inputs: torch.Tensor | str | Any,
    *,
    tokenizer: Any = None,
    past_key_values: Any = None,
    prediction: str | Sequence[int] | NDArray[np.int32] | None = None,
    context_ids: Sequence[int] | NDArray[np.int32] | None = None,
    on_pass: Callable[[VerifiedPass], None] | None = None,
    draft: str | None = None,
    nodes: int | str | None = None,
    seed: int | None = None,
    skip_special_tokens: bool = True,
    **kwargs: Any,
) -> Iterator[Piece]:
    """Generate and yield what becomes visible with every pass.

    Closing the iterator, an exception or Ctrl-C between or inside passes ends the generation and leaves the model
    usable; `model.speculation.last` then reports what was done. A call that must be left to the original `generate`
    yields its whole output at once.

    Parameters
    ----------
    model
        An accelerated model.
    inputs
        (1, L) or (L,) token ids, a mapping from a tokenizer (`input_ids`, `attention_mask`), or text.
    tokenizer
        To encode text and to decode the output; by default the one given to `accelerate`.
    past_key_values
        A cache to continue from; it ends as plain `generate` would leave it.
    prediction, draft, nodes, seed
        As for `model.generate`, see `accelerate`.
    context_ids
        (n,) what the drafter reads in place of the prompt: other texts, the most relevant last, and at the end what
        stands in front of the output. In fill-in-the-middle that is not the end of the prompt.
    on_pass
        Called with what each drafted-for pass showed, the prompt's first; the arrays are valid during the call.
    skip_special_tokens
        Leave special tokens out of the text.
    **kwargs
        Whatever `generate` takes.

    Yields
    ------
    Piece
        `token_ids` (t,) int32 and `text`. Both empty after a chunk of a long prompt has been read; a last piece may
        carry text without tokens (bytes that never became a character).

    Raises
    ------
    ConfigError
        The model is not accelerated, more than one row is given, or text without a tokenizer.
    PromptError
        The prompt is empty.
    """
    model = base_model(model)
    speculation = _speculation_of(model)
    tokenizer = tokenizer if tokenizer is not None else speculation.tokenizer
    arguments = {**_as_inputs(inputs, tokenizer, model), **kwargs, "tokenizer": tokenizer}
    if past_key_values is not None:
        arguments["past_key_values"] = past_key_values
    ids = arguments["input_ids"]
    if ids.shape[0] != 1:
        raise ConfigError("one row to stream", f"{ids.shape[0]} rows", "Call generate for batches.")
    begin = functools.partial(
        speculation.decode,
        draft=draft,
        nodes=nodes,
        context_ids=None if context_ids is None else np.asarray(context_ids, np.int32),
        on_pass=on_pass,
        seed=seed,
    )
    decoder = TextDecoder(tokenizer, skip_special_tokens) if tokenizer is not None else None
    return _stream(model, arguments, prediction, begin, decoder)


def _stream(
    model: Any,
    arguments: dict[str, Any],
    prediction: Any,
    begin: functools.partial[Running],
    decoder: TextDecoder | None,
) -> Iterator[Piece]:
    """Prepare a call when the first piece is asked for, `begin` its decoding, and show what every pass brings."""
    prepared = _prepare(model, arguments)
    if isinstance(prepared, str):
        _speculation_of(model).delegated(prepared)
        with _seeded(begin.keywords["seed"], model):
            runs: Any = iter([_delegate_row(model, arguments)])
    else:
        running = begin(prepared, prediction_ids=_prediction_ids(prediction, arguments["tokenizer"]))
        runs = iter(running)
    try:
        for visible in runs:
            yield Piece(visible, decoder.push(visible) if decoder else "")
        if rest := decoder.flush() if decoder else "":
            yield Piece(np.empty(0, np.int32), rest)
    finally:
        if not isinstance(prepared, str):
            runs.close()
            running.close()


@functools.wraps(GenerationMixin.generate)
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of an accelerated model."""
    if not isinstance(getattr(self, "speculation", None), Speculation):
        return _original(self)(*args, **kwargs)  # a copy of an accelerated model
    speculation = _speculation_of(self)
    own = {name: kwargs.pop(name, None) for name in _OWN_OPTIONS}
    if reason := own_generate(self):  # its arguments are its own, too
        with speculation.turns.lock, _seeded(own["seed"], self):
            speculation.delegated(reason)
            return _original(self)(*args, **kwargs)
    arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
    arguments.pop("self")
    arguments |= arguments.pop("kwargs", {})
    with speculation.turns.lock:
        if own["draft"] is not None:
            speculation.drafter(own["draft"])
        tokenizer = arguments.get("tokenizer") or speculation.tokenizer
        prepared = _prepare(self, arguments, 1 if _is_one_row(arguments) else speculation.max_rows)
        if isinstance(prepared, Prepared) and len(prepared.inputs.input_ids) > 1:
            rows = len(prepared.inputs.input_ids)
            own["predictions"] = _row_predictions(own.pop("prediction"), tokenizer, rows)
            with speculation.turns.decoding():
                output = generate_batch(speculation, prepared, arguments, **own)
            if isinstance(output, torch.Tensor):
                return output
            prepared = output
        if isinstance(prepared, str):
            speculation.delegated(prepared)
            with _seeded(own["seed"], self):
                return _original(self)(*args, **kwargs)
        config = prepared.config
        wants_dict = bool(config.return_dict_in_generate)
        running = speculation.decode(
            prepared,
            draft=own["draft"],
            nodes=own["nodes"],
            prediction_ids=_prediction_ids(own["prediction"], tokenizer),
            seed=own["seed"],
            keep_scores=wants_dict and bool(config.output_scores),
            keep_raw=wants_dict and bool(config.output_logits),
        )
        with speculation.turns.decoding():
            _feed(running, prepared, arguments.get("streamer"))
        return _result(running, prepared, wants_dict)


def own_generate(model: Any) -> str:
    """Why every call of a model is left to it: its class has a `generate` of its own; empty when it has not."""
    if type(model).generate is GenerationMixin.generate:
        return ""
    return f"{type(model).__name__} has a generate of its own"


@contextlib.contextmanager
def _seeded(seed: int | None, model: Any) -> Iterator[None]:
    """Let the original `generate` draw from a seed, and leave torch's generators as they were."""
    if seed is None:
        yield
        return
    device = model.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _is_one_row(arguments: dict[str, Any]) -> bool:
    """Whether a call's prompt is one row, as far as its arguments tell."""
    ids = arguments.get("inputs") if arguments.get("inputs") is not None else arguments.get("input_ids")
    return isinstance(ids, torch.Tensor) and ids.ndim == 2 and len(ids) == 1


def _prepare(model: Any, arguments: dict[str, Any], max_rows: int = 1) -> Prepared | str:
    """Prepare a call, or say why the original `generate` decodes it."""
    if model.speculation.turns.is_decoding:
        return "it is asked for in the middle of another generation"
    if reason := own_generate(model):
        return reason
    return prepare(model, _original(model), model.speculation.interface, arguments, max_rows)


def _feed(running: Running, prepared: Prepared, streamer: Any) -> None:
    """Run a generation to its end, showing tokens to the streamer; the streamer hears of the end in any case."""
    feed = StreamerFeed(streamer)
    try:
        feed.prompt(prepared.inputs.input_ids)
        for visible in running:
            feed.put(visible)
    finally:
        running.close()
        feed.end()


def _result(running: Running, prepared: Prepared, wants_dict: bool) -> Any:
    """Put the output together as `generate` returns it."""
    ids = prepared.inputs.input_ids
    new_ids = torch.from_numpy(running.decoding.text.new_ids.copy())[None].to(ids.device)
    sequences = torch.cat([ids, new_ids], dim=-1)  # narrower prompts become int64, as in plain decoding
    if not wants_dict:
        return sequences
    scores, raw = running.decoding.sampler.scores, running.decoding.sampler.raw
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(scores) if scores is not None else None,
        logits=tuple(raw) if raw is not None else None,
        past_key_values=running.cache,
    )


def why_delegated(model: Any) -> str:
    """Why a plain call with text alone is left to the original `generate`; empty when it is not."""
    if reason := own_generate(model):
        return reason
    ids = torch.full((1, 4), 3, dtype=torch.long, device=model.device)
    try:
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1}
        of_class = types.MethodType(type(model).generate, model)  # one that was set on the model is not ours to call
        prepared = prepare(model, of_class, model.speculation.interface, arguments)
    except Exception as error:  # whatever a model says to a prompt without what it is made for
        return f"a prompt of text alone fails ({in_a_line(error)})"
    return prepared if isinstance(prepared, str) else ""


def _speculation_of(model: Any) -> Speculation:
    speculation = getattr(model, "speculation", None)
    if not isinstance(speculation, Speculation):
        raise ConfigError("an accelerated model", type(model).__name__, "Call retrieve_spec.accelerate(model) first.")
    return speculation


def _original(model: Any) -> Any:
    """`generate` as it was before."""
    original = model.__dict__.get(BEFORE)
    return original if original is not None else types.MethodType(type(model).generate, model)


def _prediction_ids(prediction: Any, tokenizer: Any) -> NDArray[np.int32] | None:
    """(m,) int32 ids of an expected text, given as text, ids or a tensor; None without one."""
    if prediction is None:
        return None
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ConfigError(
                "a tokenizer to encode the prediction", "none", "Pass tokenizer= to accelerate, or give token ids."
            )
        prediction = tokenizer(prediction, add_special_tokens=False)["input_ids"]
    if isinstance(prediction, torch.Tensor):
        prediction = prediction.flatten().cpu().numpy()
    return np.asarray(prediction, dtype=np.int32)


def _row_predictions(prediction: Any, tokenizer: Any, rows: int) -> list[NDArray[np.int32] | None]:
    """Predictions of a batch's rows: a list has one for every row, anything else is that of all rows."""
    if isinstance(prediction, (list, tuple)) and not all(isinstance(entry, int) for entry in prediction):
        if len(prediction) != rows:
            raise ConfigError(
                f"a prediction for each of {rows} rows", str(len(prediction)), "Use None for a row without."
            )
        return [_prediction_ids(entry, tokenizer) for entry in prediction]
    return [_prediction_ids(prediction, tokenizer)] * rows


def _as_inputs(inputs: Any, tokenizer: Any, model: Any) -> dict[str, Any]:
    """Prompt as arguments of `generate`."""
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ConfigError("a tokenizer to encode the prompt", "none", "Pass tokenizer=, or give token ids.")
        if not inputs:
            raise PromptError("a prompt of at least one character", "an empty one", "Give some text to continue.")
        inputs = tokenizer(inputs, return_tensors="pt", return_token_type_ids=False)
    if isinstance(inputs, torch.Tensor):
        inputs = {"input_ids": inputs if inputs.ndim > 1 else inputs[None]}
    elif not hasattr(inputs, "items"):
        inputs = {"input_ids": torch.as_tensor(np.asarray(inputs, np.int64)).reshape(1, -1)}
    device = input_device(model)
    return {name: value.to(device) for name, value in inputs.items()}


def _delegate_row(model: Any, arguments: dict[str, Any]) -> NDArray[np.int32]:
    """Output of the original `generate`, without the prompt."""
    output = _original(model)(**arguments)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids: NDArray[np.int32] = sequences[0, arguments["input_ids"].shape[1] :].cpu().numpy().astype(np.int32)
    return new_ids
