"""Rows of a prepared call: one text each with its part of mask, cache and rules; what sequences are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from retrieve_spec.sampling.guides import GrammarProcessor
from retrieve_spec.sampling.samplers import processors_of_row
from retrieve_spec.verify.cache import same_rows
from retrieve_spec.verify.verifier import OF_TEXT, VerifierInputs, VerifierOutput, says_nothing


class DelegatedCall(Exception):
    """A call is left to the original `generate`; the message says why."""


@dataclass(slots=True)
class Prepared:
    """What `generate` prepared for decoding.

    Attributes
    ----------
    inputs
        Where the verifier starts from.
    processors
        Logits processors in order, warpers included when sampling.
    criteria
        Stopping criteria in order.
    config
        The merged generation config.
    callers_cache
        Whether the cache is the caller's own.
    context_ids
        (n,) int32 what a drafter reads in place of the prompt, where that is not the prompt alone.
    ids
        (rows, L) long, the text as processors and criteria see it, where a prompt of embeddings is no part of it.
    """

    inputs: VerifierInputs
    processors: Any
    criteria: Any
    config: Any
    callers_cache: bool = False
    context_ids: NDArray[np.int32] | None = None
    ids: torch.Tensor | None = None


@dataclass(slots=True)
class Row:
    """One row of a prepared call.

    Attributes
    ----------
    index
        In the call; the noise its tokens are drawn with is its own.
    ids
        (1, L) long, its text as processors and criteria see it.
    padding
        Tokens in front of it that it is decoded without.
    inputs
        Where its verifier starts from.
    processors
        Its logits processors in order.
    """

    index: int
    ids: torch.Tensor
    padding: int
    inputs: VerifierInputs
    processors: Any


def rows_of(prepared: Prepared, cache_name: str, new_cache: Callable[[], Any]) -> list[Row]:
    """The rows of a prepared call, those of a batch without the padding in front and over caches of their own."""
    whole = prepared.inputs
    texts = whole.input_ids if prepared.ids is None else prepared.ids
    fewer = texts.shape[1] - whole.input_ids.shape[1]
    if len(texts) == 1:
        return [Row(0, texts, fewer, whole, processors_of_row(prepared.processors, 0))]
    rows = []
    mask = whole.model_kwargs.get("attention_mask")
    for index, padding in enumerate(padding_in_front(whole) or []):
        kwargs = {**whole.model_kwargs, cache_name: new_cache()}
        if mask is not None:  # what is behind the padding may have holes
            rest = mask[index : index + 1, padding:]
            kwargs["attention_mask"] = None if bool(rest.all()) else rest
        if (positions := kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = positions[..., index : index + 1, padding:]
        ids = whole.input_ids[index : index + 1]
        inputs = VerifierInputs(
            ids[:, padding:], kwargs, max_length=whole.max_length - padding, returns_cache=whole.returns_cache
        )
        processors = processors_of_row(prepared.processors, index)
        rows.append(Row(index, texts[index : index + 1], padding + fewer, inputs, processors))
    return rows


_ROW_BY_ROW = (
    hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor, hf.NoBadWordsLogitsProcessor, hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensLogitsProcessor, hf.SuppressTokensAtBeginLogitsProcessor, hf.ForcedEOSTokenLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor, hf.ExponentialDecayLengthPenalty, hf.InfNanRemoveLogitsProcessor,
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.TopHLogitsWarper, hf.LogitNormalization,
    hf.PrefixConstrainedLogitsProcessor, GrammarProcessor,
)  # fmt: skip
"""Processors that say the same of a row alone as in company; others may count rows or calls."""
_STOPS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, MaxTimeCriteria)


def extras_of(prepared: Prepared, cache_name: str) -> list[str]:
    """What a batch is given besides text; what is whose only the model knows."""
    kwargs = prepared.inputs.model_kwargs
    parts = {name: value for name, value in kwargs.items() if isinstance(value, (torch.Tensor, dict))}
    return [name for name, value in parts.items() if name not in OF_TEXT | {cache_name} and not says_nothing(value)]


def check_batch(prepared: Prepared, cache_name: str) -> None:
    """Look whether the rows of a prepared batch can be decoded together.

    Raises
    ------
    DelegatedCall
        They cannot.
    """
    kwargs, criteria = prepared.inputs.model_kwargs, list(prepared.criteria)
    if extras := extras_of(prepared, cache_name):
        raise DelegatedCall(f"a batch is given {', '.join(extras)}")
    if prepared.callers_cache:
        raise DelegatedCall("a batch goes on from a cache that was given")
    if (positions := kwargs.get("position_ids")) is not None and positions.shape[-2] != len(prepared.inputs.input_ids):
        raise DelegatedCall("a batch brings its own positions")
    if type(kwargs.get(cache_name)) is not DynamicCache or kwargs[cache_name].offloading:
        raise DelegatedCall(f"a batch is kept in a {type(kwargs.get(cache_name)).__name__}")
    others = [p for p in prepared.processors if type(p) not in _ROW_BY_ROW]
    others += [c for c in criteria if type(c) not in _STOPS]
    if others:
        kind = type(others[0]).__name__
        raise DelegatedCall(f"a {kind} may tell the rows of a batch apart: generate_many calls it for each request")
    kinds = {type(criterion) for criterion in criteria}
    if kinds & {StopStringCriteria, MaxTimeCriteria} and EosTokenCriteria not in kinds:
        raise DelegatedCall("rows of a batch go on behind where they stop: there is no end-of-text token")
    if padding_in_front(prepared.inputs) is None:
        raise DelegatedCall("a row of a batch has no text")


def padding_in_front(inputs: VerifierInputs) -> list[int] | None:
    """Padding tokens in front of every row of a batch; None when a row has nothing else, or the mask is no row's."""
    mask = inputs.model_kwargs.get("attention_mask")
    rows, length = inputs.input_ids.shape
    if mask is None:
        return [0] * rows
    if mask.shape != (rows, length):
        return None
    shown = mask.bool().cpu().numpy()
    return shown.argmax(axis=1).tolist() if shown.any(axis=1).all() else None


