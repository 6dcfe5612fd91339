"""Checkpoints with weights of 8 bits, as other packages write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from batch_rows import small_model
from safetensors.torch import load_file, save_file

from retrieve_spec.reference_model import reference_path

Tensors = dict[str, torch.Tensor]
FLOATS = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def expanded(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scales of blocks of 128 × 128, the last of which are smaller, by weight."""
    rows, inputs = (torch.arange(n) // 128 for n in weight.shape)
    return scales[rows][:, inputs]


def some_scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 0.001 + 0.0001


def blocks_of(weight: torch.Tensor) -> torch.Tensor:
    return some_scales(*(-(-n // 128) for n in weight.shape))


def by_block(weight: torch.Tensor, name: str = "weight_scale_inv") -> tuple[Tensors, torch.Tensor]:
    numbers, scales = (weight * 400).to(FLOATS), blocks_of(weight)
    return {"weight": numbers, name: scales}, numbers.float() * expanded(scales, weight)


def by_output(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales = (weight * 400).to(FLOATS), some_scales(len(weight), 1).to(torch.bfloat16)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def set_format(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings or None}))


def checkpoint(folder: Path, write: Callable[..., Any], settings: dict[str, Any], family: str = "llama") -> Tensors:
    """Write a checkpoint; return the values of its tensors, by name."""
    sizes = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 320, "head_dim": 48, "attention_bias": True}
    model = small_model(family, **sizes)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder)
    for file in reference_path().glob("token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(0)
    values, stored = load_file(folder / "model.safetensors"), Tensors()
    for name, tensor in values.items():
        layer = name.removesuffix(".weight")
        if layer.endswith(("proj", "w1", "w2", "w3")):
            tensors, values[name] = write(tensor)
            stored |= {f"{layer}.{part}": each for part, each in tensors.items()}
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    set_format(folder, settings)
    return values
