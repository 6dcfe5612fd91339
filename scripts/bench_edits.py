"""Benchmark of edits that were recorded, given again through the server by a model of another size.

    python scripts/bench_edits.py TRACE... --tokenizer FILE [--size 0.1b] [--edits 12] [--processor]
        [--context 1536] [--longest 800]

A model of random weights does all the work of its passes, then the recorded token is made the most probable one
(`trace_driven.py`). Where a whole text was rewritten in a fence, `/v1/edits` is asked for it; other answers, such as
blocks of what to search and what to put there, are chats with the first file of the prompt as `prediction`. Every
answer is given with it, without it and without drafts, in turn; nothing is kept between them, and all must be the
recorded one. Of each file `--edits` are given whose prompts and answers have at most so many tokens; with `--processor`
seconds are those of one processor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import harness
import torch
from random_models import build
from starlette.testclient import TestClient
from trace_driven import TraceDriven, clock_of
from transformers import PreTrainedTokenizerFast

from retrieve_spec.bench.stats import interval
from retrieve_spec.config import ServeConfig
from retrieve_spec.server.app import create_app
from retrieve_spec.server.metrics import Metrics
from retrieve_spec.server.run import assemble
from retrieve_spec.verify.verifier import VerifierInputs

REWRITE = re.compile(r"### Instruction:\n(.*?)\n```\w*\n(.*?)\n*```\s*### Response:", re.DOTALL)
FENCED = re.compile(r"\n```\w*\n(.*?\n)```", re.DOTALL)
VARIANTS: dict[str, dict[str, Any]] = {
    "prediction": {},
    "no prediction": {"prediction": {"content": ""}},
    "drafting off": {"speculative": False},
}


class Answering(TraceDriven):
    """Says a recorded answer behind whatever prompt it is given."""

    def start(self, inputs: VerifierInputs) -> None:
        """Begin at the prompt."""
        self._trace = torch.cat([inputs.input_ids[0], self._trace])
        super().start(inputs)


def request_of(row: dict[str, Any]) -> tuple[str, dict[str, Any], str] | None:
    """Path and body of the request, and the text of its answer; None where it is neither kind of edit."""
    new = FENCED.search(row["output"])
    if (asked := REWRITE.search(row["prompt"])) and new:
        return "/v1/edits", {"instruction": asked[1], "input": asked[2] + "\n"}, new[1]
    if old := FENCED.search(row["prompt"]):
        messages = [{"role": "user", "content": row["prompt"]}]
        return "/v1/chat/completions", {"messages": messages, "prediction": {"content": old[1]}}, row["output"].strip()
    return None


def fitting(trace: str, codec: Any, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The requests of a file whose prompts and answers are not too long, in an order of chance."""
    rows = [json.loads(line) for line in Path(trace).read_text("utf-8").splitlines()]
    random.Random(0).shuffle(rows)
    for path, body, answer in filter(None, map(request_of, rows)):
        size = len(codec.encode(body.get("input") or body["messages"][0]["content"])) + 80
        if size <= options.context and len(codec.encode(answer)) <= options.longest:
            yield path, body, answer


def give(trace: str, model: Any, service: Any, client: TestClient, options: argparse.Namespace) -> dict[str, Any]:
    """Give the edits of a file in every way."""
    clock, codec = clock_of(options.processor), service.codec
    make = model.speculation._make_verifier
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    passes = dict.fromkeys(VARIANTS, 0)
    characters = tokens = 0
    for number, (path, body, answer) in enumerate(islice(fitting(trace, codec, options), options.edits)):
        said = torch.tensor([*codec.encode(answer + "```" * ("input" in body)), service.tokenizer.eos_token_id])
        model.speculation._make_verifier = lambda said=said: Answering(make(), said, clock)
        for name in harness.in_turn(list(VARIANTS), number):
            service.forget()
            began = clock()
            got = client.post(path, json={**body, "max_tokens": len(said), **VARIANTS[name]}).json()
            seconds[name].append(clock() - began)
            (choice,) = got["choices"]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if text != answer:
                raise SystemExit(f"{name} said something else: {text[-200:]!r} for {answer[-200:]!r}")
            passes[name] += got["timings"]["passes"]
        characters += len(answer)
        tokens += len(said)
        rates = {name: round(len(answer) / took[-1], 1) for name, took in seconds.items()}
        print(number + 1, path, rates, file=sys.stderr, flush=True)
    model.speculation._make_verifier = make
    off = seconds["drafting off"]
    found = {
        name: {
            "characters_per_second": characters / sum(took),
            "tokens_per_pass": tokens / passes[name],
            "speedup": interval([slow / fast for slow, fast in zip(off, took, strict=True)]),
            "speedup_pooled": sum(off) / sum(took),
        }
        for name, took in seconds.items()
    }
    return {"edits": len(off), "characters": characters, "variants": found}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The edits of all files."""
    os.environ["RETRIEVE_SPEC_CACHE"] = tempfile.mkdtemp()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=options.tokenizer, eos_token="</s>")
    model = build(options.size, options.context)
    service = assemble(model, tokenizer, options.size, ServeConfig()).service
    with TestClient(create_app(service, Metrics(lambda: 0)), base_url="http://127.0.0.1") as client:
        files = {Path(trace).name: give(trace, model, service, client, options) for trace in options.traces}
    return {"files": files, "parameters": sum(weight.numel() for weight in model.parameters())}


def main() -> None:
    """Measure and print."""
    tokens = {"context": 1536, "longest": 800}
    harness.run(measure, __doc__, "traces+", tokenizer=str, size="0.1b", edits=12, **tokens, processor=False)


if __name__ == "__main__":
    main()
