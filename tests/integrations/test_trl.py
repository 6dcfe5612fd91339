"""TRL's own trainer samples through drafts: completions are the model's, log-probabilities exact."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import retrieve_spec as rs
from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations.trl import _encoded, rollout_func

PROMPTS = ["class Stack:\n    def __init__(self):\n", "def read_lines(path):\n"]


def shortness(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(set(text))) for text in completions]


def test_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs over two prompts with four samples each; every rollout is compared with a forward of its moment."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = Path(rs.__file__).parent / "reference"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    memory = rs.RolloutMemory(tmp_path / "rollouts.bin")
    rs.accelerate(model, tokenizer, nodes=12, rollouts=memory)
    seen: list[dict[str, Any]] = []
    before = model.lm_head.weight.detach().clone()

    def checked(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        out = rollout_func(prompts, trainer)
        weights = float(model.model.layers[0].mlp.up_proj.weight.detach().double().sum())
        for prompt, ids, logprobs in zip(out["prompt_ids"], out["completion_ids"], out["logprobs"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-4, rtol=0.0)
        seen.append(out | {"prompts": prompts, "weights": weights, "nodes": model.speculation.last.nodes})
        return out

    trainer = trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=shortness,
        rollout_func=checked,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), max_steps=3, num_generations=4, per_device_train_batch_size=8,
            max_completion_length=12, temperature=0.7, top_k=0, learning_rate=1e-4, report_to=[], use_cpu=True,
            bf16=False, save_strategy="no", logging_steps=1, gradient_checkpointing=False, seed=3,
        ),
    )  # fmt: skip
    trainer.train()
    assert len(seen) == 3
    assert len({one["weights"] for one in seen}) == 3  # each optimiser step was followed
    assert all(sorted(one["prompts"]) == sorted(PROMPTS * 4) for one in seen)
    assert all(one["nodes"] > 0 for one in seen)
    pairs = [pair for one in seen for pair in zip(one["prompts"], one["prompt_ids"], strict=True)]
    assert all(tokenizer(prompt)["input_ids"] == ids for prompt, ids in pairs)
    assert not torch.equal(model.lm_head.weight, before)
    assert all(math.isfinite(step["loss"]) for step in trainer.state.log_history if "loss" in step)
    assert len(memory) == 2
    first = memory.answers_to(torch.tensor(seen[0]["prompt_ids"][0]).numpy())
    assert len(first) >= 4


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


def test_tools_are_refused_before_anything_is_sampled() -> None:
    """The trainer generates later turns itself, from prompts that name the tools."""
    prompts = [[{"role": "user", "content": "What is 6 times 7?"}]]
    with pytest.raises(ConfigError, match=r"without tools.*prod, append.*Leave rollout_func out"):
        rollout_func(prompts, Trainer([math.prod, [].append]))
