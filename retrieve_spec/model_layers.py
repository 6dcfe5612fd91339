"""From a model to its decoder blocks, whatever its family calls them."""

from __future__ import annotations

from typing import Any

from torch import nn

from retrieve_spec.errors import UnsupportedModelError


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The blocks of a decoder: its list of modules with as many entries as the config has layers.

    Raises
    ------
    UnsupportedModelError
        When the model keeps them in another way.
    """
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(
        f"a model with a list of {count} blocks", type(model).__name__, "Use the last layer's hidden states."
    )
