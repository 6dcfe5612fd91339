"""Single steps from a cache, as plain `generate` takes them: what every pass over a draft is compared with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import Cache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.cache import apart
from retrieve_spec.verify.interface import input_device
from retrieve_spec.verify.pass_inputs import kwargs_after
from retrieve_spec.verify.verifier import (
    CACHE_NAMES,
    Batching,
    Mode,
    PassKind,
    SharedPasses,
    VerifierInputs,
    VerifierOutput,
)


@dataclass(slots=True)
class Captured:
    """What `generate` gives a decoding method."""

    input_ids: torch.Tensor
    logits_processor: Any
    stopping_criteria: Any
    generation_config: Any
    model_kwargs: dict[str, Any]
    added: int = 0  # positions of the prompt without a token of the text

    def take(self) -> dict[str, Any]:
        """Return the forward's keyword arguments with a copy of the cache."""
        return copy.deepcopy(self.model_kwargs)


def capture(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Captured:
    """Stand in for a decoding method: record what `generate` prepared."""
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
    """Return arguments that give an encoder a text, and a decoder its first token."""
    start = {"decoder_start_token_id": int(ids[0, 0])}
    if model.main_input_name == "input_ids":
        return {"input_ids": ids.flip(-1), **start}
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    states = torch.randn((1, 9, width), generator=torch.Generator().manual_seed(0)).to(ids.device, model.dtype)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=states), **start}


class SingleSteps:
    """A text that the model reads as plain `generate` would: the prompt in one pass, then token by token.

    `row` is the row of a batch whose logits are read; the others get the same tokens. `unread` is the number of tokens
    at the end of the text that the first pass reads; 0 where it has been read.
    """

    def __init__(self, model: Any, text: torch.Tensor, kwargs: dict[str, Any], row: int = 0, unread: int = 0) -> None:
        self._model, self._row = model, row
        self._text, self.unread = text, unread
        self._kwargs = {**kwargs, "use_cache": True}

    @classmethod
    def of(cls, model: Any, call: Captured) -> SingleSteps:
        """Return the steps of an unread prompt."""
        return cls(model, call.input_ids, call.take(), unread=call.input_ids.shape[1])

    @classmethod
    def after(
        cls, model: Any, text: torch.Tensor, model_kwargs: dict[str, Any], outputs: Any, row: int = 0
    ) -> SingleSteps:
        """Return the steps after a text (rows, L) that was read with these arguments and outputs; copies the cache."""
        kwargs = kwargs_after(model, outputs, {**model_kwargs, "use_cache": True})
        return cls(model, text, _separate(kwargs), row)

    def feed(self, token: int | None = None) -> torch.Tensor:
        """Return the (vocab,) logits after the prompt, or after one more token."""
        return self.feed_at_once([] if token is None else [token])[-1]

    def feed_at_once(self, tokens: Sequence[int], keep: int = 0) -> torch.Tensor:
        """(rows, vocab) logits of one pass: the prompt, which may be all of the text, or some more tokens.

        Only those of the last `keep` rows, unless that is 0.
        """
        if tokens:
            more = torch.tensor([tokens], dtype=self._text.dtype, device=self._text.device)
            self._text = torch.cat([self._text, more.expand(len(self._text), len(tokens))], dim=-1)
        if len(tokens) > 1:
            self._kwargs = kwargs_after(self._model, {}, self._kwargs, len(tokens) - 1)
        first, self.unread = self.unread, 0
        inputs = self._model.prepare_inputs_for_generation(
            self._text, next_sequence_length=first or len(tokens), is_first_iteration=bool(first), **self._kwargs
        )
        inputs.pop("logits_to_keep", None)
        if keep and self._model._supports_logits_to_keep():
            inputs["logits_to_keep"] = keep
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = kwargs_after(self._model, outputs, self._kwargs)
        logits: torch.Tensor = outputs.logits[self._row, -keep:]
        return logits.float()

    @property
    def cache(self) -> Any:
        """The cache under the model's name for it, or the one that `generate` made where the model keeps its state in
        itself.
        """
        return next((cache for name in CACHE_NAMES if (cache := self._kwargs.get(name)) is not None), None)

    def fork(self) -> SingleSteps:
        """Return a copy that continues without this one."""
        twin = copy.copy(self)
        twin._kwargs = _separate(self._kwargs)
        return twin


