"""Stores of a chat variant, whose added tokens the base model does not embed."""

from __future__ import annotations

import pytest
import torch
from byte_tokenizers import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import retrieve_spec as rs
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.edit import retokenize_datastore
from retrieve_spec.errors import TokenizerMismatchError

TEXT = "def f(a):<|chat|> return a<|chat|>" * 3


def model_of(size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def test_text_in_tokens_that_the_model_does_not_embed_is_refused_until_it_is_converted(tmp_path):
    variant, base = byte_tokenizer(), byte_tokenizer()
    variant.add_special_tokens(["<|chat|>"])
    (tmp_path / "a.py").write_text(TEXT)
    build_datastore(tmp_path / "s", str(tmp_path / "a.py"), variant, workers=1)
    rs.accelerate(model_of(257), datastores=[tmp_path / "s"], nodes=8)
    model = model_of(256)
    with pytest.raises(TokenizerMismatchError, match="token 256"):
        rs.accelerate(model, datastores=[tmp_path / "s"], nodes=8)
    retokenize_datastore(tmp_path / "s", base, workers=1)
    rs.accelerate(model, datastores=[tmp_path / "s"], nodes=8)
    ids = torch.tensor([base.encode("def f(a):<|chat|> ret").ids])
    assert model.generate(ids, max_new_tokens=8, do_sample=False).shape[1] == ids.shape[1] + 8
