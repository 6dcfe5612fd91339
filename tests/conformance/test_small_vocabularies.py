"""Models of a few tokens (bytes of DNA, moves of a game) are tried with tokens that they have."""

from typing import Any

import pytest
import torch
from batch_rows import small_model

import retrieve_spec as rs

MIXERS: dict[str, Any] = {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1}


@pytest.mark.parametrize(
    ("model_type", "tokens", "mode"),
    [("llama", 2, "tree"), ("llama", 4, "tree"), ("llama", 12, "tree"), ("mamba2", 2, "tree"), ("mamba2", 5, "tree"),
     ("bloom", 3, "tree")],
)  # fmt: skip
def test_single_texts_and_batches(model_type: str, tokens: int, mode: str) -> None:
    sizes = {"vocab_size": tokens, "num_hidden_layers": 1, "pad_token_id": None}
    model = small_model(model_type, **sizes, **(MIXERS if model_type == "mamba2" else {}))
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
