"""Models of a few tokens (bytes of DNA, moves of a game) are tried with tokens that they have."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import retrieve_spec as rs

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": 0, "pad_token_id": None}  # fmt: skip
MIXERS = {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1}


def small(model_type: str, tokens: int, **extra: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=tokens, **SIZES | extra))
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 3.0
    return model.eval()


@pytest.mark.parametrize(
    ("model_type", "tokens", "mode"),
    [("llama", 2, "tree"), ("llama", 4, "tree"), ("llama", 12, "tree"), ("mamba2", 2, "tree"), ("mamba2", 5, "tree"),
     ("bloom", 3, "tree")],
)  # fmt: skip
def test_single_texts_and_batches(model_type: str, tokens: int, mode: str) -> None:
    model = small(model_type, tokens, **(MIXERS if model_type == "mamba2" else {}))
    ids = torch.randint(0, tokens, (3, 9), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    alone = {**options, "attention_mask": torch.ones_like(ids[:1])}
    one, three = model.generate(ids[:1], **alone), model.generate(ids, **options)
    rs.accelerate(model, nodes=8, recorded_pass="off")
    assert model.speculation.mode == mode
    assert torch.equal(model.generate(ids[:1], **alone), one)
    assert torch.equal(model.generate(ids, **options), three)
    assert "fails" not in model.speculation.last.reason
    if model_type == "llama":
        assert model.speculation.last.mode == "tree"
