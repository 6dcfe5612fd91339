"""Parts of a model: what is inside an adapter's wrapper, its tokens, positions and blocks, whatever its family."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from retrieve_spec.errors import UnsupportedModelError


def base_model(model: Any) -> Any:
    """The transformers model that a `peft` model wraps; anything else is returned as it is.

    Raises
    ------
    UnsupportedModelError
        When the adapter changes the prompt: such models keep their own `generate`.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                "an adapter of the model's layers (LoRA and its kin)",
                f"{config.peft_type.value}, which puts virtual tokens in front of the prompt",
                "Call the model's own generate.",
            )
    return model.get_base_model()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let a model be in evaluation mode for a while."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def embedded_tokens(model: Any) -> int:
    """How many token ids a model embeds: rows of its table, or what its config says where it has several tables."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return int(model.config.get_text_config(decoder=True).vocab_size if weight is None else weight.shape[0])


def max_positions(model: Any) -> int:
    """Positions that a model's decoder was made for, as its config says; 0 where it does not."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", 0) or 0)


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The blocks of a decoder: its list of modules with as many entries as the config has layers.

    An encoder of images or text beside it may have as many.

    Raises
    ------
    UnsupportedModelError
        When the model keeps them in another way.
    """
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    for module in (*model.get_decoder().modules(), *model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(
        f"a model with a list of {count} blocks", type(model).__name__, "Use the last layer's hidden states."
    )
