"""Checkpoints of AWQ, GPTQ and compressed-tensors with weights of 4 bits, as packed weights of the same values.

Their groups have a scale and a zero point for 32 weights or a multiple, so levels are repacked instead of rounded again
(`retrieve_spec.quantized`). Values of symmetric groups do not change; offsets of others are rounded to float16.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from retrieve_spec.errors import UnsupportedModelError
from retrieve_spec.kernels.cpu import GROUP, LANES
from retrieve_spec.quantized import Int8Embedding, PackedLinear, WeightOnlyConfig, lay_out, pack, quantize

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BITS = 4
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of AWQ of each of eight outputs."""
_REMEDY = "Load it without quantize, with the package of its format."
Get = Callable[[str], torch.Tensor | None]
"""Returns a tensor by name, None if there is none."""


@dataclass
class QuantizedWeight:
    """A weight with values (level - zero) · scale.

    Attributes
    ----------
    levels
        (n, k) uint8, from 0 to 15.
    scales, zeros
        (n, groups) of consecutive inputs.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def packed(self) -> torch.Tensor:
        """Return the weight in the layout of `retrieve_spec.quantized.pack`, with the same levels."""
        rows, inputs = self.levels.shape
        repeats = inputs // GROUP // self.scales.shape[1]
        scales = self.scales.float()
        parts = self.levels, scales, -scales * self.zeros
        levels, *numbers = (functional.pad(part, (0, 0, 0, -rows % LANES)) for part in parts)
        repeated = (each.half().repeat_interleave(repeats, 1) for each in numbers)
        return lay_out(levels.view(len(levels), -1, GROUP), *repeated)

    def dense(self) -> torch.Tensor:
        """Return the (n, k) float32 values."""
        levels = self.levels.view(*self.scales.shape, -1)
        return ((levels - self.zeros.float().unsqueeze(-1)) * self.scales.float().unsqueeze(-1)).flatten(1)


def _unpacked(words: torch.Tensor, axis: int) -> torch.Tensor:
    """Unpack the eight numbers of 4 bits in each of (a, b) int32 words, lowest first, along an axis."""
    numbers = (words.unsqueeze(-1) >> torch.arange(0, 32, _BITS, dtype=torch.int32)) & 15
    return numbers.movedim(-1, axis + 1).flatten(axis, axis + 1).to(torch.uint8)


def _read(get: Get, layer: str, *names: str) -> list[torch.Tensor]:
    found = [get(f"{layer}.{name}") for name in names]
    if any(tensor is None for tensor in found):
        raise UnsupportedModelError(f"{', '.join(names)} of {layer}", "not all of them", _REMEDY)
    return [tensor for tensor in found if tensor is not None]


def _check_order(order: torch.Tensor | None, groups: int, layer: str) -> None:
    """Check that groups have consecutive inputs."""
    if order is not None and not torch.equal(order.long(), torch.arange(len(order)) // (len(order) // groups)):
        got = f"{layer} in activation order (desc_act)"
        raise UnsupportedModelError("groups of consecutive inputs", got, _REMEDY)


def _awq(get: Get, layer: str, _settings: dict[str, Any]) -> QuantizedWeight:
    words, zeros, scales = _read(get, layer, "qweight", "qzeros", "scales")
    levels, zeros = (_unpacked(each, 1).view(len(each), -1, 8)[..., _AWQ_ORDER].flatten(1).T for each in (words, zeros))
    return QuantizedWeight(levels, scales.T, zeros)


def _gptq(get: Get, layer: str, settings: dict[str, Any]) -> QuantizedWeight:
    words, zeros, scales = _read(get, layer, "qweight", "qzeros", "scales")
    _check_order(get(f"{layer}.g_idx"), len(scales), layer)
    if _layout(settings) == "gptq":  # zero points less one; a zero point of 0 has borrowed from the next one
        zeros = zeros + 0x11111111
    return QuantizedWeight(_unpacked(words, 0).T, scales.T, _unpacked(zeros, 1).T)


def _compressed(get: Get, layer: str, _settings: dict[str, Any]) -> QuantizedWeight:
    words, scales, shape = _read(get, layer, "weight_packed", "weight_scale", "weight_shape")
    if scales.dim() != 2:
        raise UnsupportedModelError("scales of groups or outputs", f"one scale for {layer}", _REMEDY)
    _check_order(get(f"{layer}.weight_g_idx"), scales.shape[1], layer)
    outputs, inputs = shape.tolist()
    zeros = get(f"{layer}.weight_zero_point")
    if zeros is None:
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    else:  # releases before 0.10 store them as int8, around 0
        zeros = zeros + 8 if zeros.dtype == torch.int8 else _unpacked(zeros, 0)[:outputs]
    return QuantizedWeight(_unpacked(words, 1)[:, :inputs], scales, zeros)


_FORMATS: dict[str, tuple[str, Callable[[Get, str, dict[str, Any]], QuantizedWeight]]] = {
    "awq": ("qweight", _awq),
    "gptq": ("qweight", _gptq),
    "compressed-tensors": ("weight_packed", _compressed),
}
"""By `quant_method`: a tensor that every quantised layer has, and the function that reads a layer."""
_LAYOUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "awq": (("version", "checkpoint_format", "format"), ("gemm",)),
    "gptq": (("checkpoint_format", "format"), ("gptq", "gptq_v2")),
    "compressed-tensors": (("format",), ("pack-quantized",)),
}
"""By `quant_method`: settings that name the layout of weights, and supported layouts, the usual one first."""


def convert(source: Path, config: PretrainedConfig) -> Callable[[Path], None]:
    """Convert a quantised checkpoint to packed weights of 4 bits.

    The token embedding and the head get 8 bits, as with `quantize="int4"` of other models; linear layers that are not
    quantised there stay so.

    Parameters
    ----------
    source
        Folder of the checkpoint, with its weights in safetensors.
    config
        Its configuration.

    Returns
    -------
    Callable
        Writes a folder that `from_pretrained` loads.

    Raises
    ------
    UnsupportedModelError
        The checkpoint has another format, other bits, groups of other inputs than 32 consecutive ones or a multiple, or
        lacks tensors of its model.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    settings = _settings(config)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain, dtype=torch.bfloat16)
    with contextlib.ExitStack() as opened:
        files = {}
        for path in source.glob("*.safetensors"):
            file = opened.enter_context(safe_open(path, "pt"))
            files.update(dict.fromkeys(file.keys(), file))
        if not files:
            raise UnsupportedModelError("weights in *.safetensors", f"none in {source.name}", _REMEDY)
        head = model.get_output_embeddings()
        linear = (path for path, module in model.named_modules() if type(module) is nn.Linear and module is not head)
        wanted = WeightOnlyConfig(_BITS, [path for path in linear if f"{path}.weight" in files])
        quantize(model, wanted)
        state = _packed_state(model, files, settings)
    plain.dtype, plain.quantization_config = torch.bfloat16, wanted

    def save(folder: Path) -> None:
        plain.save_pretrained(folder)
        save_torch_state_dict(state, folder)
        if (generation := source / "generation_config.json").is_file():
            shutil.copy(generation, folder)

    return save


