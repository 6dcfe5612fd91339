"""Benchmark of weight formats on this CPU: plain `generate`, drafting off and `auto`, beside llama.cpp; JSON last.

Answers to chat prompts, reading them included, one after the other. With `--gguf FILE` llama-cpp-python answers the
same prompts from a file of the same weights, before all formats and after them; ratios are to the better of the two.
Of each format it says the perplexity of some text, too, and at how many of its tokens the most probable next one is
that of the first format.

    python scripts/bench_formats.py MODEL --gguf MODEL.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import harness
import torch

import retrieve_spec as rs
from retrieve_spec.reference_model import QUANTISED, load_model

PROMPTS = [
    "Explain how a bicycle stays upright, in a few sentences.",
    "Write a Python function that checks whether a string is a palindrome, with a docstring and three tests.",
    "List five ideas for a rainy afternoon with children, each with one sentence of instructions.",
    "Summarise: The committee met on Tuesday to discuss the new library. Members agreed that the new library should "
    "open on Sundays, that the new library needs a reading room, and that the budget will be voted on in May.",
    "Correct this text: he go to school every days and he like the mathematics because it are easy for he.",
    "Write a short letter to a landlord asking for the repair of a broken heater.",
    "What is the difference between a stack and a queue? Give an example of each in C.",
    "Rewrite as a list of steps: First boil the water, then add the pasta, stir it, wait nine minutes, and drain it.",
    "Tell a story about a lighthouse keeper who finds a letter in a bottle.",
    "Convert to JSON: name Ada, age 36, languages English and French, city London.",
]
Answer = Callable[[list[dict[str, str]]], int]
"""Answers a chat and says how many tokens it wrote."""


def speed(answer: Answer, prompts: list[str]) -> float:
    """Tokens per second over all prompts, after another one."""
    answer([{"role": "user", "content": "Say hello."}])
    began, tokens = perf_counter(), 0
    for prompt in prompts:
        tokens += answer([{"role": "user", "content": prompt}])
    return tokens / (perf_counter() - began)


def load(args: argparse.Namespace, kind: str) -> tuple[Any, Any]:
    """The model in one format of weights."""
    form = {"quantize": kind} if kind in QUANTISED else {"dtype": kind}
    return load_model(args.model, device="cpu", **form)


def reading(args: argparse.Namespace, kind: str) -> tuple[float, torch.Tensor]:
    """Perplexity of the text, and the most probable token behind each of it."""
    model, tokenizer = load(args, kind)
    text = "\n".join(Path(path).read_text(encoding="utf-8") for path in args.text)
    lost, found = [], []
    with torch.no_grad():
        for ids in torch.tensor(tokenizer(text)["input_ids"]).split(512)[:-1]:
            logits = model(ids[None]).logits[0].float()
            lost.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none"))
            found.append(logits.argmax(-1))
    return float(torch.cat(lost).mean().exp()), torch.cat(found)


def ours(args: argparse.Namespace, kind: str, prompts: list[str]) -> dict[str, float]:
    """Tokens per second by mode, of one format of weights."""
    model, tokenizer = load(args, kind)

    def answering(**options: Any) -> Answer:
        def answer(chat: list[dict[str, str]]) -> int:
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            torch.manual_seed(1)
            texts = model.generate(**ids, max_new_tokens=args.new_tokens, **options)
            return int(texts.shape[1] - ids["input_ids"].shape[1])

        return answer

    greedy, sampled = answering(do_sample=False), answering(do_sample=True, temperature=0.7)
    row = {"plain": speed(greedy, prompts)}
    for name, answer, options in (
        ("off", greedy, {"draft": "off"}),
        ("auto", greedy, {}),
        ("auto, T = 0.7", sampled, {}),
        *((f"nodes={nodes}", greedy, {"nodes": nodes}) for nodes in args.nodes if nodes),
    ):
        rs.accelerate(model, tokenizer=tokenizer, **options)
        row[name] = speed(answer, prompts)
        rs.restore(model)
    return row


def theirs(args: argparse.Namespace, prompts: list[str]) -> float:
    """Tokens per second of llama-cpp-python."""
    from llama_cpp import Llama

    llm = Llama(args.gguf, n_ctx=2048, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    def answer(chat: list[dict[str, str]]) -> int:
        said = llm.create_chat_completion(chat, temperature=0.0, max_tokens=args.new_tokens)
        return int(said["usage"]["completion_tokens"])

    return speed(answer, prompts)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each format."""
    torch.set_num_threads(args.threads)
    prompts = json.loads(Path(args.prompts).read_text(encoding="utf-8")) if args.prompts else PROMPTS
    before = theirs(args, prompts) if args.gguf else 0.0
    rows = {kind: ours(args, kind, prompts) for kind in args.formats}
    best = max(before, theirs(args, prompts)) if args.gguf else 0.0
    figures = {kind: {mode: round(value, 1) for mode, value in row.items()} for kind, row in rows.items()}
    found: dict[str, Any] = {"threads": args.threads, "new_tokens": args.new_tokens, "tokens_per_second": figures}
    texts = {kind: reading(args, kind) for kind in args.formats}
    first = texts[args.formats[0]][1]
    found["perplexity"] = {kind: round(value, 3) for kind, (value, _) in texts.items()}
    found["same_next_token"] = {
        kind: round(float((tokens == first).float().mean()), 4) for kind, (_, tokens) in texts.items()
    }
    if best:
        found["llama.cpp"] = round(best, 1)
        found["times_llama.cpp"] = {kind: {m: round(v / best, 2) for m, v in row.items()} for kind, row in rows.items()}
    return found


def main() -> None:
    """Measure and print."""
    sizes = {"new_tokens": 128, "threads": 2, "nodes": [0]}
    lists = {"formats": ["float32", "bfloat16", "int8", "int4"], "text": [str(harness.ROOT / "docs" / "howto.md")]}
    harness.run(measure, __doc__, "model", gguf="", prompts="", **lists, **sizes)


if __name__ == "__main__":
    main()
