"""Interleaved runs (A B C A B C …): every method answers the same prompts in one process."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers.utils import logging

from retrieve_spec.bench.machine import OtherWork, machine_facts
from retrieve_spec.bench.methods import OFF, PLAIN, Bench, Method, parse_method, sampling
from retrieve_spec.bench.report import PARTS, RUN_FILE, Record, ResultsFolder
from retrieve_spec.bench.workloads import Prompt, encode, loops, read_prompts
from retrieve_spec.config import LoadOptions
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import ConfigError
from retrieve_spec.reference_model import load_model

State = Literal["cold", "session", "shared"]
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a measurement.

    Attributes
    ----------
    prompts, methods
        Every method answers every prompt.
    runs
        Number of repetitions.
    state
        What this library may remember: `"cold"` nothing, `"session"` the turns of one conversation, `"shared"`
        everything since the run began. Every run starts without memory, since it repeats the prompts.
    max_new_tokens
        Per turn.
    sampled
        Whether tokens are sampled instead of greedy.
    """

    prompts: Sequence[Prompt]
    methods: Sequence[Method]
    runs: int = 1
    state: State = "cold"
    max_new_tokens: int = 160
    sampled: bool = False

    @property
    def reference(self) -> Method:
        """The method whose texts others are compared with: plain, else `off`, else the first.

        Sampled texts of transformers and of this library agree in distribution only (their noise is drawn
        differently), so with sampling it is `off`, else the first of this library's methods.
        """
        ours = [method for method in self.methods if method.ours]
        candidates = ours if self.sampled and ours else self.methods
        return min(candidates, key=lambda method: (method.kind != PLAIN, method.kind != OFF))

    def comparable(self, method: Method) -> bool:
        """Whether a method's texts should equal the reference's token by token."""
        return not self.sampled or method.ours == self.reference.ours

    def groups(self) -> Iterator[tuple[int, Prompt, list[Method]]]:
        """Yield runs and prompts with the methods in the order in which they answer.

        Each prompt begins with another method, so that none is always first. In conversations the reference begins,
        since the later turns of all methods follow its answers.
        """
        for run in range(1, self.runs + 1):
            for index, prompt in enumerate(self.prompts):
                shift = (index + run - 1) % len(self.methods)
                order = [*self.methods[shift:], *self.methods[:shift]]
                if len(prompt.turns) > 1:
                    order.sort(key=lambda method: method != self.reference)
                yield run, prompt, order


def measure(bench: Bench, plan: Plan, folder: ResultsFolder, progress: Callable[[], object]) -> None:
    """Measure everything; results of a prompt are written after all methods have answered it."""
    last_run = 0
    for run, prompt, methods in plan.groups():
        records: dict[str, Record] = {}
        for method in methods:
            if plan.state != "shared" or run != last_run:
                bench.forget(method)
            reference = records.get(plan.reference.name)
            records[method.name] = answer(bench, plan, prompt, method, run, reference.texts if reference else [])
        last_run = run
        for method in methods:
            if plan.comparable(method):
                found = divergence(bench, plan, prompt, records[method.name], records[plan.reference.name])
                records[method.name].divergence = found
        folder.add(list(records.values()))
        progress()


def divergence(bench: Bench, plan: Plan, prompt: Prompt, record: Record, reference: Record) -> dict[str, Any] | None:
    """Find the first difference of a method's answers from the reference's, and its gap (`parting`)."""
    for turn, (ours, theirs) in enumerate(zip(record.token_ids, reference.token_ids, strict=True)):
        before = encode(bench.tokenizer, prompt, reference.texts[:turn])[0]
        if (parted := parting(bench.model, before, ours, theirs)) is not None:
            return {"turn": turn, "position": parted[0], "gap": parted[1]}
    return None


def parting(model: Any, prompt_ids: torch.Tensor, ours: list[int], theirs: list[int]) -> tuple[int, float] | None:
    """Find the first difference of two texts after a prompt.

    Parameters
    ----------
    model
        Its logits give the gap.
    prompt_ids
        (n,) token ids.
    ours, theirs
        Token ids of the texts.

    Returns
    -------
    tuple of int and float, or None
        Index of the first token that differs, and the gap between the logits of the two tokens (between the two highest
        ones where a text ends); None if the texts are equal.
    """
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    at = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    ids = torch.cat([prompt_ids.cpu(), torch.tensor(theirs[:at], dtype=torch.long)])
    with torch.no_grad():
        logits = model(ids[None].to(model.device)).logits[0, -1].float()
    two = logits[[ours[at], theirs[at]]] if at < shorter else logits.topk(2).values
    return at, float(abs(two[0] - two[1]))


