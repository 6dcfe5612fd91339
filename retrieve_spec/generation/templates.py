"""Templates: calls of a server are made from an earlier one, since `generate` takes milliseconds to prepare each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria

from retrieve_spec.verify.steps import Captured, capture
from retrieve_spec.verify.verifier import OF_TEXT

_MOST = 64
"""Most templates of a model."""
_GUIDES = LogitsProcessor()
"""Stands for the logits processors that a call brings."""
_FOR_ANY_TEXT = (
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper,
    hf.RepetitionPenaltyLogitsProcessor, hf.SequenceBiasLogitsProcessor,
)  # fmt: skip
"""Logits processors that are the same whatever the prompt's length."""


class Templates:
    """Prepared calls of a model, by all their arguments but the text, the cache, the length and logits processors.

    The model's generation config must not change.

    Parameters
    ----------
    cache_name
        The argument by which the model takes its cache.
    """

    def __init__(self, cache_name: str) -> None:
        self._cache_name = cache_name
        self._known: dict[str, Captured | None] = {}

    def prepare(self, generate: Any, arguments: dict[str, Any]) -> Captured:
        """Return what `generate` prepares for a call of one text.

        Parameters
        ----------
        generate
            The model's original `generate`.
        arguments
            Its arguments: `input_ids`, an `attention_mask` that hides none of them, the cache, `max_new_tokens`,
            perhaps `logits_processor`, and options whose `repr` tells their value.
        """
        own = ("input_ids", "attention_mask", self._cache_name, "max_new_tokens", "logits_processor")
        key = repr(sorted((name, value) for name, value in arguments.items() if name not in own))
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            captured = generate(**{**arguments, "logits_processor": [_GUIDES]}, custom_generate=capture)
            self._known[key] = captured if self._fits_any_text(captured, arguments["input_ids"]) else None
            captured.model_kwargs[self._cache_name] = captured.input_ids = None  # nothing of a user's text is kept
        template = self._known[key]
        if template is not None:
            return self._fill(template, arguments)
        prepared: Captured = generate(**arguments, custom_generate=capture)
        return prepared

    def _fits_any_text(self, captured: Captured, ids: torch.Tensor) -> bool:
        """Whether nothing that was prepared depends on the text but what `_fill` replaces."""
        kwargs, positions = captured.model_kwargs, captured.model_kwargs.get("position_ids")
        return (
            kwargs.keys() <= OF_TEXT | {self._cache_name}
            and kwargs.get("attention_mask") is None
            and torch.equal(captured.input_ids, ids)
            and (positions is None or torch.equal(positions, _positions(ids)))
            and all(each is _GUIDES or type(each) in _FOR_ANY_TEXT for each in captured.logits_processor)
            and all(type(each) in (MaxLengthCriteria, EosTokenCriteria) for each in captured.stopping_criteria)
        )

    def _fill(self, template: Captured, arguments: dict[str, Any]) -> Captured:
        """Return the call of a template with a text, a cache, a length and logits processors."""
        ids, most = arguments["input_ids"], arguments["max_new_tokens"]
        config = copy.copy(template.generation_config)
        config.max_new_tokens, config.max_length = most, ids.shape[1] + most
        config._mask_length = ids.shape[1]  # of the mask that `generate` leaves out where it hides nothing
        kwargs = {**template.model_kwargs, self._cache_name: arguments[self._cache_name]}
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = _positions(ids)
        guides = arguments.get("logits_processor", [])
        processors = [one for each in template.logits_processor for one in (guides if each is _GUIDES else [each])]
        criteria = StoppingCriteriaList(template.stopping_criteria)
        for number, each in enumerate(criteria):
            if type(each) is MaxLengthCriteria:
                criteria[number] = MaxLengthCriteria(config.max_length, each.max_position_embeddings)
        return Captured(ids, LogitsProcessorList(processors), criteria, config, kwargs)


def _positions(ids: torch.Tensor) -> torch.Tensor:
    """Return the positions of a text without padding."""
    return torch.arange(ids.shape[1], device=ids.device)[None]
