"""Weights of 8 and 4 bits on a CPU: a quantiser of Transformers, over torch's own products with packed weights.

Importing this module makes the quantiser known: folders that `save_pretrained` wrote of such models are loaded by
`AutoModelForCausalLM.from_pretrained` like others. Activations are bfloat16. A product reads a quarter of what bfloat16
takes, which is most of what a pass over few rows costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from retrieve_spec.errors import ConfigError, UnsupportedModelError, require

METHOD = "retrieve_spec"
GROUP = 32
"""Weights of a row that share a scale and an offset in 4 bits."""
_MULTIPLE = 16
"""Of which the number of rows of a packed weight must be a multiple."""
_ALIGNED = 64
"""Bytes of which the address of packed weights is a multiple: the products load whole vectors."""


@register_quantization_config(METHOD)
class WeightOnlyConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantisation of `from_pretrained(..., quantization_config=WeightOnlyConfig(bits=4))`.

    Parameters
    ----------
    bits
        8: one scale for each row of a weight; 4: scale and offset for every 32 weights of a row. The table of tokens
        and the head have 8 in both.
    packed_for
        The instructions that 4-bit weights are laid out for; by default those of this machine.

    Raises
    ------
    ConfigError
        Other numbers of bits.
    """

    def __init__(self, bits: int = 8, packed_for: str = "", **_: Any) -> None:
        require(bits in (4, 8), "weights of 4 or 8 bits", bits, "Give one of them.")
        self.quant_method = METHOD
        self.bits = bits
        self.packed_for = packed_for or torch.backends.cpu.get_cpu_capability()


@register_quantizer(METHOD)
class WeightOnlyQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts linear layers with packed weights in place of a model's own, when it is loaded."""

    requires_calibration = False

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Refuse weights that were laid out for another CPU."""
        made, here = self.quantization_config.packed_for, torch.backends.cpu.get_cpu_capability()
        if self.quantization_config.bits == 4 and made != here:
            raise ConfigError(f"4-bit weights packed for {here}", f"packed for {made}", "Quantise the model here.")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The format of activations: with float32 the products are 10 to 100 times slower."""
        return torch.bfloat16

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        if self.pre_quantized:  # nothing has a value yet: the right shapes are made
            quantize(model, self.quantization_config.bits)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        if not self.pre_quantized:
            quantize(model, self.quantization_config.bits)
        for module in model.modules():
            if isinstance(module, PackedLinear) and module.weight.data_ptr() % _ALIGNED:
                module.weight.data = module.weight.data.clone()  # files are mapped at any address

    def is_serializable(self) -> bool:
        """Such models are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """They are not trained."""
        return False


def quantize(model: Any, bits: int) -> None:
    """Pack the weights of a model's linear layers, and its table of tokens, in place.

    Layers whose shapes the products do not take stay as they are, and so do weights that belong to no linear layer
    (experts that are one tensor), and tables that do more than look up, with the head that is tied to one.

    Raises
    ------
    UnsupportedModelError
        When that would be most of the model.
    """
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = any(model.get_submodule(name.rpartition(".")[0]) is head for name in model.all_tied_weights_keys)
    kept = head if tied and type(table) is not nn.Embedding else None
    before = sum(parameter.numel() for parameter in model.parameters())
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            layer: nn.Module | None = None
            if child is table and type(child) is nn.Embedding:
                layer = Int8Embedding(child)
            elif child is kept:
                continue
            elif type(child) is nn.Linear and child.out_features % _MULTIPLE == 0 and child.in_features % GROUP == 0:
                layer = Int8Linear(child) if bits == 8 or child is head else Int4Linear(child)
            if layer is not None:
                packed += child.weight.numel() * (child is not head or not tied)
                setattr(parent, name, layer)
    if 2 * packed < before:
        raise UnsupportedModelError(
            "a model most of whose weights are linear layers",
            f"{packed:,} of {before:,} weights in such layers",
            "Load it without quantize.",
        )
    model.tie_weights()


def _by_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, k) int8 and (n,) bfloat16: weights as multiples of their row's scale."""
    scale = (weight.float().abs().amax(1) / 127).clamp_min(1e-8).to(torch.bfloat16)
    return (weight.float() / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def _constant(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Int8Embedding(nn.Module):
    """A table of tokens in 8 bits, with one scale for each."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        weight, scale = _by_rows(table.weight.detach())
        self.weight, self.scale = _constant(weight), _constant(scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(…, k) bfloat16 rows of token ids."""
        return self.weight[ids].to(self.scale.dtype) * self.scale[ids].unsqueeze(-1)


class PackedLinear(nn.Module):
    """A linear layer with packed weights: what its kinds have in common."""

    weight: nn.Parameter

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, n) of (…, k) bfloat16."""
        out = self._product(x.reshape(-1, self.in_features).contiguous()).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        """(m, n) of (m, k)."""
        raise NotImplementedError


class Int8Linear(PackedLinear):
    """Weights are int8, with one scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight, scale = _by_rows(linear.weight.detach())
        self.weight, self.scale = _constant(weight), _constant(scale)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)  # type: ignore[no-any-return]


class Int4Linear(PackedLinear):
    """Weights are 4 bits, with scale and offset for every 32 of a row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        groups = linear.weight.detach().float().view(self.out_features, -1, GROUP)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = ((high - low) / 15).clamp_min(1e-8).to(torch.bfloat16)
        middle = (low + 8 * scale.float()).to(torch.bfloat16)  # the product takes what 8 stands for
        levels = ((groups - middle.float()[..., None]) / scale.float()[..., None] + 8).round_().clamp_(0, 15)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.flatten(1).to(torch.int32), 1)
        self.weight = _constant(packed)
        self.scales = _constant(torch.stack([scale, middle], dim=-1).transpose(0, 1).contiguous())

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        return product(rows, self.weight, GROUP, self.scales)  # type: ignore[no-any-return]
