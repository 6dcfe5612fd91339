"""Arguments of a call: text, ids or tensors, checked, as token ids that the model has, on its device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.errors import ConfigError, PromptError, nearest
from retrieve_spec.model_layers import embedded_tokens
from retrieve_spec.verify.interface import input_device

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
