"""Packed weights: products against what the weights stand for, and models that are loaded with them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_rows import small_model
from found_once import FoundOnce
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import retrieve_spec as rs
from retrieve_spec.errors import UnsupportedModelError
from retrieve_spec.kernels.cpu.packed_products import GROUP, NF4, unpack
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN
from retrieve_spec.quantized import Int8Embedding, PackedLinear, WeightOnlyConfig, pack, pack_model
from retrieve_spec.reference_model import load_model, reference_path

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="products have no form in Python")
PROMPT = torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(25)]])


def steps(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """What the least step of each weight is."""
    groups = weight.unflatten(1, (-1, GROUP))
    least = groups.abs().amax(-1) / 127 if bits == 8 else (groups.amax(-1) - groups.amin(-1)) / 15
    return least.repeat_interleave(GROUP, 1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("outputs", "biased"), [(48, False), (50, True)])
def test_layers_are_those_of_weights_a_step_away_at_most(bits: int, outputs: int, biased: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, outputs, bias=biased).to(torch.bfloat16)
    weight = linear.weight.detach().float()
    packed = PackedLinear(linear, bits)
    plain = unpack(packed.weight, 96)[:outputs]
    assert (plain - weight).abs().le(0.51 * steps(weight, bits) + 0.001 * weight.abs().amax()).all()
    x = torch.randn(2, 25, 96, dtype=torch.bfloat16)
    wanted = nn.functional.linear(x.float(), plain, linear.bias.float() if biased else None)
    assert packed(x).shape == wanted.shape and packed(x).dtype == torch.bfloat16
    torch.testing.assert_close(packed(x).float(), wanted, atol=0.03, rtol=0.02)
    torch.testing.assert_close(packed(x.float()), wanted)


def test_numbers_of_nf4_are_the_nearest_ones() -> None:
    torch.manual_seed(0)
    weight, numbers = torch.randn(20, 96), torch.tensor(NF4)
    scales = weight.view(20, -1, GROUP).abs().amax(-1).repeat_interleave(GROUP, 1)
    nearest = numbers[(weight / scales).unsqueeze(-1).sub(numbers).abs().argmin(-1)] * scales
    torch.testing.assert_close(unpack(pack(weight, 4, floats=True), 96)[:20], nearest, atol=0.0, rtol=2**-11)


def test_tables_of_tokens_are_read_by_rows() -> None:
    table = nn.Embedding(50, 64).to(torch.bfloat16)
    weight = table.weight.detach().float()
    ids = torch.tensor([[3, 49], [0, 3]])
    packed = Int8Embedding(table)
    got = packed(ids)
    assert got.shape == (2, 2, 64) and got.dtype == torch.bfloat16
    assert torch.equal(got, unpack(packed.weight, 64)[ids].to(torch.bfloat16))
    assert packed(ids[:, :0]).shape == (2, 0, 64)
    for wrong in (-1, 64):  # the table has 50 rows and is filled up to 64
        with pytest.raises(IndexError, match="token ids below 64"):
            packed(torch.tensor([[3, wrong]]))
    assert (got.float() - weight[ids]).abs().le(0.6 * steps(weight, 8)[ids] + 0.01 * weight[ids].abs()).all()


def save_llama(folder: Path, tied: bool, **options: Any) -> str:
    """A random model of few tokens beside the tokenizer of the bundled one."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 16}
    small_model("llama", tie_word_embeddings=tied, bos_token_id=None, **sizes | options).save_pretrained(folder)
    for file in reference_path().glob("token*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_models_are_kept(tmp_path: Path, cache: Path, quantize: str, tied: bool) -> None:
    folder = save_llama(tmp_path / "model", tied)
    made, _ = load_model(folder, device="cpu", quantize=quantize)
    (kept,) = (cache / "quantized").iterdir()
    written = (kept / "model.safetensors").stat().st_mtime_ns
    model: Any = load_model(folder, device="cpu", quantize=quantize)[0]
    assert (kept / "model.safetensors").stat().st_mtime_ns == written, "it was not made again"
    assert model.dtype == torch.bfloat16
    assert model.name_or_path == made.name_or_path == folder
    assert torch.equal(model(PROMPT).logits, made(PROMPT).logits)
    assert type(model.model.layers[1].mlp.up_proj) is PackedLinear
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16, 4, 8], ids=str)
def test_drafts_change_no_bit_of_a_text(
    tmp_path: Path, form: torch.dtype | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a pass are the same whatever stands beside them: with weights of 16 bits, and with packed ones."""
    folder = save_llama(tmp_path / "model", tied=True, head_dim=32)
    given = {"quantization_config": WeightOnlyConfig(form)} if isinstance(form, int) else {"dtype": form}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **given).eval()
    FoundOnce(model).use(monkeypatch)
    batch = torch.cat([PROMPT, PROMPT.flip(1), (PROMPT * 7) % 190 + 3])
    calls: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (PROMPT, {"do_sample": False}),
        (PROMPT, {"do_sample": True, "seed": 3}),
        (batch, {"do_sample": False}),
    ]
    texts = []
    for options in ({"draft": "off"}, {"nodes": 7}, {"nodes": 40}):
        rs.accelerate(model, session=True, recorded_pass="always", **options)
        for _ in range(2):  # answers of before draft for those that follow
            texts.append([model.generate(ids, max_new_tokens=40, **choices).tolist() for ids, choices in calls])
        accepted = model.speculation.last.accepted_by_source
        assert (sum(accepted.values()) > 20) == ("nodes" in options)
    assert texts == [texts[0]] * 6


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "falcon_h1": {},
}
"""Scaled tables that heads are tied to, layers that are given transposed activations, and factors in buffers."""


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_hold_weights_otherwise_are_read_again_as_they_were(tmp_path: Path, name: str, bits: int) -> None:
    model = small_model(name, vocab_size=250, hidden_size=64, intermediate_size=128, **FAMILIES[name])
    model.save_pretrained(tmp_path / "model")
    wanted = WeightOnlyConfig(bits)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=wanted)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    logits = model(PROMPT).logits
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")(PROMPT).logits, logits)


def test_another_model_of_the_same_name_is_packed_too(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder, whose files are as old, and in the same folder later."""
    for where, tied in (("a", False), ("b", True), ("b", False)):
        save_llama(tmp_path / where / "model", tied)
        for path in (tmp_path / where / "model").iterdir():
            os.utime(path, (1 + tied, 1))
        monkeypatch.chdir(tmp_path / where)
        assert load_model("model", device="cpu", quantize="int8")[0].config.tie_word_embeddings == tied
    assert len(list((cache / "quantized").iterdir())) == 3


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: Any, folder: Path) -> None:
        Path(folder).mkdir()
        raise OSError("No space left on device")

    folder = save_llama(tmp_path / "model", tied=True)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    load_model(folder, device="cpu", quantize="int8")
    assert not list((cache / "quantized").iterdir())


