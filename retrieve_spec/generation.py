"""Turns a call of an accelerated model's `generate`, or of `generate_stream`, into the model's own tokens."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from retrieve_spec.drafting.drafter import VerifiedPass
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.engine.request import Prepared, padded_together, prepare, setting
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.engine.streaming import Piece, Stream, StreamerFeed, TextDecoder
from retrieve_spec.errors import ConfigError, PromptError, in_a_line
from retrieve_spec.model_layers import base_model
from retrieve_spec.verify.interface import input_device

BEFORE = "_generate_before_speculation"
"""Where an accelerated model keeps a `generate` that was set on it before."""
_SIGNATURE = inspect.signature(GenerationMixin.generate)
_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
_OWN_OPTIONS = ("draft", "nodes", "prediction", "seed")


def generate_stream(
    model: Any,
    inputs: torch.Tensor | str | Any,
    *,
    tokenizer: Any = None,
    past_key_values: Any = None,
    prediction: str | Many[int] | NDArray[np.int32] | None = None,
    context_ids: Many[int] | NDArray[np.int32] | None = None,
    on_pass: Callable[[VerifiedPass], None] | None = None,
    draft: str | None = None,
    nodes: int | str | None = None,
    seed: int | None = None,
    skip_special_tokens: bool = True,
    **kwargs: Any,
) -> Stream:
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
    options = {
        "draft": draft,
        "nodes": nodes,
        "seed": seed,
        "context_ids": None if context_ids is None else _known_ids(context_ids, "context_ids", model),
        "on_pass": on_pass,
    }
    expected = _prediction_ids(prediction, tokenizer, model)
    under_way: list[Sequence | GenerationReport] = []
    decoder = TextDecoder(tokenizer, skip_special_tokens) if tokenizer is not None else None
    pieces = _pieces(_runs(model, arguments, expected, options, under_way), decoder)
    return Stream(pieces, lambda: _report_of(under_way))


def _runs(
    model: Any,
    arguments: dict[str, Any],
    prediction: NDArray[np.int32] | None,
    options: dict[str, Any],
    under_way: list[Sequence | GenerationReport],
) -> Generator[NDArray[np.int32], None, None]:
    """What each pass of one row makes visible; the call is prepared when the first is asked for."""
    speculation = _speculation_of(model)
    prepared = _prepare(model, arguments)
    if isinstance(prepared, str):
        under_way.append(speculation.delegated(prepared))
        with _seeded(options["seed"], model):
            whole = _delegate_row(model, arguments)
        yield whole
        return
    (sequence,) = speculation.sequences(prepared, [prediction], **options)
    under_way.append(sequence)
    try:
        with contextlib.closing(speculation.engine.run([sequence])) as passes:
            for _, visible in passes:
                if visible is not None:
                    yield visible
    finally:
        speculation.ended(sequence)
    if sequence.error is not None:
        raise sequence.error


def _pieces(
    runs: Generator[NDArray[np.int32], None, None], decoder: TextDecoder | None
) -> Generator[Piece, None, None]:
    """Runs of tokens with their text."""
    with contextlib.closing(runs):
        for visible in runs:
            yield Piece(visible, decoder.push(visible) if decoder else "")
        if rest := decoder.flush() if decoder else "":
            yield Piece(np.empty(0, np.int32), rest)


def _report_of(under_way: list[Sequence | GenerationReport]) -> GenerationReport | None:
    """What a generation did so far, None if it has not begun."""
    if not under_way:
        return None
    return under_way[0].log.summary() if isinstance(under_way[0], Sequence) else under_way[0]


@functools.wraps(GenerationMixin.generate)
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of an accelerated model."""
    if not isinstance(getattr(self, "speculation", None), Speculation):
        return _original(self)(*args, **kwargs)  # a copy of an accelerated model
    speculation = _speculation_of(self)
    own = {name: kwargs.pop(name, None) for name in _OWN_OPTIONS}
    if reason := own_generate(self):  # its arguments are its own, too
        speculation.delegated(reason)
        with _seeded(own["seed"], self):
            return _original(self)(*args, **kwargs)
    arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
    arguments.pop("self")
    arguments |= arguments.pop("kwargs", {})
    speculation.drafter(own["draft"])  # an unknown preset is an error
    prepared = _prepare(self, arguments, batches=not _is_one_row(self, arguments) and speculation.shares_passes)
    if isinstance(prepared, str):
        speculation.delegated(prepared)
        with _seeded(own["seed"], self):
            return _original(self)(*args, **kwargs)
    tokenizer = arguments.get("tokenizer") or speculation.tokenizer
    predictions = _row_predictions(own.pop("prediction"), tokenizer, len(prepared.inputs.input_ids), self)
    sequences = speculation.sequences(prepared, predictions, **own)
    _run(speculation, sequences, prepared, StreamerFeed(arguments.get("streamer")))
    return _result(sequences, prepared)


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


