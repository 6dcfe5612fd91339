"""GPU check: what a user gets on one GPU, as shipped: no private switch, nothing captured or compiled before.

    python scripts/gpu_check.py [--model FOLDER] [--trace FILE] [--seconds 450] [--out FILE]

kernels
    The kernels of rows against torch, bit for bit, attention over several texts, and how fast memory is.
choice
    Milliseconds that choosing tokens takes by rows, vocabulary and rules, and reading the most probable ones; how many
    tokens are the host's, and how many are left to it.
families
    Tiny random models in float32: texts alone and in a batch, past their windows, as plain `generate` writes them.
chat
    A chat model in bfloat16 (`--model`: a folder with its tokenizer) on ten prompts: plain `generate`, prompt lookup,
    this library greedy and sampled, with drafting off, in batches, samples of one prompt; how texts part from plain
    ones and the gap of the two best tokens there; in float32, whether texts are the same; by exact passes, whether
    texts with drafts are those without, and how fast these passes are.
8b
    A Llama shape of 8 B parameters with random weights that is made to give recorded answers (`--trace`: JSON lines
    with `prompt` and `output` as token ids; by default the library's source): tokens per second, what a pass costs by
    drafted nodes and context, next to the time that reading the weights takes.
packed
    Weights of 4 and 8 bits: products of 1 to 512 rows next to those of unpacked weights and to the time that reading
    the weights takes; the chat model in each format, greedy, sampled and with drafting off; the 8 B shape in 4 bits as
    above; and the most memory that each took.

Figures are printed as they come, and written to `--out` as one JSON object. `--dry-run` runs all of it with tiny models
on a CPU; its figures then mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, machine_facts  # isort: skip  (of this checkout)
import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from trace_driven import Answer, build, by_transformers, by_us
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

import retrieve_spec as rs
from retrieve_spec.bench.runner import parting
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.engine.report import GenerationReport
from retrieve_spec.kernels.cpu import unpack
from retrieve_spec.quantized import WeightOnlyConfig, pack
from retrieve_spec.reference_model import QUANTISED
from retrieve_spec.sampling.acceptance import RandomSampler, RowText, Warpers, packing, read_logits, read_packed
from retrieve_spec.sampling.samplers import DeviceSampler, draw, draws_alike
from retrieve_spec.verify.verifier import VerifierInputs

PROMPTS = (
    "Summarise in two sentences: The Great Barrier Reef is the world's largest coral reef system, composed of over "
    "2,900 individual reefs and 900 islands stretching for over 2,300 kilometres. It is located in the Coral Sea, off "
    "the coast of Queensland, Australia, and is built by billions of tiny organisms, known as coral polyps.",
    "Correct the spelling and grammar and return only the corrected text: Yesterday me and my brother goes to the "
    "market for buying some vegetable. We was surprised by how much the price have rise since last month.",
    "Add type hints to this Python code:\n\ndef add(a, b):\n    return a + b\n\ndef mean(values):\n    total = 0\n"
    "    for value in values:\n        total = add(total, value)\n    return total / len(values)\n",
    "Extract the name, age, city and occupation of every person as a JSON list: Maria Gonzalez, 34, is a nurse who "
    "lives in Seville. Tom Baker is 52 and works as a carpenter there. Aiko Tanaka, 29, is an engineer in Osaka.",
    "Write a short poem about the sea in autumn.",
    "What are the main differences between TCP and UDP? Give a short list.",
    "Translate to French: The meeting has been moved to Thursday at ten o'clock. Please bring the documents.",
    "Write a Python function that returns the n-th Fibonacci number, then the same with memoisation, then a test.",
    "Rewrite this email to be more polite: Send me the report today. You are late again and I am tired of waiting.",
    "Explain step by step how to make a cup of tea, then repeat the steps as a numbered list.",
)
SAMPLED = {"do_sample": True, "temperature": 0.7}
NOTHING, ROOT_TOKEN = np.empty(0, np.int32), np.array([1], np.int32)


class Check:
    """Keeps figures as they come, an error in the place of one that fails, until the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.monotonic()
        self.dry, self.device = options.dry_run, "cpu" if options.dry_run else "cuda"
        self.new_tokens = 12 if self.dry else 160
        self.found: dict[str, Any] = {"machine": machine_facts(), "dry_run": self.dry}

    def part(self, name: str, run: Callable[[], Any], least: float = 8.0) -> Any:
        """Run a part if there are so many seconds left."""
        try:
            if self.options.seconds - (time.monotonic() - self.began) < least:
                raise TimeoutError("no time left")
            value = run()
        except Exception as error:  # the other figures are worth as much
            traceback.print_exc()
            value = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        self.found[name] = value
        print(f"[{time.monotonic() - self.began:6.1f}] {name}: {value}", flush=True)
        if self.options.out:
            Path(self.options.out).write_text(json.dumps(self.found), encoding="utf-8")
        return value

    def clock(self) -> float:
        """Seconds, when the device has finished."""
        if not self.dry:
            torch.cuda.synchronize()
        return time.perf_counter()

    def most_memory(self) -> int:
        """Bytes on the device at most, since this was last asked."""
        if self.dry:
            return 0
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """Of the device, for a call that is repeated."""
        if self.dry:
            run()
            return 0.0
        from triton.testing import do_bench

        return round(float(do_bench(run)), 4)


