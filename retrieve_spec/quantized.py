"""Weights of 8 and 4 bits: a quantiser of Transformers (products: `kernels.cpu`, on a GPU `kernels.triton_products`).

Importing this module registers the quantiser with Transformers, so that `AutoModelForCausalLM.from_pretrained` loads
folders that `save_pretrained` wrote of such models. Activations are bfloat16, and rounded to 8 bits for each product.
`product_times` measures how fast this machine multiplies in each format.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from retrieve_spec.errors import UnsupportedModelError, require
from retrieve_spec.kernels.cpu import (
    CAN_RUN,
    FLOATS,
    GROUP,
    GROUP_BYTES,
    LANES,
    NF4,
    packed_product,
    row_product,
    unpacked_product,
)

METHOD = "retrieve_spec"
_LEAST = 1e-7
"""The smallest scale; smaller numbers of float16 are subnormal."""


@register_quantization_config(METHOD)
class WeightOnlyConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantisation of `from_pretrained(..., quantization_config=WeightOnlyConfig(bits=4))`.

    Parameters
    ----------
    bits
        8: a scale for every 32 weights of a row; 4: a scale and an offset. The token embedding and the head have
        integers of 8 bits in both.
    modules_to_not_convert
        Paths of linear layers that are not packed.
    floats
        Whether weights are numbers of FP8 (e4m3) or, with 4 bits, of NF4 with a scale, instead of integers. For GPUs: a
        CPU unpacks them for each product.

    Raises
    ------
    ConfigError
        `bits` is another number.
    """

    def __init__(
        self, bits: int = 8, modules_to_not_convert: Collection[str] = (), floats: bool = False, **_: Any
    ) -> None:
        require(bits in (4, 8), "weights of 4 or 8 bits", bits, "Give one of them.")
        self.quant_method = METHOD
        self.bits, self.floats = bits, floats
        self.modules_to_not_convert = list(modules_to_not_convert)


