"""Packed layers: linear layers of a model that multiply by copies of their weights while one of our passes runs it.

Models whose forward is not recorded (recurrent state, positions of their own, experts in loops) are as slow as MKL is
with a few rows. While a pass runs, such a layer has an attribute `forward` that multiplies by the copy in the threads
that run passes and is the layer's own in others: modules and weights stay as they are, and everybody else's calls do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn

from retrieve_spec.recorded.model_state import without_ours
from retrieve_spec.recorded.weight_layout import Layout, Layouts, WeightCopies

_LONE_BYTES = 1 << 19
"""Smallest weight by whose copy a lone row is multiplied: that takes some microseconds more than the product, too."""
_Taken = tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]
"""A layer's attributes, and what stands among them as its `forward` while a pass runs."""


class PackedLayers:
    """The linear layers of one model that have copies of their weights.

    Parameters
    ----------
    model
        A float32 model on a CPU; others have no such layers.
    layouts
        Copies of the model's weights.
    """

    def __init__(self, model: nn.Module, layouts: Layouts) -> None:
        self._layouts: list[Layout] = []
        self._all: list[_Taken] = []
        self._lone: list[_Taken] = []  # those by whose copies lone rows are multiplied
        self._threads: set[int] = set()  # that run passes
        for module in model.modules():
            others = without_ours(vars(module))  # as another pass may be running
            if type(module) is not nn.Linear or "forward" in others:
                continue
            layout = layouts.of(module.weight)
            if layout is not None:
                self._layouts.append(layout)
                self._all.append((vars(module), _handing(module, layout, self._threads)))
                if layout.serves(1) and layout.nbytes >= _LONE_BYTES:
                    self._lone.append(self._all[-1])
        self._copies = WeightCopies(list(enumerate(self._layouts)))

    def __len__(self) -> int:
        return len(self._layouts)

    def follow(self, closely: bool = False) -> int:
        """Copy weights again that differ from their copies; how many did."""
        with torch.no_grad():
            return self._copies.follow([layout.tensor for layout in self._layouts], closely)

    @contextlib.contextmanager
    def __call__(self, rows: int) -> Iterator[None]:
        """Let a pass over so many rows that this thread runs inside of the block multiply by the copies."""
        layers = self._all if rows > 1 else self._lone
        self._threads.add(get_ident())
        try:
            for attributes, ours in layers:
                attributes.setdefault("forward", ours)
            yield
        finally:
            self._threads.discard(get_ident())
            for attributes, ours in layers:
                if attributes.get("forward") is ours:
                    del attributes["forward"]


def _handing(module: nn.Linear, layout: Layout, threads: set[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is a layer's forward while passes run."""
    parameters = module._parameters

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = parameters["weight"]
        if weight is not layout.weight or input.dtype != torch.float32 or get_ident() not in threads:
            return nn.Linear.forward(module, input)
        return layout.product(input, parameters["bias"])

    return forward
