"""A tiny Llama that every test of this folder may accelerate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import retrieve_spec as rs


@pytest.fixture(scope="module")
def _tiny() -> Any:
    config = LlamaConfig(
        vocab_size=199, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny(_tiny: Any) -> Any:
    """A random Llama of 199 tokens and 128 positions in float32, not accelerated; left so after the test."""
    yield _tiny
    rs.restore(_tiny)


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.tensor([[3 + (i * 37 + 11) % 190 for i in range(12)]])
