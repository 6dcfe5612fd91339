"""Row layers: passes of a model's own forward multiply by programs, and nobody else notices."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from batch_rows import small_model
from torch import nn

import retrieve_spec as rs
from retrieve_spec.kernels.cpu.row_programs import CAN_RUN, is_fast_for_many
from retrieve_spec.recorded import verifier_factory
from retrieve_spec.recorded.verifier_factory import RowLayers

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="nothing is compiled")
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])


def small_mamba2():
    return small_model("mamba2", vocab_size=96, hidden_size=64, num_heads=8, head_dim=16, state_size=16, n_groups=2)


def linears(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.fixture
def products(monkeypatch):
    """Products by programs, one entry for each."""
    seen, original = [], verifier_factory.row_product

    def counted(*args):
        seen.append(args[0].shape)
        return original(*args)

    monkeypatch.setattr(verifier_factory, "row_product", counted)
    return seen


def test_passes_inside_give_the_same_logits_and_leave_nothing_behind(products):
    model = small_mamba2()
    layers = RowLayers(model)
    with torch.no_grad():
        plain = model(PROMPT).logits
        assert not products
        with layers():
            inside = model(PROMPT).logits
        assert len(products) == len(linears(model)) == len(layers)
        after = model(PROMPT).logits
    assert len(products) == len(layers)
    assert torch.equal(plain, after)
    torch.testing.assert_close(inside, plain, rtol=1e-4, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_threads_multiply_as_ever(products):
    model = small_mamba2()
    with torch.no_grad(), RowLayers(model)():
        thread = threading.Thread(target=lambda: model(PROMPT))
        thread.start()
        thread.join()
        assert not products


def test_other_formats_and_adapted_layers_are_left_alone():
    halves = small_mamba2().to(torch.bfloat16)
    assert len(RowLayers(halves)) == (len(linears(halves)) if is_fast_for_many(torch.bfloat16) else 0)
    model = small_mamba2()
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())
    assert len(RowLayers(model)) == len(linears(model)) - 1


@pytest.mark.parametrize("sample", [False, True])
def test_generations_multiply_by_programs_and_say_the_same(products, sample):
    model, plain = small_mamba2(), small_mamba2()
    rs.accelerate(model, recorded_pass="always")
    products.clear()
    options = {"max_new_tokens": 24, "do_sample": sample}
    if sample:
        drafted = model.generate(PROMPT, seed=3, **options)
        assert torch.equal(drafted, model.generate(PROMPT, seed=3, draft="off", **options))
    else:
        prediction = np.asarray(plain.generate(PROMPT, **options)[0, PROMPT.shape[1] :])
        drafted = model.generate(PROMPT, prediction=torch.tensor(prediction), **options)
        assert torch.equal(drafted, plain.generate(PROMPT, **options))
    assert products


def test_a_model_that_was_cast_in_place_multiplies_as_ever():
    model, plain = small_mamba2(), small_mamba2().to(torch.bfloat16)
    rs.accelerate(model, recorded_pass="always")
    model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    model.to(torch.bfloat16)
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False).shape == (1, PROMPT.shape[1] + 4)
    model.to(torch.float32)
    plain.to(torch.float32)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(PROMPT, **options), plain.generate(PROMPT, **options))
