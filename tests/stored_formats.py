"""Checkpoints with weights of 8 bits, and of bitsandbytes, as other packages write them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from batch_rows import small_model
from safetensors.torch import load_file, save_file

from retrieve_spec.kernels.cpu import NF4 as NUMBERS
from retrieve_spec.reference_model import reference_path

Tensors = dict[str, torch.Tensor]
FLOATS = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


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


def by_table(
    weight: torch.Tensor, nested: bool = False, numbers: Sequence[float] = NUMBERS
) -> tuple[Tensors, torch.Tensor]:
    """Two places in a table in each byte, the first in the high bits; scales of 64 weights, themselves from a table."""
    table, places = torch.tensor(numbers), torch.randint(16, (weight.numel(),))
    scales = some_scales(-(-weight.numel() // 64))
    about = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored = {"absmax": scales, "quant_map": table}
    if nested:
        codes, tables, factors = (
            torch.randint(256, scales.shape),
            torch.linspace(-1, 1, 256),
            some_scales(-(-len(scales) // 256)),
        )
        scales = tables[codes] * factors.repeat_interleave(256)[: len(codes)] + 0.01
        about |= {"nested_blocksize": 256, "nested_offset": 0.01, "nested_dtype": "float32"}
        stored |= {"absmax": codes.to(torch.uint8), "nested_absmax": factors, "nested_quant_map": tables}
    stored["quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    tensors = {f"weight.{name}": tensor for name, tensor in stored.items()}
    tensors["weight"] = (places[::2] << 4 | places[1::2]).to(torch.uint8)[:, None]
    values = table[places] * scales.repeat_interleave(64)[: len(places)]
    return tensors, values.view(weight.shape)


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
