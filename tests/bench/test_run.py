"""`bench run` from the command line to the report, with a tiny model and with the bundled one."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from retrieve_spec import cli
from retrieve_spec.bench import cli_run, runner
from retrieve_spec.bench.chart import speedups
from retrieve_spec.bench.machine import peak_memory_bytes, reset_peak_memory
from retrieve_spec.bench.methods import Bench, parse_method
from retrieve_spec.bench.report import markdown, write_report
from retrieve_spec.bench.results import ResultsFolder, read_header, read_records
from retrieve_spec.bench.runner import Plan
from retrieve_spec.bench.specbench import answer_line
from retrieve_spec.bench.stats import summarise
from retrieve_spec.bench.workloads import Prompt
from retrieve_spec.errors import ConfigError, TraceError
from retrieve_spec.reference_model import load_model

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


@pytest.fixture(scope="module")
def folder(questions, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "run"
    words = ["--prompts", f"spec-bench:{questions}", "--methods", METHODS, "--max-new-tokens", "24", "--runs", "2"]
    assert cli.run(["bench", "run", *words, "--device", "cpu", "--out", str(out), "--quiet", "--json"]) == 0
    return out


def test_every_pair_is_measured_and_greedy_answers_are_identical(folder):
    records = read_records(folder)
    assert len(records) == 2 * 2 * 5
    assert all(record.divergence is None for record in records)
    for record in records:
        assert record.new_tokens == sum(map(len, record.token_ids))
        assert record.passes == sum(record.turn_passes)
        assert record.seconds > record.first_token_s > 0
        if record.method == "plain":
            assert record.passes == record.new_tokens
        if record.method.startswith("auto"):
            assert record.passes == len(record.per_pass) + len(record.token_ids)
            assert record.new_tokens == sum(1 + a for _, a, *_ in record.per_pass) + len(record.token_ids)
        if record.method == "auto:4":
            assert max(nodes for nodes, *_ in record.per_pass) <= 4


def test_the_report_has_all_its_files(folder):
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["methods"]) == set(METHODS.split(","))
    assert summary["methods"]["auto"]["identical"] == 4
    markdown = (folder / "report.md").read_text()
    assert markdown.index("Where it loses") < markdown.index("## Methods")
    assert read_header(folder)["command"] in markdown
    lines = list(csv.DictReader((folder / "prompts.csv").open(newline="")))
    records = read_records(folder)
    assert [(line["prompt"], line["method"]) for line in lines] == [(r.prompt, r.method) for r in records]
    for line, record in zip(lines, records, strict=True):
        assert float(line["tokens_per_pass"]) == pytest.approx(record.new_tokens / record.passes, abs=1e-4)
        assert float(line["wall_ms"]) == pytest.approx(record.seconds * 1e3, abs=1e-3)
        assert (line["verify_ms"] == "") is (record.method in ("plain", "prompt-lookup"))
    assert "](speedup.svg)" in markdown and (folder / "speedup.svg").read_text().startswith("<svg ")
    for title in ("Passes by accepted tokens", "Is the expectation right?", "What a pass costs", "Where the time goes"):
        assert f"## {title}\n" in markdown, title


def test_prompts_and_tasks_may_be_called_anything(folder):
    header, records = read_header(folder), read_records(folder)
    odd = "a|b `c` <i>d</i>\n*e*\x00\x1b&amp; ~f~"
    records = [replace(r, prompt=r.prompt + odd, task=r.task + odd) for r in records]
    summary = summarise(header | {"stores": {"my|store": 1}}, records)
    lines = markdown(summary).split("\n")
    widths = [[len(re.split(r"(?<!\\)\|", line)) for line in lines[i : i + 3]] for i, line in enumerate(lines)]
    tables = [w for i, w in enumerate(widths) if lines[i + 1 : i + 2] and lines[i + 1].startswith("|---")]
    assert len(tables) > 5 and all(head == rule == row for head, rule, row in tables)
    assert r"a\|b \`c\` \<i>d\</i> \*e\* \&amp; \~f\~" in "\n".join(lines)
    assert "".join(lines).isprintable()
    assert "a|b `c` <i>d</i> *e* &amp; ~f~" in "".join(ElementTree.fromstring(speedups(summary)).itertext())


def test_answer_files_read_as_spec_bench_reads_them(folder):
    lines = [json.loads(line) for line in (folder / "answers" / "auto.run-1.jsonl").read_text().splitlines()]
    assert [line["question_id"] for line in lines] == [81, 321]
    speeds, lengths = [], []
    for line in lines:  # the arithmetic of its speed.py
        choice = line["choices"][0]
        speeds.append(sum(choice["new_tokens"]) / sum(choice["wall_time"]))
        lengths += choice["accept_lengths"]
        assert len(choice["turns"]) == len(choice["new_tokens"]) == len(choice["decoding_steps"])
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
        assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    assert min(speeds) > 0
    assert min(lengths) >= 1
    looked_up = next(r for r in read_records(folder) if r.method == "prompt-lookup")
    choice = answer_line(looked_up, read_header(folder))["choices"][0]
    assert sum(choice["accept_lengths"]) == looked_up.new_tokens


def test_spec_benchs_own_speed_up_is_what_its_script_makes_of_the_answer_files(folder):
    _, tokenizer = load_model(device="cpu")

    def choices(method, run):
        file = folder / "answers" / f"{method}.run-{run}.jsonl"
        return [json.loads(line)["choices"][0] for line in file.read_text().splitlines()]

    ratios = []
    for run in (1, 2):  # get_mean_speedup: the mean over runs of what speed() gives for each
        fast = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices("auto", run)]
        plain = choices("plain", run)
        counts = [sum(len(tokenizer(turn).input_ids) - 1 for turn in choice["turns"]) for choice in plain]
        slow = [count / sum(choice["wall_time"]) for count, choice in zip(counts, plain, strict=True)]
        ratios.append((sum(fast) / len(fast)) / (sum(slow) / len(slow)))
    expected = sum(ratios) / len(ratios)
    found = json.loads((folder / "summary.json").read_text())["methods"]["auto"]
    assert found["speedup_spec_bench"] == pytest.approx(expected)
    assert found["speedup_spec_bench"] > found["speedup_means"]  # it takes tokens from the baseline
    assert f"| auto | {expected:.3f} |" in (folder / "report.md").read_text()


def test_memory_is_that_of_the_answer(folder):
    for record in read_records(folder):
        assert record.memory["resident"] > 100e6
    before = bytearray(300 << 20)
    before[::4096] = b"x" * len(before[::4096])
    high = peak_memory_bytes()["resident"]
    del before
    reset_peak_memory()
    assert peak_memory_bytes()["resident"] < high - (200 << 20)


def test_a_folder_with_results_is_not_overwritten(folder, questions, capsys):
    words = ["--prompts", f"spec-bench:{questions}", "--methods", METHODS, "--out", str(folder), "--quiet"]
    assert cli.run(["bench", "run", *words]) == 1
    assert "--resume" in capsys.readouterr().err
    assert cli.run(["bench", "run", *words, "--resume", "--seed", "5"]) == 1
    assert "of the interrupted run" in capsys.readouterr().err


def test_an_interrupted_run_keeps_what_is_done_and_goes_on(questions, tmp_path, monkeypatch, capsys):
    words = ["bench", "run", "--prompts", f"spec-bench:{questions}", "--methods", "plain,auto", "--max-new-tokens", "8"]
    words += ["--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]
    real, calls = runner.answer, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(runner, "answer", interrupted)
    assert cli.run(words) == 130
    assert "--resume" in capsys.readouterr().err
    kept = read_records(tmp_path / "out")
    assert len(kept) == 2
    with open(tmp_path / "out" / "results.jsonl", "a") as file:
        file.write('{"run": 1, "prompt"')  # cut off in the middle of a line
    monkeypatch.setattr(runner, "answer", real)
    assert cli.run([*words, "--resume"]) == 0
    records = read_records(tmp_path / "out")
    assert len(records) == 4
    assert records[:2] == kept
    header = read_header(tmp_path / "out")
    assert header["resumed_on"]
    assert header["machine"].get("others", 0.0) >= 0.0
    assert cli.run([*words, "--resume", "--template", "vicuna"]) == 1
    assert "the template of the interrupted run" in capsys.readouterr().err


def test_results_of_two_commits_name_both(tmp_path):
    header = {"command": "first", "machine": {"commit": "a", "date": "1"}, "methods": ["plain"]}
    ResultsFolder(tmp_path / "out", header)
    for commit, expected in (("a", "a"), ("b", "a, then b"), ("b", "a, then b")):
        new = {**header, "command": "second", "machine": {"commit": commit, "date": "2"}}
        assert ResultsFolder(tmp_path / "out", new, resume=True).header["machine"]["commit"] == expected
    assert read_header(tmp_path / "out")["command"] == "first"


def test_methods_rotate_and_the_reference_begins_conversations():
    methods = [parse_method(name) for name in ("auto", "plain", "off")]
    single, talk = Prompt("s", "t", ("x",)), Prompt("t", "t", ("x", "y"))
    orders = [[m.name for m in order] for _, _, order in Plan([single, single, talk], methods, runs=2).groups()]
    assert orders[0] == ["auto", "plain", "off"]
    assert orders[1] == ["plain", "off", "auto"]
    assert orders[3] == ["plain", "off", "auto"]
    assert orders[2][0] == orders[5][0] == "plain"
    sampled = Plan([single], methods, sampled=True)
    assert sampled.reference.name == "off"
    assert [sampled.comparable(method) for method in methods] == [True, False, True]
    assert Plan([single], methods[:2], sampled=True).reference.name == "auto"


def test_sampled_answers_of_ours_are_identical_and_those_of_transformers_are_not_judged(questions, tmp_path):
    words = ["--prompts", f"spec-bench:{questions}", "--methods", "plain,off,auto", "--max-new-tokens", "12"]
    words += ["--temperature", "0.9", "--top-p", "0.95", "--limit", "1", "--device", "cpu", "--quiet"]
    assert cli.run(["bench", "run", *words, "--out", str(tmp_path / "out")]) == 0
    methods = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"]
    assert [methods[name]["identical"] for name in ("plain", "off", "auto")] == [None, 1, 1]


@pytest.mark.parametrize(
    ("name", "kind", "nodes", "ours"),
    [
        ("plain", "plain", None, False),
        ("auto:16", "auto", 16, True),
        ("prompt-lookup", "prompt-lookup", None, False),
        ("prompt-lookup:5", "prompt-lookup", 5, False),
        ("ours/prompt-lookup:5", "prompt-lookup", 5, True),
    ],
)
def test_names_of_methods(name, kind, nodes, ours):
    method = parse_method(name)
    assert (method.kind, method.nodes, method.ours) == (kind, nodes, ours)


def test_a_method_can_do_without_sources():
    method = parse_method("auto~recycling~ngram:16")
    assert (method.kind, method.without, method.nodes, method.ours) == ("auto", ("recycling", "ngram"), 16, True)


@pytest.mark.parametrize("name", ["plain:3", "off:1", "auto:", "auto:x", "ours/off:2"])
def test_wrong_names_of_methods(name):
    with pytest.raises(ConfigError):
        parse_method(name)


def test_unknown_methods_and_prompts_are_explained(tmp_path, capsys):
    assert cli.run(["bench", "run", "--methods", "plain,plain", "--out", str(tmp_path)]) == 2
    assert cli.run(["bench", "run", "--methods", "plain,atuo", "--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "'atuo'" in capsys.readouterr().err
    assert cli.run(["bench", "run", "--methods", "auto~recyclin", "--out", str(tmp_path), "--device", "cpu"]) == 1
    assert "'recyclin'" in capsys.readouterr().err
    assert cli.run(["bench", "run", "--prompts", "/no/such.jsonl", "--out", str(tmp_path)]) == 1
    assert "/no/such.jsonl" in capsys.readouterr().err
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
        top = model(torch.tensor([ids])).logits[0, -1].topk(2)
    assert top.indices[0] == theirs.token_ids[0][3]
    assert (found["turn"], found["position"]) == (0, 3)
    assert found["gap"] == pytest.approx(float(top.values[0] - top.values[1]), rel=1e-4)


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


def test_what_a_state_policy_forgets(monkeypatch, tmp_path):
    forgotten = []
    methods = [parse_method("auto")]
    prompts = [Prompt(str(i), "t", ("x",)) for i in range(2)]

    class Fake:
        def forget(self, method):
            forgotten.append(method.name)

    monkeypatch.setattr(runner, "answer", lambda b, plan, p, m, run, said: runner.Record(run, p.name, p.task, m.name))
    monkeypatch.setattr(runner, "divergence", lambda *args: None)
    counts = {}
    for state in ("cold", "session", "shared"):
        forgotten.clear()
        header = {"methods": ["auto"], "machine": {"date": ""}}
        folder = ResultsFolder(tmp_path / state, header)
        runner.measure(Fake(), Plan(prompts, methods, runs=2, state=state), folder, lambda records: None)
        counts[state] = len(forgotten)
    assert counts == {"cold": 4, "session": 4, "shared": 2}


def test_progress_counts_prompts(capsys):
    with cli_run.Progress(2, 0, quiet=True) as progress:
        progress([runner.Record(1, "p", "t", "plain", new_tokens=10, seconds=2.0)])
    assert progress.sums == {"plain": [10.0, 2.0]}
