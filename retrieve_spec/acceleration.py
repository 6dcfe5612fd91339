"""Acceleration: makes a Hugging Face causal language model decode through verified drafts, losslessly.

Greedy text has the tokens of plain `generate` in float32. Sampled text is, for a seed, that of this library's loop
without drafts, and is distributed as plain `generate`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from retrieve_spec.config import AUTO, OFF, SpeculationConfig
from retrieve_spec.datastore.store import read_ahead
from retrieve_spec.drafting.drafter import Drafter, Layer, Preparable, UsesBigrams
from retrieve_spec.drafting.first_start import compiled_beside
from retrieve_spec.engine.budget import PassThreads, using
from retrieve_spec.engine.first_passes import measure_passes, read_bigrams
from retrieve_spec.engine.speculation import Speculation, check_stores, open_store
from retrieve_spec.errors import TokenizerMismatchError, UnsupportedModelError, require
from retrieve_spec.generation.calls import generate, why_delegated, why_not_inside
from retrieve_spec.generation.request import BEFORE
from retrieve_spec.generation.streams import generate_many, generate_stream
from retrieve_spec.kernels.compiled_code import compiles, log_compiling
from retrieve_spec.model_layers import base_model, embedded_tokens, evaluating
from retrieve_spec.openmp import survive_forks
from retrieve_spec.recorded.verifier_factory import VerifierFactory
from retrieve_spec.sampling.acceptance import read_logits
from retrieve_spec.sources.dense import DenseIndexes
from retrieve_spec.verify.interface import input_device, read_interface
from retrieve_spec.verify.probe import Finding, probe

logger = logging.getLogger(__name__)

__all__ = ["accelerate", "accelerated", "generate_many", "generate_stream", "restore"]


def accelerate(
    model: Any,
    tokenizer: Any = None,
    *,
    datastores: Sequence[Any] | None = None,
    drafter: Drafter | None = None,
    config: SpeculationConfig | None = None,
    **options: Any,
) -> Any:
    """Let a model's `generate` draft and verify; its signature stays, and greedy output has the same tokens in float32.

    Sampled output depends on the seed alone, not on drafts, and has the same distribution; it is another draw than
    plain `generate` makes with that seed.

    `model.generate` takes ten more keyword arguments. What cannot be sped up is left to the original `generate`;
    `model.speculation.last` says what happened and why.

    - `draft`: "auto", "off" or a preset.
    - `nodes`: the budget per pass.
    - `prediction`: text or token ids that the output is expected to follow.
    - `context_ids`: (n,) tokens that the drafter reads in place of the prompt: other texts, the most relevant last, and
      at the end the text before the output. In fill-in-the-middle that is not the end of the prompt.
    - `seed`: of sampling; by default it is drawn from torch's generator.
    - `scope`: whose text this is; sessions draft from answers of the same scope alone.
    - `store`: a datastore, or several, that this call alone drafts from besides: folders, or stores opened before.
    - `siblings`: "share" (samples of one prompt draft from what the others write) or "off".
    - `on_pass`: a function that is called with the `VerifiedPass` that the drafter observes, the prompt's first; its
      arrays are valid during the call.
    - `return_logprobs`: with `return_dict_in_generate=True` the output has the fields `logprobs` and `raw_logprobs`
      (`retrieve_spec.generation.calls.DecoderOnlyOutput`).

    Parameters
    ----------
    model
        A `transformers` causal language model, or a `peft` model around one.
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
        The object cannot generate, or its adapter changes the prompt.
    TokenizerMismatchError
        The tokenizer has tokens the model does not know, or a store or session was made with another one.
    ModelMismatchError
        A store's dense index was built with another model (`dense="off"` drafts from the rest of the store).
    StoreError
        A folder holds no store, or a damaged or unfinished one; the session's file is damaged or something else.
    ConfigError
        An option is unknown or out of range; also for an unknown preset or one that misses a source.
    """
    wrapper, model = model, base_model(model)
    prepare(model, tokenizer, datastores, drafter, config, **options)
    original = model.__dict__.get("generate")
    if _is_ours(original):  # of an accelerated model this is a copy of
        original = model.__dict__.get(BEFORE)
    if original is not None:
        model.__dict__[BEFORE] = original
    model.__dict__["generate"] = types.MethodType(generate, model)
    return wrapper


@compiles
@log_compiling()
def prepare(
    model: Any,
    tokenizer: Any = None,
    datastores: Sequence[Any] | None = None,
    drafter: Drafter | None = None,
    config: SpeculationConfig | None = None,
    **options: Any,
) -> None:
    """Make what a model needs to be drafted for, `model.speculation`; arguments and errors are those of `accelerate`.

    Its `generate` stays, or is the original one again.
    """
    _check_arguments(model, datastores, drafter, config)
    known = embedded_tokens(model)
    _check_tokenizer(tokenizer, known)
    config = (config or SpeculationConfig()).with_options(**options)
    survive_forks()
    _undo(model)
    read_logits(torch.zeros(1, 2), 1)  # loads Numba's first kernel, which must not be part of later times
    stores = [open_store(store, tokenizer) for store in datastores or ()]
    if stores and tokenizer is None:
        logger.warning("no tokenizer was given to check the datastores by: pass tokenizer= to accelerate")
    read_ahead(stores)
    check_stores(model, known, config, stores)
    threads = PassThreads.of_torch() if input_device(model).type == "cpu" else None
    drafts_alone = drafter is None and config.draft == AUTO and not stores
    second_process = compiled_beside() if drafts_alone else contextlib.nullcontext()
    with second_process as compiling, using(threads, spare=0 if compiling is None else 1):
        passes = VerifierFactory(model, config, _layer_of(drafter, config, stores), _find_mode)
        speculation = Speculation(model, config, passes, tokenizer, stores, drafter)
        _prepare_drafter(speculation, compiling)
    speculation.engine.threads = threads
    model.speculation = speculation
    if reason := why_delegated(model, speculation.interface):
        speculation.mode, speculation.reason = "delegated", reason
    elif speculation.mode != "tree":
        speculation.say_once(f"drafts are verified in {speculation.mode} mode: {speculation.reason}")
    if passes.pass_kind == "model's own":
        speculation.say_once(f"passes go through the model's own modules: {passes.pass_reason}")
    if config.nodes == AUTO and config.draft != OFF:
        measure_passes(speculation)


def _layer_of(drafter: Drafter | None, config: SpeculationConfig, stores: list[Any]) -> Layer:
    """The layer whose hidden states are drafted from."""
    own = DenseIndexes(stores).layer if drafter is None and config.dense == AUTO else None
    return own or getattr(drafter, "wants_hidden", None) or "last"


def _prepare_drafter(speculation: Speculation, compiling: subprocess.Popen[bytes] | None) -> None:
    """Read the model's bigrams, and get the drafter ready, whose kernels another process may be compiling."""
    drafters = speculation.drafters
    if _reads_bigrams(speculation):
        drafters.bigrams = read_bigrams(speculation)
        if isinstance(drafters.given, UsesBigrams):
            drafters.given.use_bigrams(drafters.bigrams)
    first = speculation.drafter()  # raises for an unknown preset or a missing source now instead of at the first call
    if compiling is not None:
        compiling.wait()
    if isinstance(first, Preparable):
        first.prepare()


