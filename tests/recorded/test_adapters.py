"""Adapters of the real `peft`: what an accelerated model says is what the model says, whatever is switched when."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from small_decoders import OPTIONS, accelerate, check, ids, says
from small_decoders import build as build_model

import retrieve_spec as rs
from retrieve_spec.errors import UnsupportedModelError

TARGETS = ["q_proj", "v_proj", "down_proj"]


def build(model_type: str) -> Any:
    """A model of one layer: adapters of another one are the same modules again."""
    return build_model(model_type, num_hidden_layers=1)


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **options})


def two_adapters() -> Any:
    model = peft.get_peft_model(build("llama"), lora(), adapter_name="a")
    model.add_adapter("b", lora(lora_alpha=16))
    return model.eval()


def test_adapters_are_switched_disabled_and_merged_behind_the_recording() -> None:
    model = two_adapters()
    assert accelerate(model) is model
    first = check(model)
    model.set_adapter("b")
    second = check(model)
    known = {id(entry.recording) for entry in model.speculation._passes._known}
    for name, said in (("a", first), ("b", second), ("a", first)):
        model.set_adapter(name)
        assert torch.equal(check(model), said)
    assert {id(entry.recording) for entry in model.speculation._passes._known} == known, "each is recorded once"
    with model.disable_adapter():
        base = check(model)
    assert len({tuple(said[0].tolist()) for said in (first, second, base)}) == 3
    peft_model = model.base_model
    for change in (
        peft_model.merge_adapter, peft_model.unmerge_adapter, peft_model.disable_adapter_layers,
        peft_model.enable_adapter_layers,
    ):  # fmt: skip
        change()
        check(model)
    assert torch.equal(check(model), first)
    rs.restore(model)
    assert not hasattr(model, "speculation")


def test_adapters_are_added_deleted_and_unloaded() -> None:
    model = accelerate(two_adapters())
    check(model)
    model.add_adapter("c", lora(lora_alpha=32))
    model.set_adapter("c")
    check(model.eval())
    model.add_weighted_adapter(["a", "b"], [0.5, 0.5], "d", combination_type="linear")
    model.set_adapter("d")
    check(model.eval())
    model.set_adapter("a")
    model.delete_adapter("b")
    check(model)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", 3.0)
    check(model)
    check(model.merge_and_unload())


def test_adapters_of_routers_and_experts_are_no_quantised_layers() -> None:
    model = accelerate(build("mixtral"))
    model.add_adapter(lora(target_modules="all-linear"), "a")
    ours = model.eval().generate(input_ids=ids(20), **OPTIONS)
    assert torch.equal(ours, says(model))


def test_a_model_is_wrapped_after_it_was_accelerated() -> None:
    model = accelerate(build("llama"))
    check(model)
    wrapped = peft.get_peft_model(model, lora()).eval()
    check(wrapped)
    wrapped.unload()
    check(model)


def test_streams_and_batches_of_a_wrapper() -> None:
    model = rs.accelerate(two_adapters(), draft="prompt-lookup", nodes=6, recorded_pass="always")
    both = torch.cat([ids(20), ids(20).flip(1)])
    for name in ("b", "a"):
        model.set_adapter(name)
        pieces = [piece.token_ids for piece in rs.generate_stream(model, ids(20), **OPTIONS)]
        assert torch.equal(torch.cat([torch.from_numpy(p) for p in pieces]), says(model)[0, 20:])
        assert torch.equal(model.generate(input_ids=both, **OPTIONS), says(model, both))
        assert model.speculation.last.rows == 2


def test_transformers_loads_and_switches_adapters_itself(tmp_path: Path) -> None:
    two_adapters().save_pretrained(tmp_path)
    model = accelerate(build("llama"))
    base = check(model)
    model.load_adapter(str(tmp_path / "a"), adapter_name="a")
    first = check(model)
    model.load_adapter(str(tmp_path / "b"), adapter_name="b")
    model.set_adapter("b")
    check(model)
    model.set_adapter("a")
    assert torch.equal(check(model), first)
    model.disable_adapters()
    assert torch.equal(check(model), base)
    model.enable_adapters()
    model.delete_adapter("b")
    check(model)


CONFIGS: dict[str, Callable[[], Any]] = {
    "DoRA": lambda: lora(use_dora=True),
    "rsLoRA": lambda: lora(use_rslora=True),
    "dropout": lambda: lora(lora_dropout=0.5),
    "bias": lambda: lora(bias="lora_only"),
    "embeddings": lambda: lora(target_modules=["embed_tokens", "q_proj"]),
    "head": lambda: lora(target_modules=["lm_head", "q_proj"]),
    "tokens": lambda: lora(trainable_token_indices=[5, 6, 7]),
    "modules to save": lambda: lora(modules_to_save=["lm_head"]),
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS, init_weights=False),
    "OFT": lambda: peft.OFTConfig(
        r=0, oft_block_size=4, target_modules=["q_proj"], init_weights=False, use_cayley_neumann=False
    ),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], d_initial=0.3),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    "LayerNorm": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_kinds_of_adapters(name: str) -> None:
    """Whether a kind can be recorded is its own affair; what is said is not."""
    torch.manual_seed(1)
    model = peft.get_peft_model(build("llama"), CONFIGS[name]()).eval()
    trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained if name != "OFT" else ():
        parameter.add_(0.05 * torch.randn_like(parameter))
    accelerate(model)
    for disabled in (False, True, False):
        with model.disable_adapter() if disabled else contextlib.nullcontext():
            assert torch.equal(model.generate(input_ids=ids(20), **OPTIONS), says(model))
    for parameter in trained:
        parameter.mul_(1.5)
    assert torch.equal(model.generate(input_ids=ids(20), **OPTIONS), says(model))


def test_adapters_chosen_by_the_call_are_followed() -> None:
    model = accelerate(two_adapters())
    ours = model.generate(input_ids=ids(20), adapter_names=["b"], **OPTIONS)
    assert model.speculation.last.pass_reason == "adapters are chosen for this call alone"
    model.set_adapter("b")
    assert torch.equal(ours, check(model))


def test_adapters_that_wake_up_behind_some_tokens_are_followed() -> None:
    """Their hooks count rows from the end of a pass, so a pass over a draft would leave some of it out."""
    invocation = ids(20)[0, 12:15].tolist()
    config = lora(task_type="CAUSAL_LM", alora_invocation_tokens=invocation)
    model = accelerate(peft.get_peft_model(build("llama"), config).eval())
    ours = model.generate(input_ids=ids(20), **OPTIONS)
    assert torch.equal(ours, says(model))
    assert model.speculation.last.pass_kind == "plain"


def test_adapters_that_change_the_prompt_are_refused() -> None:
    model = peft.get_peft_model(build("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        rs.accelerate(model)


def test_prompt_adapters_around_an_accelerated_model_keep_their_own_generate() -> None:
    model = accelerate(build("llama"))
    wrapped = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ours = wrapped.generate(input_ids=ids(20), **OPTIONS)
    assert model.speculation.last.mode == "delegated"
    rs.restore(model)
    assert torch.equal(ours, wrapped.generate(input_ids=ids(20), **OPTIONS))


def test_replaced_adapters_leave_no_weights_behind() -> None:
    model = accelerate(two_adapters())
    check(model)
    model.add_adapter("c", lora())
    model.set_adapter("c")
    check(model.eval())
    weights = [w for n, w in model.named_parameters() if ".b." in n]
    assert weights
    gone = [weakref.ref(w) for w in weights]
    del weights
    model.delete_adapter("b")
    check(model)
    gc.collect()
    assert not any(ref() is not None for ref in gone)
