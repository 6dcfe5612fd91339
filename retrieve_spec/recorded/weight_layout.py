"""Linear layers over weights laid out once for products with few rows, as a verifying pass has.

MKL packs a row-major weight anew at every call. oneDNN can keep it packed: with 4 … 64 rows that is two to four times
as fast where measured, and which of the two is used for how many rows is measured here, per shape of weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.nn import functional

_ROWS = (1, 2, 4, 16, 64)
"""Numbers of rows that are tried; from the largest of them on, one answer holds."""
_PACKED_FOR = 16
_REPEATS = 5
_WINS = 0.95


@dataclass(frozen=True, slots=True)
class Layout:
    """How a weight is kept beside the model's own.

    Attributes
    ----------
    tensor
        The packed weight (opaque to all but `packed_linear`), or a column-major copy.
    from_rows
        Fewest rows for which the packed weight is used; 0 for a column-major copy, which serves any number.
    """

    tensor: torch.Tensor
    from_rows: int = 0


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, from_rows: int
) -> torch.Tensor:
    """Product of (…, rows, d) with a weight (out, d), by its packed form when there are rows enough."""
    if x.shape[-2] >= from_rows:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]
    return functional.linear(x, weight, bias)


class Layouts:
    """Chooses a layout per weight; weights of one shape share the measurement.

    Parameters
    ----------
    most_bytes
        Size of all copies together; weights beyond it stay as they are.
    """

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._of_weight: dict[int, Layout | None] = {}
        self._from_rows: dict[torch.Size, int] = {}

    def of(self, weight: torch.Tensor) -> Layout | None:
        """Layout of a (out, d) weight, None when it stays as it is."""
        if id(weight) not in self._of_weight:
            self._of_weight[id(weight)] = self._choose(weight)
        return self._of_weight[id(weight)]

    def _choose(self, weight: torch.Tensor) -> Layout | None:
        """Copy a weight into the layout that is faster here, within what memory is left."""
        if weight.device.type != "cpu" or weight.nbytes > self._left:
            return None
        self._left -= weight.nbytes
        weight = weight.detach()
        packed = None if self._from_rows.get(weight.shape) == 0 else pack(weight)
        if packed is not None:
            if weight.shape not in self._from_rows:
                self._from_rows[weight.shape] = rows_that_pay(weight, packed)
            if self._from_rows[weight.shape]:
                return Layout(packed, self._from_rows[weight.shape])
        return Layout(weight.t().contiguous().t())


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


def rows_that_pay(weight: torch.Tensor, packed: torch.Tensor) -> int:
    """Fewest rows from which the packed weight is faster at every larger number tried, 0 for never."""
    columns = weight.t().contiguous().t()
    fewest = 0
    for rows in reversed(_ROWS):
        x = torch.ones(1, rows, weight.shape[1])

        def by_packed(x: torch.Tensor = x) -> torch.Tensor:
            return packed_linear(x, weight, packed, None, 1)

        def by_columns(x: torch.Tensor = x) -> torch.Tensor:
            return functional.linear(x, columns)

        if _seconds(by_packed) > _WINS * _seconds(by_columns):
            break
        fewest = rows
    return fewest


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    """Least of a few times: other processes only ever add to one."""
    run()
    times = []
    for _ in range(_REPEATS):
        began = perf_counter()
        run()
        times.append(perf_counter() - began)
    return min(times)