@register_quantizer(METHOD)
class WeightOnlyQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces a model's linear layers by layers with packed weights, while it is loaded."""

    requires_calibration = False

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which weights are loaded: the stored one, so that they are rounded once."""
        return torch.bfloat16 if self.pre_quantized else dtype

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        if self.pre_quantized:  # weights have no values yet, only shapes
            quantize(model, self.quantization_config)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        if not self.pre_quantized:
            pack_model(model, self.quantization_config)

    def is_serializable(self) -> bool:
        """Whether such models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether such models can be trained."""
        return False


def pack_model(model: Any, config: WeightOnlyConfig) -> None:
    """Pack a loaded model in place, as if it had been loaded with `config`.

    Raises
    ------
    UnsupportedModelError
        As `quantize` does.
    """
    quantize(model, config)
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not kept.intersection(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    with torch.device("meta"):  # buffers that the model creates in its own format are reloaded in this one
        like = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.bfloat16)
    for name, buffer in like.named_buffers():
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        setattr(owner, last, getattr(owner, last).to(buffer.dtype))
    model.config.dtype = torch.bfloat16
    model.config.quantization_config = config
    model.hf_quantizer = WeightOnlyQuantizer(config)


def quantize(model: Any, config: WeightOnlyConfig) -> None:
    """Pack the weights of a model's linear layers, and its table of tokens, in place.

    Some weights are not packed: layers whose shapes the products do not support, weights that belong to no linear layer
    (experts in one tensor), and embeddings that do more than look up, with a head that is tied to one.

    Raises
    ------
    UnsupportedModelError
        That would leave most of the model as it is.
    """
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = any(model.get_submodule(name.rpartition(".")[0]) is head for name in model.all_tied_weights_keys)
    kept = {model.get_submodule(path) for path in config.modules_to_not_convert}
    if tied and type(table) is not nn.Embedding:
        kept.add(head)
    before = sum(parameter.numel() for parameter in model.parameters())
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            layer: nn.Module | None = None
            if child is table and type(child) is nn.Embedding and child.embedding_dim % GROUP == 0:
                layer = Int8Embedding(child)
            elif child in kept:
                continue
            elif type(child) is nn.Linear and child.in_features % GROUP == 0:
                is_head = child is head
                layer = PackedLinear(child, 8 if is_head else config.bits, config.floats and not is_head)
            if layer is not None:
                packed += child.weight.numel() * (child is not head or not tied)
                setattr(parent, name, layer.train(child.training))
    if 2 * packed < before:
        raise UnsupportedModelError(
            "a model most of whose weights are linear layers",
            f"{packed:,} of {before:,} weights in such layers",
            "Load it without quantize.",
        )
    model.tie_weights()


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def pack(weight: torch.Tensor, bits: int, floats: bool = False) -> torch.Tensor:
    """Return the packed form of (n, k) floats, rounded to the nearest: (n, bytes of a row) uint8, or `FLOATS`.

    Rows are padded to a multiple of 16. Values of GGUF's blocks Q4_0 and Q4_1 (in 8 bits: Q8_0) do not change.
    """
    if floats and bits == 4:
        blocks = weight.float().reshape(len(weight), -1, GROUP)
        scales = blocks.abs().amax(-1).clamp(min=_LEAST)
        table = torch.tensor(NF4, device=weight.device)
        levels = torch.bucketize(blocks / scales.unsqueeze(-1), (table[1:] + table[:-1]) / 2)
        return pack_floats(levels.flatten(1).byte(), scales)
    if floats:
        largest = weight.float().abs().amax(1, keepdim=True).clamp(min=_LEAST)
        scales = largest / torch.finfo(torch.float8_e4m3fn).max
        return pack_floats((weight / scales).to(torch.float8_e4m3fn), scales.expand(-1, weight.shape[1] // GROUP))
    groups = functional.pad(weight.float(), (0, 0, 0, -len(weight) % LANES)).view(-1, weight.shape[1] // GROUP, GROUP)
    if bits == 8:
        scale, offset = groups.abs().amax(-1) / 127, groups.new_zeros(())
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        scale, offset = (high - low) / 15, low
        largest = torch.where(high > -low, high, low)
        eighth = largest / -8
        steps = (groups / eighth.unsqueeze(-1)).nan_to_num(posinf=99.0, neginf=99.0).round()
        is_even = (steps * eighth.unsqueeze(-1) == groups).all(-1) & (steps.amax(-1) <= 7)  # exact, as in Q4_0 blocks
        scale, offset = torch.where(is_even, eighth, scale), torch.where(is_even, largest, offset)
    scale = torch.where(scale.abs() < _LEAST, _LEAST, scale)
    scale, offset = scale.half(), offset.half()
    levels = ((groups - offset.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)).round_()
    if bits == 8:
        return lay_out(8, (levels.clamp_(-127, 127) + 128).byte(), scale)
    return lay_out(4, levels.clamp_(0, 15).byte(), scale, offset)


def pack_floats(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the packed form of (n, k) floats with (n, k / 32) scales: (n, bytes of a row) `FLOATS`.

    Levels are numbers of FP8, or places in `NF4`, which are uint8.
    """
    padding, bits = (0, 0, 0, -len(levels) % LANES), 4 if levels.dtype == torch.uint8 else 8
    numbers, factors = functional.pad(levels.view(torch.uint8), padding), functional.pad(256 * scales.float(), padding)
    return lay_out(bits, numbers.view(len(numbers), -1, GROUP), factors.half()).view(FLOATS)


