"""Plain verifier: one token per pass, prepared as `generate` does, for models whose state cannot be rolled back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.extras import CACHE_NAMES, kwargs_behind
from retrieve_spec.verify.verifier import Mode, PassKind, VerifierInputs, VerifierOutput


class StepVerifier:
    """A `Verifier` in "plain" mode for any model and cache: the model prepares every input itself.

    What modules hold of a text themselves (RecurrentGemma's state) is put back before the next token of that text.
    """

    def __init__(self, model: Any, reason: str) -> None:
        self.model = model
        self.mode: Mode = "plain"
        self.reason = reason
        self.whole_prompts = True
        self.pass_kind: PassKind = "plain"
        self.pass_reason = reason
        self._takes_logits_to_keep = model._supports_logits_to_keep()
        self._kwargs: dict[str, Any] = {}
        self._outputs: Any = None
        self._held: list[tuple[nn.Module, str, Any]] = []

    def start(self, inputs: VerifierInputs) -> None:
        """Begin a generation."""
        self._kwargs = {**inputs.model_kwargs, "use_cache": True}
        self._text = inputs.input_ids
        self._uncached = len(inputs.uncached_ids)
        self._outputs, self._held = None, []

    def go_on(self, text: torch.Tensor, model_kwargs: dict[str, Any], outputs: Any) -> None:
        """Take on a text, (1, L) long, that was read with these arguments and these outputs."""
        self._kwargs = {**model_kwargs, "use_cache": True}
        self._text, self._uncached = text, 0
        self._outputs, self._held = outputs, held_by(self.model)

    def forward(
        self,
        root_ids: NDArray[np.int32],
        tree: DraftTree | None = None,
        *,
        keep: int = 1,
        want_hidden: Layer | None = None,
    ) -> VerifierOutput:
        """Run one pass over the whole uncached prompt or over one token (`Verifier.forward`)."""
        assert tree is None or not len(tree), "a plain verifier takes no drafts"
        first = self._outputs is None
        if first:
            assert len(root_ids) == self._uncached, "a plain verifier takes the prompt in one piece"
        else:
            assert len(root_ids) == 1, "a plain verifier takes one token at a time"
            token = torch.tensor([[int(root_ids[0])]], dtype=self._text.dtype, device=self._text.device)
            self._text = torch.cat([self._text, token], dim=-1)
            self._kwargs = kwargs_behind(self.model, self._outputs, self._kwargs)
        if self._takes_logits_to_keep:
            self._kwargs["logits_to_keep"] = keep
        inputs = self.model.prepare_inputs_for_generation(
            self._text, next_sequence_length=len(root_ids), is_first_iteration=first, **self._kwargs
        )
        for module, name, value in self._held:
            if getattr(module, name, None) is not value:
                setattr(module, name, value)  # another text was read in between
        self._outputs = self.model(**inputs, return_dict=True)
        held = held_by(self.model) if first else self._held
        self._held = [(module, name, getattr(module, name, None)) for module, name, _ in held]
        return VerifierOutput(self._outputs.logits[0, -keep:])

    def commit(self, path: NDArray[np.int32]) -> None:
        """Nothing to drop: every token that was fed stays."""

    def finish(self) -> Any:
        """Return the cache, whatever the model calls it."""
        outputs, self._outputs = self._outputs, None
        for name in CACHE_NAMES:
            cache = getattr(outputs, name, None)
            if cache is None:  # some models keep their state to themselves; `generate` hands back what it made
                cache = self._kwargs.get(name)
            if cache is not None:
                return cache
        return None


@contextlib.contextmanager
def keeping_texts(model: nn.Module) -> Iterator[None]:
    """Put back what modules keep of a text, tensors or nothing, when the block ends."""
    before = [
        (module, {name: value for name, value in vars(module).items() if value is None or _is_tensor(value)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, values in before:
            for name in [name for name, value in vars(module).items() if _is_tensor(value) and name not in values]:
                delattr(module, name)
            for name, value in values.items():
                if vars(module).get(name, before) is not value:
                    setattr(module, name, value)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def held_by(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Tensors that are plain attributes of modules: what a model keeps of a text to itself."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
