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
from typing import Any

import torch
from torch import nn

_LARGEST = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest difference, as a share of the logits' spread, that rounding makes in the exact formats …"""
_MOST = {torch.float64: 1e-6, torch.float32: 2e-3}
_READINGS = 4.0
"""… or so many times the difference between two plain readings, but not more than `_MOST`."""
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
        device = next((tensor.device for tensor in module.state_dict().values() if isinstance(tensor, torch.Tensor)),
                      model.device)  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        rows = 0.1 * torch.randn((2, int(module.in_features)), generator=generator)  # type: ignore[arg-type]
        others = rows * torch.tensor([[1.0], [3.0]])
        first, again = (module(given.to(device, model.dtype))[0] for given in (rows, others))
        if not torch.equal(first, again):
            return f"{type(module).__name__} layers scale their inputs over all rows of a pass"
    return ""