def kernels(check: Check) -> dict[str, Any]:
    """The kernels against torch, and how fast memory is copied, in bytes read and written per second."""
    from triton.testing import do_bench

    from retrieve_spec.kernels import triton_rows
    from retrieve_spec.recorded.packed_pass import why_not_triton

    torch.manual_seed(0)
    found: dict[str, Any] = {"several texts": why_not_triton("cuda") or "agree"}
    for dtype in (torch.bfloat16, torch.float16):
        x, other = (torch.randn(1, 65, 4096, device="cuda", dtype=dtype) for _ in range(2))
        weight = torch.randn(4096, device="cuda", dtype=dtype)
        queries, keys = (torch.randn(1, 65, n, 128, device="cuda", dtype=dtype).transpose(1, 2) for n in (32, 8))
        cos, sin = (torch.randn(1, 1, 65, 128, device="cuda", dtype=dtype) for _ in range(2))
        wide = (x + other).float()
        normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
        turned = [y * cos + torch.cat([-y[..., 64:], y[..., :64]], -1) * sin for y in (queries, keys)]
        total, ours = triton_rows.add_rms_norm(x, other, weight, 1e-5)
        both = triton_rows.rotate_both(queries, keys, cos, sin)
        found[str(dtype)] = {
            "sum": torch.equal(total, x + other),
            "norm": torch.equal(ours, normed),
            "rotary": all(map(torch.equal, both, turned)),
            "gate": torch.equal(triton_rows.gate(x, other), functional.silu(x) * other),
        }
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(block)
    found["bytes_per_s"] = 2 * block.nbytes / do_bench(lambda: target.copy_(block)) * 1e3
    return found


def packed_product(check: Check, weights: str) -> dict[str, Any]:
    """By rows, how far products with a packed weight are from those with an unpacked one, and what both take."""
    from retrieve_spec.kernels.triton_products import linears

    kind = torch.float16 if check.dry else torch.bfloat16  # Triton's interpreter cannot multiply bfloat16
    outputs, inputs = (48, 96) if check.dry else (28672, 4096)
    torch.manual_seed(0)
    weight = pack(torch.randn(outputs, inputs, device=check.device), **QUANTISED[weights])
    plain, found = unpack(weight, inputs).to(kind), dict[str, Any]({"weight_bytes": weight.nbytes})
    for rows in (1, 17) if check.dry else (1, 8, 16, 17, 64, 512):
        x = torch.randn(1, rows, inputs, device=check.device, dtype=kind)
        wanted = functional.linear(x.float(), plain.float())
        off = (linears(x, [weight], [None])[0] - wanted).pow(2).mean().sqrt() / wanted.std()
        found[str(rows)] = {
            "off": round(float(off), 5),
            "ms": check.milliseconds(lambda x=x: linears(x, [weight], [None])),
            "unpacked_ms": check.milliseconds(lambda x=x: functional.linear(x, plain)),
        }
    return found


