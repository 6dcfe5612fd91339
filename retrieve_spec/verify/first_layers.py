"""First layers: the beginning of a model in float32, where rounding hides no fault of a pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from retrieve_spec.errors import in_a_line
from retrieve_spec.model_layers import decoder_blocks
from retrieve_spec.verify.interface import attention_of, input_device
from retrieve_spec.verify.shrink import keep_layers, layer_lists, parts_of, shrink_vocabulary

_MOST_LAYERS = 8
_MOST_BYTES = 8 << 30
_VOCABULARY = 4096


def first_layers(model: Any) -> tuple[Any, str]:
    """A float32 copy of a model's first layers and tokens, or None and why there is none.

    It has two layers at least, and one of every kind that the model has. Its weights are the model's own.
    """
    try:
        config = _config_of(model, _enough(model))
        with torch.random.fork_rng(devices=[]), torch.device(input_device(model)):
            first = type(model)._from_config(config, dtype=torch.float32, attn_implementation=attention_of(model))
        _take_weights(first, model)
    except Exception as error:  # whatever a config does not take, or weights that cannot be cast
        return None, in_a_line(error)
    return first.eval(), ""


def _enough(model: Any) -> int:
    """How many layers have one of every kind among them: of the same modules, and of which the config says the same.

    Raises
    ------
    ValueError
        When that would be many, or take much memory.
    """
    blocks, text = decoder_blocks(model), model.config.get_text_config(decoder=True)
    said = layer_lists(text, len(blocks))
    sharing = len(blocks) - int(getattr(text, "num_kv_shared_layers", 0) or 0)
    kinds = [
        (_modules(block), [repr(value[i]) for value in said.values()], i >= sharing) for i, block in enumerate(blocks)
    ]
    count = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    if count > _MOST_LAYERS or count > sharing:
        raise ValueError(f"its first {_MOST_LAYERS} layers are not of every kind")
    if 4 * sum(p.numel() for block in blocks[:count] for p in block.parameters()) > _MOST_BYTES:
        raise ValueError("its first layers are large")
    return min(count, len(blocks))


def _modules(block: nn.Module) -> list[tuple[str, type, list[torch.Size]]]:
    return [
        (name, type(module), [tensor.shape for tensor in module.parameters(recurse=False)])
        for name, module in block.named_modules()
    ]


def _config_of(model: Any, layers: int) -> Any:
    """A model's config with fewer layers and tokens."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if config.to_dict().get("per_layer_config") or text.to_dict().get("per_layer_config"):
        raise ValueError("its layers have configs of their own")
    keep_layers(text, range(layers))
    for part in {id(part): part for part in (config, text, *parts_of(config))}.values():
        shrink_vocabulary(part, _VOCABULARY)
    return config


def _take_weights(first: nn.Module, model: nn.Module) -> None:
    """Cast the weights of the layers that are there, and of the tokens.

    Raises
    ------
    TypeError
        When weights are quantised.
    """
    given = {
        name.replace(".base_layer.", "."): tensor  # an adapter's wrapper
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    with torch.no_grad():
        for name, parameter in first.named_parameters(remove_duplicate=False):
            tensor = given[name]
            if type(tensor) not in (nn.Parameter, torch.Tensor) or not tensor.is_floating_point():
                raise TypeError(f"{name} is quantised")
            parameter.copy_(tensor[: len(parameter)])
        for name, buffer in first.named_buffers(remove_duplicate=False):
            if name in given and given[name].shape == buffer.shape:
                buffer.copy_(given[name])
