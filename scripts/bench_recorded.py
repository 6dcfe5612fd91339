"""Benchmark of larger models that give recorded answers, on this machine.

    python scripts/bench_recorded.py TRACE --tokenizer FILE [--size 0.1b 0.4b] [--answers 12] [--new-tokens 80]
    python scripts/bench_recorded.py TRACE --tokenizer FILE --size 0.1b qwen3_5 nemotron_h mamba2 granite4 --processor

No weights of a larger model are needed: a Llama-shaped or a hybrid model of random weights does all the work of its
passes, then the recorded token is made the most probable one. So passes cost what they cost, and drafts are right and
wrong as they would have been, but for one thing: the runner-up tokens are noise, which takes from `auto` what it learns
of them. Plain is transformers' own `generate`, and so is prompt lookup; every answer is given by all methods in turn,
each begins with another one, and nothing is kept between answers. `--weights` names their format (float32, bfloat16,
int8, int4); `--context` is the longest prompt; hybrids carry the `share` they have of the speed-up of the first size.
With `--processor` seconds are those of one processor, which other work on the machine moves less.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from itertools import chain, zip_longest
from typing import Any

import harness
import torch
from trace_driven import HYBRIDS, SHAPES, Answer, Clock, Timing, build, by_transformers, by_us

import retrieve_spec as rs
from retrieve_spec.bench.replay import read_trace
from retrieve_spec.bench.report import interval
from retrieve_spec.bench.workloads import subtask
from retrieve_spec.datastore.fingerprint import load_tokenizer

METHODS = ("plain", "prompt-lookup", "off", "auto")
HYBRID_METHODS = ("plain", "off", "chains", "auto")
SHORTEST = 32
"""Tokens of the shortest answer that is measured."""


def chosen(options: argparse.Namespace) -> list[Answer]:
    """Answers of all tasks in turn, in a random order that is always the same."""
    by_task: dict[str, list[Answer]] = defaultdict(list)
    for row in read_trace(options.trace, load_tokenizer(options.tokenizer)):
        output = row.segments[0][0][: options.new_tokens]
        if len(row.prompt) <= options.context and len(output) >= SHORTEST:
            prompt = torch.as_tensor(row.prompt, dtype=torch.long)
            trace = torch.cat([prompt, torch.as_tensor(output, dtype=torch.long)])
            by_task[subtask(row.task)].append(Answer(subtask(row.task), prompt[None], trace))
    rng = random.Random(0)
    for answers in by_task.values():
        rng.shuffle(answers)
    in_turn = [answer for answer in chain(*zip_longest(*by_task.values())) if answer is not None]
    return in_turn[: options.answers]


def give(size: str, answers: list[Answer], options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Figures of all methods with a model of one size or shape."""
    model = build(size, options.context, weights=options.weights)
    if (last := max(int(answer.trace.max()) for answer in answers)) >= model.config.vocab_size:
        raise SystemExit(f"{size} has {model.config.vocab_size:,} tokens, and answers have token {last:,}: "
                         "name another tokenizer, as the text of others is as good for timing")  # fmt: skip
    rs.accelerate(model)
    make = model.speculation._make_verifier

    def by(method: str, answer: Answer) -> Timing:
        if method == "plain":
            return by_transformers(model, answer, clock)
        if method == "prompt-lookup":
            return by_transformers(model, answer, clock, prompt_lookup_num_tokens=10)
        return by_us(model, answer, clock, make, "off" if method == "off" else "auto", chains=method == "chains")

    names = HYBRID_METHODS if size in HYBRIDS else METHODS
    for name in names:
        by(name, Answer("", answers[0].prompt[:, :16], answers[0].trace[:32]))
    results: dict[str, list[Timing]] = {name: [] for name in names}
    for number, answer in enumerate(answers):
        for name in harness.in_turn(names, number):
            results[name].append(by(name, answer))
        speeds = ", ".join(f"{name} {answer.new / results[name][-1].seconds:.1f}" for name in names)
        print(f"{size} {number + 1}/{len(answers)} {answer.task}: tokens/s {speeds}", flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "methods": {name: figures(results, name, answers) for name in names}}


def figures(results: dict[str, list[Timing]], name: str, answers: list[Answer]) -> dict[str, Any]:
    """Speed-ups of one method over plain, and what its passes were like."""
    mine, plain, new = results[name], results["plain"], sum(answer.new for answer in answers)
    seconds = sum(t.seconds for t in mine)
    found: dict[str, Any] = {
        "tokens_per_second": new / seconds,
        "speedup": interval([p.seconds / m.seconds for p, m in zip(plain, mine, strict=True)]),
        "speedup_pooled": sum(t.seconds for t in plain) / seconds,
        "after_prompt_pooled": sum(t.seconds - t.first for t in plain) / sum(t.seconds - t.first for t in mine),
        "slower_than_plain": sum(m.seconds > p.seconds for p, m in zip(plain, mine, strict=True)),
        "same": sum(t.same for t in mine),
    }
    if reports := [t.report for t in mine if t.report is not None]:
        passes = sum(report.passes for report in reports)
        found |= {"tokens_per_pass": new / passes, "nodes_per_pass": sum(report.nodes for report in reports) / passes}
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The sizes and shapes that are named."""
    if unknown := set(options.size) - {*SHAPES, *HYBRIDS}:
        raise SystemExit(f"no size {', '.join(unknown)}: name some of {', '.join([*SHAPES, *HYBRIDS])}")
    answers = chosen(options)
    if not answers:
        limits = f"of {SHORTEST} tokens after a prompt of at most {options.context}"
        raise SystemExit(f"no answer {limits} in {options.trace}")
    if options.processor:
        torch.set_num_threads(1)
    clock = time.process_time if options.processor else time.perf_counter
    with torch.no_grad():
        sizes = {size: give(size, answers, options, clock) for size in options.size}
    first = sizes[options.size[0]]["methods"]
    for size in (size for size in options.size[1:] if size in HYBRIDS):
        sizes[size]["share"] = {f"{method} {name}": sizes[size]["methods"][method][name] / first["auto"][name]
                                for method in ("chains", "auto")
                                for name in ("speedup_pooled", "after_prompt_pooled")}  # fmt: skip
    return {
        "answers": len(answers),
        "new_tokens": sum(answer.new for answer in answers),
        "prompt_tokens": sum(answer.prompt.shape[1] for answer in answers),
        "sizes": sizes,
    }


def main() -> None:
    """Measure and print."""
    limits = {"answers": 12, "new_tokens": 80, "context": 1024}
    harness.run(
        measure, __doc__, "trace", tokenizer=str, size=["0.1b", "0.4b"], **limits, processor=False, weights="float32"
    )


if __name__ == "__main__":
    main()