RULES = {
    "T": Warpers(0.7),
    "top-k": Warpers(0.7, top_k=50),
    "top-p": Warpers(0.7, top_p=0.9),
    "min-p": Warpers(0.7, min_p=0.05),
}


def choice(check: Check, rows: int, vocab: int) -> dict[str, Any]:
    """What choosing at every row of a pass costs, and whether tokens are the host's."""
    spread = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3
    scores, text = spread.to(check.device, torch.bfloat16), RowText(torch.ones((1, 1), dtype=torch.long))
    tree = DraftTree.from_paths([list(range(rows - 1))]) if rows > 1 else DraftTree()
    host_logits = read_logits(scores.cpu(), 1)
    found: dict[str, Any] = {
        "by kernels": {"drawn": draws_alike(check.device), "read": packing(check.device).__name__ == "pack_largest"},
        "read": check.milliseconds(lambda: read_packed(scores, 8, None)),
    }
    for name, warpers in RULES.items():
        host = RandomSampler(warpers, seed=7)
        rules = DeviceSampler(host).rules(text, tree)
        drawn, same = draw(scores, rules).tolist(), 0
        for row in range(rows):
            so_far = RowText(torch.ones((1, 1 + row), dtype=torch.long))
            same += drawn[row] == host.choose(host_logits, row, so_far)
        milliseconds = check.milliseconds(lambda rules=rules: draw(scores, rules))
        found[name] = {"ms": milliseconds, "same": same, "left": drawn.count(-1)}
    return found


def family(check: Check, name: str) -> dict[str, Any]:
    """Whether a family's texts are those of plain `generate`, alone and in a batch of prompts of several lengths."""
    sizes: dict[str, Any] = {
        "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
        "initializer_range": 0.2, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    sizes |= {"sliding_window": 16} if name in ("mistral", "gemma3_text", "gpt_oss") else {}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2} if name in ("mixtral", "gpt_oss") else {}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32)
    model = model.eval().to(check.device)
    longest = 40 if check.dry else 700  # several pieces of a prompt
    rows = [[3 + (i * 37 + 11 + 5 * row) % 190 for i in range(longest - 9 * row)] for row in range(3)]
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=check.device)
    options = {"max_new_tokens": 12 if check.dry else 64, "do_sample": False, "pad_token_id": 0}
    plain = [model.generate(ids[:1], **options), model.generate(ids, attention_mask=(ids != 0).long(), **options)]
    rs.accelerate(model, nodes=24, recorded_pass="always")
    answers, found = plain[1][:, longest:].tolist(), {}
    for kind, given, expected in (("alone", ids[:1], plain[0]), ("batch", ids, plain[1])):
        told = answers if kind == "batch" else answers[0]
        mask = (given != 0).long()
        same = torch.equal(model.generate(given, attention_mask=mask, prediction=told, **options), expected)
        last = model.speculation.last
        found[kind] = {
            "same": same, "kind": last.pass_kind, "why": last.pass_reason, "ran": last.ran, "eager": last.eager_reason,
        }  # fmt: skip
    return found


