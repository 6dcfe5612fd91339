"""Templates: calls of a server are made from an earlier one, since `generate` takes milliseconds to prepare each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria

from retrieve_spec.engine.joining import CallOptions, Prepared, sequences_of
from retrieve_spec.engine.sequence import Sequence
from retrieve_spec.generation.delegation import past_length
from retrieve_spec.generation.request import check_embedded, prediction_ids, prepare_call, speculation_of
from retrieve_spec.verify.verifier import OF_TEXT, VerifierInputs

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

    Parameters
    ----------
    model
        An accelerated model, whose generation config must not change.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache_name: str = model.speculation.interface.cache_name
        self._known: dict[str, Prepared | None] = {}

    def open(self, input_ids: torch.Tensor, options: CallOptions, **arguments: Any) -> Sequence | None:
        """Return the sequence of a text (1, L), which `speculation.engine` joins and takes from pass to pass.

        Parameters
        ----------
        input_ids, options
            The text, and the call's options of this library.
        arguments
            Other arguments of `generate`: an `attention_mask` that hides nothing, a cache that holds a beginning of the
            text, `max_new_tokens`, perhaps `logits_processor`, and options whose `repr` tells their value.

        Returns
        -------
        Sequence or None
            None where the call is left to the original `generate`.
        """
        prepared = self.prepare({"input_ids": input_ids, **arguments})
        if isinstance(prepared, str):
            return None
        expected = prediction_ids(options.prediction, arguments.get("tokenizer"), self._model)
        (sequence,) = sequences_of(speculation_of(self._model), prepared, [expected], options)
        return sequence

    def prepare(self, arguments: dict[str, Any]) -> Prepared | str:
        """Return what `generate` prepares for a call of one text, or why it has to decode it; arguments as of `open`.

        Raises
        ------
        UnknownTokenError
            The text has a token that the model does not embed.
        """
        own = ("input_ids", "attention_mask", self._cache_name, "max_new_tokens", "logits_processor", "tokenizer")
        key = repr(sorted((name, value) for name, value in arguments.items() if name not in own))
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = self._template(arguments)
        template = self._known[key]
        return prepare_call(self._model, arguments) if template is None else self._fill(template, arguments)

    def _template(self, arguments: dict[str, Any]) -> Prepared | None:
        """Return the prepared call without its text and cache; None where more of it depends on the text."""
        prepared = prepare_call(self._model, {**arguments, "logits_processor": [_GUIDES]})
        if isinstance(prepared, str) or not self._fits_any_text(prepared, arguments["input_ids"]):
            return None
        prepared.inputs = VerifierInputs(torch.empty(1, 0), {**prepared.inputs.model_kwargs, self._cache_name: None})
        return prepared

    def _fits_any_text(self, prepared: Prepared, ids: torch.Tensor) -> bool:
        """Whether nothing that was prepared depends on the text but what `_fill` replaces."""
        kwargs, positions = prepared.inputs.model_kwargs, prepared.inputs.model_kwargs.get("position_ids")
        return (
            kwargs.keys() <= OF_TEXT | {self._cache_name}
            and kwargs.get("attention_mask") is None
            and prepared.ids is None
            and prepared.context_ids is None
            and torch.equal(prepared.inputs.input_ids, ids)
            and (positions is None or torch.equal(positions, _positions(ids)))
            and all(each is _GUIDES or type(each) in _FOR_ANY_TEXT for each in prepared.processors)
            and all(type(each) in (MaxLengthCriteria, EosTokenCriteria) for each in prepared.criteria)
            and not self._model.speculation.interface.rope_rescans  # longer texts may be left to `generate`
        )

    def _fill(self, template: Prepared, arguments: dict[str, Any]) -> Prepared:
        """Return the call of a template with a text, a cache, a length and logits processors."""
        ids, most = arguments["input_ids"], arguments["max_new_tokens"]
        config = copy.copy(template.config)
        config.max_new_tokens, config.max_length = most, ids.shape[1] + most
        kwargs = {**template.inputs.model_kwargs, self._cache_name: arguments[self._cache_name]}
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = _positions(ids)
        inputs = VerifierInputs(ids, kwargs, past_length(kwargs), max_length=config.max_length)
        check_embedded(self._model, inputs)
        guides = arguments.get("logits_processor", [])
        processors = [one for each in template.processors for one in (guides if each is _GUIDES else [each])]
        criteria = StoppingCriteriaList(template.criteria)
        for number, each in enumerate(criteria):
            if type(each) is MaxLengthCriteria:
                criteria[number] = MaxLengthCriteria(config.max_length, each.max_position_embeddings)
        return Prepared(inputs, LogitsProcessorList(processors), criteria, config, template.callers_cache)


def _positions(ids: torch.Tensor) -> torch.Tensor:
    """Return the positions of a text without padding."""
    return torch.arange(ids.shape[1], device=ids.device)[None]
