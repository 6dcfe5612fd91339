"""Single steps from a cache, as plain `generate` takes them: what every pass over a draft is compared with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from retrieve_spec.verify.cache import apart
from retrieve_spec.verify.extras import kwargs_behind
from retrieve_spec.verify.interface import input_device


@dataclass(slots=True)
class Captured:
    """What `generate` hands a decoding method."""

    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]
    added: int = 0  # places of the prompt that its text does not have

    def take(self) -> dict[str, Any]:
        """The keyword arguments of the forward, with a cache of their own."""
        return copy.deepcopy(self.model_kwargs)


def capture(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Captured:
    """Stand in for a decoding method: take down what `generate` prepared."""
    return Captured(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)


def prepare_call(model: Any, ids: torch.Tensor, attention_mask: torch.Tensor) -> Captured:
    """Let `generate` prepare a prompt of (1, L) tokens; where there is an encoder, it reads them backwards."""
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": attention_mask}
    if model.config.is_encoder_decoder:
        arguments = {"decoder_input_ids": ids, "decoder_attention_mask": attention_mask} | _encoded(model, ids)
    options = {"max_new_tokens": 64, "num_beams": 1, "do_sample": False, "use_cache": True}
    prepared: Captured = GenerationMixin.generate(model, **arguments, **options, custom_generate=capture)
    return prepared


def _encoded(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Arguments that give an encoder something to read, and a decoder its first token."""
    start = {"decoder_start_token_id": int(ids[0, 0])}
    if model.main_input_name == "input_ids":
        return {"input_ids": ids.flip(-1), **start}
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    states = torch.randn((1, 9, width), generator=torch.Generator().manual_seed(0)).to(ids.device, model.dtype)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=states), **start}


class SingleSteps:
    """A text that the model reads as plain `generate` would: the prompt in one pass, then token by token.

    `row`: of a batch, whose logits are looked at; the others are fed the same tokens.
    """

    def __init__(
        self, model: Any, text: torch.Tensor, kwargs: dict[str, Any], row: int = 0, first: bool = True
    ) -> None:
        self._model, self._row = model, row
        self._text, self._first = text, first
        self._kwargs = {**kwargs, "use_cache": True}

    @classmethod
    def of(cls, model: Any, call: Captured) -> SingleSteps:
        """A prompt that nothing of has been read."""
        return cls(model, call.input_ids, call.take())

    @classmethod
    def behind(
        cls, model: Any, text: torch.Tensor, model_kwargs: dict[str, Any], outputs: Any, row: int = 0
    ) -> SingleSteps:
        """A text (rows, L) that has been read with these arguments and outputs; their cache stays as it is."""
        after = kwargs_behind(model, outputs, {**model_kwargs, "use_cache": True})
        return cls(model, text, _separate(after), row, first=False)

    def feed(self, token: int | None = None) -> torch.Tensor:
        """(vocab,) logits behind the prompt, or behind one more token."""
        return self.feed_at_once([] if token is None else [token])[-1]

    def feed_at_once(self, tokens: Sequence[int]) -> torch.Tensor:
        """(rows, vocab) logits of one pass: the prompt, which may be all of the text, or some more tokens."""
        if tokens:
            more = torch.tensor([tokens], dtype=self._text.dtype, device=self._text.device)
            self._text = torch.cat([self._text, more.expand(len(self._text), len(tokens))], dim=-1)
        if len(tokens) > 1:
            self._kwargs = kwargs_behind(self._model, {}, self._kwargs, len(tokens) - 1)
        length = self._text.shape[1] if self._first else len(tokens)
        inputs = self._model.prepare_inputs_for_generation(
            self._text, next_sequence_length=length, is_first_iteration=self._first, **self._kwargs
        )
        inputs.pop("logits_to_keep", None)
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = kwargs_behind(self._model, outputs, self._kwargs)
        self._first = False
        logits: torch.Tensor = outputs.logits[self._row]
        return logits.float()

    def fork(self) -> SingleSteps:
        """The same text to be continued otherwise."""
        twin = copy.copy(self)
        twin._kwargs = _separate(self._kwargs)
        return twin


def _separate(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments with a cache of their own; other tensors are read only."""
    return {
        name: apart(value) if isinstance(value, Cache)
        else value if isinstance(value, (torch.Tensor, ModelOutput)) else copy.deepcopy(value)
        for name, value in model_kwargs.items()
    }  # fmt: skip


def vocabulary(model: Any) -> int:
    """Tokens that a model embeds and may say."""
    config = model.config.get_text_config(decoder=True)
    embedded = getattr(model.get_input_embeddings(), "num_embeddings", 1 << 30)  # encoders may have a vocabulary apart
    return min(int(getattr(config, "vocab_size", embedded)), embedded)


def ordinary_tokens(model: Any) -> range:
    """Tokens to try a model with: the first few, which are often special, are left out where there are enough."""
    known = min(vocabulary(model), 30_000)
    return range(3 if known > 8 else 0, known)


def sample_tokens(model: Any, length: int, which: int = 0) -> torch.Tensor:
    """(1, length) long, tokens that the model has; `which` of several texts of them."""
    ordinary = ordinary_tokens(model)
    numbers: NDArray[np.int64] = ordinary.start + (np.arange(length) * 7919 + 13 + which) % len(ordinary)
    return torch.from_numpy(numbers)[None].to(input_device(model))
