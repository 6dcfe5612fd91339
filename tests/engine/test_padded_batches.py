"""Batches through a model's own forward: every row says what it says alone, whoever comes and goes beside it."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import MAMBA2, drawn_trees, left_padded, script, small_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import retrieve_spec as rs
from retrieve_spec.engine.budget import share_evenly
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.padded_batch import PaddedBatch, why_not_shared
from retrieve_spec.verify.probe import probe

RECORDED: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("gemma2", {"sliding_window": 8, "attn_implementation": "eager"}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 8}),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    ("deepseek_v3", {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                     "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                     "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}),
    ("olmo2", {}),
    ("cohere2", {"sliding_window": 8}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "extra", "recorded_pass"),
    [*((*family, "off") for family in RECORDED + OTHERS), *((*family, "always") for family in RECORDED)],
)
def test_families(model_type: str, extra: dict[str, Any], recorded_pass: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, capped logits, experts, learned positions, latent attention; texts go beyond the windows."""
    model = small_model(model_type, **extra)
    inputs, options = left_padded((20, 3, 29)), {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    plain = model.generate(**inputs, **options)
    script(model, monkeypatch, plain, "branchy", recorded_pass=recorded_pass)
    assert torch.equal(model.generate(**inputs, **options), plain)
    assert (model.speculation.batching_blocker(), model.speculation.last.rows) == ("", 3)
    assert model.speculation.last.tokens_per_pass > 3.5


_GRANITE = {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
            "mamba_d_state": 8, "num_local_experts": 0, "num_experts_per_tok": 0,
            "shared_intermediate_size": 48}  # fmt: skip
_NEMOTRON = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
             "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2}  # fmt: skip
_QWEN = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [("mamba2", MAMBA2), ("granitemoehybrid", _GRANITE), ("nemotron_h", _NEMOTRON), ("qwen3_5_text", _QWEN),
     ("lfm2", {"layer_types": ["conv", "full_attention"]})],
)  # fmt: skip
@pytest.mark.parametrize("name", ["branchy", "half"])
def test_families_with_recurrent_state(
    model_type: str, extra: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of several lengths, one of which ends early; the states of each stay its own, with drafts and without."""
    model = small_model(model_type, **extra)
    inputs, options = left_padded((20, 1, 29, 7)), {"max_new_tokens": 26, "do_sample": False}
    asked = {"return_dict_in_generate": True, "output_logits": True}
    free = model.generate(**inputs, **options, **asked)
    options["eos_token_id"] = int(free.sequences[2, 29 + 11])
    plain = model.generate(**inputs, **options)
    script(model, monkeypatch, free.sequences, name, recorded_pass="off")
    assert torch.equal(model.generate(**inputs, **options), plain)
    assert (model.speculation.batching_blocker(), model.speculation.last.rows) == ("", 4)
    assert model.speculation.last.tokens_per_pass > 4
    assert torch.equal(model.generate(**inputs, **options, draft="off"), plain)
    logits = model.generate(**inputs, **options | {"eos_token_id": None}, **asked).logits
    torch.testing.assert_close(torch.stack(logits), torch.stack(free.logits), atol=1e-4, rtol=1e-3)


def test_padding_behind_a_recurrent_prompt_is_not_read_alone() -> None:
    """Pieces of five leave a lone token, of which such layers do not see that it is masked."""
    model = small_model("mamba2", **MAMBA2)
    ids = 3 + torch.arange(22).reshape(2, 11)
    mask = torch.ones_like(ids)
    mask[0, 10] = 0
    inputs, options = {"input_ids": ids, "attention_mask": mask}, {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs, **options)
    rs.accelerate(model, recorded_pass="off", prefill_chunk=5)
    assert torch.equal(model.generate(**inputs, **options), plain)


def test_a_batch_whose_padding_is_read_is_left_to_generate() -> None:
    """Mixers mask what they are given; a bias of their projections stands behind the mask."""
    model = small_model("mamba2", **MAMBA2, use_bias=True)
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.in_proj.bias.normal_()
    inputs, options = left_padded(), {"max_new_tokens": 16, "do_sample": False}
    plain = model.generate(**inputs, **options)
    rs.accelerate(model, recorded_pass="off")
    assert torch.equal(model.generate(**inputs, **options), plain)
    assert "padding" in model.speculation.last.reason


def test_a_pass_that_cannot_be_shared_is_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = small_model("qwen3_5_text", **_QWEN)
    inputs, options = left_padded(), {"max_new_tokens": 9, "do_sample": False}
    plain = hybrid.generate(**inputs, **options)
    rs.accelerate(hybrid, recorded_pass="off")
    assert not hybrid.speculation.batching_blocker()
    whole, calls = PaddedBatch.forward_all, itertools.count()

    def failing(self: Any, *given: Any) -> Any:
        if next(calls) % 2 == 0:
            raise torch.OutOfMemoryError("too much at once")
        return whole(self, *given)

    monkeypatch.setattr(PaddedBatch, "forward_all", failing)
    assert torch.equal(hybrid.generate(**inputs, **options), plain)
    assert next(calls) > 4


def test_what_shared_passes_cannot_serve() -> None:
    """A forward that is another one in company is noticed, and its batches are left to `generate`."""
    hybrid = small_model("qwen3_5_text", **_QWEN)
    interface = probe(hybrid, read_interface(hybrid)).interface
    assert why_not_shared(hybrid, interface) == ""

    def other(_head: Any, _given: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits * (1.0 if len(logits) == 1 else 1.1)

    hook = hybrid.lm_head.register_forward_hook(other)
    assert "other logits" in why_not_shared(hybrid, interface)
    rs.accelerate(hybrid, recorded_pass="off")
    hybrid.generate(**left_padded(), max_new_tokens=3, do_sample=False)
    assert hybrid.speculation.last.mode == "delegated"
    assert "other logits" in hybrid.speculation.last.reason
    hook.remove()
    beside = small_model(
        "falcon_h1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1
    )
    assert "state and keys together" in why_not_shared(beside, probe(beside, read_interface(beside)).interface)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_even_shares_are_the_best_there_are(data: st.DataObject) -> None:
    """Against every width of the pass; parents stay with their children."""
    trees = drawn_trees(data)
    rows, most = len(trees), data.draw(st.integers(0, 8))
    steps = data.draw(st.lists(st.floats(0.0, 1.0), min_size=rows * 8 + 1, max_size=rows * 8 + 1))
    seconds = (1.0 + np.cumsum(steps)).astype(np.float32)
    best = [sorted(np.exp(tree.log_p).tolist(), reverse=True) for tree in trees]
    widest = min(most, max(map(len, trees)))
    rates = [(rows + sum(sum(p[:w]) for p in best)) / seconds[rows * w] for w in range(widest + 1)]
    kept = share_evenly(trees, seconds, most)
    width = max(map(len, kept))
    got = (rows + sum(tree.expected_accepted for tree in kept)) / seconds[rows * width]
    assert got == pytest.approx(max(rates), rel=1e-4)
    for tree in kept:
        assert (tree.parent < np.arange(len(tree))).all()
    assert [len(tree) for tree in share_evenly(trees, None, most)] == [min(len(tree), most) for tree in trees]