def test_packed_folders_are_models_like_others(tmp_path: Path) -> None:
    """In a process that has imported nothing else."""
    folder = save_llama(tmp_path / "model", tied=True)
    packed, tokenizer = load_model(folder, device="cpu", quantize="int8")
    packed.save_pretrained(tmp_path / "packed")
    tokenizer.save_pretrained(tmp_path / "packed")
    program = (
        "import sys, torch; from retrieve_spec.reference_model import load_model\n"
        "print(float(load_model(sys.argv[1], device='cpu')[0](torch.arange(9)[None]).logits.float().sum()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "packed")], capture_output=True, check=True)
    assert float(done.stdout) == float(packed(torch.arange(9)[None]).logits.detach().float().sum())
    with pytest.raises(UnsupportedModelError, match="weights that are not quantised"):
        load_model(str(tmp_path / "packed"), device="cpu", quantize="int4")


def test_what_cannot_be_packed_is_said(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "gpt2", tied=True)
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4)).save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match="most of whose weights are linear layers"):
        load_model(folder, device="cpu", quantize="int8")


def test_a_model_that_casts_to_the_format_of_its_weights_is_refused() -> None:
    """Numbers that were rounded to whole ones would be no error, and no text."""
    config = AutoConfig.for_model("mamba", vocab_size=250, hidden_size=64, num_hidden_layers=1, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    pack_model(model, WeightOnlyConfig(8))
    with pytest.raises(UnsupportedModelError, match="rows of 64 floats, got rows of 64 uint8"):
        model(PROMPT)
    with pytest.raises(UnsupportedModelError, match="rows of 64 floats, got rows of 96 bfloat16"):
        PackedLinear(nn.Linear(64, 16), 8)(torch.ones(1, 96, dtype=torch.bfloat16))


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q8_0"])
def test_numbers_of_gguf_blocks_stay_the_same(form: str) -> None:
    torch.manual_seed(0)
    groups = torch.randn(48, 3, 32)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    low, spread = groups.amin(-1, keepdim=True).half(), groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    scales = {"Q4_0": largest / -8, "Q4_1": spread / 15, "Q8_0": largest.abs() / 127}
    scale = scales[form].half().float()
    scale[0, 0] = 0.0
    offset = low.float() if form == "Q4_1" else 0.0
    least, most = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q8_0": (-127, 127)}[form]
    levels = ((groups - offset) / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(least, most)
    weight = (levels * scale + offset).flatten(1)
    assert torch.equal(unpack(pack(weight, 8 if form == "Q8_0" else 4), 96), weight)


def test_a_gguf_file_is_packed_as_the_folder_it_was_made_of(gguf: str) -> None:
    model, tokenizer = load_model(gguf, device="cpu", quantize="int4")
    folder, own = load_model(device="cpu", quantize="int4")
    ids = own("def add(a, b):", return_tensors="pt")["input_ids"]
    assert torch.equal(tokenizer("def add(a, b):", return_tensors="pt")["input_ids"], ids)
    again, tokens = load_model(gguf, device="cpu", quantize="int4")
    assert torch.equal(model(ids).logits, folder(ids).logits) and torch.equal(again(ids).logits, folder(ids).logits)
    assert tokens.get_vocab() == own.get_vocab()
