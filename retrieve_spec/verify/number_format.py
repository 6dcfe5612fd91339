"""Number formats: what rounding makes of a model's logits, and how far a pass may therefore be from single steps.

In float32 and float64 a fault is orders of magnitude larger than rounding, and the largest difference tells. In 16 bits
and with quantised weights it is not: two plain ways of reading one text differ by a tenth of the logits' spread. There
the root mean square of the differences is held against that of several plain readings, and faults are looked for in a
float32 copy of the first layers (`retrieve_spec.verify.first_layers`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

_LARGEST = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference, as a share of the logits' spread, that rounding makes in the exact formats …"""
_MOST = {torch.float64: 1e-6, torch.float32: 2e-3}
_READINGS = 4.0
"""… or so many times the difference between two plain readings, but not more than `_MOST`."""
_ROWS = (4, 5, 7, 8, 9, 16, 17, 33, 64, 65, 129, 257)
_MOST_ROWS = 8
"""Numbers of rows whose products are held against one another, and how many a pass is filled up to at most."""
_NUMBERS, _MOST_TRIED = 1 << 20, 1 << 13
"""Numbers of a product that are compared, and rows at most: two orders seldom round one of them differently."""
_VECTOR = 64
_ROOT_MEAN_SQUARE = 2.0
"""How many times the largest root mean square of plain readings a pass may be off in the other formats."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far logits are off, and how far they may be, as shares of their spread."""

    measured: float
    allowed: float

    @property
    def is_rounding(self) -> bool:
        """Whether they are the same up to rounding; never with NaN."""
        return self.measured <= self.allowed

    @property
    def excess(self) -> float:
        """How many times farther off they are than allowed."""
        return self.measured / self.allowed if self.measured == self.measured else math.inf

    def __str__(self) -> str:
        return f"off by {self.measured:.2g} of their spread, {self.allowed:.2g} allowed"


@dataclass(frozen=True, slots=True)
class Rounding:
    """What plain decoding makes of rounding.

    Attributes
    ----------
    dtype
        Of the model.
    exact
        Whether all of its arithmetic is in float32 or float64.
    largest, rms
        How far plain readings of a text are from single steps, as shares of the logits' spread: the largest difference,
        and the largest root mean square.
    """

    dtype: torch.dtype
    exact: bool
    largest: float = 0.0
    rms: float = 0.0

    @classmethod
    def of(cls, model: Any, wanted: torch.Tensor, readings: Sequence[torch.Tensor]) -> Rounding:
        """That of a model, from several readings of what single steps gave as `wanted`, all (rows, vocab)."""
        spread = spread_of(wanted)
        differences = [reading - wanted for reading in readings]
        largest = max((float(d.abs().max()) for d in differences), default=0.0) / spread
        rms = max((float(d.square().mean().sqrt()) for d in differences), default=0.0) / spread
        return cls(model.dtype, is_exact(model), largest, rms)

    def compare(self, got: torch.Tensor, wanted: torch.Tensor) -> Deviation:
        """Hold the logits of passes against those of single steps, (rows, vocab) each."""
        spread, difference = spread_of(wanted), got - wanted
        last_place = torch.finfo(self.dtype).eps / 2 * float(wanted.abs().max()) / spread  # readings may agree by luck
        if self.exact:
            noise = min(_READINGS * max(self.largest, last_place), _MOST[self.dtype])
            return Deviation(float(difference.abs().max()) / spread, max(_LARGEST[self.dtype], noise))
        allowed = max(_LARGEST.get(self.dtype, 0.0), _ROOT_MEAN_SQUARE * max(self.rms, last_place))
        return Deviation(float(difference.square().mean().sqrt()) / spread, allowed)


def spread_of(logits: torch.Tensor) -> float:
    """How far logits lie from one another."""
    return float(logits.std(dim=-1).mean())


def is_exact(model: Any) -> bool:
    """Whether a model computes in float32 or float64 throughout."""
    floats = (parameter for parameter in model.parameters() if parameter.is_floating_point())
    return model.dtype in _LARGEST and all(p.dtype in _LARGEST for p in floats) and not any(_quantised(model))


def _quantised(model: Any) -> Iterator[nn.Module]:
    """Linear layers whose weights are no plain tensors of floating-point numbers."""
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.is_floating_point()
        if hasattr(module, "in_features") and not plain:
            yield module


def rows_change_one_another(model: Any) -> str:
    """Name the layers whose answer to a row depends on the other rows of a pass; empty where none does.

    So it is where inputs are quantised with one scale for all rows of a pass: every draft would change the text.
    """
    tried: set[tuple[type, type]] = set()
    for module in _quantised(model):
        kind = (type(module), type(getattr(module, "weight", None)))
        if kind in tried:
            continue
        tried.add(kind)
        # not from its state: bitsandbytes unpacks 4-bit weights to make one, and packs them less exactly again
        tensors = chain(module.parameters(), module.buffers())
        device = next((tensor.device for tensor in tensors), model.device)
        generator = torch.Generator().manual_seed(0)
        rows = 0.1 * torch.randn((2, int(module.in_features)), generator=generator)  # type: ignore[arg-type]
        others = rows * torch.tensor([[1.0], [3.0]])
        first, again = (module(given.to(device, model.dtype))[0] for given in (rows, others))
        if not torch.equal(first, again):
            return f"{type(module).__name__} layers scale their inputs over all rows of a pass"
    return ""


def why_not_one_order(model: Any) -> str:
    """Why rows of a model's passes cannot be computed in one order whatever stands beside them; empty where they may.

    Vectors of elementwise operations end with rows whose width is a multiple of theirs; experts, and layers that are no
    `torch.nn.Linear`, multiply in ways of their own.
    """
    if model.device.type != "cpu":
        return f"it is for a CPU, the model is on {model.device}"
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"it is for 16 bits, the model is in {model.dtype}"
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linear = {id(module.weight) for module in (*layers, *tables)}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in linear:
            return f"{name} is not the weight of a linear layer"
        if parameter.dtype != model.dtype:
            return f"{name} is in {parameter.dtype}"
    odd = [layer.in_features for layer in layers if layer.in_features % _VECTOR]
    return f"a layer is {odd[0]} wide, which is no multiple of {_VECTOR}" if odd else ""


@torch.inference_mode()
def rows_for_one_order(model: Any) -> int:
    """Fewest rows from which linear layers add up every row in one order, whatever stands beside it; 0 where none is.

    Libraries choose that order by the shape of a product. oneDNN's of 16-bit numbers is one for any number of rows but
    the first few.
    """
    fewest, most, tried = _ROWS[0], _ROWS[-1], set[torch.Size]()
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.shape in tried:
            continue
        tried.add(module.weight.shape)
        many = most * max(min(_NUMBERS // module.out_features, _MOST_TRIED) // most, 1)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn((1, many, module.in_features), generator=generator).to(model.device, model.dtype)
        whole = _in_parts(module, rows, most)
        for count in reversed(_ROWS[:-1]):
            parts = _in_parts(module, rows[:, : many if count <= _MOST_ROWS else most], count)
            if count >= fewest and not torch.equal(parts, whole[: len(parts)]):
                fewest = _ROWS[_ROWS.index(count) + 1]
                break
        if fewest > _MOST_ROWS:
            return 0
    return fewest


def _in_parts(layer: nn.Module, rows: torch.Tensor, count: int) -> torch.Tensor:
    """(rows, out) what a layer makes of (1, rows, in), so many at a time, without a rest."""
    whole = rows.shape[1] // count * count
    return torch.cat([layer(rows[:, i : i + count])[0] for i in range(0, whole, count)])
