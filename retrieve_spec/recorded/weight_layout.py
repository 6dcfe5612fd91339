"""Weight layouts: copies of weights, packed once for products with few rows, that are kept equal to the weights.

MKL packs a row-major weight anew at every call. oneDNN can keep it packed: with 4 … 64 rows that is two to four times
as fast where measured; whether it is here is tried, per shape of weight.

A copy does not follow its weight by itself. Before a generation every weight's storage and version counter are compared
with what they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional

from retrieve_spec.recorded.model_state import place, storage_ref, version_of, without_ours

_TRIED = (1, 16)
"""Numbers of rows that a packed weight is tried with."""
_REPEATS = 5


class Layout:
    """A packed copy of a weight, kept beside the model's own.

    Attributes
    ----------
    weight
        The model's own.
    tensor
        The packed weight, opaque to all but `packed_linear`.
    """

    def __init__(self, weight: torch.Tensor, tensor: torch.Tensor) -> None:
        self.weight, self.tensor, self.nbytes = weight, tensor, weight.nbytes
        self._note()

    def _note(self) -> None:
        """Take down what the weight is like at the moment it is copied."""
        self._place, self._version = place(self.weight), version_of(self.weight)
        self._storage = storage_ref(self.weight)  # its name is not given to another one meanwhile
        self._sample = self._diagonal()

    def _diagonal(self) -> torch.Tensor:
        """The weight's wrapped diagonal, which meets every row and every column."""
        rows, columns = self.weight.shape
        at = torch.arange(max(rows, columns))
        return self.weight.detach()[at % rows, at % columns]

    def is_current(self, closely: bool = False) -> bool:
        """Whether storage and version counter of the weight are those of the copy; `closely`: its diagonal, too."""
        same = self._place == place(self.weight) and self._version == version_of(self.weight)
        return same and (not closely or torch.equal(self._sample, self._diagonal()))

    def copy_again(self) -> None:
        """Let the copy be one of the weight as it is now."""
        self.tensor = pack(self.weight.detach())
        self._note()


def follow(layouts: Iterable[Layout], closely: bool = False) -> int:
    """Copy weights again that differ from their copies (`Layout.is_current`); how many did."""
    stale = {id(layout): layout for layout in layouts if not layout.is_current(closely)}
    with torch.no_grad():
        for layout in stale.values():
            layout.copy_again()
    return len(stale)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Product of (…, d) with a weight (out, d) in its packed form."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


class Layouts:
    """Chooses which weights are packed, for all recordings of a model; weights of one shape share the trial.

    Parameters
    ----------
    most_bytes
        Size of all copies together; weights beyond it stay as they are.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._of_weight: WeakValueDictionary[int, Layout] = WeakValueDictionary()
        self._pays: dict[torch.Size, bool] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the copies that recordings hold."""
        return sum(layout.nbytes for layout in list(self._of_weight.values()))

    def of(self, weight: torch.Tensor) -> Layout | None:
        """Layout of a (out, d) weight, None when it stays as it is."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
            return None  # also of one that was copied before: a model may be cast or moved in place
        layout = self._of_weight.get(id(weight))
        if layout is not None and not layout.is_current(closely=True):
            layout.copy_again()
        if layout is not None or weight.ndim != 2 or weight.nbytes > self._most - self.nbytes:
            return layout
        if weight.shape not in self._pays:
            self._pays[weight.shape] = packing_pays(weight.detach())
        if not self._pays[weight.shape]:
            return None
        self._of_weight[id(weight)] = made = Layout(weight, pack(weight.detach()))
        return made


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack a float32 weight for oneDNN."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), max(_TRIED))  # type: ignore[no-any-return]


def packing_pays(weight: torch.Tensor) -> bool:
    """Whether products with a weight are the same and together faster where it is packed."""
    gained = 0.0
    try:
        packed = pack(weight)
        for rows in _TRIED:
            x = torch.linspace(-1.0, 1.0, rows * weight.shape[1]).reshape(1, rows, -1)
            expected, product = functional.linear(x, weight), packed_linear(x, packed)
            if not torch.allclose(product, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
                return False
            lying, ours = _seconds(lambda x=x: functional.linear(x, weight), lambda x=x: packed_linear(x, packed))
            gained += math.log(lying / ours)
    except (AttributeError, RuntimeError):  # another build of torch: these operations are inductor's, not promised
        return False
    return gained > 0.0


def _seconds(*runs: Callable[..., torch.Tensor]) -> list[float]:
    """Least of a few times of each, taken in turn: other processes only ever add to one."""
    times = [math.inf] * len(runs)
    for _ in range(_REPEATS):
        for i, run in enumerate(runs):
            began = perf_counter()
            run()
            times[i] = min(times[i], perf_counter() - began)
    return times


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
                if layout.nbytes >= _LONE_BYTES:
                    self._lone.append(self._all[-1])

    def __len__(self) -> int:
        return len(self._layouts)

    def follow(self, closely: bool = False) -> int:
        """Copy weights again that differ from their copies; how many did."""
        return follow(self._layouts, closely)

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
        return packed_linear(input, layout.tensor, parameters["bias"])

    return forward
