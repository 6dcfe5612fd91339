"""Recorded answers with logits: what is kept is what the model says, and a replay takes the passes of the model."""

import numpy as np
import pytest
import torch

import retrieve_spec as rs
from retrieve_spec.bench.methods import FreshDrafter, sampling
from retrieve_spec.bench.recording import TOP, LogitTrace, record
from retrieve_spec.bench.replay import Replay
from retrieve_spec.bench.workloads import Prompt
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.engine import bigrams as model_bigrams

CODE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
PROMPTS = [
    Prompt("two turns", "writing", (CODE, "\n\ndef side(area, width):\n")),
    Prompt("one", "qa", ("import os\nimport sys\n\n\ndef main():\n",)),
]
NODES, LENGTH = 24, 40


@pytest.fixture(autouse=True)
def _same_bigrams(tmp_path, monkeypatch):
    """A model is asked for all its bigrams, however long it takes."""
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_bigrams, "SECONDS", 60.0)


def recorded(model, tokenizer, temperature=0.0, nodes=(NODES,)):
    return record(model, tokenizer, PROMPTS, nodes=nodes, max_new_tokens=LENGTH, **sampling(temperature, 0.9))


def passes_of_model(model, tokenizer, trace, temperature):
    rs.accelerate(model, tokenizer, drafter=FreshDrafter(SpeculationConfig(), tokenizer=tokenizer), nodes=NODES)
    found = []
    for row in trace.rows:
        torch.manual_seed(0)
        ids = torch.as_tensor(row.prompt, dtype=torch.long)[None]
        text = model.generate(ids, max_new_tokens=LENGTH, **sampling(temperature, 0.9))
        assert text[0, ids.shape[1] :].tolist() == row.segments[0][0].tolist()
        found.append(model.speculation.last.passes)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replay_takes_the_passes_of_the_model(reference_model, reference_tokenizer, tmp_path, temperature):
    trace = recorded(reference_model, reference_tokenizer, temperature)
    trace.save(tmp_path / "trace.npz")
    again = LogitTrace.load(tmp_path / "trace.npz", reference_tokenizer)
    fresh = FreshDrafter(SpeculationConfig(), tokenizer=reference_tokenizer)
    fresh.bigrams = again.bigrams
    replay = Replay(fresh, NODES)
    replayed = [replay.run([row])["passes"] for row in again.rows]
    live = np.cumsum(passes_of_model(reference_model, reference_tokenizer, trace, temperature))
    np.testing.assert_allclose(replayed, live, atol=1)  # the last draft of an answer may be deeper
    assert replay.result()["accepted_by_source"].get("recycling", 0) > 0


def test_contexts_hold_what_the_model_says_there(reference_model, reference_tokenizer):
    trace = recorded(reference_model, reference_tokenizer, nodes=(8, NODES))
    rs.restore(reference_model)
    row = trace.rows[-1]
    contexts, end, wrong_turns = trace.contexts, row.shown.end, 0
    for at in np.flatnonzero(np.isfinite(contexts.top_logits[:, 0])).tolist():
        path, above = [int(contexts.token[at])], int(contexts.parent[at])
        while above >= 0 and above != end:
            path.insert(0, int(contexts.token[above]))
            above = int(contexts.parent[above])
        if above != end or at % 7:
            continue
        wrong_turns += path != row.segments[0][0][: len(path)].tolist()
        ids = torch.as_tensor([*row.prompt.tolist(), *path], dtype=torch.long)
        with torch.no_grad():
            best = reference_model(ids[None]).logits[0, -1].topk(TOP)
        np.testing.assert_allclose(contexts.top_logits[at], best.values.numpy(), atol=1e-3)
        assert contexts.top_ids[at, 0] == best.indices[0]
    assert wrong_turns > 10
