"""Packed copies of weights: the same products, within the memory that was allowed, and none without oneDNN."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional

from retrieve_spec.recorded import weight_layout
from retrieve_spec.recorded.weight_layout import Layouts, pack, packed_linear, packing_pays

needs_packing = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch cannot pack weights")


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(24, 16), (33, 7), (1, 64)])
def test_packed_products_are_the_products(shape, bias):
    torch.manual_seed(0)
    weight, offset = torch.randn(shape), torch.randn(shape[0]) if bias else None
    for rows in (1, 2, 3, 17, 65):
        x = torch.randn(1, rows, shape[1])
        expected = functional.linear(x, weight, offset)
        torch.testing.assert_close(packed_linear(x, pack(weight), offset), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed_linear(x[0], pack(weight), offset), expected[0], rtol=1e-4, atol=1e-4)


@needs_packing
def test_one_copy_per_weight_within_the_limit_while_somebody_reads_it(monkeypatch):
    monkeypatch.setattr(weight_layout, "packing_pays", lambda weight: True)
    weights = [torch.randn(16, 8) for _ in range(3)]
    layouts = Layouts(2 * weights[0].nbytes)
    first, second = layouts.of(weights[0]), layouts.of(weights[1])
    assert layouts.of(weights[0]) is first and second is not None
    assert layouts.of(weights[2]) is None and layouts.nbytes == 2 * weights[0].nbytes
    del second
    gc.collect()
    assert layouts.of(weights[2]) is not None
    assert Layouts(1 << 20).of(torch.randn(16, 8).to(torch.bfloat16)) is None
    assert Layouts(1 << 20).of(torch.randn(16, 8).t()) is None


def refused(*arguments):
    raise RuntimeError("no such primitive")


@needs_packing
@pytest.mark.parametrize(
    ("product", "lying", "pays"),
    [(packed_linear, 2.0, True), (packed_linear, 0.5, False), (refused, 2.0, False),
     (lambda x, packed, *_: packed_linear(x, packed) + 1.0, 2.0, False)],
)  # fmt: skip
def test_a_weight_is_packed_where_products_are_the_same_and_faster(monkeypatch, product, lying, pays):
    monkeypatch.setattr(weight_layout, "packed_linear", product)
    monkeypatch.setattr(weight_layout, "_seconds", lambda *runs: (lying, 1.0))
    assert packing_pays(torch.randn(16, 8)) == pays