def figures(reports: list[GenerationReport], tokens: int, seconds: float) -> dict[str, Any]:
    """Speed of some answers, and what the passes were like where this library made them."""
    found: dict[str, Any] = {"tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}
    if reports:
        passes, last = sum(report.passes for report in reports), reports[-1]
        times = ("draft_ms", "verify_ms", "commit_ms", "learn_ms")
        found |= {
            "nodes_per_pass": round(sum(report.nodes for report in reports) / passes, 1),
            **{name: round(sum(getattr(report, name) for report in reports) / passes, 3) for name in times},
            "tokens_per_pass": round(tokens / passes, 3),
            "ms_per_pass": round(seconds / passes * 1e3, 3),
            "ran": dict(sum((Counter(report.ran) for report in reports), Counter[str]())),
            **{name: getattr(last, name) for name in ("pass_kind", "pass_reason", "mode", "eager_reason")},
        }
    return found


def accelerated(model: Any, **options: Any) -> dict[str, Any]:
    """Seconds that `accelerate` takes, and what it finds."""
    began = time.perf_counter()
    rs.accelerate(model, **options)
    found = {name: getattr(model.speculation, name) for name in ("mode", "reason", "pass_kind", "pass_reason")}
    return {"seconds": round(time.perf_counter() - began, 1), **found}


class Chat:
    """A chat model on prompts, its weights packed in a format or as they are."""

    def __init__(self, check: Check, weights: str | None = None) -> None:
        self.check = check
        folder = check.options.model
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        options: dict[str, Any] = {"dtype": torch.float32 if check.dry else torch.bfloat16}
        if weights is not None:
            options = {"quantization_config": WeightOnlyConfig(**QUANTISED[weights])}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).to(check.device).eval()

    def call(self, prompts: list[str], new: int, **options: Any) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of each answer."""
        texts = [self.rendered(prompt) for prompt in prompts]
        given = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(self.check.device)
        given.pop("token_type_ids", None)
        began = self.check.clock()
        out = self.model.generate(**given, max_new_tokens=new, **options)
        seconds = self.check.clock() - began
        rows = out[:, given["input_ids"].shape[1] :].tolist()
        return seconds, [[token for token in row if token != self.tokenizer.pad_token_id] for row in rows]

    def measure(self, calls: list[list[str]], new: int = 0, **options: Any) -> tuple[dict[str, Any], list[list[int]]]:
        """Figures over several calls, each with one prompt or with a batch, and the answers."""
        total, said, reports = 0.0, list[list[int]](), []
        for prompts in calls:
            seconds, answers = self.call(prompts, new or self.check.new_tokens, **options)
            total, said = total + seconds, said + answers
            if hasattr(self.model, "speculation"):
                reports.append(self.model.speculation.last)
        return figures(reports, sum(map(len, said)), total), said

    def parted(self, ours: list[list[int]], plain: list[list[int]]) -> list[dict[str, Any]]:
        """By answer, whether it is the plain one; where not, at which token, and the gap there."""
        found = []
        for prompt, one, other in zip(PROMPTS, ours, plain, strict=False):
            shorter = min(len(one), len(other))
            ids = self.tokenizer(self.rendered(prompt), return_tensors="pt").input_ids[0]
            there = parting(self.model, ids, one[:shorter], other[:shorter])
            found.append({"same": there is None, **dict(zip(("token", "gap"), there or (), strict=False))})
        return found

    def rendered(self, prompt: str) -> str:
        """A prompt in the model's chat template, if it has one."""
        if self.tokenizer.chat_template is None:
            return prompt
        message = {"role": "user", "content": prompt}
        return self.tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)


def chat(check: Check) -> None:
    """All that is measured of a chat model."""
    subject = Chat(check)
    few = [[prompt] for prompt in PROMPTS[: 2 if check.dry else 3]]
    alone = few if check.dry else [[prompt] for prompt in PROMPTS]
    greedy = {"do_sample": False}
    texts: dict[str, list[list[int]]] = {}

    def kept(name: str, *given: Any, **options: Any) -> dict[str, Any]:
        figures, texts[name] = subject.measure(*given, **options)
        return figures

    def warm(**options: Any) -> None:
        subject.call(["Say hello."], 24, **options)

    warm(**greedy)
    short = 12 if check.dry else 64
    for name in ("chat plain, first", "chat plain"):  # cuDNN plans anew for every length that it has not seen
        check.part(name, lambda: kept("plain", few, short, **greedy))
    check.part("chat prompt lookup", lambda: kept("lookup", few, short, prompt_lookup_num_tokens=10, **greedy))
    accelerate = partial(accelerated, subject.model, tokenizer=subject.tokenizer)
    check.part("chat accelerate", accelerate)
    warm(**greedy)
    check.part("chat greedy", lambda: kept("greedy", alone, **greedy))
    check.part("chat drafting off", lambda: kept("off", few, draft="off", **greedy))
    rs.restore(subject.model)
    check.part("chat accelerate again", accelerate)  # nothing of the greedy answers is known
    warm(**SAMPLED)
    check.part("chat sampled", lambda: kept("sampled", alone, **SAMPLED))
    for rows in (2, 3) if check.dry else (8, 32):
        batch = [(list(PROMPTS) * 4)[:rows]]
        check.part(f"chat batch of {rows}, first", lambda batch=batch: kept("batch", batch, short, **greedy))
        check.part(f"chat batch of {rows}", lambda batch=batch: kept("batch", batch, **greedy))
    samples = {**SAMPLED, "num_return_sequences": 2 if check.dry else 8}
    check.part("chat samples of one prompt", lambda: kept("samples", [[PROMPTS[4]]], **samples))
    rs.restore(subject.model)
    check.part("chat parted from plain", lambda: subject.parted(texts["greedy"], texts["plain"]))

    def exact() -> dict[str, Any]:
        found: dict[str, Any] = {"accelerate": accelerate(exact=True)}
        for name, rules in (("greedy", greedy), ("sampled", SAMPLED | {"seed": 7})):
            alone, said = subject.measure(few, short, draft="off", **rules)
            ours, ours_said = subject.measure(few, short, **rules)
            found[name] = {"off": alone, "ours": ours, "same": ours_said == said}
        rs.restore(subject.model)
        return found

    check.part("chat exact", exact, least=20.0)

    def single() -> dict[str, Any]:
        subject.model.float()
        plain, said = subject.measure(few, short, **greedy)
        accelerate()
        ours, ours_said = subject.measure(few, short, **greedy)
        rs.restore(subject.model)
        return {"plain": plain, "ours": ours, "same": ours_said == said}

    check.part("chat float32", single, least=20.0)