def answer(bench: Bench, plan: Plan, prompt: Prompt, method: Method, run: int, earlier: Sequence[str]) -> Record:
    """Answer all turns of one prompt with one method.

    Parameters
    ----------
    earlier
        The reference method's answers, which later turns follow; empty: the method's own.
    """
    record = Record(run, prompt.name, prompt.task, method.name, mode=method.kind)
    for turn in range(len(prompt.turns)):
        before = earlier[:turn] if earlier else record.texts
        ids = encode(bench.tokenizer, prompt, before).to(bench.model.device)
        prediction = prompt.prediction if turn == 0 else None
        generation = bench.generate(method, ids, max_new_tokens=plan.max_new_tokens, prediction=prediction)
        record.new_tokens += len(generation.token_ids)
        record.token_ids.append(generation.token_ids)
        record.texts.append(bench.tokenizer.decode(generation.token_ids, skip_special_tokens=True).strip())
        record.passes += generation.passes
        record.seconds += generation.seconds
        record.first_token_s += generation.first_token_s
        if (report := generation.report) is not None:
            record.nodes = (record.nodes or 0) + report.nodes
            record.split_ms = {part: record.split_ms.get(part, 0.0) + getattr(report, f"{part}_ms") for part in PARTS}
            record.accepted_by_source = dict(Counter(record.accepted_by_source) + Counter(report.accepted_by_source))
            record.mode, record.reason = report.mode, report.reason
    record.looping = loops(record.texts[-1])
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `bench run`, as described in its help."""

    model: str
    prompts: str
    methods: Sequence[str]
    stores: Sequence[str]
    state: State
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    runs: int
    limit: int | None
    tasks: str | None
    loading: LoadOptions


def run_bench(options: RunOptions, out: Path, command: str, quiet: bool) -> None:
    """Run a benchmark and write its results to the folder `out`, which records `command`.

    Raises
    ------
    RetrieveSpecError
        The model, the prompts, a method, a store or the folder cannot be used.
    """
    logging.disable_progress_bar()
    if (out / RUN_FILE).exists():
        raise ConfigError("a new folder", f"results in {out}", "Give another --out.")
    chosen = [parse_method(name) for name in options.methods]
    questions = read_prompts(options.prompts, options.limit, options.tasks.split(",") if options.tasks else None)
    plan = Plan(questions, chosen, options.runs, options.state, options.max_new_tokens, sampled=options.temperature > 0)
    model, tokenizer = load_model(options.model, **asdict(options.loading))
    bench = Bench(
        model,
        tokenizer,
        chosen,
        datastores=[open_datastore(path, tokenizer=tokenizer) for path in options.stores],
        session=options.state != "cold",
        seed=options.seed,
        options=sampling(options.temperature, options.top_p),
    )
    folder = ResultsFolder(out, _header(options, command, model, questions))  # made only when all options are right
    first = encode(tokenizer, questions[0], [])
    for method in chosen:  # so that compilation is no part of the figures
        bench.generate(method, first, max_new_tokens=WARM_UP_TOKENS)
        bench.forget(method)
    others = OtherWork()
    try:
        with tqdm(total=len(questions) * plan.runs, unit="prompt", disable=quiet) as bar:
            measure(bench, plan, folder, bar.update)
    finally:
        folder.note(machine=folder.header["machine"] | {"others": others.cores()})


def _header(options: RunOptions, command: str, model: Any, questions: Sequence[Prompt]) -> dict[str, Any]:
    """Return the description of a run; its digest prevents comparing figures of different prompts."""
    which = f", {options.tasks} only" if options.tasks else ""
    digest = hashlib.sha256(json.dumps([astuple(question) for question in questions]).encode()).hexdigest()[:16]
    sizes = {
        path: sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()) for path in options.stores
    }
    return {
        "command": command,
        "machine": machine_facts(),
        "model": options.model,
        "dtype": options.loading.quantize or str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "prompts": f"{options.prompts}{which} ({len(questions)} prompts, digest {digest})",
        "methods": list(options.methods),
        "stores": sizes,
        "state": options.state,
        "runs": options.runs,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
    }
