"""Sections `model` and `compiled` of `gpu_check.py`: what passes cost and how fast recorded answers are decoded."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_setting import Attempt, Setting, draft, plain_pass, prompt_of, started, tree_pass
from trace_driven import Answer, Timing, build, by_transformers, by_us

import retrieve_spec as rs
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.engine.cost import CostModel
from retrieve_spec.engine.cost_probe import measure_passes
from retrieve_spec.recorded.recording import try_recording
from retrieve_spec.verify.interface import read_interface
from retrieve_spec.verify.probe import probe
from retrieve_spec.verify.verifier import Verifier


def model(setting: Setting, attempt: Attempt, size: str) -> None:
    """Cost curves and decoding of one size."""
    target = build(size, max(setting.context), setting.device, torch.bfloat16)
    attempt("weight_bytes", lambda: sum(p.nbytes for p in target.parameters()))
    makers: dict[str, Callable[[], Verifier]] = {}

    def record() -> dict[str, Any]:
        began = time.perf_counter()
        finding = probe(target, read_interface(target))
        make, why = try_recording(target, finding, SpeculationConfig(recorded_pass="always"))
        if make is not None:
            makers["static"] = make
        return {"why_not": why, "recording_s": round(time.perf_counter() - began, 1)}

    def graphs() -> str:
        makers["static graphs"] = setting.graph_maker(makers["static"])
        return "agree"

    attempt("recorded pass", record)
    if "static" in makers:
        attempt("graphs", graphs)
    curves(setting, attempt, target, makers, setting.context[-1])
    answers = list(recorded_answers(setting, target.config.vocab_size))
    kinds = list(reversed(makers))
    attempt("decode generate", lambda: baseline(setting, target, answers))
    for kind in kinds[:1]:
        attempt(f"decode ours ({kind})", lambda kind=kind: ours(setting, target, makers[kind], answers))
    attempt("decode prompt lookup", lambda: baseline(setting, target, answers, prompt_lookup_num_tokens=10))
    for context in reversed(setting.context[:-1]):
        curves(setting, attempt, target, makers, context)
    for kind in kinds[1:]:
        attempt(f"decode ours ({kind})", lambda kind=kind: ours(setting, target, makers[kind], answers))
    attempt("gpu_gb", lambda: round(torch.cuda.max_memory_allocated() / 2**30, 1) if setting.on_gpu else 0.0)


def curves(setting: Setting, attempt: Attempt, target: Any, makers: Any, context: int) -> None:
    """A plain pass, and passes of every kind by number of nodes, the fastest kind first."""

    def plain() -> dict[str, float]:
        return {"0": setting.median_ms(plain_pass(target, prompt_of(context, setting.device)))}

    attempt(f"curve {context} plain", plain)
    for kind in reversed(makers):
        attempt(f"curve {context} {kind}", lambda kind=kind: curve(setting, target, makers[kind], context))


def curve(setting: Setting, target: Any, make: Callable[[], Verifier], context: int) -> dict[str, float]:
    """Milliseconds of a pass by number of drafted nodes."""
    verifier = started(make(), target, prompt_of(context, setting.device), 512)
    times = {str(nodes): setting.median_ms(tree_pass(verifier, draft(nodes))) for nodes in setting.nodes}
    verifier.finish()
    gc.collect()
    return times


def compiled(setting: Setting, attempt: Attempt, size: str) -> None:
    """`generate` with a static compiled cache, which compiles first."""
    target = build(size, max(setting.context), setting.device, torch.bfloat16)
    answers = list(recorded_answers(setting, target.config.vocab_size))[:1]
    attempt("decode static compiled cache", lambda: baseline(setting, target, answers, cache_implementation="static"))


def baseline(setting: Setting, target: Any, answers: list[Answer], **extra: Any) -> dict[str, Any]:
    """Tokens per second of the model's own `generate`."""
    given = by_transformers(target, answers[0].cut(16), setting.clock, **extra)  # sets up, and compiles if it does
    return rates(answers, [by_transformers(target, answer, setting.clock, **extra) for answer in answers], given.same)


def ours(setting: Setting, target: Any, make: Callable[[], Verifier], answers: list[Answer]) -> dict[str, Any]:
    """Tokens per second of an accelerated model, and where the time goes."""
    rs.accelerate(target, recorded_pass="always")
    target.speculation._make_verifier, target.speculation.cost = make, CostModel()
    measure_passes(target, target.speculation)  # of this kind of pass
    try:
        warm, *given = (by_us(target, answer, setting.clock, make, "auto") for answer in (answers[0], *answers))
    finally:
        rs.restore(target)
    reports = [told.report for told in given if told.report is not None]
    passes = sum(report.passes for report in reports)
    parts = ("draft_ms", "verify_ms", "commit_ms", "learn_ms")
    spent = {part: round(sum(getattr(report, part) for report in reports) / passes, 4) for part in parts}
    return {
        **rates(answers, given, warm.same),
        "tokens_per_pass": round(sum(answer.new for answer in answers) / passes, 3),
        "nodes_per_pass": round(sum(report.nodes for report in reports) / passes, 1),
        "outside_ms": round(sum(spent.values()) - spent["verify_ms"], 4),
        **spent,
    }


def rates(answers: list[Answer], given: list[Timing], same: bool) -> dict[str, Any]:
    """Speed over all answers, and whether all said what was recorded."""
    tokens, seconds = sum(answer.new for answer in answers), sum(told.seconds for told in given)
    same = same and all(told.same for told in given)
    return {"tokens_per_s": round(tokens / seconds, 2), "ms_per_token": round(seconds / tokens * 1e3, 3), "same": same}


def recorded_answers(setting: Setting, vocab: int) -> Iterator[Answer]:
    """Answers of a trace, or pieces of the library's source, one behind a long prompt."""
    from tokenizers import Tokenizer

    package = Path(rs.__file__).parent
    tokenizer = Tokenizer.from_file(str(package / "reference" / "tokenizer.json"))

    def read(text: Any) -> list[int]:
        ids = text if isinstance(text, list) else tokenizer.encode(text).ids
        return [int(token) % vocab for token in ids]

    def answer(prompt: list[int], output: list[int]) -> Answer:
        trace = torch.tensor(prompt + output, device=setting.device)
        return Answer("", trace[None, : len(prompt)], trace)

    if setting.trace is not None:
        for line in Path(setting.trace).read_text(encoding="utf-8").splitlines()[: 1 if setting.dry else 4]:
            record = json.loads(line)
            yield answer(read(record["prompt"])[-max(setting.context) :], read(record["output"])[: setting.new_tokens])
        return
    names = ("verify/hf.py", "engine/sequence.py", "engine/speculation.py")
    pieces = [read((package / name).read_text(encoding="utf-8")) for name in names]
    whole = [token for piece in pieces for token in piece]
    new, longest = setting.new_tokens, max(setting.context)
    for ids, start in ((whole, min(longest - 256, len(whole) - new)), *((piece, 512) for piece in pieces)):
        start = max(min(start, len(ids) - new, 40 if setting.dry else start), 1)
        yield answer(ids[:start], ids[start : start + new])
        if setting.dry:
            return