def _is_one_row(model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call asks for one row, as far as its arguments tell."""
    ids = arguments.get("inputs") if arguments.get("inputs") is not None else arguments.get("input_ids")
    one = isinstance(ids, torch.Tensor) and ids.ndim == 2 and len(ids) == 1
    return one and (setting(model, arguments, "num_return_sequences") or 1) == 1


def _prepare(model: Any, arguments: dict[str, Any], batches: bool = False) -> Prepared | str:
    """Prepare a call, or say why the original `generate` decodes it."""
    if model.speculation.engine.is_stepping:
        return "it is asked for in the middle of another generation"
    if reason := own_generate(model):
        return reason
    return prepare(model, _original(model), model.speculation.interface, arguments, batches)


def _run(speculation: Speculation, sequences: list[Sequence], prepared: Prepared, feed: StreamerFeed) -> None:
    """Run the sequences of a call to their ends; the first that fails ends all. The streamer hears of the end."""
    running = speculation.engine.run(sequences)
    try:
        feed.prompt(prepared.inputs.input_ids)
        for sequence, visible in running:
            if visible is not None:
                feed.put(visible)
            elif sequence.error is not None:
                raise sequence.error
    finally:
        running.close()
        feed.end()
        speculation.ended(*sequences)


def _result(sequences: list[Sequence], prepared: Prepared) -> Any:
    """Put the output together as `generate` returns it."""
    ids = prepared.inputs.input_ids  # narrower prompts become int64, as in plain decoding
    pad = prepared.config._pad_token_tensor
    output = padded_together([sequence.text for sequence in sequences], pad).to(ids.device)
    if not prepared.config.return_dict_in_generate:
        return output
    (sequence,) = sequences
    encoded = prepared.inputs.model_kwargs.get("encoder_outputs")
    scores, raw = sequence.sampler.scores, sequence.sampler.raw
    kind = GenerateDecoderOnlyOutput if encoded is None else GenerateEncoderDecoderOutput
    return kind(
        sequences=output,
        scores=tuple(scores) if scores is not None else None,
        logits=tuple(raw) if raw is not None else None,
        past_key_values=sequence.cache,
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


def _prediction_ids(prediction: Any, tokenizer: Any, model: Any) -> NDArray[np.int32] | None:
    """(m,) int32 ids of an expected text, given as text, ids or a tensor; None without one."""
    if prediction is None:
        return None
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ConfigError(
                "a tokenizer to encode the prediction", "none", "Pass tokenizer= to accelerate, or give token ids."
            )
        prediction = tokenizer(prediction, add_special_tokens=False)["input_ids"]
    return _known_ids(prediction, "prediction", model)


def _known_ids(given: Any, name: str, model: Any) -> NDArray[np.int32]:
    """(n,) int32 token ids, given as a sequence or a tensor.

    Raises
    ------
    ConfigError
        They are no numbers, or the model has no such tokens.
    """
    try:
        ids = np.asarray(given.cpu() if isinstance(given, torch.Tensor) else given).ravel()
        whole = ids.astype(np.int64)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"token ids as {name}", repr(given)[:60], "Give one list of whole numbers.") from None
    known = model.get_input_embeddings().weight.shape[0]
    if len(ids) and not ((whole == ids).all() and whole.min() >= 0 and whole.max() < known):
        wrong = ids[(whole != ids) | (whole < 0) | (whole >= known)][0]
        raise ConfigError(
            f"{name} of token ids 0 … {known - 1}, which the model has",
            str(wrong),
            "Encode it with the model's own tokenizer.",
        )
    return whole.astype(np.int32)


def _row_predictions(prediction: Any, tokenizer: Any, rows: int, model: Any) -> list[NDArray[np.int32] | None]:
    """Predictions of a batch's rows: a list has one for every row, anything else is that of all rows."""
    if rows > 1 and isinstance(prediction, (list, tuple)) and not all(isinstance(entry, int) for entry in prediction):
        if len(prediction) != rows:
            raise ConfigError(
                f"a prediction for each of {rows} rows", str(len(prediction)), "Use None for a row without."
            )
        return [_prediction_ids(entry, tokenizer, model) for entry in prediction]
    return [_prediction_ids(prediction, tokenizer, model)] * rows


def _as_inputs(inputs: Any, tokenizer: Any, model: Any) -> dict[str, Any]:
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
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value, np.int64))
    except (TypeError, ValueError):
        raise ConfigError(
            "rows of one length", "rows of different length, or no numbers", "Let the tokenizer pad, or give one row."
        ) from None
    return (tensor if tensor.ndim > 1 else tensor[None]).to(input_device(model))


def _delegate_row(model: Any, arguments: dict[str, Any]) -> NDArray[np.int32]:
    """Output of the original `generate`, without the prompt."""
    output = _original(model)(**arguments)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    given = arguments["input_ids"].shape[1] if not model.config.is_encoder_decoder else 1
    new_ids: NDArray[np.int32] = sequences[0, given:].cpu().numpy().astype(np.int32)
    return new_ids
