"""Makes a Hugging Face causal language model decode through verified drafts, saying exactly what it would have said."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import types
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

from retrieve_spec.config import AUTO, SpeculationConfig
from retrieve_spec.datastore.dense import check_model
from retrieve_spec.datastore.fingerprint import tokenizer_fingerprint
from retrieve_spec.datastore.readahead import read_ahead
from retrieve_spec.datastore.store import Datastore, check_tokenizer, open_datastore
from retrieve_spec.decoding.acceptance import read_logits
from retrieve_spec.decoding.batch import generate_batch
from retrieve_spec.decoding.costprobe import measure_passes
from retrieve_spec.decoding.fast_verifier import try_build
from retrieve_spec.decoding.hf import HFVerifier
from retrieve_spec.decoding.interface import read_interface
from retrieve_spec.decoding.plain import StepVerifier
from retrieve_spec.decoding.probe import Finding, probe
from retrieve_spec.decoding.request import Prepared, prepare
from retrieve_spec.decoding.running import Running
from retrieve_spec.decoding.speculation import OFF, Speculation
from retrieve_spec.decoding.streaming import Piece, StreamerFeed, TextDecoder
from retrieve_spec.decoding.verifier import Verifier
from retrieve_spec.drafting.drafter import Drafter, Layer, VerifiedPass
from retrieve_spec.errors import ConfigError, PromptError, TokenizerMismatchError, UnsupportedModelError
from retrieve_spec.sources.dense import DenseIndexes

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_OWN_OPTIONS = ("draft", "nodes", "prediction", "seed")


def accelerate(
    model: Any,
    tokenizer: Any = None,
    *,
    datastores: Sequence[Any] | None = None,
    drafter: Drafter | None = None,
    config: SpeculationConfig | None = None,
    **options: Any,
) -> Any:
    """Let a model's `generate` draft and verify; its signature and its output stay the same.

    `model.generate` takes four more keyword arguments: `draft` ("auto", "off" or a preset), `nodes` (the budget per
    pass), `prediction` (text or token ids the output is expected to follow) and `seed` (of sampling; by default it is
    drawn from torch's generator). What cannot be sped up is left to the original `generate`; `model.speculation.last`
    says what happened and why.

    Parameters
    ----------
    model
        A `transformers` causal language model.
    tokenizer
        Its tokenizer, for text predictions and streams of text.
    datastores
        Datastores to draft from: folders, or stores opened before.
    drafter
        What drafts instead of the configured preset.
    config
        How to draft; `options` override its fields.

    Returns
    -------
    object
        The same model.

    Raises
    ------
    UnsupportedModelError
        The object cannot generate.
    TokenizerMismatchError
        The tokenizer has tokens the model does not know, or a store was built with another one.
    ModelMismatchError
        A store's dense index was built with another model (`dense="off"` drafts from the rest of the store).
    StoreError
        A folder holds no store, or a damaged or unfinished one.
    ConfigError
        An option is unknown or out of range; also for an unknown preset or one that misses a source.
    """
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        raise UnsupportedModelError(
            "a transformers model that can generate",
            type(model).__name__,
            "Load it with AutoModelForCausalLM.from_pretrained.",
        )
    config = (config or SpeculationConfig()).with_options(**options)
    if tokenizer is not None:
        _check_tokenizer(model, tokenizer)
    if isinstance(getattr(model, "speculation", None), Speculation):
        restore(model)
    loading = _load_kernels()
    finding = _find_mode(model)
    stores = [_open_store(store, tokenizer) for store in datastores or ()]
    read_ahead(stores)
    check_stores = functools.partial(_check_dense, model, config)
    check_stores(stores)
    make_verifier, why_not_static = _verifier_factory(model, finding, config, _wanted_layer(drafter, stores, config))
    speculation = Speculation(config, finding, make_verifier, tokenizer, stores, drafter)
    speculation.check_stores = check_stores
    speculation.model_key = _model_key(model)
    speculation.prepare_seconds = loading
    speculation.prepare()  # an unknown preset or a missing source is an error now, not at the first call
    model.speculation = speculation
    original = model.__dict__.get("generate")
    model.__dict__["_generate_before_speculation"] = original
    model.__dict__["generate"] = types.MethodType(_generate, model)
    if finding.mode != "tree":
        speculation.say_once(f"drafts are verified in {finding.mode} mode: {finding.reason}")
    if why_not_static:
        speculation.say_once(f"passes go through the model's own modules: {why_not_static}")
    if config.nodes == AUTO and config.draft != OFF:
        measure_passes(model, speculation)
    return model


def _open_store(store: Any, tokenizer: Any) -> Datastore:
    """Open a folder, or check that an open store was built with the tokenizer."""
    if isinstance(store, (str, os.PathLike)):
        return open_datastore(store, tokenizer=tokenizer)
    if tokenizer is not None and isinstance(store, Datastore):
        check_tokenizer(store.path, store.manifest, tokenizer_fingerprint(tokenizer))
    return store  # type: ignore[no-any-return]


def _check_dense(model: Any, config: SpeculationConfig, stores: Sequence[Any]) -> None:
    """Refuse dense indexes of another model, unless they are not drafted from."""
    for store in stores:
        if config.dense == AUTO and store.dense:
            check_model(store.manifest.dense, model)


def _wanted_layer(drafter: Drafter | None, stores: Sequence[Any], config: SpeculationConfig) -> Layer:
    """The layer whose hidden states will be asked for."""
    if drafter is not None:
        return drafter.wants_hidden or "last"
    return (DenseIndexes(stores).layer if config.dense == AUTO else None) or "last"


def _load_kernels() -> float:
    """Let Numba set itself up and load a first kernel, so that what follows is timed without it; seconds taken."""
    began = perf_counter()
    read_logits(torch.zeros(1, 2), 1)
    return perf_counter() - began


def _model_key(model: Any) -> str:
    """Name under which what was learned about a model is kept: its kind and a hash of its configuration."""
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    text = json.dumps(config, sort_keys=True, default=str)
    return f"{model.config.model_type}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def restore(model: Any) -> Any:
    """Undo `accelerate`; a model that was not accelerated is returned as it is."""
    if isinstance(getattr(model, "speculation", None), Speculation):
        original = model.__dict__.pop("_generate_before_speculation", None)
        model.__dict__.pop("generate", None)
        if original is not None:
            model.__dict__["generate"] = original
        del model.speculation
    return model


@contextlib.contextmanager
def accelerated(model: Any, tokenizer: Any = None, **options: Any) -> Iterator[Any]:
    """Accelerate a model within a `with` block (arguments of `accelerate`)."""
    accelerate(model, tokenizer, **options)
    try:
        yield model
    finally:
        restore(model)


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
    speculation = _speculation_of(model)
    tokenizer = tokenizer if tokenizer is not None else speculation.tokenizer
    arguments = {**_as_inputs(inputs, tokenizer, model), **kwargs, "tokenizer": tokenizer}
    if past_key_values is not None:
        arguments["past_key_values"] = past_key_values
    ids = arguments["input_ids"]
    if ids.shape[0] != 1:
        raise ConfigError("one row to stream", f"{ids.shape[0]} rows", "Call generate for batches.")
    read = None if context_ids is None else np.asarray(context_ids, np.int32)
    return _stream(model, arguments, tokenizer, draft, nodes, prediction, read, on_pass, seed, skip_special_tokens)


def _stream(
    model: Any,
    arguments: dict[str, Any],
    tokenizer: Any,
    draft: str | None,
    nodes: int | str | None,
    prediction: Any,
    context_ids: NDArray[np.int32] | None,
    on_pass: Callable[[VerifiedPass], None] | None,
    seed: int | None,
    skip_special_tokens: bool,
) -> Iterator[Piece]:
    speculation = _speculation_of(model)
    decoder = TextDecoder(tokenizer, skip_special_tokens) if tokenizer is not None else None
    prepared = prepare(model, _original(model), speculation.interface, arguments)
    if isinstance(prepared, str):
        speculation.delegated(prepared)
        runs: Any = iter([_delegate_row(model, arguments)])
    else:
        predicted = _prediction_ids(prediction, tokenizer)
        running = speculation.decode(
            prepared,
            draft=draft,
            nodes=nodes,
            prediction_ids=predicted,
            context_ids=context_ids,
            on_pass=on_pass,
            seed=seed,
        )
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
def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of an accelerated model."""
    if not isinstance(getattr(self, "speculation", None), Speculation):
        return _original(self)(*args, **kwargs)  # a copy of an accelerated model
    speculation = _speculation_of(self)
    own = {name: kwargs.pop(name, None) for name in _OWN_OPTIONS}
    arguments = _SIGNATURE.bind(self, *args, **kwargs).arguments
    arguments.pop("self")
    arguments |= arguments.pop("kwargs", {})
    with speculation.exclusive():
        if own["draft"] is not None:
            speculation.drafter(own["draft"])
        tokenizer = arguments.get("tokenizer") or speculation.tokenizer
        prepared = prepare(self, _original(self), speculation.interface, arguments, speculation.max_rows)
        if isinstance(prepared, Prepared) and len(prepared.inputs.input_ids) > 1:
            rows = len(prepared.inputs.input_ids)
            own["predictions"] = _row_predictions(own.pop("prediction"), tokenizer, rows)
            output = generate_batch(speculation, prepared, arguments, **own)
            if isinstance(output, torch.Tensor):
                return output
            prepared = output
        if isinstance(prepared, str):
            speculation.delegated(prepared)
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
        _feed(running, prepared, arguments.get("streamer"))
        return _result(running, prepared, wants_dict)


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
    new_ids = torch.from_numpy(running.decoding.text.new_ids.copy())[None].to(device=ids.device, dtype=ids.dtype)
    sequences = torch.cat([ids, new_ids], dim=-1)
    if not wants_dict:
        return sequences
    scores, raw = running.chooser.scores, running.chooser.raw
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=tuple(scores) if scores is not None else None,
        logits=tuple(raw) if raw is not None else None,
        past_key_values=running.cache,
    )


