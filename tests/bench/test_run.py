"""`bench run` from the command line to the report, with a tiny model and with the bundled one."""

import json

import pytest
import torch
from found_once import FoundOnce

from retrieve_spec import cli
from retrieve_spec.bench import report as stats
from retrieve_spec.bench import runner
from retrieve_spec.bench.methods import SOURCES, Bench, Method, parse_method
from retrieve_spec.bench.report import Record, read_results, write_report
from retrieve_spec.bench.runner import Plan
from retrieve_spec.bench.workloads import Prompt
from retrieve_spec.errors import ConfigError, TraceError
from retrieve_spec.reference_model import load_model
from retrieve_spec.sources import SOURCE_NAMES

METHODS = "plain,prompt-lookup,off,auto,auto:4"


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "question.jsonl"
    code = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
    rows = [
        {"question_id": 81, "category": "writing", "turns": [code, "\n\ndef side(area, width):\n"]},
        {"question_id": 321, "category": "qa", "turns": ["import os\nimport sys\n\n\ndef main():\n"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module", autouse=True)
def _each_model_is_recorded_once():
    """Though every method accelerates it again."""
    with pytest.MonkeyPatch.context() as patched:

        def load(*arguments, **options):
            model, tokenizer = load_model(*arguments, **options)
            FoundOnce(model).use(patched)
            return model, tokenizer

        patched.setattr(runner, "load_model", load)
        yield


@pytest.fixture(scope="module")
def folder(questions, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "run"
    words = ["--prompts", f"spec-bench:{questions}", "--methods", METHODS, "--max-new-tokens", "12", "--runs", "2"]
    assert cli.run(["bench", "run", *words, "--device", "cpu", "--out", str(out), "--quiet", "--json"]) == 0
    return out


def test_every_pair_is_measured_and_greedy_answers_are_identical(folder):
    _, records = read_results(folder)
    assert len(records) == 2 * 2 * 5
    assert all(record.divergence is None for record in records)
    for record in records:
        assert record.new_tokens == sum(map(len, record.token_ids))
        assert record.seconds > record.first_token_s > 0
        if record.method == "plain":
            assert record.passes == record.new_tokens


def test_a_folder_with_results_is_not_overwritten(folder, questions, capsys):
    words = ["--prompts", f"spec-bench:{questions}", "--methods", METHODS, "--out", str(folder), "--quiet"]
    assert cli.run(["bench", "run", *words]) == 1
    assert "--out" in capsys.readouterr().err


def test_sampled_answers_of_ours_are_identical_and_those_of_transformers_are_not_judged(questions, tmp_path):
    words = ["--prompts", f"spec-bench:{questions}", "--methods", "plain,off,auto", "--max-new-tokens", "12"]
    words += ["--temperature", "0.9", "--top-p", "0.95", "--limit", "1", "--device", "cpu", "--quiet"]
    assert cli.run(["bench", "run", *words, "--out", str(tmp_path / "out")]) == 0
    methods = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]
    assert [methods[name]["identical"] for name in ("plain", "off", "auto")] == [None, 1, 1]


@pytest.mark.parametrize(
    ("name", "kind", "nodes", "ours", "without"),
    [
        ("plain", "plain", None, False, ()),
        ("auto:16", "auto", 16, True, ()),
        ("prompt-lookup:5", "prompt-lookup", 5, False, ()),
        ("ours/prompt-lookup", "prompt-lookup", None, True, ()),
        ("auto~recycling~ngram:16", "auto", 16, True, ("recycling", "ngram")),
    ],
)
def test_names_of_methods(name, kind, nodes, ours, without):
    assert parse_method(name) == Method(name, kind, nodes, ours, without)


def test_auto_can_do_without_each_source_of_a_text():
    """A script is a drafter of its own, and what is forced needs no source."""
    assert SOURCES.keys() == set(SOURCE_NAMES) - {"script", "forced"}


@pytest.mark.parametrize("name", ["plain:3", "off:1", "auto:", "auto:x", "ours/off:2"])
def test_wrong_names_of_methods(name):
    with pytest.raises(ConfigError):
        parse_method(name)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--methods", "plain,plain"], 2, "each method once"),
        (["--methods", "plain,atuo"], 1, "'atuo'"),
        (["--methods", "auto~recyclin"], 1, "'recyclin'"),
        (["--methods", "sam~context"], 1, "another preset"),
        (["--prompts", "/no/such.jsonl"], 1, "/no/such.jsonl"),
    ],
)
def test_unknown_methods_and_prompts_are_explained(tmp_path, capsys, words, code, message):
    assert cli.run(["bench", "run", *words, "--out", str(tmp_path), "--device", "cpu"]) == code
    assert message in capsys.readouterr().err
    with pytest.raises(TraceError):
        write_report(tmp_path)


def test_a_divergence_is_found_where_it_is_and_with_the_gap_there(tmp_path):
    model, tokenizer = load_model(device="cpu")
    bench = Bench(model, tokenizer, [parse_method("plain")], options={"do_sample": False})
    plan = Plan([Prompt("p", "t", ("def f(x):\n    return",))], [parse_method("plain")], max_new_tokens=6)
    theirs = runner.answer(bench, plan, plan.prompts[0], plan.methods[0], 1, [])
    ours = runner.answer(bench, plan, plan.prompts[0], plan.methods[0], 1, [])
    assert runner.divergence(bench, plan, plan.prompts[0], ours, theirs) is None
    ours.token_ids[0][3] += 1
    found = runner.divergence(bench, plan, plan.prompts[0], ours, theirs)
    ids = tokenizer(plan.prompts[0].turns[0], return_tensors="pt")["input_ids"][0].tolist() + theirs.token_ids[0][:3]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    gap = logits[theirs.token_ids[0][3]] - logits[ours.token_ids[0][3]]
    assert (found["turn"], found["position"]) == (0, 3)
    assert found["gap"] == pytest.approx(abs(float(gap)), rel=1e-4)


def test_plain_is_the_untouched_generate_whatever_the_instance_carries():
    model, tokenizer = load_model(device="cpu")
    ids = tokenizer("def f(x):\n", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    methods = [parse_method("plain"), parse_method("auto")]
    bench = Bench(model, tokenizer, methods, options={"do_sample": False})
    model.generate = lambda *a, **k: pytest.fail("the instance's generate was called")
    generation = bench.generate(methods[0], ids, max_new_tokens=6)
    assert generation.token_ids == expected
    assert generation.passes == 6
    assert not model._forward_pre_hooks


def record(run, prompt, method, tokens, seconds, *, task="writing", passes=10, looping=False, **more):
    ids = [list(range(tokens))]
    return Record(
        run, prompt, task, method, new_tokens=tokens, token_ids=ids, seconds=seconds, first_token_s=seconds / 10,
        passes=passes, looping=looping, **more,
    )  # fmt: skip


HEADER = {"methods": ["plain", "auto"], "runs": 2}


@pytest.fixture
def records():
    made = []
    for run, noise in ((1, 1.0), (2, 2.0)):  # the machine is half as fast in run 2: ratios within a run do not see it
        made += [record(run, "a", "plain", 100, 1.0 * noise), record(run, "a", "auto", 100, 0.5 * noise)]
        made += [record(run, "b", "plain", 100, 1.0 * noise), record(run, "b", "auto", 100, 0.25 * noise)]
        made += [record(run, "c", "plain", 100, 1.0 * noise), record(run, "c", "auto", 100, 2.0 * noise, looping=True)]
    return made


def test_summary_of_known_figures(records):
    summary = stats.summarise(HEADER, records)
    auto = summary["methods"]["auto"]
    assert stats.ratios(records, "auto", "plain") == {"a": 2.0, "b": 4.0, "c": 0.5}
    assert sum(summary["methods"]["plain"]["split_ms_per_token"].values()) == pytest.approx(15.0)
    assert summary["baseline"] == "plain"
    assert auto["speedup"]["value"] == 2.0
    assert auto["not_looping"]["speedup"]["value"] == 3.0
    assert auto["speedup_pooled"] == pytest.approx(3 / 2.75)
    assert auto["tokens_per_pass"] == 10.0
    assert auto["identical"] == auto["answers"] == 6
    assert [(e["prompt"], e["ratio"], e["looping"]) for e in summary["losing"]] == [("c", 0.5, True)]
    assert list(auto["by_task"]) == ["mt_bench"]