def lay_out(bits: int, levels: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
    """Return packed weights of (n, k / 32, 32) uint8 levels and (n, k / 32) float16 scales and, if any, offsets."""
    fours = levels.view(-1, LANES, levels.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if bits == 4:
        fours = fours[:, :, :4] | (fours[:, :, 4:] << 4)
    by_panel = [x.view(-1, LANES, x.shape[1]).transpose(1, 2).contiguous().view(torch.uint8) for x in numbers]
    return torch.cat([fours.flatten(2), *by_panel], -1).view(len(levels), -1)


class Int8Embedding(nn.Module):
    """A token embedding in 8 bits, packed like a head that may be tied to it."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight = _constant(pack(table.weight.detach(), 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return (…, k) bfloat16 embeddings of token ids."""
        if CAN_RUN and ids.device.type == "cpu":
            return torch.ops.retrieve_spec.packed_rows(ids, self.weight)  # type: ignore[no-any-return]
        panels, places = ids // LANES, ids % LANES
        packed = self.weight.view(len(self.weight) // LANES, -1, GROUP_BYTES[8])
        weights = packed[..., : GROUP * LANES].view(*packed.shape[:2], GROUP // 4, LANES, 4)
        scales = packed[..., GROUP * LANES :].view(torch.float16)
        levels = weights[panels, :, :, places].float() - 128  # (…, k / 32, 8, 4)
        rows: torch.Tensor = levels.flatten(-2) * scales[panels, :, places].unsqueeze(-1)
        return rows.flatten(-2).to(torch.bfloat16)


class PackedLinear(nn.Module):
    """A linear layer with packed weights.

    Parameters
    ----------
    linear
        The layer that it replaces; its number of inputs is a multiple of 32.
    bits
        8 or 4.
    floats
        Whether the 8 bits are FP8.
    """

    def __init__(self, linear: nn.Linear, bits: int, floats: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = _constant(pack(linear.weight.detach(), bits, floats))
        bias = linear.bias
        self.bias = None if bias is None else _constant(functional.pad(bias.detach(), (0, -len(bias) % LANES)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (…, n) of (…, k), both bfloat16.

        Raises
        ------
        UnsupportedModelError
            The model casts a layer's input to the dtype of its weights, as Mamba does for its head; or its layers do
            not fit each other.
        """
        if not x.is_floating_point() or x.shape[-1] != self.in_features:
            wanted = f"a model that gives a layer rows of {self.in_features} floats"
            got = f"rows of {x.shape[-1]} {str(x.dtype).removeprefix('torch.')}"
            raise UnsupportedModelError(wanted, got, "Load it without quantize.")
        out = torch.ops.retrieve_spec.packed_product(x, self.weight, self.bias)
        return out if self.out_features % LANES == 0 else out[..., : self.out_features]  # type: ignore[no-any-return]


def product_on_gpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Product of (…, k) rows with a packed weight, both on a GPU; of rows in 16 bits by a Triton kernel.

    Raises
    ------
    UnsupportedModelError
        Triton is missing.
    """
    if x.element_size() != 2:
        return unpacked_product(x, weight, bias)
    try:
        from retrieve_spec.kernels.triton_products import linears
    except ImportError as error:
        wanted, got = "Triton, whose kernels multiply by packed weights on a GPU", str(error)
        raise UnsupportedModelError(wanted, got, "Install triton, or load the model without quantize.") from error
    with torch.cuda.device(x.device):
        out = linears(x.reshape(1, -1, x.shape[-1]), [weight], [bias])[0]
    return out.view(*x.shape[:-1], len(weight))


torch.library.impl("retrieve_spec::packed_product", "cuda", product_on_gpu)
_BETTER = 1.3
"""The least speed-up at which another format is recommended."""


def product_times() -> dict[str, int]:
    """Return the microseconds of eight rows times a (2048, 2048) weight, by format; empty without compiled kernels."""
    if not CAN_RUN:
        return {}
    rows, weight = torch.randn(8, 2048), torch.randn(2048, 2048)
    half, short = rows.to(torch.bfloat16), weight.to(torch.bfloat16)
    float16_rows, float16 = rows.half(), weight.half()
    byte, four = pack(weight, 8), pack(weight, 4)
    products: dict[str, Callable[[], torch.Tensor]] = {
        "float32": lambda: row_product(rows, weight),
        "bfloat16": lambda: row_product(half, short),
        "float16": lambda: row_product(float16_rows, float16),
        "int8": lambda: packed_product(half, byte),
        "int4": lambda: packed_product(half, four),
    }
    took = dict.fromkeys(products, float("inf"))
    for _ in range(6):  # interleaved, so that weights come from memory; the first round warms up
        for name, product in products.items():
            began = time.perf_counter()
            product()
            took[name] = min(took[name], time.perf_counter() - began)
    return {name: round(1e6 * seconds) for name, seconds in took.items()}


def advice_on_format(dtype: str, times: dict[str, int]) -> list[str]:
    """Return sentences on formats faster than `dtype`, by the times of `product_times`."""
    own, found = times.get(dtype, 0), []
    if faster := [name for name in ("bfloat16", "int8", "int4") if times and _BETTER * times[name] < own]:
        took = ", ".join(f"{name} {times[name]}" for name in faster)
        found.append(
            f"Eight rows times a weight take {own} µs in {dtype} here ({took}): give --dtype bfloat16, or "
            "--quantize, which changes what the model says a little."
        )
    if dtype == "bfloat16" and _BETTER * times.get("float32", own) < own:
        found.append("Products of bfloat16 are slower than those of float32 here: --dtype float32.")
    return found
