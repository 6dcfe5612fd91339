"""Benchmark of long answers: tokens per pass, drafted nodes and memory by thousand tokens; a JSON object last.

    python scripts/bench_long.py [--quantize int8] [--temperature 0 0.7] [--nodes auto 60] [--stories 2]

A chat model tells stories, one at a time, each as long as it is asked to be: the end of a text is not allowed before.
Memory is what the process has more than at the beginning of the story, the keys and values of its text included.
Answers that end in a loop are counted. One more story, a short one, is told first, so that nothing is loaded later.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any

import harness

import retrieve_spec as rs
from retrieve_spec.acceleration import accelerated
from retrieve_spec.bench.machine import resident_bytes
from retrieve_spec.bench.methods import sampling
from retrieve_spec.bench.workloads import Prompt, encode, loops
from retrieve_spec.reference_model import load_model

STORIES = (
    "Write a very long story about a lighthouse keeper and her three brothers, with many chapters.",
    "Write a long novel about a cartographer who is sent to map a country that does not exist.",
    "Tell me the whole history of an invented island, year by year, in as much detail as you can.",
    "Write a long detective story in twenty chapters that is set in a beekeeping village.",
)
PIECE = 1000
"""Tokens for which a figure is given."""


def told(model: Any, ids: Any, options: dict[str, Any], new_tokens: int) -> list[dict[str, float]]:
    """Figures of a story: passes, nodes, memory that was added, and whether it loops, for each thousand tokens."""
    text, found, before = "", [], resident_bytes()
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    with rs.generate_stream(model, ids, **lengths, **options) as pieces:
        count = 0
        for piece in pieces:
            text, count = text + piece.text, count + len(piece.token_ids)
            if count // PIECE > len(found):
                added = (resident_bytes() - before) / 2**20
                found.append({"passes": 0, "nodes": 0, "memory": added, "loops": loops(text)})
    end = 1
    for nodes, accepted, *_ in model.speculation.last.per_pass:
        end += accepted + 1
        if end <= PIECE * len(found):
            found[(end - 1) // PIECE]["passes"] += 1
            found[(end - 1) // PIECE]["nodes"] += nodes
    return found


def row(model: Any, tokenizer: Any, temperature: float, nodes: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of all stories at one temperature and number of nodes, for each thousand tokens."""
    options = {**sampling(temperature, args.top_p), "nodes": int(nodes) if nodes.isdigit() else nodes}
    stories = []
    for seed, story in enumerate(STORIES[: args.stories]):
        ids = encode(tokenizer, Prompt(story, "story", (story,), raw=False), ())
        model.speculation.forget()
        stories.append(told(model, ids, {**options, "seed": seed}, args.new_tokens))
    thousands = [{name: [each[name] for each in pieces] for name in pieces[0]} for pieces in zip(*stories, strict=True)]
    return {
        "temperature": temperature,
        "nodes": nodes,
        "tokens_per_pass": [round(PIECE * len(stories) / sum(each["passes"]), 3) for each in thousands],
        "nodes_per_pass": [round(sum(each["nodes"]) / sum(each["passes"]), 1) for each in thousands],
        "memory_mib": [round(max(each["memory"])) for each in thousands],
        "looping": [sum(each["loops"]) for each in thousands],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each temperature and number of nodes."""
    model, tokenizer = load_model(args.model, quantize=args.quantize or None)
    with accelerated(model, tokenizer):
        told(model, encode(tokenizer, Prompt("", "", STORIES[:1]), ()), {"do_sample": False}, PIECE // 10)
        rows = []
        for temperature, nodes in itertools.product(args.temperature, args.nodes):
            rows.append(row(model, tokenizer, temperature, nodes, args))
            print(json.dumps(rows[-1]), file=sys.stderr)
    return {"stories": args.stories, "new_tokens": args.new_tokens, "rows": rows}


def main() -> None:
    """Measure and print."""
    how = {"model": "smollm2", "quantize": "", "temperature": [0.0, 0.7], "top_p": 0.9, "nodes": ["auto", "60"]}
    harness.run(measure, __doc__, **how, stories=len(STORIES), new_tokens=6000)


if __name__ == "__main__":
    main()
