"""Checkpoints that other packages quantised, read without these packages.

- AWQ, GPTQ and compressed-tensors with 4 bits become packed weights (`convert`): groups have a scale and a zero point
  for 32 weights or a multiple, so levels are repacked instead of rounded again (`retrieve_spec.quantized`). Values of
  symmetric groups do not change; offsets of others are rounded to float16.
- FP8 and bitsandbytes' NF4 also become packed weights, for a GPU: their numbers stay, scales are rounded to float16.
- FP8, compressed-tensors with 8 bits and bitsandbytes become weights in 16 or 32 bits (`read_values`). Layers of 8 bits
  also round inputs to 8 bits, which has no place on a CPU; here inputs are not rounded, so scales of inputs are unused.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from retrieve_spec.errors import UnsupportedModelError
from retrieve_spec.kernels.cpu import GROUP, LANES
from retrieve_spec.quantized import Int8Embedding, PackedLinear, WeightOnlyConfig, lay_out, pack, pack_floats, quantize

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BITS = 4
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of AWQ of each of eight outputs."""
_REMEDY = "Load it by from_pretrained, with the package of its format."
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
        _check_group(inputs // self.scales.shape[1])
        repeats = inputs // GROUP // self.scales.shape[1]
        scales = self.scales.float()
        parts = self.levels, scales, -scales * self.zeros
        levels, *numbers = (functional.pad(part, (0, 0, 0, -rows % LANES)) for part in parts)
        repeated = (each.half().repeat_interleave(repeats, 1) for each in numbers)
        return lay_out(_BITS, levels.view(len(levels), -1, GROUP), *repeated)

    def dense(self) -> torch.Tensor:
        """Return the (n, k) float32 values."""
        levels = self.levels.view(*self.scales.shape, -1)
        return ((levels - self.zeros.float().unsqueeze(-1)) * self.scales.float().unsqueeze(-1)).flatten(1)


def _check_group(inputs: int) -> None:
    """Check that a group of the packed layout has one scale."""
    if inputs % GROUP:
        raise UnsupportedModelError(f"groups of {GROUP} inputs or a multiple", f"groups of {inputs}", _REMEDY)


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


def convert(source: Path, config: PretrainedConfig, wanted: WeightOnlyConfig) -> Callable[[Path], None]:
    """Convert a quantised checkpoint to packed weights with the same levels.

    The token embedding and the head get integers of 8 bits, as those of other models; linear layers that are not
    quantised there stay so.

    Parameters
    ----------
    source
        Folder of the checkpoint, with its weights in safetensors.
    config
        Its configuration.
    wanted
        The format: integers of 4 bits, or floats for a checkpoint that `has_floats` of them.

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
    from transformers import AutoModelForCausalLM

    settings = _settings_to_keep(config, wanted)
    plain = _without_format(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain, dtype=torch.bfloat16)
    with _opened(source) as files:
        read = _readers(files, settings)
        head = model.get_output_embeddings()
        linear = (path for path, module in model.named_modules() if type(module) is nn.Linear and module is not head)
        wanted.modules_to_not_convert = [path for path in linear if path not in read]
        quantize(model, wanted)
        state = _packed_state(model, files, read)
    plain.dtype, plain.quantization_config = torch.bfloat16, wanted

    def save(folder: Path) -> None:
        plain.save_pretrained(folder)
        save_torch_state_dict(state, folder)
        if (generation := source / "generation_config.json").is_file():
            shutil.copy(generation, folder)

    return save


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the open file of each tensor in a folder, by name."""
    from safetensors import safe_open

    with contextlib.ExitStack() as opened:
        files = {}
        for path in source.glob("*.safetensors"):
            file = opened.enter_context(safe_open(path, "pt"))
            files.update(dict.fromkeys(file.keys(), file))
        if not files:
            raise UnsupportedModelError("weights in *.safetensors", f"none in {source.name}", _REMEDY)
        yield files


def _getter(files: dict[str, Any]) -> Get:
    return lambda name: files[name].get_tensor(name) if name in files else None


def _readers(files: dict[str, Any], settings: dict[str, Any]) -> dict[str, Callable[[], StoredWeight]]:
    """Return a function that reads the weight of each quantised layer."""
    get = _getter(files)
    if settings["quant_method"] in _FORMATS and not _is_scaled(settings):
        marker, read = _FORMATS[settings["quant_method"]]
        layers = [name.removesuffix(f".{marker}") for name in files if name.endswith(f".{marker}")]
        return {layer: partial(read, get, layer, settings) for layer in layers}
    return {layer: partial(_read_marked, get, layer, marker, settings) for layer, marker in _markers(files).items()}


def _packed_state(
    model: Any, files: dict[str, Any], read: dict[str, Callable[[], StoredWeight]]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantised model, which is on the meta device, from the open file of each tensor."""
    get, head, state = _getter(files), model.get_output_embeddings(), {}
    for key, wanted in model.state_dict().items():
        if key in model.all_tied_weights_keys:
            continue
        layer, _, name = key.rpartition(".")
        module = model.get_submodule(layer)
        is_packed = name == "weight" and isinstance(module, PackedLinear | Int8Embedding)
        if name == "weight" and layer in read:
            weight = read[layer]()
            if isinstance(module, PackedLinear) and module is not head:
                state[key] = weight.packed()
            else:
                state[key] = pack(weight.dense(), 8) if is_packed else weight.dense().to(wanted.dtype)
        elif (tensor := get(key)) is None:
            raise UnsupportedModelError("a checkpoint with every weight of its model", f"none for {key}", _REMEDY)
        elif is_packed:
            state[key] = pack(tensor, 8)
        else:
            state[key] = functional.pad(tensor, (0, wanted.shape[-1] - tensor.shape[-1])).to(wanted.dtype)
    return state


def _settings_to_keep(config: PretrainedConfig, wanted: WeightOnlyConfig) -> dict[str, Any]:
    """Return the settings of a checkpoint's format, after checking that the wanted one can keep its levels."""
    settings = _settings(config)
    _check_transforms(settings)
    if has_floats(config, wanted):
        return settings
    method = settings.get("quant_method")
    if method not in _FORMATS:
        formats = ", ".join((*_FORMATS, *_WITH_VALUES))
        raise UnsupportedModelError(f"weights that are not quantised, or by {formats}", str(method), _REMEDY)
    weights = [group["weights"] for group in _groups(settings)]
    bits = {each["num_bits"] for each in weights} or {settings.get("bits")}
    bits |= {layer["bits"] for layer in (settings.get("dynamic") or {}).values() if "bits" in layer}
    if bits != {_BITS}:
        raise UnsupportedModelError("weights of 4 bits", f"{', '.join(sorted(map(str, bits)))} bits", _REMEDY)
    layouts = _LAYOUTS[method][1]
    if (layout := _layout(settings)) not in layouts:
        raise UnsupportedModelError(f"weights in the layout {' or '.join(layouts)}", layout, _REMEDY)
    if wanted.floats or wanted.bits != _BITS:
        got = f"{wanted.bits} bits{' of floats' if wanted.floats else ''}"
        raise UnsupportedModelError("int4 for a checkpoint of integers of 4 bits", got, "Give 'int4'.")
    return settings


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of a checkpoint's format; none if it has no format."""
    given: Any = getattr(config, "quantization_config", None) or {}
    return given if isinstance(given, dict) else given.to_dict()


def _groups(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of compressed-tensors that quantise weights; others quantise activations."""
    return [group for group in (settings.get("config_groups") or {}).values() if group["weights"]]


def _check_transforms(settings: dict[str, Any]) -> None:
    """Check that no inputs or outputs are to be rotated."""
    transforms = (settings.get("transform_config") or {}).get("config_groups") or {}
    places = {each["location"] for transform in transforms.values() for each in transform["apply"]}
    if online := sorted(place for place in places if not place.startswith("weight")):
        raise UnsupportedModelError("transforms of weights only", f"transforms of {', '.join(online)}", _REMEDY)


def _layout(settings: dict[str, Any]) -> str:
    """Return the layout of a checkpoint's quantised weights."""
    names, (usual, *_) = _LAYOUTS[settings["quant_method"]]
    return str(next((settings[name] for name in names if settings.get(name)), usual)).lower()


def _without_format(config: PretrainedConfig) -> PretrainedConfig:
    plain = copy.deepcopy(config)
    del plain.quantization_config
    return plain


def has_values(config: PretrainedConfig) -> bool:
    """Whether a checkpoint has one of the formats of `read_values`."""
    settings = _settings(config)
    return settings.get("quant_method") in _WITH_VALUES or _is_scaled(settings)


def has_floats(config: PretrainedConfig, wanted: WeightOnlyConfig) -> bool:
    """Whether a checkpoint's weights are numbers of the wanted format, FP8 or NF4."""
    settings = _settings(config)
    if wanted.floats and wanted.bits == _BITS:
        return bool(settings.get("load_in_4bit")) and settings["bnb_4bit_quant_type"] == "nf4"
    is_fp8 = settings.get("quant_method") in ("fp8", "fbgemm_fp8") or settings.get("format") == "float-quantized"
    return wanted.floats and is_fp8


def _is_scaled(settings: dict[str, Any]) -> bool:
    return settings.get("quant_method") == "compressed-tensors" and settings.get("format") in _SCALED_LAYOUTS


def read_values(
    source: Path, config: PretrainedConfig, dtype: torch.dtype
) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
    """Read the values of a checkpoint's weights.

    Parameters
    ----------
    source
        Folder of the checkpoint, with its weights in safetensors.
    config
        Its configuration, for which `has_values` is true.
    dtype
        Of the weights that are quantised there; others keep theirs.

    Returns
    -------
    tuple
        Configuration and tensors of the same model without a format.

    Raises
    ------
    UnsupportedModelError
        Inputs are to be rotated, or a weight's scale is missing or unknown.
    """
    settings = _settings(config)
    _check_transforms(settings)
    state = {}
    with _opened(source) as files:
        get = _getter(files)
        markers = _markers(files)
        for layer, marker in markers.items():
            state[f"{layer}.weight"] = _read_marked(get, layer, marker, settings).dense().to(dtype)
        for name in files:
            if (layer_and_part := _PART.fullmatch(name)) and layer_and_part[1] in markers:
                continue
            tensor = state[name] = files[name].get_tensor(name)
            if tensor.dtype == torch.int8 or (tensor.is_floating_point() and tensor.element_size() == 1):
                raise UnsupportedModelError(f"a known scale for {name}", "none", _REMEDY)
    return _without_format(config), state


def _markers(files: dict[str, Any]) -> dict[str, str]:
    """Return the name of its scales by quantised layer."""
    return {name[: found.start()]: found[1] for name in files if (found := _MARKER.search(name))}


_TABLE_MARKER = "weight.absmax"
_MARKER = re.compile(r"\.(weight_scale_inv|weight_scale|SCB|weight\.absmax)$")
"""A tensor that every quantised layer has: its scales."""
_PART = re.compile(r"(.*?)\.(weight\..+|(?!bias$)[^.]+)")
"""A layer, and a tensor that its format replaces."""
_WITH_VALUES = ("fp8", "fbgemm_fp8", "bitsandbytes")
_SCALED_LAYOUTS = ("float-quantized", "int-quantized", "naive-quantized")
"""Layouts of compressed-tensors in which each weight has 8 bits."""


@dataclass
class ScaledWeight:
    """A weight with values (number - zero) · scale.

    Attributes
    ----------
    numbers
        (n, k) of 8 bits.
    zeros
        (n, 1), or None where they are all 0.
    scales
        (n, blocks) float32.
    block
        Number of inputs that share a scale; the last block may be smaller.
    """

    numbers: torch.Tensor
    zeros: torch.Tensor | None
    scales: torch.Tensor
    block: int

    def packed(self) -> torch.Tensor:
        """Return a weight in FP8 in the layout of `retrieve_spec.quantized.pack_floats`, with the same numbers."""
        _check_group(self.block)
        return pack_floats(self.numbers, self.scales[:, torch.arange(0, self.numbers.shape[1], GROUP) // self.block])

    def dense(self) -> torch.Tensor:
        """Return the (n, k) float32 values."""
        values = self.numbers.float()
        if self.zeros is not None:
            values -= self.zeros.float()
        return values.mul_(self.scales.repeat_interleave(self.block, 1)[:, : values.shape[1]])


@dataclass
class TableWeight:
    """A weight with values table[place] · scale.

    Attributes
    ----------
    places
        (n, k) uint8, from 0 to 15.
    table
        (16,) float32: `NF4`, or another one, which cannot be packed.
    scales
        (blocks,) float32, of the weight as one row.
    block
        Number of weights that share a scale; the last block may be smaller.
    """

    places: torch.Tensor
    table: torch.Tensor
    scales: torch.Tensor
    block: int

    def packed(self) -> torch.Tensor:
        """Return a weight in NF4 in the layout of `retrieve_spec.quantized.pack_floats`, with the same places."""
        _check_group(self.block)
        of_group = torch.arange(0, self.places.numel(), GROUP) // self.block
        return pack_floats(self.places, self.scales[of_group].view(len(self.places), -1))

    def dense(self) -> torch.Tensor:
        """Return the (n, k) float32 values."""
        return _times(self.table[self.places.int()], self.scales, self.block).view(self.places.shape)


StoredWeight = QuantizedWeight | ScaledWeight | TableWeight


def _read_marked(get: Get, layer: str, marker: str, settings: dict[str, Any]) -> ScaledWeight | TableWeight:
    """Return a layer's weight, by the name of its scales."""
    if marker == _TABLE_MARKER:
        return _by_table(get, layer, settings)
    return _by_scale(get, layer, marker, settings)


def _by_scale(get: Get, layer: str, marker: str, settings: dict[str, Any]) -> ScaledWeight:
    """Return numbers of 8 bits with a scale of all of them, or with scales of outputs or blocks."""
    numbers, scales = _read(get, layer, "weight", marker)
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    scales = scales.float().reshape(-1, 1) if scales.dim() < 2 else scales.float()
    if marker == "SCB":
        scales = scales / 127
    rows, inputs = _block(numbers.shape, scales.shape, settings, layer)
    scales = scales.repeat_interleave(rows, 0)[: len(numbers)]
    return ScaledWeight(numbers, get(f"{layer}.weight_zero_point"), scales, inputs)


def _block(weight: torch.Size, scales: torch.Size, settings: dict[str, Any], layer: str) -> tuple[int, int]:
    """Return the numbers of outputs and inputs that share a scale."""
    sizes = [
        settings.get("weight_block_size"),
        *(group["weights"].get("block_structure") for group in _groups(settings)),
    ]
    for size in filter(None, sizes):
        if all(-(-numbers // some) == given for numbers, some, given in zip(weight, size, scales, strict=True)):
            return size[0], size[1]
    if any(numbers % given for numbers, given in zip(weight, scales, strict=True)):
        raise UnsupportedModelError(
            f"scales of equal blocks in {layer}", f"{tuple(scales)} of {tuple(weight)}", _REMEDY
        )
    outputs, inputs = (numbers // given for numbers, given in zip(weight, scales, strict=True))
    return outputs, inputs


def _by_table(get: Get, layer: str, settings: dict[str, Any]) -> TableWeight:
    """Return two numbers of 4 bits from each byte, which are places in a table, with scales of blocks."""
    kind = f"weight.quant_state.bitsandbytes__{settings['bnb_4bit_quant_type']}"
    weight, scales, table, text = _read(get, layer, "weight", _TABLE_MARKER, "weight.quant_map", kind)
    about = json.loads(bytes(text.tolist()))
    if "nested_offset" in about:
        nested, nested_table = _read(get, layer, "weight.nested_absmax", "weight.nested_quant_map")
        scales = _times(nested_table[scales.int()], nested, about["nested_blocksize"]) + about["nested_offset"]
    pairs = weight.view(torch.uint8).flatten()
    places = torch.stack([pairs >> 4, pairs & 15], -1).view(about["shape"])
    return TableWeight(places, table, scales.float(), about["blocksize"])


def _times(values: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply each block of so many values by its scale."""
    return values.flatten().mul_(scales.float().repeat_interleave(size)[: values.numel()])
