"""Packed weights on a pretended GPU: loaded there, packed there, multiplied by what stands for the Triton kernel."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import stand_in
from pretend_cuda import CudaTensor, PretendCuda, moved_recording
from scripted_drafter import ScriptedDrafter
from small_decoders import VOCAB, build, ids
from stored_formats import FP8, NF4, by_block, by_output, by_table, checkpoint

import retrieve_spec as rs
from retrieve_spec import acceleration
from retrieve_spec.errors import ConfigError, UnsupportedModelError
from retrieve_spec.kernels.cpu import FLOATS, row_programs, unpack, unpacked_product
from retrieve_spec.quantized import PackedLinear, WeightOnlyConfig, pack_model
from retrieve_spec.recorded.packed_pass import PassGraphs
from retrieve_spec.recorded.recorded_pass import RecordedPass
from retrieve_spec.recorded.recorded_verifier import RecordedVerifier
from retrieve_spec.reference_model import QUANTISED, load_model
from retrieve_spec.verify.hf import HFVerifier
from retrieve_spec.verify.interface import read_interface


def packed(weights: str) -> Any:
    model = build("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    pack_model(model, WeightOnlyConfig(**QUANTISED[weights]))
    return model.eval()


@torch.library.custom_op("pretended::unpacked_product", mutates_args=())
def _unpacked_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return unpacked_product(x, weight, bias)


@pytest.fixture
def products(gpu: PretendCuda, with_triton: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product by the stand-in; the host multiplies by unpacked weights, as it does."""
    module: Any = ModuleType("retrieve_spec.kernels.triton_products")
    rows: list[int] = []

    def linears(x: torch.Tensor, weights: Any, biases: Any) -> Any:
        assert isinstance(x, CudaTensor) and x.ndim == 3 and x.device.index == gpu.current
        rows.append(x.shape[1])
        return tuple(map(torch.ops.pretended.unpacked_product, [x], weights, biases))

    module.linears = linears
    stand_in(monkeypatch, module)
    monkeypatch.setattr(row_programs, "CAN_RUN", False)
    return rows


@pytest.mark.parametrize(
    ("weights", "graphs", "index"), [("int4", True, 0), ("int8", False, 1), ("fp8", True, 0), ("nf4", True, 0)]
)
def test_texts_are_those_of_unpacked_products(
    gpu: PretendCuda, products: list[int], monkeypatch: pytest.MonkeyPatch, weights: str, graphs: bool, index: int
) -> None:
    """Prompts, passes with drafts and captured ones, on any GPU; packed weights are all there is of a layer's."""
    host, device = packed(weights), torch.device("cuda", index)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = host.generate(ids(70), **options)
    recorded = moved_recording(RecordedPass(host, 2), index)
    model = copy.deepcopy(host).to(device)
    finding = acceleration._find_mode(host)  # which does not depend on the device, where it takes much longer
    monkeypatch.setattr(acceleration, "_find_mode", lambda model: finding)
    rs.accelerate(model, drafter=ScriptedDrafter(expected[0], "branchy", vocab=VOCAB), nodes=12, recorded_pass="off")
    interface, captured = read_interface(model), PassGraphs(recorded) if graphs else None
    model.speculation._make_verifier = lambda: RecordedVerifier(model, HFVerifier(model, interface), recorded, captured)
    for _ in range(2):
        products.clear()
        said = model.generate(ids(70).to(device), **options)
        assert torch.equal(said.to("cpu"), expected)
    report = model.speculation.last
    assert report.pass_kind == "recorded" and report.tokens_per_pass > 1.5
    assert (set(report.ran) <= {"captured", "replayed"}) if graphs else max(products) >= 70
    assert all(p.dtype in (torch.uint8, FLOATS) for p in model.parameters() if p.ndim > 1)


def assert_same(model: Any, host: Any) -> None:
    """A model on a GPU has what one on the host has."""
    for name, tensor in host.state_dict().items():
        found = model.state_dict()[name]
        assert isinstance(found, CudaTensor) and torch.equal(found.host, tensor), name


def test_a_gpu_packs_what_a_cpu_packs(gpu: PretendCuda) -> None:
    for weights, settings in QUANTISED.items():
        model = build("llama", hidden_size=64, intermediate_size=96, head_dim=16).to("cuda")
        pack_model(model, WeightOnlyConfig(**settings))
        assert_same(model, packed(weights))


def test_a_gpu_takes_the_folder_of_a_cpu(
    gpu: PretendCuda, products: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path))
    host, _ = load_model(device="cpu", quantize="int4")
    model, tokenizer = load_model(device="cuda", quantize="int4")
    assert len(list((tmp_path / "quantized").iterdir())) == 1
    given = tokenizer("def add(a, b):", return_tensors="pt").input_ids
    assert_same(model, host)
    logits = model(given.to("cuda")).logits
    torch.testing.assert_close(logits.to("cpu"), host(given).logits, atol=0.3, rtol=0.05)
    assert isinstance(logits, CudaTensor) and products
    with pytest.raises(ConfigError, match="a CPU or a CUDA GPU"):
        load_model(device="meta", quantize="int4")


@pytest.mark.parametrize(
    ("write", "settings", "weights", "bytes_each"),
    [  # two bytes for each scale of 32 weights
        (by_block, FP8, "fp8", 1 + 2 / 32),
        (by_output, {"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8", 1 + 2 / 32),
        (by_table, NF4, "nf4", 1 / 2 + 2 / 32),
        (partial(by_table, nested=True), NF4, "nf4", 1 / 2 + 2 / 32),
    ],
)
def test_numbers_of_floats_stay(
    gpu: PretendCuda, products: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, settings: Any,
    weights: str, bytes_each: float,
) -> None:  # fmt: skip
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    values = checkpoint(tmp_path / "model", write, settings)
    for _ in range(2):  # as converted, and as the cache has it
        model, _ = load_model(str(tmp_path / "model"), device="cuda", quantize=weights)
        for path, layer in model.model.layers.named_modules():
            if isinstance(layer, PackedLinear):
                wanted, weight = values[f"model.layers.{path}.weight"], layer.weight.to("cpu")
                assert weight.nbytes == bytes_each * wanted.numel()
                torch.testing.assert_close(unpack(weight, wanted.shape[1]), wanted, atol=0.0, rtol=2**-11)
    assert len(list((tmp_path / "cache" / "quantized").iterdir())) == 1
    with pytest.raises(ConfigError, match="a CUDA GPU"):
        load_model(str(tmp_path / "model"), device="cpu", quantize=weights)


def test_without_triton_a_gpu_says_so(gpu: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "retrieve_spec.kernels.triton_products", None)
    model = packed("int4").to("cuda")
    with pytest.raises(UnsupportedModelError, match="expected Triton"):
        model.generate(ids(5).to("cuda"), max_new_tokens=2)
    x = torch.randn(1, 64)
    layer = model.model.layers[0].self_attn.q_proj
    assert torch.equal(layer(x.to("cuda")).to("cpu"), unpacked_product(x, layer.weight.to("cpu")))
