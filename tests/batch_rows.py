"""Rows of a batch that differ, drafters that write what a script says, small models, drawn trees: for batch tests."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scripted_drafter import ScriptedDrafter
from transformers import AutoConfig, AutoModelForCausalLM

import retrieve_spec as rs
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine import joining
from retrieve_spec.engine.text_drafter import TextDrafter

LENGTHS = (5, 17, 1, 11)
_SMALL: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
]
"""Small models whose batches differ most: rotary positions, a window, positions learned."""


def left_padded(lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """Rows of different text and length, as a tokenizer with `padding_side="left"` gives them."""
    longest = max(lengths)
    ids, mask = torch.zeros((2, len(lengths), longest), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.tensor([3 + (i * 37 + 11 * row + 7) % 190 for i in range(length)])
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def script(
    model: Any, monkeypatch: pytest.MonkeyPatch, answers: Any, name: str, **options: Any
) -> list[ScriptedDrafter]:
    """Accelerate a model whose rows draft what `answers` say, each row its own, in the manner of a script."""
    rs.accelerate(model, **{"nodes": 12} | options)
    drafters: list[ScriptedDrafter] = []
    rows = 0

    class Scripted(TextDrafter):
        """What drafts for the next row."""

        def __init__(self, made: Any, options: Any, *given: Any, **more: Any) -> None:
            nonlocal rows
            super().__init__(made, options, *given, **more | {"may_defer": False})
            answer, rows = answers[rows % len(answers)], rows + 1
            if options.draft != "off":
                drafters.append(ScriptedDrafter(answer[answer != 0], name))
                self._open = lambda drafter=drafters[-1]: drafter  # type: ignore[method-assign]

    monkeypatch.setattr(joining, "TextDrafter", Scripted)
    return drafters


CHAINS: dict[str, Any] = {
    "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8,
    "attn_implementation": "eager",
}  # fmt: skip
"""Settings of a small model ("gpt_neo") that verifies chains alone."""
MAMBA2: dict[str, Any] = {
    "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2, "attn_implementation": "eager",
}  # fmt: skip
"""… and of one ("mamba2") that has recurrent state alone."""


def small_model(kind: str | type, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model of two layers with random weights, of a type or a class: the same one at every call."""
    attention = settings.pop("attn_implementation", None)
    torch.manual_seed(0)
    if isinstance(kind, str):
        config = AutoConfig.for_model(kind, **_SMALL | settings)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
    config = kind.config_class(**_SMALL | settings)  # type: ignore[attr-defined]
    return kind(config).to(dtype).eval()


def tree_of(p: list[float], parent: list[int]) -> DraftTree:
    """A tree whose nodes have these probabilities and parents."""
    n = len(p)
    return DraftTree(
        np.arange(n, dtype=np.int32), np.array(parent, np.int32), np.ones(n, np.int32),
        np.log(np.array(p, np.float32)), np.zeros(n, np.uint8), np.full(n, -1, np.int64),
    )  # fmt: skip


def drawn_trees(data: st.DataObject) -> list[DraftTree]:
    """A few trees, whose nodes are less probable than their parents."""
    trees = []
    for _ in range(data.draw(st.integers(2, 5))):
        n = data.draw(st.integers(0, 8))
        parent = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
        p: list[float] = []
        for i in range(n):
            p.append(data.draw(st.floats(0.01, 1.0)) * (p[parent[i]] if parent[i] >= 0 else 1.0))
        trees.append(tree_of(p, parent))
    return trees
