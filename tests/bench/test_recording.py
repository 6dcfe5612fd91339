"""Recorded answers with logits: what is kept is what the model says, and a replay takes the passes of the model."""

import json

import numpy as np
import pytest
import torch

import retrieve_spec as rs
from retrieve_spec import cli
from retrieve_spec.bench.methods import FreshDrafter, sampling
from retrieve_spec.bench.recording import TOP, LogitTrace, record
from retrieve_spec.bench.replay import Replay
from retrieve_spec.bench.workloads import Prompt
from retrieve_spec.config import DenseConfig, SpeculationConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.engine import bigrams as model_bigrams
from retrieve_spec.errors import TokenizerMismatchError, TraceError

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


def test_dense_indexes_are_looked_into_by_recorded_states(reference_model, reference_tokenizer, tmp_path, capsys):
    questions, text = tmp_path / "questions.jsonl", tmp_path / "text.py"
    questions.write_text(json.dumps({"prompt": CODE}))
    text.write_text(CODE + "    return width * height * depth\n\n\n" + CODE)
    config = StoreConfig(dense=DenseConfig("reference", dims=32))
    build_datastore(tmp_path / "store", str(text), reference_tokenizer, config=config)
    words = ["--prompts", str(questions), "--nodes", "16", "--max-new-tokens", "24", "--device", "cpu", "--quiet"]

    def looked_up(*hidden):
        out = tmp_path / "trace.npz"
        assert cli.run(["bench", "record", *words, *hidden, "--out", str(out)]) == 0
        return LogitTrace.load(out, reference_tokenizer), ["bench", "replay", str(out), "--tokenizer", "reference"]

    trace, replay = looked_up("--hidden", "last")
    (row,) = trace.rows
    whole = torch.as_tensor([*row.prompt.tolist(), *row.segments[0][0].tolist()])[None]
    with torch.no_grad():
        wanted = reference_model(whole, output_hidden_states=True).hidden_states[-1][0, len(row.prompt) - 1 : -1]
    np.testing.assert_allclose(row.shown.states, wanted.numpy(), atol=0.02, rtol=0.01)
    options = ["--store", str(tmp_path / "store"), "--json", "--quiet", "--draft", "dresd"]
    counts = []
    for hidden in (("--hidden", "last"), ()):
        _, replay = looked_up(*hidden)
        capsys.readouterr()
        assert cli.run([*replay, *options]) == 0
        counts.append(json.loads(capsys.readouterr().out.splitlines()[-1])["accepted_by_source"].get("dense", 0))
    assert counts[0] > 0 == counts[1]
    _, replay = looked_up("--hidden", "1")
    assert cli.run([*replay, *options]) == 1 and "--hidden last" in capsys.readouterr().err
    assert cli.run(["bench", "record", *words, "--hidden", "99", "--out", str(tmp_path / "x.npz")]) == 1
    assert "from 1 to" in capsys.readouterr().err


def test_other_files_and_tokenizers_are_refused(reference_model, reference_tokenizer, tmp_path):
    whole, cut = tmp_path / "trace.npz", tmp_path / "cut.npz"
    recorded(reference_model, reference_tokenizer).save(whole)
    other = tmp_path / "tokenizer.json"
    pipeline = json.loads(reference_tokenizer.backend_tokenizer.to_str())
    pipeline["model"]["vocab"] |= {"never a word": len(pipeline["model"]["vocab"])}
    other.write_text(json.dumps(pipeline))
    with pytest.raises(TokenizerMismatchError, match="Name that of their model"):
        LogitTrace.load(whole, other)
    cut.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(TraceError, match="bench record"):
        LogitTrace.load(cut, reference_tokenizer)
    for place in range(100, whole.stat().st_size - 200, 997):
        damaged = bytearray(whole.read_bytes())
        damaged[place] ^= 255
        cut.write_bytes(damaged)
        with pytest.raises(TraceError, match="bench record"):
            LogitTrace.load(cut, reference_tokenizer)
    np.savez(cut, tokens=np.zeros(3))
    with pytest.raises(TraceError, match="bench record"):
        LogitTrace.load(cut, reference_tokenizer)
