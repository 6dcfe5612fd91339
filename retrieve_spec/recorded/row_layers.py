"""Row layers: linear layers that multiply by programs over rows while passes of a model's own forward run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn

from retrieve_spec.kernels.row_programs import CAN_RUN, row_product, serves

_Taken = tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]
"""A layer's attributes, and what stands among them as its `forward` while a pass runs."""


class RowLayers:
    """The linear layers of one model whose products programs do faster.

    Parameters
    ----------
    model
        A float32 model on a CPU; others have no such layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[_Taken] = []
        self._threads: set[int] = set()  # that run passes
        for module in model.modules() if CAN_RUN else ():
            if type(module) is not nn.Linear or "forward" in vars(module) or not _is_fast(module.weight):
                continue
            self._layers.append((vars(module), _handing(module, self._threads)))

    def __len__(self) -> int:
        return len(self._layers)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Let a pass that this thread runs inside of the block multiply by programs."""
        self._threads.add(get_ident())
        try:
            for attributes, ours in self._layers:
                attributes.setdefault("forward", ours)
            yield
        finally:
            self._threads.discard(get_ident())
            for attributes, ours in self._layers:
                if attributes.get("forward") is ours:
                    del attributes["forward"]


def _is_fast(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and serves(weight)


def _handing(module: nn.Linear, threads: set[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is a layer's forward while passes run."""
    parameters = module._parameters

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = parameters["weight"]
        assert weight is not None
        if input.dtype != weight.dtype or not _is_fast(weight) or get_ident() not in threads:
            return nn.Linear.forward(module, input)
        return row_product(input, weight, parameters["bias"])

    return forward
