"""Packed layers: linear layers of a model that multiply by copies of their weights while one of our passes runs it.

Models whose forward is not recorded (recurrent state, positions of their own, experts in loops) are as slow as MKL is
with a few rows. Their layers are handed rows that know a faster product (torch's `__torch_function__` protocol), for
one pass at a time: modules and weights stay as they are, and everybody else's calls do, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_wide
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from retrieve_spec.recorded.state_parts import others_hooks
from retrieve_spec.recorded.weight_layout import Layout, Layouts, WeightCopies

_LINEAR = functional.linear, nn.Linear.forward
_LONE_BYTES = 1 << 19
"""Smallest weight by whose copy a lone row is multiplied: handing rows over takes some microseconds, too."""


def _somebody_watches() -> bool:
    """Whether somebody else, a profiler say, is given what all linear layers are given: tensors, they expect."""
    if torch_wide._global_forward_hooks or torch_wide._global_forward_pre_hooks:
        return True
    if (functional.linear, nn.Linear.forward) != _LINEAR or not torch._C._is_torch_function_enabled():
        return True
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode) is not DeviceContext for mode in modes)


class _Rows:
    """Input of one linear layer, which `torch.nn.functional.linear` asks for the product."""

    __slots__ = ("layout", "rows")

    def __init__(self, rows: torch.Tensor, layout: Layout) -> None:
        self.rows, self.layout = rows, layout

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, *others = args
        if function is functional.linear and others[0] is given.layout.weight and not kwargs:
            return given.layout.product(given.rows, *others[1:])
        return function(given.rows, *others, **(kwargs or {}))


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
        self._layers: list[tuple[nn.Linear, Layout]] = []
        for module in model.modules():
            if type(module) is nn.Linear and "forward" not in vars(module):
                layout = layouts.of(module.weight)
                if layout is not None:
                    self._layers.append((module, layout))
        self._lone = [
            (module, layout) for module, layout in self._layers if layout.serves(1) and layout.nbytes >= _LONE_BYTES
        ]
        self._copies = WeightCopies(list(enumerate(layout for _, layout in self._layers)))
        self._passes = 0

    def __len__(self) -> int:
        return len(self._layers)

    def follow(self) -> int:
        """Copy weights again that differ from their copies; how many did."""
        passes, self._passes = self._passes, 0
        with torch.no_grad():
            return self._copies.follow([layout.tensor for _, layout in self._layers], passes)

    @contextlib.contextmanager
    def __call__(self, rows: int) -> Iterator[None]:
        """Let a pass over so many rows that this thread runs inside of the block multiply by the copies."""
        layers = self._layers if rows > 1 else self._lone
        if not layers or _somebody_watches():
            yield
            return
        self._passes += 1
        thread = get_ident()
        handles = []
        try:
            for module, layout in layers:
                if not others_hooks(module._forward_pre_hooks) and not others_hooks(module._forward_hooks):
                    handles.append(module.register_forward_pre_hook(_handing(layout, thread)))
            yield
        finally:
            for handle in handles:
                handle.remove()


def _handing(layout: Layout, thread: int) -> Any:
    """A hook that hands a layer rows which know the product by a copy of its weight."""

    def hand(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if get_ident() != thread or len(args) != 1 or args[0].dtype != torch.float32:
            return None
        return (_Rows(args[0], layout),)

    return hand