def _speculation_of(model: Any) -> Speculation:
    speculation = getattr(model, "speculation", None)
    if not isinstance(speculation, Speculation):
        raise ConfigError("an accelerated model", type(model).__name__, "Call retrieve_spec.accelerate(model) first.")
    return speculation


def _original(model: Any) -> Any:
    """`generate` as it was before."""
    original = model.__dict__.get("_generate_before_speculation")
    return original if original is not None else types.MethodType(type(model).generate, model)


def _find_mode(model: Any) -> Finding:
    interface = read_interface(model)
    if model.config.is_encoder_decoder:
        return Finding("plain", "encoder-decoder models are not drafted for", interface)
    training = model.training
    model.eval()
    try:
        return probe(model, interface)
    finally:
        model.train(training)


def _verifier_factory(
    model: Any, finding: Finding, config: SpeculationConfig, layer: Layer
) -> tuple[Callable[[], Verifier], str]:
    """What makes a generation's verifier, and why it is not the static one."""

    def make() -> Verifier:
        if finding.mode == "plain":
            return StepVerifier(model, finding.reason)
        return HFVerifier(model, finding.interface, finding.mode, finding.reason)

    static, why = try_build(model, finding, config, layer)
    return static or make, why


def _check_tokenizer(model: Any, tokenizer: Any) -> None:
    known = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > known:
        raise TokenizerMismatchError(
            f"a tokenizer of at most {known} tokens, as many as the model embeds",
            f"{len(tokenizer)} tokens ({getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__})",
            "Load the tokenizer from where the model came from.",
        )


def _prediction_ids(prediction: Any, tokenizer: Any) -> NDArray[np.int32] | None:
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
    return {name: value.to(model.device) for name, value in inputs.items()}


def _delegate_row(model: Any, arguments: dict[str, Any]) -> NDArray[np.int32]:
    """Output of the original `generate`, without the prompt."""
    output = _original(model)(**arguments)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids: NDArray[np.int32] = sequences[0, arguments["input_ids"].shape[1] :].cpu().numpy().astype(np.int32)
    return new_ids
