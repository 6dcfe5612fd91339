"""The row kernels of models on a CPU, against the operations they stand for."""

import pytest
import torch
from torch.nn import functional

from retrieve_spec.kernels.cpu import layer_rows
from retrieve_spec.kernels.cpu.number_formats import LIKE


@pytest.mark.parametrize("dtype", list(LIKE))
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_rows_are_what_torch_computes(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, up, weight = ((torch.randn(1, n, 200) * 3).to(dtype) for n in (rows, rows, 1))
    weight = weight[0, 0]
    total, ours = layer_rows.add_rms_norm(x, up, weight, 1e-5)
    assert torch.equal(total, x + up) and torch.equal(layer_rows.rms_norm(total, weight, 1e-5), ours)
    wide = (x + up).float()
    normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    if dtype != torch.float32:
        torch.testing.assert_close(ours, normed, atol=0.0, rtol=2 * torch.finfo(dtype).eps)
        assert float((ours != normed).float().mean()) < 5e-3  # where a sum in another order is rounded otherwise
        assert torch.equal(layer_rows.gate(x, up), functional.silu(x) * up)
    else:
        torch.testing.assert_close(ours, normed)
        torch.testing.assert_close(layer_rows.gate(x, up), functional.silu(x) * up)
    cos, sin = (torch.randn(1, 1, rows, 24).to(dtype) for _ in range(2))
    heads, keys = (torch.randn(1, rows, n, 24).to(dtype).transpose(1, 2) for n in (3, 2))
    for given, turned in zip((heads, keys), layer_rows.rotate_both(heads, keys, cos, sin), strict=True):
        low, high = given[..., :12], given[..., 12:]
        assert torch.equal(turned, given * cos + torch.cat([-high, low], -1) * sin)
        assert turned.transpose(1, 2).is_contiguous()


def test_layer_rows_keep_what_is_no_number() -> None:
    x = torch.tensor([[[float("nan"), 1.0], [float("inf"), 1.0], [3.4e38, 1.0]]]).bfloat16()
    total, _ = layer_rows.add_rms_norm(x, x, torch.ones(2).bfloat16(), 1e-5)
    torch.testing.assert_close(total, x + x, equal_nan=True)


def test_gates_of_any_size_are_what_torch_computes() -> None:
    x = torch.tensor([[[-torch.inf, -3e38, -1e3, -89.0, -80.0, 0.0, 80.0, 89.0, 3e38, torch.inf]]])
    torch.testing.assert_close(layer_rows.gate(x, torch.ones_like(x)), functional.silu(x), equal_nan=True)
