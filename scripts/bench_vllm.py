"""Benchmark of drafting inside vLLM: speed without drafts and with one method; JSON on standard output.

Both are engines in this process over the same model; prompts are pieces of this package's files. Rounds are
interleaved, and medians given. One method a run: vLLM's CPU build starts no further engine once one has loaded Numba.
Run it where vLLM is installed (docs/vllm.md).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import checkout  # noqa: F401

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

PACKAGE = Path(__file__).resolve().parent.parent / "retrieve_spec"
OURS = {"method": "custom_class", "model": "retrieve_spec.integrations.vllm.Proposer", "num_speculative_tokens": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}


def engines(args: argparse.Namespace) -> dict[str, Any]:
    """An engine without drafts, and one with the method."""
    from vllm import LLM

    made = {}
    methods: dict[str, dict[str, Any]] = {"none": {}, "ngram": {"speculative_config": NGRAM}}
    methods["ours"] = {
        "speculative_config": OURS,
        "worker_extension_cls": "retrieve_spec.integrations.vllm.WorkerExtension",
        "additional_config": {"retrieve_spec": {"datastores": args.datastore}},
    }
    methods = {name: options for name, options in methods.items() if name in ("none", args.method)}
    for name, options in methods.items():
        made[name] = LLM(
            args.model,
            enforce_eager=True,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=max(args.concurrency),
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
            disable_log_stats=False,
            **options,
        )
    return made


def counted(llm: Any) -> tuple[float, float]:
    """Passes that verified a draft, and tokens accepted in them, since the engine began."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    kinds = ("num_drafts", "num_accepted_tokens")
    drafts, accepted = (float(found.get(f"vllm:spec_decode_{kind}", 0)) for kind in kinds)
    return drafts, accepted


def served(llm: Any, prompts: list[Any], parameters: Any, at_once: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of decoding: of steps in which no prompt is read, `at_once` requests at a time."""
    texts: list[list[int]] = []
    tokens, seconds = 0, 0.0
    for first in range(0, len(prompts), at_once):
        batch = prompts[first : first + at_once]
        for i, prompt in enumerate(batch):
            llm.llm_engine.add_request(f"{first + i}-{perf_counter()}", prompt, parameters)
        known: dict[str, list[int]] = {}
        while llm.llm_engine.has_unfinished_requests():
            reads = len(known) < len(batch)
            began = perf_counter()
            outs = llm.llm_engine.step()
            took = perf_counter() - began
            before = sum(map(len, known.values()))
            known |= {out.request_id: list(out.outputs[0].token_ids) for out in outs}
            if not reads:
                tokens += sum(map(len, known.values())) - before
                seconds += took
        texts += known.values()
    return tokens / seconds, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(PACKAGE / "reference"))
    parser.add_argument("--method", choices=["ours", "ngram"], default="ours")
    parser.add_argument("--datastore", action="append", default=[])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=600)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    made = engines(args)

    import torch
    import vllm
    from vllm import SamplingParams

    tokenizer = made["none"].get_tokenizer()
    texts = [tokenizer.encode(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
    texts = [text for text in texts if len(text) > args.prompt_tokens]
    step = max(len(texts) // args.prompts, 1)
    prompts = [{"prompt_token_ids": text[: args.prompt_tokens]} for text in texts[::step][: args.prompts]]
    table = []
    for temperature in args.temperature:
        parameters = SamplingParams(temperature=temperature, max_tokens=args.new_tokens, ignore_eos=True)
        for at_once in args.concurrency:
            speeds: dict[str, list[float]] = {name: [] for name in made}
            counts = counted(made[args.method])  # of the process
            answers = {}
            for _ in range(args.rounds):
                for name, llm in made.items():
                    speed, answers[name] = served(llm, prompts, parameters, at_once)
                    speeds[name].append(speed)
            row: dict[str, Any] = {"temperature": temperature, "concurrency": at_once}
            for name in made:
                row[name] = {"tokens_per_second": round(statistics.median(speeds[name]), 1)}
                row[name]["rounds"] = [round(speed, 1) for speed in speeds[name]]
            drafts, accepted = (now - then for now, then in zip(counted(made[args.method]), counts, strict=True))
            row[args.method]["tokens_per_drafted_pass"] = round(1 + accepted / drafts, 2) if drafts else None
            if not temperature:
                row["same_text"] = sorted(answers[args.method]) == sorted(answers["none"])
            table.append(row)
            print(json.dumps(row), file=sys.stderr)
    own = made["ours"].collective_rpc("retrieve_spec_statistics")[0] if args.method == "ours" else None
    machine = {"machine": platform.machine(), "threads": torch.get_num_threads(), "vllm": vllm.__version__}
    print(json.dumps({**machine, "options": vars(args), "rows": table, "ours": own}, indent=1))


if __name__ == "__main__":
    main()