def _separate(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with a copy of the cache; other tensors are read only."""
    return {
        name: apart(value) if isinstance(value, Cache)
        else value if isinstance(value, (torch.Tensor, ModelOutput)) else copy.deepcopy(value)
        for name, value in model_kwargs.items()
    }  # fmt: skip


def vocabulary(model: Any) -> int:
    """Number of tokens that a model embeds and can generate."""
    config = model.config.get_text_config(decoder=True)
    embedded = getattr(model.get_input_embeddings(), "num_embeddings", 1 << 30)  # encoders may have another vocabulary
    return min(int(getattr(config, "vocab_size", embedded)), embedded)


def ordinary_tokens(model: Any) -> range:
    """Return the tokens to try a model with, without the first few, which are often special, where there are enough."""
    known = min(vocabulary(model), 30_000)
    return range(3 if known > 8 else 0, known)


def sample_tokens(model: Any, length: int, which: int = 0) -> torch.Tensor:
    """Return (1, length) long, tokens that the model has; `which` selects one of several texts."""
    ordinary = ordinary_tokens(model)
    numbers: NDArray[np.int64] = ordinary.start + (np.arange(length) * 7919 + 13 + which) % len(ordinary)
    return torch.from_numpy(numbers)[None].to(input_device(model))


class StepVerifier:
    """A `Verifier` in "plain" mode for any model and cache: the model prepares every input itself.

    State that modules hold themselves (RecurrentGemma's) is restored before the next token of its text.
    """

    def __init__(self, model: Any, reason: str) -> None:
        self.model = model
        self.mode: Mode = "plain"
        self.most_rows = 1
        self.reason = reason
        self.whole_prompts = True
        self.pass_kind: PassKind = "plain"
        self.pass_reason = reason
        self._steps: SingleSteps | None = None
        self._held: list[tuple[nn.Module, str, Any]] = []

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation."""
        unread = inputs.num_uncached
        self._steps = SingleSteps(self.model, inputs.input_ids, inputs.model_kwargs, unread=unread)
        self._held = []

    def go_on(self, text: torch.Tensor, model_kwargs: dict[str, Any], outputs: Any) -> None:
        """Continue a text, (1, L) long, that was read with these arguments and outputs."""
        after = kwargs_after(self.model, outputs, {**model_kwargs, "use_cache": True})
        self._steps, self._held = SingleSteps(self.model, text, after), held_by(self.model)

    batching: Batching = "none"

    def fresh(self) -> StepVerifier:
        """Return another verifier of the model."""
        return StepVerifier(self.model, self.reason)

    def share(self, passes: SharedPasses) -> None:
        """Share passes with others: it does not."""

    def shared_passes(self, is_reading: bool, want_hidden: Layer | None = None) -> SharedPasses | None:
        """Passes that it shares with other texts: none."""
        return None

    def reads_rest(self, roots: int) -> bool:
        """Whether the rest of a prompt is read with a draft after it: never."""
        return False

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run one pass over the whole uncached prompt or over one token (`Verifier.forward`)."""
        assert self._steps is not None and len(root_ids) == (self._steps.unread or 1), "the prompt, then single tokens"
        first = self._steps.unread
        for module, name, value in self._held:
            if getattr(module, name, None) is not value:
                setattr(module, name, value)  # another text was processed in between
        logits = self._steps.feed_at_once([] if first else root_ids.tolist(), keep)
        held = held_by(self.model) if first else self._held
        self._held = [(module, name, getattr(module, name, None)) for module, name, _ in held]
        return VerifierOutput(logits)

    def commit(self, path: NDArray[np.int32]) -> None:
        """Do nothing: every token that was fed stays."""

    def finish(self) -> Any:
        """Return the cache."""
        steps, self._steps = self._steps, None
        return None if steps is None else steps.cache


_MISSING = object()


@contextlib.contextmanager
def keeping_texts(model: nn.Module) -> Iterator[None]:
    """Restore, when the block ends, what modules keep of a text: tensors, buffers, and counters beside these."""
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            names = attributes.keys() | vars(module).keys()
            changes = [(name, attributes.get(name, _MISSING), vars(module).get(name, _MISSING)) for name in names]
            changes = [(name, was, value) for name, was, value in changes if was is not value]
            keeps = any(module._buffers[name] is not buffer for name, buffer in buffers.items())
            if not keeps and not any(isinstance(value, torch.Tensor) for _, *values in changes for value in values):
                continue
            module._buffers.update(buffers)  # dynamic rotary frequencies depend on the length
            for name, was, _ in changes:  # such as a table and its length, which belong together
                if was is _MISSING:
                    delattr(module, name)
                else:
                    setattr(module, name, was)


def held_by(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the tensors that are plain attributes of modules: the state that a model keeps in itself."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
