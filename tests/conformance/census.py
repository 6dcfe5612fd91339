"""Every architecture of transformers' mappings in, how it is decoded and whether the text is that of `generate` out.

Every entry is built by shrinking its default config; each is decoded plainly and accelerated: greedy, sampled, padded,
over a second turn, from embeddings, with a picture, under planted drafts that are right and wrong.

python tests/conformance/census.py --mapping causal --part 1/8 --out census.jsonl
python tests/conformance/census.py --only qwen3_5_text,mamba2
python tests/conformance/census.py --collect census*.jsonl    # what docs/conformance.md is made from
"""

import argparse
import json
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from census_models import EXTRA, HYBRID, MAPPINGS, build, names, picture_prompt, prompt
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs
from retrieve_spec.bench.machine import machine_facts

__all__ = ["EXTRA", "HYBRID", "MAPPINGS", "build", "examine", "names", "prompt"]
DATA = Path(__file__).resolve().parents[2] / "docs" / "data" / "census.json"
COMMAND = "python tests/conformance/census.py --mapping MAPPING --part K/N --out FILE; --collect FILE…"
NEW = 18
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "temperature": 0.9, "seed": 3}


class Planted(ScriptedDrafter):
    """A scripted drafter for one call after another, whatever it is shown as the text before them."""

    def __init__(self) -> None:
        super().__init__([], "branchy", vocab=200)
        self.prompt = 0

    def plant(self, answer: torch.Tensor, prompt: int, script: str) -> None:
        """Draft in a manner for the call that comes: `answer` begins with `prompt` tokens that are given."""
        self.answer, self.prompt, self.script, self.seen = answer.tolist(), prompt, script, []

    def start(self, prompt_ids: Any, prediction_ids: Any = None) -> None:
        super().start(prompt_ids, prediction_ids)
        self.text = self.answer[: self.prompt]


def padded(inputs: dict[str, Any], many: int = 5) -> dict[str, Any]:
    """The same prompt with padding in front."""
    given = dict(inputs)
    length = inputs["input_ids"].shape[1]
    given.setdefault("attention_mask", torch.ones(1, length, dtype=torch.long))
    for name, value in given.items():
        if name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "cross_attention_mask"):
            front = value.new_zeros((1, many, *value.shape[2:]))
            given[name] = torch.cat([front, value], dim=1)
    return given


