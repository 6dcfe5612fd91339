"""Benchmark of drafting inside llama-cpp-python: no drafts, its own prompt lookup, and ours; a JSON object last.

Every prompt is answered once by each method, one after the other in turning order, by a `Llama` of its own over the
same file in this process. Time counts from the first token to the last, so that no prompt's reading is in it, and so
does processor time, which other programs disturb less. Prompts are beginnings of this package's files; with
`--datastore DIR` there is a method that drafts from it too.

    python scripts/export_gguf.py reference.gguf && python scripts/bench_llama_cpp.py reference.gguf
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import harness
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from retrieve_spec.integrations.llama_cpp import DraftModel

PACKAGE = Path(__file__).resolve().parent.parent / "retrieve_spec"


def answered(llm: Any, prompt: list[int], count: int, temperature: float) -> tuple[list[int], float, float]:
    """Tokens of an answer; seconds and processor seconds after the first of them."""
    text: list[int] = []
    began = busy = 0.0
    llm.set_seed(len(prompt))
    for token in llm.generate(prompt, temp=temperature):
        if not text:
            began, busy = perf_counter(), process_time()
        text.append(token)
        if len(text) == count:
            break
    return text, perf_counter() - began, process_time() - busy


def table(llms: dict[str, Any], prompts: list[list[int]], count: int, temperature: float) -> dict[str, Any]:
    """Figures of one temperature."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
    texts: dict[str, list[list[int]]] = {name: [] for name in llms}
    before = {name: llm.draft_model.statistics() for name, llm in llms.items() if name.startswith("ours")}
    for i, prompt in enumerate(prompts):
        for name in harness.in_turn(list(llms), i):
            text, *seconds = answered(llms[name], prompt, count, temperature)
            took[name].append((seconds[0], seconds[1]))
            texts[name].append(text)
    row: dict[str, Any] = {"temperature": temperature, "prompts": len(prompts)}
    for name, llm in llms.items():
        seconds, busy = (sum(column) for column in zip(*took[name], strict=True))
        tokens = sum(len(text) - 1 for text in texts[name])
        ratios = [plain[1] / own[1] for plain, own in zip(took["none"], took[name], strict=True)]
        row[name] = {
            "tokens_per_second": round(tokens / seconds, 1),
            "tokens_per_processor_second": round(tokens / busy, 1),
            "median_ratio": round(statistics.median(ratios), 3),
            "slowest_ratio": round(min(ratios), 3),
            "same_text": sum(a == b for a, b in zip(texts[name], texts["none"], strict=True)),
        }
        if name in before:
            counts = {key: value - before[name][key] for key, value in llm.draft_model.statistics().items()}
            row[name]["tokens_per_step"] = round(counts["emitted"] / max(counts["steps"], 1), 2)
            row[name]["draft_ms_per_step"] = round(1e3 * counts["draft_seconds"] / max(counts["steps"], 1), 3)
    return row


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each temperature."""
    drafters: dict[str, Any] = {"none": None, "prompt lookup": LlamaPromptLookupDecoding(), "ours": DraftModel()}
    if args.datastore:
        drafters["ours, store"] = DraftModel(args.datastore)
    given = {"n_ctx": -(-(args.prompt_tokens + args.new_tokens + 16) // 256) * 256, "n_threads": args.threads}
    given |= {"n_threads_batch": args.threads, "verbose": False}
    llms = {
        name: Llama(args.model, **given, logits_all=bool(made), draft_model=made) for name, made in drafters.items()
    }
    texts = [llms["none"].tokenize(path.read_bytes(), add_bos=False) for path in sorted(PACKAGE.rglob("*.py"))]
    texts = [text[: args.prompt_tokens] for text in texts if len(text) > args.prompt_tokens]
    prompts = texts[:: max(len(texts) // args.prompts, 1)][: args.prompts]
    for llm in llms.values():
        answered(llm, prompts[0][:50], 20, 0.0)  # whatever the first call makes
    return {
        "llama-cpp-python": importlib.metadata.version("llama-cpp-python"),
        "threads": args.threads,
        "new_tokens": args.new_tokens,
        "rows": [table(llms, prompts, args.new_tokens, temperature) for temperature in args.temperature],
    }


def main() -> None:
    """Measure and print."""
    sizes = {"prompts": 24, "prompt_tokens": 400, "new_tokens": 160, "threads": 1}
    harness.run(measure, __doc__, "model", datastore="", temperature=[0.0, 0.7], **sizes)


if __name__ == "__main__":
    main()