KEPT = 4
"""Prompts of `generate_many` whose readings are kept for later requests."""


@runtime_checkable
class CopiesRows(Protocol):
    """A verifier that can hand out what its cache holds."""

    def copy_rows(self) -> DynamicCache | None:
        """The rows held between two passes, in a cache that nothing writes to; None where rows are not all there is."""


class SharedPrompt:
    """One prompt of several sequences, for models that take the cache as the argument `cache_name`."""

    def __init__(self, cache_name: str) -> None:
        self.members = 0
        self._cache_name = cache_name
        self._is_read: Callable[[], bool] | None = None  # asks the sequence that reads it whether it still does
        self._rows: DynamicCache | None = None
        self._last_pass: tuple[VerifierOutput, int] | None = None  # and the row of it that follows the prompt

    def must_wait(self, is_reading: Callable[[], bool]) -> bool:
        """Whether another sequence is reading the prompt; if nobody is, the one that asks does from now on."""
        if self._last_pass is not None:
            return False
        if self._is_read is not None and self._is_read != is_reading and self._is_read():
            return True
        self._is_read = is_reading
        return False

    def keep(self, verifier: Any, output: VerifierOutput, first_row: int) -> None:
        """Keep what has been read and committed, unless nobody else will ask for it."""
        self._is_read = None
        if self.members < 2 or self._last_pass is not None or not isinstance(verifier, CopiesRows):
            return
        self._rows = verifier.copy_rows()
        if self._rows is not None:
            hidden = None if output.hidden is None else output.hidden.clone()
            self._last_pass = VerifierOutput(output.logits.clone(), hidden), first_row

    def taken(self, inputs: VerifierInputs) -> tuple[VerifierInputs, tuple[VerifierOutput, int] | None]:
        """What a sequence with these inputs starts from.

        Returns
        -------
        inputs
            Those that begin behind the prompt if it was kept, else the same.
        last_pass
            What the prompt's last pass gave, and the row of it that follows the prompt; None where it was not kept.
        """
        if self._last_pass is None or self._rows is None:
            return inputs, None
        kwargs = {**inputs.model_kwargs, self._cache_name: same_rows(self._rows)}
        past = inputs.input_ids.shape[1]
        behind = replace(inputs, model_kwargs=kwargs, past_length=past, holds_past=True)
        return behind, self._last_pass


def is_text_alone(inputs: VerifierInputs, cache_name: str) -> bool:
    """Whether tokens are all that a model is given."""
    known = OF_TEXT | {cache_name}
    return all(name in known or value is None for name, value in inputs.model_kwargs.items())


class SharedPrompts:
    """The prompts of sequences that go together, by their tokens."""

    def __init__(self, cache_name: str) -> None:
        self.cache_name = cache_name
        self._known: dict[bytes, SharedPrompt] = {}

    def of(self, inputs: VerifierInputs) -> SharedPrompt | None:
        """What sequences with these inputs share; None where they hold more than tokens."""
        if not is_text_alone(inputs, self.cache_name) or inputs.past_length or inputs.returns_cache:
            return None
        parts = [inputs.input_ids, *(inputs.model_kwargs.get(name) for name in ("attention_mask", "position_ids"))]
        key = b"|".join(b"" if part is None else part.cpu().numpy().tobytes() for part in parts)
        shared = self._known.pop(key, None) or SharedPrompt(self.cache_name)
        shared.members += 1
        self._known[key] = shared
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return shared
