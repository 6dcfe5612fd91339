"""Checkpoints of FP8, of compressed-tensors with 8 bits and of bitsandbytes, read without these packages."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stored_formats import (
    FLOATS,
    FP8,
    NF4,
    Tensors,
    blocks_of,
    by_block,
    by_output,
    by_table,
    checkpoint,
    expanded,
    some_scales,
)

import retrieve_spec as rs
from retrieve_spec.errors import UnsupportedModelError
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN
from retrieve_spec.quantized import pack
from retrieve_spec.reference_model import load_model, reference_path

IDS = torch.arange(3, 30)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def by_block_of_compressed_tensors(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return by_block(weight, "weight_scale")


def by_power_of_two(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, _ = by_block(weight)
    scales = blocks_of(weight).to(torch.float8_e8m0fnu)
    values = tensors["weight"].float() * expanded(scales.float(), weight)
    return tensors | {"weight_scale_inv": scales.view(torch.uint8)}, values


def by_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scale = (weight * 400).to(FLOATS), some_scales()
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, numbers.float() * scale


def in_integers(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scales = (weight * 200).clamp(-128, 127).to(torch.int8), some_scales(len(weight), 1)
    zeros = torch.randint(-9, 9, (len(weight), 1)).to(torch.int8)
    return {"weight": numbers, "weight_scale": scales, "weight_zero_point": zeros}, (numbers.float() - zeros) * scales


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8} | weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


ANY_TABLE = torch.linspace(-1, 1, 16).tolist()
ROTATION = {"apply": [{"location": "weight_input"}, {"location": "input"}]}
ROTATED = {"transform_config": {"config_groups": {"u": ROTATION}}}


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        (by_block, FP8),
        (by_power_of_two, FP8 | {"scale_fmt": "ue8m0"}),
        (by_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
        (by_output, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
        (by_output, compressed("float-quantized", type="float", strategy="channel")),
        (by_block_of_compressed_tensors, compressed("float-quantized", strategy="block", block_structure=[128, 128])),
        (in_integers, compressed("int-quantized", type="int", strategy="channel")),
        (partial(by_table, numbers=ANY_TABLE), NF4),
        (partial(by_table, nested=True, numbers=ANY_TABLE), NF4 | {"bnb_4bit_use_double_quant": True}),
    ],
)
def test_a_cpu_loads_the_values_of_quantised_weights(
    tmp_path: Path, write: Callable[..., Any], settings: dict[str, Any]
) -> None:
    values = checkpoint(tmp_path / "model", write, settings)
    model, _ = load_model(str(tmp_path / "model"), device="cpu")
    assert model.dtype == torch.bfloat16 and model.generation_config.max_new_tokens == 7
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name].to(torch.bfloat16)), name
    full, _ = load_model(str(tmp_path / "model"), device="cpu", dtype="float32")
    for name, parameter in full.named_parameters():
        assert torch.equal(parameter, values[name]), name


def test_experts_are_read_as_well(tmp_path: Path) -> None:
    values = checkpoint(tmp_path / "model", by_block, FP8, "mixtral")
    model, _ = load_model(str(tmp_path / "model"), device="cpu")
    model.save_pretrained(tmp_path / "plain")
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        assert torch.equal(tensor, values[name].to(torch.bfloat16)), name


@pytest.mark.skipif(not CAN_RUN, reason="products have no form in Python")
def test_values_are_packed_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = checkpoint(tmp_path / "model", by_block, FP8)
    model, _ = load_model(str(tmp_path / "model"), device="cpu", quantize="int8")
    for name, layer in model.model.layers.named_modules():
        if name.endswith("proj"):
            path = f"model.layers.{name}.weight"
            assert torch.equal(layer.weight, pack(values[path].to(torch.bfloat16), 8)), path
    monkeypatch.setattr("retrieve_spec.quantized_checkpoints.read_values", None)
    again, _ = load_model(str(tmp_path / "model"), device="cpu", quantize="int8")
    assert len(list((cache / "quantized").iterdir())) == 1
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    expected = model.generate(IDS, max_new_tokens=20, do_sample=False)
    rs.accelerate(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=20, do_sample=False), expected)
    assert model.speculation.last.pass_kind == "recorded"


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=["nf4 twice", "nf4", "fp4", "int8"],
)
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_bitsandbytes(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import dequantize_and_replace

    checkpoint(tmp_path / "plain", lambda weight: ({"weight": weight}, weight), {})
    wanted = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **options)
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=wanted, dtype=torch.bfloat16, device_map="cpu"
    )
    plain.save_pretrained(tmp_path / "model")
    for file in reference_path().glob("token*.json"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    dequantize_and_replace(plain, wanted, torch.bfloat16)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model, _ = load_model(str(tmp_path / "model"), device="cpu")
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, atol=0.0, rtol=2**-8)


def without_scale(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return {"weight": weight.to(FLOATS)}, weight


def without_weight(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return {"weight_scale": some_scales()}, weight


def unevenly(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return {"weight": weight.to(FLOATS), "weight_scale": some_scales(5, 1)}, weight


@pytest.mark.parametrize(
    ("write", "settings", "said"),
    [
        (without_scale, FP8, "a known scale for model.layers"),
        (without_weight, FP8, "weight, weight_scale of model.layers"),
        (unevenly, FP8, "scales of equal blocks"),
        (by_output, compressed("float-quantized") | ROTATED, "transforms of input"),
    ],
)
def test_other_checkpoints_are_refused(
    tmp_path: Path, write: Callable[..., Any], settings: dict[str, Any], said: str
) -> None:
    checkpoint(tmp_path / "model", write, settings)
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(str(tmp_path / "model"), device="cpu")
