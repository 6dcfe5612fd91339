"""Trial of rollouts in training: a few steps of TRL's GRPO trainer, and what drafting did for them.

    python scripts/train_with_rollouts.py --steps 6

Needs the extra `trl`. The reward is a toy: completions with few different characters are better. The same steps run
once without drafts and once with siblings and a rollout memory; printed are tokens per pass and seconds of every
rollout as JSON lines. Seconds are this machine's; samples are the same as long as the weights are.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import harness

PROMPTS = [
    "class Stack:\n    def __init__(self):\n",
    "import os\n\n\ndef read_lines(path):\n",
    "def quicksort(items):\n",
    "class Matrix:\n    def __add__(self, other):\n",
]


def reward(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(set(text))) for text in completions]


def train(drafts: bool, options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """What every rollout of one training took."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import retrieve_spec as rs
    from retrieve_spec.integrations.trl import rollout_func
    from retrieve_spec.reference_model import load_model

    model, tokenizer = load_model("reference")
    model = model.to(torch.float32)
    if drafts:
        rs.accelerate(model, tokenizer, rollouts=rs.RolloutMemory(folder / "rollouts.bin"))
    else:
        rs.accelerate(model, tokenizer, draft="off")
    figures: list[dict[str, float]] = []
    passes: list[int] = []
    ended = model.speculation.ended

    def counted(*sequences: Any) -> None:
        ended(*sequences)
        passes.extend(sequence.report.passes for sequence in sequences)

    model.speculation.ended = counted

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        passes.clear()
        began = perf_counter()
        out = rollout_func(prompts, trainer)
        seconds = perf_counter() - began
        tokens = sum(map(len, out["completion_ids"]))
        figures.append({"seconds": seconds, "tokens": tokens, "tokens_per_pass": tokens / sum(passes)})
        return out

    settings = GRPOConfig(
        output_dir=str(folder), max_steps=options.steps, num_generations=options.samples, learning_rate=1e-5,
        per_device_train_batch_size=options.samples * len(PROMPTS), max_completion_length=options.tokens,
        temperature=options.temperature, top_k=0, report_to=[], use_cpu=not torch.cuda.is_available(), bf16=False,
        save_strategy="no", gradient_checkpointing=False, seed=1, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": PROMPTS})
    GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward, rollout_func=rollouts, train_dataset=data,
        args=settings,
    ).train()  # fmt: skip
    return figures


def main() -> None:
    """Print what every rollout took."""
    options = harness.arguments(__doc__, steps=6, samples=8, tokens=64, temperature=0.7)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    for drafts in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            for step, figures in enumerate(train(drafts, options, Path(folder))):
                print(json.dumps({"drafts": drafts, "step": step, **figures}), flush=True)


if __name__ == "__main__":
    main()
