"""Traces of deep models from their first layers: the same pass; every layer is traced where these show too little."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from small_decoders import OPTIONS, accelerate, build, ids
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from retrieve_spec.kernels.cpu import layer_rows
from retrieve_spec.model_layers import decoder_blocks
from retrieve_spec.recorded.layer_copies import copied_layers
from retrieve_spec.recorded.recorded_pass import RecordedPass

KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
WINDOWED: dict[str, Any] = {"sliding_window": 8, "layer_types": KINDS * 3}
WINDOWED_FAMILIES = ("gemma2", "gemma3_text", "gpt_oss")


def deep(model_type: str, layers: int) -> Any:
    """A family's random model with more layers."""
    extra: dict[str, Any] = {"num_hidden_layers": layers} | ({"n_layer": layers} if model_type == "gpt2" else {})
    if model_type in WINDOWED_FAMILIES:
        extra |= WINDOWED | {"layer_types": (KINDS * 3)[:layers]}
    return build(model_type, **extra)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int) -> torch.Tensor:
    """Attention that is another one in each layer."""
    scale = 1 / (2 + layer)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, is_causal=True, enable_gqa=True, scale=scale
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gpt_oss", "gpt2"])
def test_copies_are_what_every_layer_shows(model_type: str) -> None:
    layers = 6 if model_type in WINDOWED_FAMILIES else 4
    model = deep(model_type, layers)
    like = copied_layers(model)
    assert len(like) == layers and max(like) < layers - 2
    blocks = len(list(model.modules()))
    whole, copied = (RecordedPass(model, layers, row_kernels=layer_rows, like=like) for like in ((), like))
    assert len(list(model.modules())) == blocks
    assert copied.rules == whole.rules and copied.no_states()[-1][0].shape == whole.no_states()[-1][0].shape
    tokens, positions = ids(12), torch.arange(12)[None]
    for ours, theirs in zip(copied.run(tokens, positions, attend), whole.run(tokens, positions, attend), strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        next(decoder_blocks(model)[-1].parameters()).mul_(2)
    assert not torch.equal(copied.run(tokens, positions, attend)[0], theirs)


def test_kinds_are_told_by_modules_settings_and_config() -> None:
    assert copied_layers(deep("llama", 2)) == []
    assert copied_layers(deep("llama", 5)) == [0, 1, 1, 1, 1]
    assert copied_layers(deep("gemma3_text", 9)) == [0, 1, 2, 1, 1, 2, 1, 1, 2]
    model = deep("llama", 5)
    model.model.layers[3].self_attn.scaling = 0.5
    assert copied_layers(model) == [0, 1, 2, 3, 1]
    model.model.layers[4].mlp.act_fn = torch.nn.GELU()
    assert copied_layers(model) == []


def test_blocks_are_those_of_the_decoder_where_an_encoder_has_as_many() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    }  # fmt: skip
    images = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    text = LlamaConfig(**sizes, vocab_size=199, num_key_value_heads=2)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=images, text_config=text, image_token_index=198))
    assert decoder_blocks(model) is model.model.language_model.layers


class Scaled(LlamaDecoderLayer):  # type: ignore[misc]
    """A layer that does what only its number tells."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * (1 + self.layer_idx / 4), *args, **kwargs)


class Gained(LlamaMLP):  # type: ignore[misc]
    """Keeps a factor as a plain attribute."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.gain


def renumber(model: Any) -> None:
    """Let layers do what only their numbers tell."""
    for i, layer in enumerate(model.model.layers):
        layer.__class__ = Scaled
        layer.layer_idx = i


def share(model: Any) -> None:
    """Give all layers the products of the first one."""
    for layer in model.model.layers:
        layer.mlp = model.model.layers[0].mlp


def gain(model: Any) -> None:
    """Give each layer a factor of its own."""
    for i, layer in enumerate(model.model.layers):
        layer.mlp.__class__ = Gained
        layer.mlp.gain = torch.tensor(1 + i / 4)


@pytest.mark.parametrize("change", [renumber, share, gain])
def test_every_layer_is_traced_where_copies_would_be_wrong(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = deep("llama", 5)
    change(model)
    wanted = model.generate(ids(20), **OPTIONS)
    with caplog.at_level(logging.INFO, "retrieve_spec"):
        accelerate(model)
    assert "the pass is recorded in another way" in caplog.text
    assert torch.equal(model.generate(ids(20), **OPTIONS), wanted)
    assert model.speculation.pass_kind == "recorded", model.speculation.pass_reason