def packed_chat(check: Check, weights: str) -> dict[str, Any]:
    """A chat model with packed weights: its speed, whether drafts change its greedy text, and its memory."""
    subject = Chat(check, weights)
    check.most_memory()
    found: dict[str, Any] = {"accelerate": accelerated(subject.model, tokenizer=subject.tokenizer)}
    prompts, new = [[prompt] for prompt in PROMPTS[: 2 if check.dry else 6]], 12 if check.dry else 0
    subject.call(["Say hello."], new or 24, do_sample=False)
    greedy, said = subject.measure(prompts, new, do_sample=False)
    off, alone = subject.measure(prompts, new, draft="off", do_sample=False)
    sampled, _ = subject.measure(prompts, new, **SAMPLED)
    same = sum(map(list.__eq__, said, alone))
    return found | {
        "greedy": greedy, "off": off, "sampled": sampled, "same": same, "most_memory": check.most_memory(),
    }  # fmt: skip


def shape(check: Check, size: str, weights: str) -> None:
    """All that is measured of a model of random weights in one format."""
    model = build(size, 64 if check.dry else 32_768, check.device, weights)
    check.most_memory()
    name = f"{size} {weights}" if weights in QUANTISED else size
    vocab = model.config.vocab_size
    size_of = {"weight_bytes": sum(parameter.nbytes for parameter in model.parameters())}
    recorded = "always" if check.dry else "auto"
    check.part(f"{name} accelerate", lambda: accelerated(model, recorded_pass=recorded) | size_of)
    if not hasattr(model, "speculation"):  # no time was left, or it failed
        return
    make = model.speculation._make_verifier
    answers = recorded_answers(check, vocab)

    def decode() -> dict[str, Any]:
        warm, *given = (by_us(model, answer, check.clock, make, "auto") for answer in (answers[0], *answers))
        reports = [told.report for told in given if told.report is not None]
        tokens, seconds = sum(answer.new for answer in answers), sum(told.seconds for told in given)
        return {
            **figures(reports, tokens, seconds),
            "same": warm.same and all(told.same for told in given),
            "first_token_ms": [round(told.first * 1e3, 1) for told in given],
            "prompts": [answer.prompt.shape[1] for answer in answers],
            "most_memory": check.most_memory(),
        }

    check.part(f"{name} recorded answers", decode)
    model.speculation._make_verifier = make
    for context in (64,) if check.dry else (512, 4000, 32000):
        check.part(f"{name} pass at {context}", lambda context=context: curve(check, make, model, context))
    rs.restore(model)
    if weights in QUANTISED:
        return

    def plain() -> dict[str, Any]:
        short = [Answer("", a.prompt, a.trace[: a.prompt.shape[1] + 24]) for a in answers[:2]]
        given = [by_transformers(model, answer, check.clock) for answer in short]
        return {"tokens_per_s": round(48 / sum(told.seconds for told in given), 1)}

    for kind in ("plain, first", "plain"):
        check.part(f"{name} {kind}", plain)


