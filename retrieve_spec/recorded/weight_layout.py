"""Weight layouts: copies of weights, packed once for products with few rows, that are kept equal to the weights.

MKL packs a row-major weight anew at every call. oneDNN can keep it packed: with 4 … 64 rows that is two to four times
as fast where measured, and which of the two is used for how many rows is measured here, per shape of weight.

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

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from retrieve_spec.recorded.model_state import place, storage_ref, version_of, without_ours

_ROWS = (1, 2, 4, 16, 64)
"""Numbers of rows that are tried; from the largest of them on, one answer holds."""
_PACKED_FOR = 16
_REPEATS = 5
_MOST_BETWEEN = 1 << 26
"""Bytes that are read between two products at most: more than caches hold."""
_TWIN_BYTES = 1 << 22
"""Bytes of a twin at most: of larger weights, whose products take long beside finding their code, the first rows."""
_WINS = 0.95
_Layers = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A weight as it lies, packed, and as a column-major copy."""


class Layout:
    """How a weight is kept beside the model's own.

    Attributes
    ----------
    weight
        The model's own.
    tensor
        The packed weight (opaque to all but `packed_linear`), or a column-major copy.
    from_rows
        Fewest rows for which the packed weight is used; 0 for a column-major copy, which serves any number.
    """

    def __init__(self, weight: torch.Tensor, tensor: torch.Tensor, from_rows: int = 0) -> None:
        self.weight, self.tensor, self.from_rows = weight, tensor, from_rows
        self.nbytes = weight.nbytes
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

    def serves(self, rows: int) -> bool:
        """Whether so many rows are multiplied by the copy."""
        return rows >= self.from_rows

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Product of (…, d) with the weight, by the copy where it serves so many rows."""
        if not self.from_rows:
            return functional.linear(x, self.tensor, bias)
        if x.numel() < self.from_rows * x.shape[-1]:
            return functional.linear(x, self.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.tensor, bias, "none", [], "")  # type: ignore[no-any-return]

    def copy_again(self) -> None:
        """Let the copy be one of the weight as it is now."""
        weight = self.weight.detach()
        packed = pack(weight) if self.from_rows else None
        if packed is None:
            packed, self.from_rows = _by_columns(weight), 0
        self.tensor = packed
        self._note()


def follow(layouts: Iterable[Layout], closely: bool = False) -> int:
    """Copy weights again that differ from their copies (`Layout.is_current`); how many did."""
    stale = {id(layout): layout for layout in layouts if not layout.is_current(closely)}
    with torch.no_grad():
        for layout in stale.values():
            layout.copy_again()
    return len(stale)


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, from_rows: int
) -> torch.Tensor:
    """Product of (…, rows, d) with a weight (out, d), by its packed form when there are rows enough."""
    if x.shape[-2] >= from_rows:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
    return functional.linear(x, weight, bias)


class Layouts:
    """Chooses a layout per weight, for all recordings of a model; weights of one shape share the measurement.

    Parameters
    ----------
    most_bytes
        Size of all copies together; weights beyond it stay as they are.
    others_bytes
        Size of the weights that a pass reads between two products with one of them.
    """

    def __init__(self, most_bytes: int, others_bytes: int = 0) -> None:
        self._most, self._others = most_bytes, others_bytes
        self._of_weight: WeakValueDictionary[int, Layout] = WeakValueDictionary()
        self._from_rows: dict[torch.Size, int] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the copies that recordings hold."""
        return sum(layout.nbytes for layout in list(self._of_weight.values()))

    def of(self, weight: torch.Tensor) -> Layout | None:
        """Layout of a (out, d) weight, None when it stays as it is."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.is_contiguous():
            return None  # also of one that was copied before: a model may be cast or moved in place
        layout = self._of_weight.get(id(weight))
        if layout is None:
            layout = self._choose(weight)
            if layout is not None:
                self._of_weight[id(weight)] = layout
        elif not layout.is_current(closely=True):
            layout.copy_again()
        return layout

    def _choose(self, weight: torch.Tensor) -> Layout | None:
        """Copy a weight into the layout that is faster here, within what memory is left."""
        if weight.ndim != 2 or weight.nbytes > self._most - self.nbytes:
            return None
        plain = weight.detach()
        packed = None if self._from_rows.get(weight.shape) == 0 else pack(plain)
        if packed is not None:
            if weight.shape not in self._from_rows:
                self._from_rows[weight.shape] = rows_that_pay(plain, packed, self._others)
            if self._from_rows[weight.shape]:
                return Layout(weight, packed, self._from_rows[weight.shape])
        return Layout(weight, _by_columns(plain))


def _by_columns(weight: torch.Tensor) -> torch.Tensor:
    """A column-major copy."""
    return weight.t().contiguous().t()


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Pack a float32 weight for oneDNN, None where torch cannot or the product would be another."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or weight.dtype != torch.float32:
        return None
    sample = torch.linspace(-1.0, 1.0, 3 * weight.shape[1]).reshape(1, 3, -1)
    try:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)
        product = packed_linear(sample, weight, packed, None, 1)
    except (AttributeError, RuntimeError):  # another build of torch: these operations are inductor's, not promised
        return None
    expected = functional.linear(sample, weight)
    close = torch.allclose(product, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    return packed if close else None


def rows_that_pay(weight: torch.Tensor, packed: torch.Tensor, others_bytes: int = 0) -> int:
    """Fewest rows from which the packed weight is used, 0 for never.

    So many bytes of other weights are read between two products, as in a pass: a weight that lies in a cache is
    multiplied by few rows as fast in any layout, one that comes from memory twice as fast where it is packed. What
    comes from memory is the weight alone: the code has just multiplied by that of another layer, here by a twin.

    Fewer rows than it is used for are multiplied by the weight as it lies: as few as make all numbers together fastest,
    so that a single time that other processes spoiled decides nothing. Over all numbers of rows the two have to be
    faster than a column-major copy, by the geometric mean.
    """
    twin = weight[: max(_TWIN_BYTES // weight[0].nbytes, 1)].clone()
    packed_twin = pack(twin)
    ours = weight, packed, _by_columns(weight)
    theirs = ours if packed_twin is None else (twin, packed_twin, _by_columns(twin))
    others, times = torch.zeros(min(others_bytes, _MOST_BETWEEN) // 4), []
    for rows in _ROWS:
        x = torch.ones(1, rows, weight.shape[1])

        def by_packed(on: _Layers = ours, x: torch.Tensor = x) -> torch.Tensor:
            return packed_linear(x, on[0], on[1], None, 1)

        def by_columns(on: _Layers = ours, x: torch.Tensor = x) -> torch.Tensor:
            return functional.linear(x, on[2])

        def as_it_lies(on: _Layers = ours, x: torch.Tensor = x) -> torch.Tensor:
            return functional.linear(x, on[0])

        times.append(_seconds(by_packed, by_columns, as_it_lies, twin=theirs, others=others))
    packs, copied, lying = np.log(times).T
    lost = np.cumsum((packs - lying - np.log(_WINS))[::-1])[::-1]  # by the first number of rows that it serves
    first = int(lost.argmin())
    against_columns = np.append(lying[:first], packs[first:]) - copied
    return _ROWS[first] if np.exp(against_columns.mean()) <= _WINS else 0


def _seconds(*runs: Callable[..., torch.Tensor], twin: Any, others: torch.Tensor) -> list[float]:
    """Least of a few times of each, taken in turn: other processes only ever add to one.

    `others` are read before, and each has just run on a `twin` of what it is timed on.
    """
    for run in runs:
        run()
    times = [math.inf] * len(runs)
    for _ in range(_REPEATS):
        others.sum()
        for i, run in enumerate(runs):
            run(twin)
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
                if layout.serves(1) and layout.nbytes >= _LONE_BYTES:
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
        return layout.product(input, parameters["bias"])

    return forward
