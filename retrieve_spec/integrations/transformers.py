"""Custom generation for transformers: one call of `generate` drafts and verifies, others of the model stay as they are.

::

    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True, datastores=["stores/code"])
    model.generate(**inputs, custom_generate=generate)

Nothing is accelerated for good: what the first call prepares stays with the model as `model.speculation` for the next
ones, `model.generate` is not replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.generation.utils import GENERATION_MODES_MAPPING

from retrieve_spec.acceleration import prepare
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.drafter import Drafter
from retrieve_spec.engine.joining import DelegatedCall
from retrieve_spec.engine.speculation import Speculation
from retrieve_spec.errors import ConfigError
from retrieve_spec.generation.calls import decode_captured, seeded
from retrieve_spec.generation.calls import generate as accelerated_generate
from retrieve_spec.generation.request import BEFORE, pop_options
from retrieve_spec.verify.steps import capture

FOLDER = str(Path(__file__).parent / "recipe")
"""Folder for `custom_generate=`, in the form of a repository; a model's own repository needs the folder in it."""
_PREPARING = threading.Lock()
"""Lets threads that call a model for the first time prepare it once."""
_ONCE = frozenset(SpeculationConfig.__dataclass_fields__) - {"draft", "nodes"}
"""Options of a model, not of a call, beside stores, drafter and config."""


def generate(
    *args: Any,
    model: Any = None,
    draft: str | None = None,
    nodes: int | str | None = None,
    prediction: Any = None,
    seed: int | None = None,
    scope: str | None = None,
    siblings: str | None = None,
    datastores: Sequence[Any] | None = None,
    drafter: Drafter | None = None,
    config: SpeculationConfig | None = None,
    **arguments: Any,
) -> Any:
    """Generate as an accelerated model does; transformers calls this, by the folder or as a callable.

    Parameters
    ----------
    *args
        As a callable: the model and its input ids, prepared by transformers. By the folder: as for `generate`.
    model
        By the folder: the model.
    draft, nodes, prediction, seed, scope, siblings
        As for `generate` of a model that `retrieve_spec.accelerate` was given.
    datastores, drafter, config
        As for `accelerate`: what the first call gives serves the next ones too. One that gives others prepares anew.
    **arguments
        Arguments of `generate`. By the folder: also `return_logprobs`, and fields of `SpeculationConfig`, which belong
        to the model as stores do. As a callable there is no `streamer` and no `tokenizer`: transformers keeps these.

    Returns
    -------
    object
        What `generate` returns.

    Raises
    ------
    ConfigError
        Options for `accelerate` are given to a model that was accelerated by itself, or are out of range.
    UnsupportedModelError, StoreError, TokenizerMismatchError, ModelMismatchError
        As for `accelerate`.
    """
    own = {"draft": draft, "nodes": nodes, "prediction": prediction, "seed": seed, "scope": scope, "siblings": siblings}
    once = {"datastores": datastores, "drafter": drafter, "config": config}
    if model is None:
        model, input_ids = args
        _prepare(model, None, once)
        return _decode(model, input_ids, own, arguments)
    once |= {name: arguments.pop(name) for name in list(arguments) if name in _ONCE}
    _prepare(model, arguments.get("tokenizer"), once)
    return accelerated_generate(model, *args, **own, **arguments)


def _prepare(model: Any, tokenizer: Any, given: dict[str, Any]) -> None:
    """Prepare a model, if it was not, or with other options."""
    given = {name: value for name, value in given.items() if value is not None}
    with _PREPARING:
        before, speculation = model.__dict__.get("generate"), getattr(model, "speculation", None)
        prepared = isinstance(speculation, Speculation)
        if prepared and getattr(before, "__func__", None) is accelerated_generate:
            if given:
                remedy = "Give them to accelerate, or call restore(model) first."
                raise ConfigError("a model that is not accelerated", f"one, and {', '.join(given)}", remedy)
        elif not prepared or (given and given != getattr(speculation, "prepared_with", None)):
            prepare(model, tokenizer, **given)
            model.speculation.prepared_with = given
        with suppress(AttributeError):  # a model's repository may have this as its generate: what is left to the
            if model.__dict__.get(BEFORE).func is generate:  # original is left to the class's
                del model.__dict__[BEFORE]


def _decode(model: Any, input_ids: Any, own: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Decode what transformers has prepared, or let transformers decode it."""
    speculation = model.speculation
    options = pop_options(own, model)
    speculation.drafter(options.draft)  # an unknown preset is an error
    prepared = capture(model, input_ids, **arguments)
    try:
        if speculation.engine.is_stepping:
            raise DelegatedCall("it is asked for in the middle of another generation")
        cache = speculation.interface.cache_name
        return decode_captured(model, prepared, {cache: arguments.get(cache)}, options)
    except DelegatedCall as why:
        reason = str(why)
        speculation.delegated(reason)
    method = getattr(type(model), GENERATION_MODES_MAPPING[prepared.generation_config.get_generation_mode()], None)
    if method is None:
        raise ConfigError("a way to decode that transformers has itself", reason, "Leave custom_generate out.")
    with seeded(options.seed, model):
        return method(model, input_ids, **arguments)