def _packed_state(model: Any, files: dict[str, Any], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantised model, which is on the meta device, from the open file of each tensor."""

    def get(name: str) -> torch.Tensor | None:
        return files[name].get_tensor(name) if name in files else None

    marker, read = _FORMATS[settings["quant_method"]]
    head, state = model.get_output_embeddings(), {}
    for key, wanted in model.state_dict().items():
        if key in model.all_tied_weights_keys:
            continue
        layer, _, name = key.rpartition(".")
        module = model.get_submodule(layer)
        is_packed = name == "weight" and isinstance(module, PackedLinear | Int8Embedding)
        bits = _BITS if isinstance(module, PackedLinear) and module is not head else 8
        if is_packed and f"{layer}.{marker}" in files:
            weight = read(get, layer, settings)
            if (inputs := weight.levels.shape[1]) % (weight.scales.shape[1] * GROUP):
                got = f"{inputs // weight.scales.shape[1]} in {layer}"
                raise UnsupportedModelError(f"groups of {GROUP} inputs or a multiple", got, _REMEDY)
            state[key] = weight.packed() if bits == _BITS else pack(weight.dense(), bits)
        elif (tensor := get(key)) is None:
            raise UnsupportedModelError("a checkpoint with every weight of its model", f"none for {key}", _REMEDY)
        elif is_packed:
            state[key] = pack(tensor, bits)
        else:
            state[key] = functional.pad(tensor, (0, wanted.shape[-1] - tensor.shape[-1])).to(wanted.dtype)
    return state


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of a checkpoint's format, after checking that they are supported."""
    given: Any = config.quantization_config
    settings: dict[str, Any] = given if isinstance(given, dict) else given.to_dict()
    method, groups = settings.get("quant_method"), settings.get("config_groups") or {}
    if method not in _FORMATS:
        raise UnsupportedModelError(
            f"weights that are not quantised, or by {', '.join(_FORMATS)}", str(method), _REMEDY
        )
    weights = [group["weights"] for group in groups.values() if group["weights"]]  # others quantise activations
    bits = {each["num_bits"] for each in weights} or {settings.get("bits")}
    bits |= {layer["bits"] for layer in (settings.get("dynamic") or {}).values() if "bits" in layer}
    if bits != {_BITS}:
        raise UnsupportedModelError("weights of 4 bits", f"{', '.join(sorted(map(str, bits)))} bits", _REMEDY)
    layouts = _LAYOUTS[method][1]
    if (layout := _layout(settings)) not in layouts:
        raise UnsupportedModelError(f"weights in the layout {' or '.join(layouts)}", layout, _REMEDY)
    transforms = (settings.get("transform_config") or {}).get("config_groups") or {}
    places = {each["location"] for transform in transforms.values() for each in transform["apply"]}
    if online := sorted(place for place in places if not place.startswith("weight")):
        raise UnsupportedModelError("transforms of weights only", f"transforms of {', '.join(online)}", _REMEDY)
    return settings


def _layout(settings: dict[str, Any]) -> str:
    """Return the layout of a checkpoint's quantised weights."""
    names, (usual, *_) = _LAYOUTS[settings["quant_method"]]
    return str(next((settings[name] for name in names if settings.get(name)), usual)).lower()