class Entry:
    """One entry of the census: a model that is accelerated, and what its calls gave."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.checks: dict[str, str] = {}
        self.modes: dict[str, str] = {}
        self.drafter = Planted()

    def compare(self, key: str, inputs: dict[str, Any], scripts: tuple[str, ...]) -> None:
        """Decode one prompt plainly and under drafts."""
        model = self.model
        wanted = self.plainly(key, lambda: type(model).generate(model, **inputs, **GREEDY))
        if wanted is None:
            return
        given = wanted.shape[1] - NEW
        for script in scripts:
            self.drafter.plant(wanted[0], given, script)
            self.note(f"{key} {script}", lambda: torch.equal(model.generate(**inputs, **GREEDY), wanted))
            last = model.speculation.last
            if script != "wrong" and last is not None:
                self.modes[key] = last.mode if last.mode != "delegated" else f"delegated: {last.reason}"
                self.checks[f"tokens per pass {key} {script}"] = f"{last.tokens_per_pass:.2f}"
        self.drafter.plant(wanted[0], given, "branchy")
        if self.modes.get(key, "").startswith("delegated"):
            return

        def same() -> bool:
            drawn = model.generate(**inputs, **SAMPLED)
            self.drafter.plant(drawn[0], given, "branchy")
            drafted = model.generate(**inputs, **SAMPLED)
            return torch.equal(drafted, drawn) and torch.equal(model.generate(**inputs, **SAMPLED, draft="off"), drawn)

        self.note(f"{key} sampled", same)

    def note(self, key: str, same: Any) -> None:
        """Take down what a comparison says, or raises."""
        try:
            self.checks[key] = "same" if same() else "differs"
        except Exception as error:
            self.checks[key] = f"raises {type(error).__name__}: {str(error)[:80]}"

    def plainly(self, key: str, decode: Any) -> Any:
        """What the model gives by itself; None where it raises, which is taken down."""
        try:
            return decode()
        except Exception as error:
            self.checks[key] = f"plain raises {type(error).__name__}: {str(error)[:60]}"
            return None

    def second_turn(self, inputs: dict[str, Any], key: str) -> None:
        """A cache that is handed back and continued from."""
        model, options = self.model, {**GREEDY, "return_dict_in_generate": True}

        def turns() -> Any:
            first = type(model).generate(model, **inputs, **options)
            more = torch.cat([first.sequences, prompt(model, 6, 53)], dim=1)
            second = type(model).generate(model, more, past_key_values=first.past_key_values, **options)
            return first, more, second.sequences

        if (turned := self.plainly(key, turns)) is None:
            return
        first, more, wanted = turned

        def same() -> bool:
            self.drafter.plant(first.sequences[0], inputs["input_ids"].shape[1], "branchy")
            cache = model.generate(**inputs, **options).past_key_values
            self.drafter.plant(wanted[0], more.shape[1], "branchy")
            return torch.equal(model.generate(more, past_key_values=cache, **options).sequences, wanted)

        self.note(key, same)

    def embedded(self, ids: torch.Tensor) -> None:
        """A prompt that is given as embeddings."""
        embeds = self.plainly("embeddings", lambda: self.model.get_input_embeddings()(ids).detach())
        if embeds is not None:
            self.compare("embeddings", {"inputs_embeds": embeds}, ("branchy",))

    def all(self, mapping: str) -> None:
        """Every kind of call."""
        ids = prompt(self.model, 30)
        every = ("right", "wrong", "branchy")
        self.compare("text", {"input_ids": ids}, every)
        self.compare("short", {"input_ids": prompt(self.model, 5)}, ("branchy",))
        self.compare("padded", padded({"input_ids": ids}), ("wrong", "branchy"))
        if not self.model.config.is_encoder_decoder:
            self.second_turn({"input_ids": ids}, "second turn")
            self.embedded(ids)
        if mapping == "image":
            picture = picture_prompt(self.model)
            if picture is None:
                self.checks["picture"] = "no picture that the model takes was found"
                return
            self.compare("picture", picture, every)
            self.compare("padded picture", padded(picture), ("branchy",))


def examine(name: str, mapping: str) -> dict[str, Any]:
    """One entry's line of the census."""
    began = time.perf_counter()
    line: dict[str, Any] = {"name": name, "mapping": mapping}
    try:
        model = build(name, mapping)
    except Exception as error:
        return {**line, "mode": "not built", "reason": f"{type(error).__name__}: {str(error)[:120]}"}
    entry = Entry(model)
    try:
        rs.accelerate(model, drafter=entry.drafter, nodes=16)
        line |= {"class": type(model).__name__, "mode": model.speculation.mode, "reason": model.speculation.reason}
        recurrence = model.speculation.interface.recurrence
        line["way"] = recurrence.way if recurrence is not None else ""
        entry.all(mapping)
    except Exception as error:
        line |= {"mode": "crash", "reason": f"{type(error).__name__}: {str(error)[:120]}"}
    bad = [key for key, value in entry.checks.items() if value == "differs" or value.startswith("raises")]
    seconds = round(time.perf_counter() - began, 1)
    return {**line, "calls": entry.modes, "checks": entry.checks, "wrong": bad, "seconds": seconds}


def summary(line: dict[str, Any]) -> dict[str, Any]:
    """What the docs say of an entry."""
    checks, calls = line.get("checks", {}), line.get("calls", {})
    text = calls.get("text", "plain raises" if "text" in checks else line["mode"])
    text, _, why = text.partition(": ")
    if text == "plain raises":
        why = "its own generate does not take text alone" if line["mapping"] != "causal" else "its own generate fails"
    why = why or ("" if text == "tree" else line.get("reason", ""))
    return {
        "name": line["name"],
        "mapping": line["mapping"],
        "class": line.get("class", ""),
        "text": text,
        "why": re.sub(r" \(off by .*?\)|\[.*?\]", "", " ".join(why.split()))[:110],
        "picture": calls.get("picture", "").partition(":")[0],
        "compared": sum(value in ("same", "differs") for value in checks.values()),
        "wrong": line.get("wrong") or [],
    }


def collect(files: list[Path]) -> None:
    """Write the data that the docs are made from; the last line of an entry counts, without one what was known."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    known = json.loads(DATA.read_text(encoding="utf-8"))["entries"] if DATA.exists() else []
    by_name = {(entry["mapping"], entry["name"]): entry for entry in known}
    by_name |= {(line["mapping"], line["name"]): summary(line) for line in lines}
    entries = [by_name[key] for key in sorted(by_name)]
    data = {"command": COMMAND, "machine": machine_facts(), "entries": entries}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _late(*_args: Any) -> None:
    raise TimeoutError("an entry took too long")


def main() -> None:
    """Examine the entries that were asked for, one line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapping", choices=list(MAPPINGS), default="causal")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th entry, from the K-th on")
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--seconds", type=int, default=150, help="for one entry at most")
    parser.add_argument("--out", type=Path, help="file that lines are added to")
    parser.add_argument("--collect", type=Path, nargs="+", help="write docs/data/census.json from such files")
    args = parser.parse_args()
    if args.collect:
        collect(args.collect)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = (int(number) for number in args.part.split("/"))
    chosen = args.only.split(",") if args.only else names(args.mapping)[part - 1 :: parts]
    signal.signal(signal.SIGALRM, _late)
    for name in chosen:
        signal.alarm(args.seconds)
        line = json.dumps(examine(name, args.mapping))
        signal.alarm(0)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
