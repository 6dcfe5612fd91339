"""Batch prompt: the rows of a batch that are given more than text, read together as `generate` reads them, then apart.

Which picture belongs to which row only the model knows, so it reads the prompts of all rows in one pass. Behind it
every row is a text of its own: a part of the cache without the padding, and a position to go on from. Where the model
is given anything else behind its prompt, or passes over drafts do not say what single steps of the whole batch say, the
call is left to `generate`; what was found of a kind of call is known from then on.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.verify.cache import HOLD_STATE, TAKE_TREES
from retrieve_spec.verify.call_kinds import CallKind
from retrieve_spec.verify.extras import SET_EACH_PASS, Extras, kwargs_behind
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import catch_hidden
from retrieve_spec.verify.shrink import lengths_of
from retrieve_spec.verify.steps import SingleSteps
from retrieve_spec.verify.verifier import Mode, VerifierInputs, VerifierOutput

_ROWS = "rows of a batch"


class BatchPrompt:
    """What a pass over the prompts of a batch left: for every row where it goes on, and the logits to go on with.

    Parameters
    ----------
    model
        Whose prompt it is.
    inputs
        Of the whole batch, (rows, L) tokens.
    padding
        Tokens in front of every row that it is decoded without.
    cache_name
        Argument of the forward that carries the cache.
    """

    def __init__(self, model: Any, inputs: VerifierInputs, padding: list[int], cache_name: str) -> None:
        self.model, self.inputs, self.padding, self._cache_name = model, inputs, padding, cache_name
        self.problem = ""
        """Why rows cannot go on apart, once they were read; empty when they can."""
        self.names = self._beside_text(inputs.model_kwargs)
        self._outputs: Any = None
        self._positions: torch.Tensor | None = None
        self._last: torch.Tensor | None = None

    @property
    def by_axis(self) -> bool:
        """Whether rows go on at other positions on one axis than on another."""
        at = self._positions
        return at is not None and at.ndim != 2 and not bool((at == at[:1]).all())

    def read(self, layer: Layer | None = None) -> None:
        """Run the pass, unless it has been; hidden states of a `layer` are kept for drafters that look them up."""
        if self._outputs is not None and (layer is None or self._last is not None):
            return
        kwargs = {**self.inputs.model_kwargs, "use_cache": True}
        kwargs[self._cache_name] = copy.deepcopy(kwargs[self._cache_name])  # nothing is in it yet; a pass may fail
        ids = self.inputs.input_ids
        with torch.no_grad(), catch_hidden(self.model, layer) as hidden:
            given = self.model.prepare_inputs_for_generation(
                ids, next_sequence_length=ids.shape[1], is_first_iteration=True, **kwargs
            )
            outputs = self.model(**given, return_dict=True)
        self._kwargs = kwargs
        self._last = hidden[-1][:, -1:] if hidden else None
        after = kwargs_behind(self.model, outputs, dict(kwargs))
        self._cache = after[self._cache_name]
        step = self.model.prepare_inputs_for_generation(
            torch.cat([ids, ids[:, -1:]], dim=1), next_sequence_length=1, is_first_iteration=False, **after
        )
        self._positions = step.get("position_ids")
        self.problem = self._why_not(step)
        self._outputs = outputs

    def _beside_text(self, kwargs: dict[str, Any]) -> frozenset[str]:
        """Names of the arguments of a pass that say more than its text."""
        of_text = SET_EACH_PASS | {"attention_mask", self._cache_name}
        return Extras({name: value for name, value in kwargs.items() if name not in of_text}).kind

    def _why_not(self, step: dict[str, Any]) -> str:
        """Why rows are no texts of their own behind the prompt, by what the model is given there."""
        given = [name for name in self._beside_text(step) if not name.endswith("token_type_ids")]  # all of it is text
        if given:
            return f"behind the prompts of a batch the model is given {', '.join(sorted(given))}"
        if type(self._cache) is not DynamicCache or self._cache.offloading:
            return f"a batch is kept in a {type(self._cache).__name__}"
        for layer in self._cache.layers:
            if type(layer) not in TAKE_TREES + HOLD_STATE:
                return f"a {type(layer).__name__} of a batch cannot be taken apart"
        if self._positions is None and any(self.padding):
            return "the model counts the padding of a batch"
        return ""

    def row(self, index: int) -> tuple[VerifierInputs, VerifierOutput]:
        """Where a row goes on from, a cache of its own included, and what the pass said behind its prompt."""
        padding, ids = self.padding[index], self.inputs.input_ids[index : index + 1]
        length = ids.shape[1] - padding
        kwargs: dict[str, Any] = {self._cache_name: _row_of(self._cache, index, length)}
        if self._positions is not None:
            ahead = torch.arange(-length, 0, device=self._positions.device)
            kwargs["position_ids"] = self._positions[..., index : index + 1, -1:] + ahead
        inputs = replace(
            self.inputs, input_ids=ids[:, padding:], model_kwargs=kwargs, past_length=length, holds_past=True,
            max_length=self.inputs.max_length - padding, common_rows=True,
        )  # fmt: skip
        hidden = None if self._last is None else self._last[index]
        return inputs, VerifierOutput(self._outputs.logits[index, -1:], hidden)

    def examine(self, own: HFVerifier) -> str:
        """Why such calls are left to `generate`, found out once for each kind: passes over drafts behind a row are held
        to single steps of the whole batch.
        """
        kinds, length = own.kinds, self.inputs.input_ids.shape[1]
        if kinds is None:
            return "nothing is known of calls with more than text"
        beyond = sum(length > other for other in lengths_of(self.model.config).values())
        kind = CallKind(self.names | {_ROWS}, any(self.padding), beyond)
        if kind in kinds.known:
            mode, why = kinds.known[kind]
            return "" if mode == "tree" else why
        self.read()
        if self.problem:
            kinds.known[kind] = "plain", self.problem
            return self.problem
        index = max(range(len(self.padding)), key=self.padding.__getitem__)
        twins: list[HFVerifier] = []

        def steps() -> SingleSteps:
            return SingleSteps.behind(self.model, self.inputs.input_ids, self._kwargs, self._outputs, index)

        def verifier(mode: Mode) -> HFVerifier:
            twins.append(HFVerifier(self.model, own.interface, mode))
            twins[-1].start(self.row(index)[0])
            return twins[-1]

        end = own.interface.rope_switch or own.interface.max_positions
        try:
            mode, why = kinds.examine(
                kind, (own.mode, own.reason), self.model, steps, verifier, end - length if end else None
            )
        finally:
            for twin in twins:
                twin.finish()
        return "" if mode == "tree" else why or f"drafts are verified in {mode} mode"


class RowPrompt:
    """The prompt of one row of a batch, as `SharedPrompt` gives it to a sequence: read before any sequence starts."""

    def __init__(self, batch: BatchPrompt, index: int) -> None:
        self._batch, self._index = batch, index

    def must_wait(self, is_reading: Any) -> bool:
        """Nobody waits."""
        return False

    def keep(self, verifier: Any, output: VerifierOutput, first_row: int) -> None:
        """Nobody else asks for it."""

    def taken(self, inputs: VerifierInputs) -> tuple[VerifierInputs, tuple[VerifierOutput, int]]:
        """Where the sequence goes on, and the row of the logits behind its prompt."""
        behind, output = self._batch.row(self._index)
        return replace(behind, max_length=inputs.max_length), (output, 0)


def _row_of(cache: DynamicCache, index: int, length: int) -> DynamicCache:
    """One row of a cache behind its padding, `length` tokens, in a cache of its own that shares the tensors."""
    row = copy.copy(cache)
    row.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in row.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name)
                setattr(layer, name, {i: s if s is None else s[index : index + 1].clone() for i, s in states.items()})
            for name in ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"):
                if isinstance(value := getattr(layer, name, None), dict):
                    setattr(layer, name, dict(value))
        if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel():
            first = max(layer.keys.shape[-2] - length, 0)
            layer.keys = layer.keys[index : index + 1, :, first:]
            layer.values = layer.values[index : index + 1, :, first:]
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
    return row
