"""How often texts part in a number format, with drafts and between plain ways of reading the same prompts.

    python scripts/near_ties.py MODEL --prompts spec-bench:question.jsonl --formats bfloat16 --new-tokens 48

Greedy text of a folder or hub id, on a CPU. Ways to write it are compared with transformers' own `generate`: the same
with eager attention, in a batch of two, by this library without drafts, with drafts, and exactly. Where two texts part,
the gap is that of the two tokens' logits in the model's own reading of the text before: drafts add nothing to rounding
when it is no larger than between plain ways.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import harness
import torch
from bench_batches import padded

import retrieve_spec as rs
from retrieve_spec.bench.runner import parting
from retrieve_spec.bench.workloads import encode, read_prompts
from retrieve_spec.reference_model import load_model
from retrieve_spec.verify.interface import attention_implementation

CONTEXT = 256
"""Tokens of a prompt at most: its last ones."""
Texts = list[list[int]]
Inputs = list[torch.Tensor]


def one_by_one(model: Any, prompts: Inputs, tokens: int, **arguments: Any) -> Texts:
    """Greedy text after each prompt."""
    settings = {"max_new_tokens": tokens, "do_sample": False, **arguments}
    return [model.generate(ids[None], **settings)[0, len(ids) :].tolist() for ids in prompts]


def in_pairs(model: Any, prompts: Inputs, tokens: int, pad: int) -> Texts:
    """Greedy text after each prompt, two prompts at a time, padded on the left."""
    texts: Texts = []
    for pair in zip(prompts[::2], prompts[1::2], strict=True):
        given = padded(list(pair))
        out = model.generate(**given, max_new_tokens=tokens, do_sample=False, pad_token_id=pad)
        ends = [row[given["input_ids"].shape[1] :].tolist() for row in out]
        texts += [row[: row.index(pad)] if pad in row else row for row in ends]
    return texts


def of_format(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The ways in one number format."""
    model, tokenizer = load_model(options.model, dtype=name, device="cpu")
    prompts = [encode(tokenizer, prompt, [])[0, -CONTEXT:] for prompt in read_prompts(options.prompts, options.limit)]
    prompts = prompts[: len(prompts) // 2 * 2]
    tokens, pad = options.new_tokens, model.generation_config.pad_token_id or tokenizer.eos_token_id
    plain = one_by_one(model, prompts, tokens)

    def eager() -> Texts:
        with attention_implementation(model, "eager"):
            return one_by_one(model, prompts, tokens)

    def exact(**arguments: Any) -> Texts:
        rs.restore(model)
        rs.accelerate(model, tokenizer=tokenizer, exact=True)
        return one_by_one(model, prompts, tokens, **arguments)

    ways: dict[str, Callable[[], Texts]] = {
        "plain, eager attention": eager,
        "plain, in a batch of two": lambda: in_pairs(model, prompts, tokens, pad),
        "drafting off": lambda: one_by_one(model, prompts, tokens, draft="off"),
        "drafts": lambda: one_by_one(model, prompts, tokens),
        "exact": exact,
        "exact, drafting off": lambda: one_by_one(model, prompts, tokens, draft="off"),
    }
    found: dict[str, Any] = {"prompts": len(prompts)}
    kept: dict[str, Texts] = {}
    for way, read in ways.items():
        if way == "drafting off":
            rs.accelerate(model, tokenizer=tokenizer)
        kept[way] = texts = read()
        parted = []
        for ids, text, own in zip(prompts, texts, plain, strict=True):
            shorter = min(len(text), len(own))  # the end of a padded text may be missing
            if (there := parting(model, ids, text[:shorter], own[:shorter])) is not None:
                parted.append(there)
        found[way] = {
            "same": len(prompts) - len(parted),
            "tokens_before": statistics.median([at for at, _ in parted] or [tokens]),
            "gap_median": round(statistics.median([gap for _, gap in parted] or [0.0]), 4),
            "gap_largest": round(max((gap for _, gap in parted), default=0.0), 4),
        }
    same = sum(a == b for a, b in zip(kept["exact"], kept["exact, drafting off"], strict=True))
    return found | {"exact_as_without_drafts": same, "exact_mode": model.speculation.mode}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All formats."""
    return {"model": options.model, "formats": {name: of_format(name, options) for name in options.formats}}


def main() -> None:
    """Measure and print."""
    formats = ["bfloat16", "float16", "float32"]
    harness.run(measure, __doc__, "model", prompts="builtin", limit=60, formats=formats, new_tokens=96)


if __name__ == "__main__":
    main()
