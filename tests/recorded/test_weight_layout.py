"""Weights in another layout: the same products, within the memory that was allowed, and a way back without oneDNN."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional

from retrieve_spec.recorded import weight_layout
from retrieve_spec.recorded.weight_layout import Layouts, pack, packed_linear

needs_packing = pytest.mark.skipif(pack(torch.ones(8, 8)) is None, reason="this torch cannot pack weights")


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(24, 16), (33, 7), (1, 64)])
def test_packed_products_are_the_products(shape, bias):
    torch.manual_seed(0)
    weight, offset = torch.randn(shape), torch.randn(shape[0]) if bias else None
    packed = pack(weight)
    for rows in (1, 2, 3, 17, 65):
        x = torch.randn(1, rows, shape[1])
        expected = functional.linear(x, weight, offset)
        torch.testing.assert_close(packed_linear(x, weight, packed, offset, 1), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed_linear(x[0], weight, packed, offset, 1), expected[0], rtol=1e-4, atol=1e-4)


@needs_packing
def test_few_rows_read_the_weight_itself():
    weight = torch.randn(8, 4)
    packed = pack(torch.zeros(8, 4))
    assert packed_linear(torch.ones(1, 2, 4), weight, packed, None, 3).abs().sum() > 0
    assert packed_linear(torch.ones(1, 3, 4), weight, packed, None, 3).abs().sum() == 0


def test_one_copy_per_weight_within_the_limit(monkeypatch):
    monkeypatch.setattr(weight_layout, "rows_that_pay", lambda weight, packed, _others: 4)
    weights = [torch.randn(16, 8) for _ in range(3)]
    layouts = Layouts(2 * weights[0].nbytes)
    first = layouts.of(weights[0])
    assert layouts.of(weights[0]) is first
    second = layouts.of(weights[1])  # what nobody holds would make room for the next
    assert second is not None
    assert layouts.of(weights[2]) is None
    assert Layouts(0).of(weights[0]) is None


@pytest.mark.parametrize("reason", ["slower", "refused", "another product"])
def test_column_major_copies_where_packing_does_not_serve(monkeypatch, reason):
    weight = torch.randn(16, 8)
    if reason == "slower":
        monkeypatch.setattr(weight_layout, "rows_that_pay", lambda weight, packed, _others: 0)
    elif reason == "refused":
        monkeypatch.setattr(weight_layout, "packed_linear", _refuse)
    else:
        monkeypatch.setattr(weight_layout, "packed_linear", lambda x, weight, *rest: x @ weight.t() + 1.0)
    layout = Layouts(1 << 20).of(weight)
    assert layout.from_rows == 0
    assert layout.tensor.stride() == (1, 16)
    assert torch.equal(layout.tensor, weight)


def test_half_precision_and_column_major_weights_are_not_copied():
    assert Layouts(1 << 20).of(torch.randn(16, 8).to(torch.bfloat16)) is None
    assert Layouts(1 << 20).of(torch.randn(16, 8).t()) is None


def test_copies_that_nobody_reads_make_room_for_others():
    weights = [torch.randn(16, 8) for _ in range(2)]
    layouts = Layouts(weights[0].nbytes)
    kept = layouts.of(weights[0])
    assert layouts.of(weights[1]) is None and layouts.nbytes == weights[0].nbytes
    del kept
    gc.collect()
    assert layouts.of(weights[1]) is not None


def _refuse(*arguments):
    raise RuntimeError("no such primitive")


def _by_name(**seconds):
    """Stands in for the race of three products."""
    return lambda *runs, twin, others: [seconds[run.__name__] for run in runs]


@needs_packing
@pytest.mark.parametrize(("packed", "columns", "expected"), [(1.0, 2.0, 1), (2.0, 1.0, 0), (0.99, 1.0, 0)])
def test_the_packed_weight_has_to_win_by_a_margin(monkeypatch, packed, columns, expected):
    weight = torch.randn(16, 8)
    race = _by_name(by_packed=packed, by_columns=columns, as_it_lies=columns)
    monkeypatch.setattr(weight_layout, "_seconds", race)
    assert weight_layout.rows_that_pay(weight, pack(weight)) == expected
