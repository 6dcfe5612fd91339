"""Measures what a decoding step costs outside the model's forward pass; prints one JSON object as the last line.

    python scripts/bench_step.py [--nodes 32] [--context 4096] [--draft script|auto] [--steps 200]

A random Llama of `--layers` layers decodes with trees of exactly `--nodes` nodes. The time inside the model's forward
is subtracted from the time of each step; what is left is drafting, input and mask building, reading the logits, the
walk, the commit and learning.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import retrieve_spec as rs
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.tree import DraftTree


class FullTrees:
    """Proposes trees of exactly the asked size: one likely branch and short side branches, one token accepted."""

    top_k, wants_hidden = 8, None

    def __init__(self, nodes: int) -> None:
        chain = list(range(2, 2 + nodes // 2))
        side = [[1000 + i] for i in range(nodes - nodes // 2)]
        self._tree = DraftTree.from_paths([chain, *side])
        self._next = 0

    def start(self, prompt_ids: Any, prediction_ids: Any = None) -> None:
        """Begin: nothing to read."""

    def observe_prompt(self, token_ids: Any, top_ids: Any, top_logits: Any) -> None:
        """Learn nothing."""

    def propose(self, budget: Budget) -> DraftTree:
        """Return the tree of this benchmark."""
        ids = self._tree.token_ids.copy()
        ids[-1] = self._next  # a side branch carries the last likely token, so that some commits move rows
        return replace(self._tree, token_ids=ids)

    def observe(self, verified: VerifiedPass) -> None:
        """Take the likeliest token for the side branch."""
        if verified.top_ids is not None:
            self._next = int(verified.top_ids[0, 0])

    def finish(self) -> None:
        """End: nothing to keep."""


def measure(vocab: int, nodes: int, context: int, layers: int, steps: int, draft: str) -> dict[str, float]:
    """Milliseconds per step outside and inside the forward pass."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context + steps * 40, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    drafter = FullTrees(nodes) if draft == "script" else None
    rs.accelerate(model, drafter=drafter, nodes=nodes if draft != "off" else 0, recorded_pass="off")
    inside: list[float] = []
    forward = model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        outputs = forward(*args, **kwargs)
        inside.append(time.perf_counter() - began)
        return outputs

    model.forward = timed
    ids = torch.randint(2, vocab, (1, context))
    stamps = [time.perf_counter()]
    for _ in rs.generate_stream(model, ids, max_new_tokens=steps, do_sample=False):
        stamps.append(time.perf_counter())
    total = np.diff(stamps)[10:]
    outside = (total - np.array(inside)[-len(total) :]) * 1e3
    last = model.speculation.last
    return {
        "outside_p50_ms": round(float(np.median(outside)), 4),
        "outside_p95_ms": round(float(np.quantile(outside, 0.95)), 4),
        "inside_p50_ms": round(float(np.median(inside[10:])) * 1e3, 4),
        "nodes_per_pass": round(last.nodes / last.passes, 1),
        "draft_ms": round(last.draft_ms / last.passes, 4),
        "commit_ms": round(last.commit_ms / last.passes, 4),
        "learn_ms": round(last.learn_ms / last.passes, 4),
    }


def main() -> None:
    """Measure for the vocabulary of the bundled model and for a common one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--draft", choices=["script", "auto", "off"], default="script")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        f"vocab_{vocab}": measure(vocab, options.nodes, options.context, options.layers, options.steps, options.draft)
        for vocab in (8192, 32_000)
    }
    result |= {"options": vars(options), "cpu": _cpu(), "cores": os.cpu_count(), "torch": torch.__version__}
    print(json.dumps(result))


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