def curve(check: Check, make: Callable[[], Any], model: Any, context: int) -> dict[str, float]:
    """Milliseconds of a pass by number of drafted nodes after a context."""
    ids = torch.as_tensor((np.arange(context) * 7919 + 13) % model.config.vocab_size, device=check.device)[None]
    cache = DynamicCache(config=model.config)
    kwargs = {"past_key_values": cache, "position_ids": torch.arange(context, device=check.device)[None]}
    verifier, times = make(), {}
    verifier.start(VerifierInputs(ids, kwargs, max_length=context + 700))
    verifier.forward(ids[0].cpu().numpy().astype(np.int32))
    verifier.commit(NOTHING)
    for nodes in (0, 3) if check.dry else (0, 1, 3, 15, 31, 63, 64, 127, 255):
        main = list(range(20, 20 + (nodes + 1) // 2))
        sides = [[model.config.vocab_size - 1 - i] for i in range(nodes - len(main))]
        tree, took = DraftTree.from_paths([main, *sides]) if nodes else None, []
        for _ in range(11):
            began = check.clock()
            verifier.forward(ROOT_TOKEN, tree)
            took.append((check.clock() - began) * 1e3)
            verifier.commit(NOTHING)
        times[str(nodes)] = round(statistics.median(took[3:]), 3)
    verifier.finish()
    return times


def recorded_answers(check: Check, vocab: int) -> list[Answer]:
    """Answers of a trace, or pieces of the library's source."""
    if check.options.trace:
        records = [json.loads(line) for line in Path(check.options.trace).read_text("utf-8").splitlines()]
        pairs = [(record["prompt"][-4000:], record["output"][: check.new_tokens]) for record in records]
    else:
        package = ROOT / "retrieve_spec"
        tokenizer = Tokenizer.from_file(str(package / "reference" / "tokenizer.json"))
        largest = sorted(package.rglob("*.py"), key=lambda path: (path.stat().st_size, path))[-3:]
        texts = [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in largest]
        pairs = [(text[:300], text[300 : 300 + check.new_tokens]) for text in texts]
    pairs = [(prompt[-40:], output) for prompt, output in pairs[:2]] if check.dry else pairs
    ids = [([t % vocab for t in prompt], [t % vocab for t in output]) for prompt, output in pairs]
    made = [(torch.tensor([prompt]), torch.tensor(prompt + output)) for prompt, output in ids]
    return [Answer("", prompt.to(check.device), trace.to(check.device)) for prompt, trace in made]


def main() -> None:
    """Run the sections, and print one JSON object last."""
    places = {"model": "", "trace": "", "out": "", "only": [""]}
    options = arguments(__doc__, **places, seconds=450.0, dry_run=False)
    if options.dry_run and "TRITON_INTERPRET" not in os.environ:  # Triton reads it when torch imports it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    torch.set_grad_enabled(False)
    check = Check(options)
    wanted = options.only if any(options.only) else ["kernels", "choice", "families", "chat", "8b", "packed"]
    size = "tiny" if check.dry else "8b"
    if "kernels" in wanted and not check.dry:
        check.part("kernels", lambda: kernels(check))
    if "choice" in wanted:
        for rows, vocab in itertools.product(
            (1, 3) if check.dry else (1, 17, 65), (3000,) if check.dry else (49152, 128256)
        ):
            check.part(f"choice {rows} x {vocab}", partial(choice, check, rows, vocab))
    if "families" in wanted:
        for name in ("llama",) if check.dry else ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "mixtral"):
            check.part(f"family {name}", lambda name=name: family(check, name))
    if "chat" in wanted and options.model:
        chat(check)
    if "8b" in wanted:
        shape(check, size, "float32" if check.dry else "bfloat16")
    if "packed" in wanted:
        for weights in QUANTISED:
            check.part(f"products of {weights}", partial(packed_product, check, weights))
        for weights in QUANTISED if options.model else ():
            check.part(f"chat in {weights}", partial(packed_chat, check, weights), least=20.0)
        shape(check, size, "int4")
    print(json.dumps(check.found))


if __name__ == "__main__":
    main()
