"""Regression guard: counts of a fixed workload that do not depend on the machine, against the checked-in ones.

::

    pytest tests/bench/test_guard.py        # compare: fails when tokens per pass fell by more than 1 %
    python scripts/regression_guard.py      # write the counts of today as the new baseline, on purpose

Two workloads, both at fixed node budgets (measured cost plays no part): recorded answers are replayed without the
model, where every count is exact; the bundled model answers the same prompts, where drafts also come from its logits.
Answers are sampled (with a fixed seed), because greedy ones of so small a model
loop. An answer that this machine rounds to another text is left out on both sides. The store holds the prompts of the
last answers, which the others are drafted from.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT
from tokenizers import Tokenizer

from retrieve_spec.bench.replay import Replay, read_trace
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.reference_model import load_model, reference_path

FOLDER = ROOT / "tests" / "bench" / "guard"
ANSWERS, BASELINE = FOLDER / "answers.jsonl", FOLDER / "baseline.json"
ALLOWED_LOSS = 0.01
STORED = 5  # last answers whose prompts are in the store
REPLAY_NODES = (16, 60)
LIVE_NODES = 16
GENERATION = {"max_new_tokens": 96, "do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0, "seed": 1}


def replayed() -> dict[str, Any]:
    """Counts of `auto` over the recorded answers, per budget and with the session kept."""
    tokenizer = Tokenizer.from_file(str(reference_path() / "tokenizer.json"))
    rows = list(read_trace(ANSWERS, tokenizer))
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        texts = [json.loads(line)["prompt"] for line in ANSWERS.read_text(encoding="utf-8").splitlines()[-STORED:]]
        source = Path(folder) / "texts.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        build_datastore(Path(folder) / "store", Source(str(source), field="text"), reference_path(), workers=1)
        stores = [open_datastore(Path(folder) / "store", tokenizer=tokenizer)]
        states = {"": (False, []), ", session kept": (True, []), ", store": (False, stores)}
        for nodes in REPLAY_NODES:
            for name, (session, datastores) in states.items():
                drafter: Any = build_drafter(SpeculationConfig(session=session), datastores=datastores)
                result = Replay(drafter, nodes).run(rows[:-STORED] if datastores else rows)
                counts[f"replay, {nodes} nodes{name}"] = {
                    "tokens": result["tokens"],
                    "passes": result["passes"],
                    "nodes": round(result["nodes_per_pass"] * result["passes"]),
                    "accepted_by_source": result["accepted_by_source"],
                }
    return counts


def live() -> dict[str, Any]:
    """Counts of the bundled model's own decoding, per prompt."""
    import retrieve_spec as rs

    model, tokenizer = load_model(device="cpu")
    counts = {}
    for line in ANSWERS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rs.accelerate(model, tokenizer, nodes=LIVE_NODES)
        inputs = tokenizer(row["prompt"], return_tensors="pt")
        output = model.generate(**inputs, **GENERATION)
        text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        if text == row["output"]:
            last = model.speculation.last
            counts[f"live, {row['id']}"] = {
                "tokens": last.new_tokens,
                "passes": last.passes,
                "nodes": last.nodes,
                "accepted_by_source": last.accepted_by_source,
            }
    return counts


def compare(now: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """What got worse than allowed; empty when nothing did.

    Every replay stands alone; live answers are compared together, where both sides have them.
    """
    groups = {name: [name] for name in baseline if name.startswith("replay")}
    groups["live answers"] = [name for name in baseline if name.startswith("live") and name in now]
    failures = []
    for what, names in groups.items():
        if not names or not set(names) <= set(now):
            failures.append(f"{what}: not measured")
        elif (new := rate(now, names)) < (old := rate(baseline, names)) * (1 - ALLOWED_LOSS):
            failures.append(f"{what}: {new:.3f} tokens per pass, {old:.3f} before ({new / old - 1:+.1%})")
    return failures


def rate(counts: dict[str, Any], names: list[str]) -> float:
    """Tokens per pass over several counts."""
    return sum(counts[name]["tokens"] for name in names) / sum(counts[name]["passes"] for name in names)


def main() -> None:
    """Write the counts of today as the new baseline."""
    BASELINE.write_text(json.dumps(replayed() | live(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
