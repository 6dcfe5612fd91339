"""Checkpoints of AWQ, GPTQ and compressed-tensors, packed with the values that they have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_rows import small_model
from safetensors.torch import load_file, save_file

import retrieve_spec as rs
from retrieve_spec.errors import UnsupportedModelError
from retrieve_spec.kernels.cpu.packed_products import unpack
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN
from retrieve_spec.quantized import PackedLinear
from retrieve_spec.reference_model import load_model, reference_path

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="products have no form in Python")
Tensors = dict[str, torch.Tensor]
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers of 4 bits of a row in each word: the first of the order in its lowest bits."""
    eights = numbers.long().view(len(numbers), -1, 8)
    packed = sum(eights[..., number] << 4 * place for place, number in enumerate(order))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)  # type: ignore[arg-type, operator]


def awq(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    by_input = {"qweight": levels.T, "qzeros": zeros.T}
    return {name: words(each, AWQ_OUTPUTS) for name, each in by_input.items()} | {"scales": scales.T.half()}


def gptq(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, less: int = 1) -> Tensors:
    inputs, groups = levels.shape[1], scales.shape[1]
    return {
        "qweight": words(levels).T,
        "qzeros": words(zeros.T - less),
        "scales": scales.T.half(),
        "g_idx": (torch.arange(inputs) // (inputs // groups)).int(),
    }


def gptq_v2(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return gptq(levels, scales, zeros, 0)


def compressed(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    shape = torch.tensor(levels.shape)
    return {"weight_packed": words(levels), "weight_scale": scales.to(torch.bfloat16), "weight_shape": shape}


def compressed_with_zeros(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return compressed(levels, scales, zeros) | {"weight_zero_point": words(zeros.T).T}


def compressed_by_older_releases(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return compressed(levels, scales, zeros) | {"weight_zero_point": (zeros - 8).to(torch.int8)}


def settings_of(bits: int = 4, form: str = "pack-quantized") -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


AWQ = {"quant_method": "awq", "bits": 4, "version": "GEMM", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}
ROTATION = {"apply": [{"location": "weight_input"}, {"location": "input"}]}
ROTATED = {"transform_config": {"config_groups": {"u": ROTATION}}}


def checkpoint(
    folder: Path,
    write: Callable[..., Tensors],
    settings: dict[str, Any],
    group: int,
    symmetric: bool = False,
    quantised: str = "proj.weight",
) -> Tensors:
    """Write a random checkpoint; return the values of its quantised weights, whose names end alike, by name."""
    small_model("llama", vocab_size=4096, hidden_size=128, intermediate_size=256, head_dim=32).save_pretrained(folder)
    for file in reference_path().glob("token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    tensors, values, seeded = load_file(folder / "model.safetensors"), Tensors(), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(quantised)]:
        rows, inputs = tensors.pop(name).shape
        groups = 1 if group == -1 else inputs // group
        levels = torch.randint(16, (rows, inputs), generator=seeded)
        zeros = torch.randint(16, (rows, groups), generator=seeded)
        zeros = torch.full_like(zeros, 8) if symmetric else zeros
        scales = (torch.rand(rows, groups, generator=seeded) * 0.01 + 0.001).to(torch.bfloat16).float()
        tensors |= {
            name.replace("weight", part): each.contiguous() for part, each in write(levels, scales, zeros).items()
        }
        values[name] = ((levels.view(rows, groups, -1) - zeros[..., None]) * scales[..., None]).flatten(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return values


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("write", "settings", "group", "symmetric"),
    [
        (awq, AWQ, 128, False),
        (gptq, GPTQ, 32, True),
        (gptq, GPTQ, 32, False),
        (gptq_v2, GPTQ | {"checkpoint_format": "gptq_v2"}, 64, False),
        (compressed, settings_of(), -1, True),
        (compressed_with_zeros, settings_of(), 32, False),
        (compressed_by_older_releases, settings_of(), 32, False),
    ],
)
def test_values_of_a_checkpoint_stay(
    tmp_path: Path, write: Callable[..., Tensors], settings: dict[str, Any], group: int, symmetric: bool
) -> None:
    values = checkpoint(tmp_path / "model", write, settings, group, symmetric)
    model, _ = load_model(str(tmp_path / "model"), device="cpu", quantize="int4")
    layers = {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    assert values.keys() == layers.keys() - {"lm_head.weight"}
    for name, wanted in values.items():
        got = unpack(layers[name].weight, wanted.shape[1])[: len(wanted)]
        torch.testing.assert_close(got, wanted, atol=0.0 if symmetric else 1e-4, rtol=0.0)
    again, _ = load_model(str(tmp_path / "model"), device="cpu", quantize="int4")
    ids = torch.arange(5)[None]
    assert torch.equal(again(ids).logits, model(ids).logits), "the cache has the same model"


def test_layers_that_a_checkpoint_does_not_quantise_stay(tmp_path: Path) -> None:
    packed = checkpoint(tmp_path / "partly", awq, AWQ, 32, quantised="o_proj.weight")
    source = load_file(tmp_path / "partly" / "model.safetensors")
    for _ in range(2):  # as converted, and as the cache has it
        model, _ = load_model(str(tmp_path / "partly"), device="cpu", quantize="int4")
        for name, layer in model.model.layers.named_modules():
            if name.endswith("_proj"):
                path = f"model.layers.{name}.weight"
                assert isinstance(layer, PackedLinear) == (path in packed)
                assert path in packed or torch.equal(layer.weight, source[path].to(torch.bfloat16))
    ids = torch.arange(3, 30)[None]
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    rs.accelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    assert model.speculation.last.pass_kind == "recorded"


def shuffled(*weight: torch.Tensor) -> Tensors:
    tensors = gptq(*weight)
    return tensors | {"g_idx": tensors["g_idx"].flip(0)}


def with_one_scale(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Tensors:
    return compressed(levels, scales, zeros) | {"weight_scale": scales[0, :1]}


def without_scales(*weight: torch.Tensor) -> Tensors:
    return {name: tensor for name, tensor in awq(*weight).items() if name != "scales"}


@pytest.mark.parametrize(
    ("write", "settings", "group", "said"),
    [
        (shuffled, GPTQ, 32, "activation order"),
        (gptq, GPTQ, 16, "groups of 32 inputs or a multiple"),
        (gptq, GPTQ | {"bits": 8}, 32, "8 bits"),
        (gptq, GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}}, 32, "4, 8 bits"),
        (gptq, GPTQ | {"checkpoint_format": "marlin"}, 32, "marlin"),
        (awq, AWQ | {"version": "gemv"}, 32, "gemv"),
        (awq, {"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv"}, 32, "gemv"),
        (compressed, settings_of(8), 32, "8 bits"),
        (compressed, settings_of(form="marlin-24"), 32, "marlin-24"),
        (compressed, settings_of() | ROTATED, 32, "transforms of input"),
        (with_one_scale, settings_of(), 32, "one scale"),
        (without_scales, AWQ, 32, "not all of them"),
        (awq, {"quant_method": "quip"}, 32, "quip"),
    ],
)
def test_other_checkpoints_are_refused(
    tmp_path: Path, write: Callable[..., Tensors], settings: dict[str, Any], group: int, said: str
) -> None:
    checkpoint(tmp_path / "model", write, settings, group)
    with pytest.raises(UnsupportedModelError, match=said):
        load_model(str(tmp_path / "model"), device="cpu", quantize="int4")


def test_other_files_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", gptq, GPTQ, 32)
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        load_model(str(tmp_path / "model"), device="cpu", quantize="int4")


def test_a_damaged_checkpoint_is_not_taken_for_a_full_cache(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", gptq, GPTQ, 32)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UnsupportedModelError, match="incomplete metadata"):
        load_model(str(tmp_path / "model"), device="cpu", quantize="int4")


def test_without_quantize_the_error_names_it(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", gptq, GPTQ, 32)
    with pytest.raises(UnsupportedModelError, match="quantize='int4'"):
        load_model(str(tmp_path / "model"), device="cpu")
    with pytest.raises(UnsupportedModelError, match="Give 'int4'"):
        load_model(str(tmp_path / "model"), device="cpu", quantize="int8")
