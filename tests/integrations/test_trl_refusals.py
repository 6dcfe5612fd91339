"""What the rollout function takes from a trainer and what it refuses, without TRL."""

from __future__ import annotations

from typing import Any

import pytest

from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations.trl import _encoded, rollout_func


class Tokenizer:
    def apply_chat_template(self, conversation: Any, **given: Any) -> Any:
        assert given["chat_template"] == "template" and given["add_generation_prompt"]
        return {"input_ids": [[len(prompt)] for prompt in conversation]}


class Trainer:
    """What a `GRPOTrainer` has of what comes before sampling."""

    processing_class = Tokenizer()
    chat_template = "template"

    def __init__(self, tools: Any = ()) -> None:
        self.chat_template_kwargs: dict[str, Any] = {}
        self.tools = list(tools)


def test_conversations_and_pictures() -> None:
    assert _encoded([[{"role": "user", "content": "hi"}]], Trainer()) == [[1]]
    with pytest.raises(ConfigError, match="prompts of text"):
        _encoded([[{"role": "user", "content": [{"type": "image"}]}]], Trainer())


def multiply(a: int, b: int) -> int:
    """Product of two numbers."""
    return a * b


class Game:
    """An environment, whose methods are tools to the trainer."""

    def guess(self, number: int) -> str:
        return "lower"


def test_tools_are_refused_before_anything_is_sampled() -> None:
    """The trainer generates later turns itself, from prompts that name the tools."""
    prompts = [[{"role": "user", "content": "What is 6 times 7?"}]]
    with pytest.raises(ConfigError, match=r"without tools.*multiply, guess.*Leave rollout_func out"):
        rollout_func(prompts, Trainer([multiply, Game().guess]))