def _check_arguments(model: Any, datastores: Any, drafter: Any, config: Any) -> None:
    """Refuse arguments that are something else."""
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        raise _no_model(model)
    several = not isinstance(datastores, (str, os.PathLike))
    require(several, "a list of datastores", datastores, f"Give datastores=[{str(datastores)!r}].")
    options_remedy = "Give options by name: draft='auto', …."
    require(isinstance(config, SpeculationConfig | None), "a SpeculationConfig as config", config, options_remedy)
    drafts = drafter is None or callable(getattr(drafter, "propose", None))
    require(drafts, "a drafter", drafter, options_remedy)


def _check_tokenizer(tokenizer: Any, known: int) -> None:
    """Refuse what is no tokenizer, and one of more tokens than are `known` to the model."""
    is_name = isinstance(tokenizer, (str, os.PathLike))
    has_tokens = tokenizer is None or (hasattr(tokenizer, "__len__") and not is_name)
    require(has_tokens, "a tokenizer", tokenizer, "Load it with AutoTokenizer.from_pretrained.")
    if tokenizer is not None and len(tokenizer) > known:
        raise TokenizerMismatchError(
            f"a tokenizer of at most {known} tokens, as many as the model embeds",
            f"{len(tokenizer)} tokens ({getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__})",
            "Load the tokenizer from where the model came from.",
        )


def _reads_bigrams(speculation: Speculation) -> bool:
    """Whether drafts are made from bigrams, and the model can be asked for them."""
    given = speculation.drafters.given
    drafts = speculation.config.draft == AUTO if given is None else isinstance(given, UsesBigrams)
    can_ask = speculation.ranks is None and not speculation.interface.has_encoder  # ranks must run the same passes
    return drafts and can_ask and speculation.tokenizer is not None and speculation.mode == "tree"


def _no_model(given: Any) -> UnsupportedModelError:
    """The error of what is no model that can generate, with what to do where that can be seen."""
    got, remedy = type(given).__name__, "Load it with AutoModelForCausalLM.from_pretrained."
    if isinstance(given, (str, os.PathLike)):
        name = str(given)[:60]
        got, remedy = repr(name), f"Load it with AutoModelForCausalLM.from_pretrained({name!r})."
    elif isinstance(getattr(given, "_orig_mod", None), PreTrainedModel):
        got = "one that torch.compile returned"
        remedy = "Accelerate the model first, then compile it: torch.compile(accelerate(model))."
    elif isinstance(given, PreTrainedModel):
        got, remedy = f"{got}, which has no head for the next token", "Load it with AutoModelForCausalLM."
    return UnsupportedModelError("a transformers model that can generate", got, remedy)


def _is_ours(method: Any) -> bool:
    return getattr(method, "__func__", None) is generate


def restore(model: Any) -> Any:
    """Undo `accelerate`, copies of weights included; a model that was not accelerated is returned as it is."""
    wrapper, model = model, base_model(model)
    if not isinstance(model, PreTrainedModel):
        raise _no_model(model)
    _undo(model)
    return wrapper


def _undo(model: Any) -> None:
    """Let a model be as before it was accelerated, if it was."""
    if not isinstance(getattr(model, "speculation", None), Speculation):
        return
    model.speculation.invalidate()
    model.speculation.drafters.keep(at_once=True)
    original = model.__dict__.pop(BEFORE, None)
    if _is_ours(model.__dict__.get("generate")):
        del model.__dict__["generate"]
    if original is not None:
        model.__dict__["generate"] = original
    del model.speculation


@contextlib.contextmanager
def accelerated(model: Any, tokenizer: Any = None, **options: Any) -> Iterator[Any]:
    """Accelerate a model within a `with` block (arguments of `accelerate`)."""
    accelerate(model, tokenizer, **options)
    try:
        yield model
    finally:
        restore(model)


def _find_mode(model: Any) -> Finding:
    """What a probe says of a model that need not be in evaluation mode."""
    interface = read_interface(model)
    if reason := why_not_inside(model):
        return Finding("plain", reason, interface)
    with evaluating(model):
        return probe(model, interface)
