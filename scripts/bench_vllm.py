"""Benchmark of drafting inside vLLM: no drafts, vLLM's n-grams and suffix decoding, and ours; a JSON object last.

Each method is an engine over the same model in a process of its own. They answer in turn, one at a time, so that a
machine that grows slower does so for all of them; medians of the rounds are given. When an answer ends, the next
request begins; steps are counted in which as many are under way as are to be, and no prompt is read: on the clock, in
processor time, and what `propose` takes of that. All methods write the same texts: above temperature 0 those that
vLLM has sampled without drafts, put in place of what its sampler says when that has done its work (by chance one
method's texts would else repeat themselves more than another's); a draft is right as often as when rejection sampling
decides. Prompts are pieces of this repository's files (of `--prompts-from`), or with `--questions` the first turns of
what `bench run --prompts` takes, whose answers end where the model ends them; each is asked once, `--prompts` in a
round. `--method NAME[:TOKENS]` names methods, `store` needs `--datastore`. Run it where vLLM is installed
(docs/vllm.md); suffix decoding is left out where its package cannot be built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from time import perf_counter, process_time, thread_time
from typing import Any

import harness
from harness import ROOT

sys.path.insert(1, str(ROOT / "tools" / "compare"))
from sources import Skipped, arctic_folder

from retrieve_spec.bench.workloads import encode, read_prompts

FOLDERS = [ROOT / "retrieve_spec", ROOT / "tests", ROOT / "scripts"]
METHODS = {"none": 0, "ngram": 8, "suffix": 16, "ours": 16, "store": 16}
"""What there is, and how many tokens each drafts at most unless that is said: `suffix:24`."""
NO_TOKEN = -1
"""What vLLM's sampler says where a draft was not accepted."""
OWN, SUFFIX_DEPTH = ("ngram", "suffix"), 24
"""What vLLM brings itself, and the depth of its suffix trees by default."""
OURS = {"method": "custom_class", "model": "retrieve_spec.integrations.vllm.Proposer"}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def options(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """What an engine of the method is made with."""
    name, tokens = named(method)
    if name == "none":
        return {}
    if name in OWN:
        depth = {"suffix_decoding_max_tree_depth": max(tokens, SUFFIX_DEPTH)}
        more = depth if name == "suffix" else {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        return {"speculative_config": {"method": name, "num_speculative_tokens": tokens, **more}}
    return {
        "speculative_config": {**OURS, "num_speculative_tokens": tokens},
        "additional_config": {"retrieve_spec": {"datastores": [args.datastore] if name == "store" else []}},
    }


def named(method: str) -> tuple[str, int]:
    """A method's name, and how many tokens it drafts at most."""
    name, _, tokens = method.partition(":")
    return name, int(tokens or METHODS[name])


def repair() -> None:
    """Let vLLM's CPU build sample at the temperature it is asked for; 0.32 drops it with any method's drafts."""
    import numpy as np
    import torch
    from vllm.v1.sample import rejection_sampler

    def expanded(values: Any, ends: Any, total: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        each = values.numpy().copy()
        each[each == replace_from] = replace_to
        return torch.from_numpy(each.repeat(np.diff(ends.numpy(), prepend=0)))

    rejection_sampler.expand_batch_to_tokens = expanded


def dictated(worker: Any) -> dict[bytes, list[int]]:
    """Let a worker say the texts that are in the dictionary that comes back, by prompt, whatever its sampler says."""
    texts: dict[bytes, list[int]] = {}
    runner = worker.model_runner
    sample, batch = runner._sample, runner.input_batch

    def said(logits: Any, metadata: Any) -> Any:
        output = sample(logits, metadata)
        if not texts:
            return output
        ids, drafts, begin = output.sampled_token_ids.numpy(), [], 0
        if metadata is not None:
            drafts = metadata.draft_token_ids.tolist()
        for i in range(len(ids)):
            prompt = int(batch.num_prompt_tokens[i])
            wanted = texts[batch.token_ids_cpu[i, :prompt].tobytes()][int(batch.num_tokens_no_spec[i]) - prompt :]
            drafted = metadata.num_draft_tokens[i] if drafts else 0
            right = 0
            while right < min(drafted, len(wanted) - 1) and drafts[begin + right] == wanted[right]:
                right += 1
            begin += drafted
            ids[i] = NO_TOKEN
            ids[i, : right + 1] = wanted[: right + 1]
        return output

    runner._sample = said
    return texts


def clocked(worker: Any) -> list[float]:
    """Count what a worker's proposer takes, whichever it is: seconds of its thread, in the list that comes back."""
    spent = [0.0]
    drafter = getattr(worker.model_runner, "drafter", None)
    if drafter is not None:
        propose = drafter.propose

        def timed(*args: Any, **kwargs: Any) -> Any:
            thread_time()  # after a model's pass the clock itself takes microseconds to be found
            began = thread_time()
            try:
                return propose(*args, **kwargs)
            finally:
                spent[0] += thread_time() - began

        drafter.propose = timed
    return spent


def engine(method: str, args: argparse.Namespace, orders: Connection) -> None:
    """A process: makes an engine, says that it is there, and answers until it is told None."""
    sys.path += os.environ["PYTHONPATH"].split(os.pathsep)  # a spawned process has its parent's path in place of it
    import numpy as np
    from vllm import LLM

    llm = LLM(
        args.model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=max(args.concurrency),
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 29,
        **options(method, args),
    )
    repair()
    [spent], [texts] = llm.collective_rpc(clocked), llm.collective_rpc(dictated)
    orders.send(True)
    while (order := orders.recv()) is not None:
        prompts, at_once, sampling, wanted = order
        texts.clear()
        texts |= {np.array(prompt, np.int32).tobytes(): text for prompt, text in zip(prompts, wanted, strict=False)}
        orders.send(served(llm, spent, prompts, at_once, sampling))


def served(llm: Any, spent: list[float], prompts: list[list[int]], at_once: int, sampling: dict[str, Any]) -> Any:
    """Answers to prompts, and what the steps took in which `at_once` were under way and no prompt was read."""
    from vllm import SamplingParams

    parameters = SamplingParams(**sampling)
    texts: dict[str, list[int]] = {}
    names: list[str] = []
    sums = dict.fromkeys(("tokens", "rows", "seconds", "busy", "proposing"), 0.0)
    waiting, under_way = list(enumerate(prompts)), set[str]()
    while waiting or under_way:
        while waiting and len(under_way) < at_once:
            i, prompt = waiting.pop(0)
            names.append(name := f"{i}-{perf_counter()}")
            under_way.add(name)
            llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        counts = len(under_way) == at_once and under_way <= texts.keys()
        had = sum(len(texts[name]) for name in under_way) if counts else 0
        began, busy, proposing = perf_counter(), process_time(), spent[0]
        outs = llm.llm_engine.step()
        took = perf_counter() - began, process_time() - busy, spent[0] - proposing
        texts |= {out.request_id: list(out.outputs[0].token_ids) for out in outs}
        if counts:
            made = sum(len(texts[name]) for name in under_way) - had
            for name, more in zip(sums, (made, at_once, *took), strict=True):
                sums[name] += more
        under_way -= {out.request_id for out in outs if out.finished}
    return sums, [texts[name] for name in names]


def figures(rounds: list[Any]) -> dict[str, Any]:
    """Figures of a method's rounds."""
    total = {name: sum(sums[name] for sums, _ in rounds) for name in rounds[0][0]}
    return {
        "tokens_per_second": round(statistics.median(sums["tokens"] / sums["seconds"] for sums, _ in rounds), 1),
        "tokens_per_processor_second": round(total["tokens"] / total["busy"], 1),
        "tokens_per_row": round(total["tokens"] / total["rows"], 3),
        "propose_ms_per_row": round(1e3 * total["proposing"] / total["rows"], 4),
    }


def prompts_of(args: argparse.Namespace) -> Iterator[list[int]]:
    """Questions or pieces of Python files, each once: suffix decoding remembers what it has answered."""
    from transformers import AutoTokenizer

    tokenizer, length = AutoTokenizer.from_pretrained(args.model), args.prompt_tokens
    if args.questions:
        pieces = [encode(tokenizer, question, ())[0].tolist() for question in read_prompts(args.questions)]
    else:
        files = [path for folder in args.prompts_from for path in sorted(folder.rglob("*.py"))]
        texts = [tokenizer.encode(path.read_text(), verbose=False) for path in files]
        pieces = [text[at : at + length] for text in texts for at in range(0, len(text) - length, length)]
    random.Random(0).shuffle(pieces)
    yield from pieces
    sys.exit(f"{len(pieces)} prompts are too few: give more folders, or fewer --prompts or --rounds")


def table(engines: dict[str, Connection], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each temperature and number of requests at a time."""
    pieces, rows = prompts_of(args), []
    for temperature in args.temperature:
        sampling = {"temperature": temperature, "max_tokens": args.new_tokens, "ignore_eos": not args.questions}
        for at_once in args.concurrency:
            rounds: dict[str, list[Any]] = {name: [] for name in engines}
            for turn in range(args.rounds + 1):
                count = max(args.prompts, at_once * 3 // 2) if turn else at_once  # the first turn warms up
                asked, texts = list(islice(pieces, count)), []
                if temperature:
                    engines["none"].send((asked, max(args.concurrency), sampling, []))
                    *_, texts = engines["none"].recv()
                for name in harness.in_turn(list(engines), turn):
                    engines[name].send((asked, at_once, sampling, texts))
                    found = engines[name].recv()
                    if turn:
                        rounds[name].append(found)
            row: dict[str, Any] = {"temperature": temperature, "concurrency": at_once, "prompts": len(asked)}
            row["methods"] = {name: figures(found) for name, found in rounds.items()}
            row["same_text"] = all(found[-1][1] == rounds["none"][-1][1] for found in rounds.values())
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    return rows


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The methods that are named and can be started, in turn."""
    os.environ |= {**ENVIRONMENT, "OMP_NUM_THREADS": str(args.threads), "NUMBA_NUM_THREADS": str(args.threads)}
    if not args.datastore:
        args.method = [name for name in args.method if named(name)[0] != "store"]
    spawn = multiprocessing.get_context("spawn")
    engines: dict[str, Connection] = {}
    processes = []
    with contextlib.suppress(Skipped):  # then vLLM names what it misses
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], str(arctic_folder())])
    for name in dict.fromkeys(["none", *args.method]):
        engines[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=engine, args=(name, args, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
    for name in list(engines):
        try:
            engines[name].recv()
        except EOFError:  # it has said why
            del engines[name]
    rows = table(engines, args)
    for connection in engines.values():
        connection.send(None)
    for process in processes:  # what they took is theirs only when they have ended
        process.join()
    given = {name: getattr(args, name) for name in ("prompt_tokens", "new_tokens", "threads", "rounds")}
    return {**given, "rows": rows}


def main() -> None:
    """Measure and print."""
    sizes = {"prompts": 16, "prompt_tokens": 600, "new_tokens": 128, "rounds": 3, "threads": 1}
    what = {"model": str(ROOT / "retrieve_spec" / "reference"), "method": list(METHODS), "datastore": ""}
    asked = {"prompts_from": FOLDERS, "questions": ""}
    harness.run(measure, __doc__, **what, concurrency=[1, 4, 16], temperature=[0.0, 0.7], **asked, **sizes)


if __name__ == "__main__":
    main()
