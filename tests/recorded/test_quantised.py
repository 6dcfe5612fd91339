"""Quantised targets: what is verified how, and that the output stays the target's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from batch_rows import small_model
from scripted_drafter import ScriptedDrafter
from torch import nn
from torch.utils._pytree import tree_map_only

import retrieve_spec as rs

IDS = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(30)]])


class WeightOnly(nn.Module):
    """A linear layer with int8 weights and one scale per output, as weight-only quantisation stores it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.in_features = linear.in_features

    def _save_to_state_dict(self, *args: Any) -> None:
        """Lose something, as 4-bit layers of bitsandbytes do on a CPU."""
        self.codes.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes.float() * self.scale).T


class Codes(torch.Tensor):
    """A weight that is made of int8 weights and scales, and looks like one of float32."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        args, kwargs = tree_map_only(cls, lambda weight: weight.codes * weight.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.fixture
def full() -> Any:
    return small_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)


def replace_linears(parts: Iterable[nn.Module], make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put other layers in place of the linear ones that some modules have."""
    for part in parts:
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, make(child))


def check(model: Any, script: str, tokens_per_pass: float) -> None:
    plain = model.generate(IDS, max_new_tokens=40, do_sample=False)
    rs.accelerate(model, drafter=ScriptedDrafter(plain[0], script), nodes=24, recorded_pass="always")
    assert torch.equal(model.generate(IDS, max_new_tokens=40, do_sample=False), plain)
    assert model.speculation.last.tokens_per_pass >= tokens_per_pass


def test_weight_only_quantisation_is_recorded_and_verified_in_trees(full: Any) -> None:
    replace_linears(full.model.modules(), WeightOnly)
    check(full, "branchy", 2.0)
    assert full.speculation.mode == "tree" and full.speculation.last.pass_kind == "recorded"


def test_weights_that_are_made_of_other_tensors_are_not_read_by_their_address(full: Any) -> None:
    for layer in full.model.layers:
        own = WeightOnly(layer.mlp.up_proj)
        layer.mlp.up_proj.weight = nn.Parameter(Codes(own.codes, own.scale), requires_grad=False)
    check(full, "branchy", 2.0)
    assert full.speculation.mode == "tree" and full.speculation.last.pass_kind == "recorded"


@pytest.mark.filterwarnings("ignore")
def test_activations_quantised_over_all_rows_leave_plain_decoding(full: Any) -> None:
    """One scale for all rows of a pass: a row's logits depend on its neighbours, so drafts cannot be verified."""
    quantised = torch.ao.quantization.quantize_dynamic(full, {nn.Linear}, dtype=torch.qint8)
    check(quantised, "right", 1.0)
    assert quantised.speculation.mode == "plain"
    assert "scale their inputs over all rows of a pass" in quantised.speculation.reason


@pytest.mark.parametrize("kind", ["Linear8bitLt", "Linear4bit"])
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_layers_say_what_they_say_alone(full: Any, kind: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    options = {"quant_type": "nf4"} if kind == "Linear4bit" else {"has_fp16_weights": False}

    def quantised(linear: nn.Linear) -> nn.Module:
        made = getattr(bitsandbytes.nn, kind)(linear.in_features, linear.out_features, bias=False, **options)
        made.load_state_dict(linear.state_dict())
        return made.to("cpu")  # type: ignore[no-any-return]

    replace_linears([layer.mlp for layer in full.model.layers], quantised)
    check(full.eval(), "branchy", 1.0)
    assert full.speculation.mode == "tree"
