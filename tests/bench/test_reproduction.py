"""Every part of the reproduction asks for what the program offers, goes on where it was, and becomes a table."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from retrieve_spec import cli
from retrieve_spec.bench import chart

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        names = ("reproduction", "measuring", "blocks", "pictures")
        yield tuple(importlib.import_module(name) for name in names)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def speed(value):
    return {"value": value, "low": value, "high": value, "prompts": 1}


def summary(words):
    """What `bench run --json` prints, with figures that do not matter."""
    names = words[words.index("--methods") + 1].split(",")
    figures = {
        "speedup": speed(1.5), "over_off": speed(1.2), "not_looping": {"speedup": speed(1.5)}, "speedup_pooled": 1.5,
        "tokens_per_second": speed(100.0), "tokens_per_pass": 2.0, "nodes_per_pass": 3.0, "identical": 1, "answers": 1,
        "ms_per_token": speed(1.0), "first_token_ms": speed(1.0), "split_ms_per_token": {"prefill": 1.0},
        "peak_memory_bytes": {"resident": 10**9}, "divergences": [], "accepted_by_source": {"context": 1},
        "new_tokens": 10,
    }  # fmt: skip
    by_task = {task: {"speedup": speed(1.5), "tokens_per_pass": 2.0} for task in ("edit", "prose")}
    packages = {"torch": "1", "transformers": "1"}
    machine = {
        "processor": "x", "cores": 2, "torch_threads": 2, "packages": packages, "python": "3", "commit": "c+",
        "date": "d", "load": 2.5,
    }  # fmt: skip
    header = {"command": "a command", "machine": machine, "prompts": "builtin", "cost_curves": {"auto": [1.0]}}
    methods = {name: {**figures, "by_task": by_task} for name in names}
    losing = [{"prompt": "p", "task": "prose", "method": "auto", "ratio": 0.9, "looping": True}]
    theirs = {"prompt": "p", "task": "prose", "method": "prompt-lookup", "ratio": 0.5, "looping": False}
    return {"header": header, "baseline": names[0], "methods": methods, "prompts": 1, "losing": [*losing, theirs],
            "slower_than_off": losing}  # fmt: skip


TIMES = {what: {"p50": 1.0, "p99": 2.0} for what in ("propose_us", "observe_us", "pass_us")}
MACHINE = {
    "processor": "x", "cores": 2, "torch_threads": 1, "packages": {"torch": "1", "transformers": "1"}, "python": "3",
    "commit": "c", "date": "d", "load": 0.1, "others": 0.9,
}  # fmt: skip
STEP = {"p50_us": 1.0, "p90_us": 2.0, "p99_us": 3.0, "mean_match": 4.0, "steps_that_fell_off": 0.5}
OPEN = {"first_ms": 3.0, "median_ms": 1.0}
BUILT = {
    "tokens_per_second": 5e5, "seconds": 4.0, "cpu_seconds": 3.0, "stages": {"reading": 2.0, "indexing": 1.0},
    "memory_gb": 0.5,
}  # fmt: skip
INDEX = {
    "index": "hnsw", "recall_at_10": 0.9, "query_ms": {"p50": 1.0, "p99": 2.0}, "key_bytes": None,
    "bytes_per_vector": 53.2, "build_s": 1.0,
}  # fmt: skip
TYPED = {
    "requests": 5, "latency_ms": {"p50": 1.0, "p95": 2.0}, "outside_model_ms": {"p50": 0.5, "p95": 0.6},
    "visible_characters": {"150": 7.0, "250": 8.0},
}  # fmt: skip
GIVEN = {
    "tokens_per_second": 30.0, "speedup": speed(1.5), "speedup_pooled": 1.5, "after_prompt_pooled": 1.75,
    "slower_than_plain": 0, "same": 1,
}  # fmt: skip
SCRIPTS = {
    "scripts/bench_batches.py": {
        "batches": [{"rows": 2, "temperature": t, "auto": {"ratio": 1.5}, "off": {"ratio": 1.6}} for t in (0.0, 1.0)],
        "arrivals": {"requests": 4, "within_s": 2.0, "auto": dict.fromkeys(("total_s", "p50_s", "p95_s"), 1.0)},
        "new_tokens": 16,
    },
    "scripts/bench_rollouts.py": {
        "epochs": [{"temperature": 1.0, "prompts": 2, "plain": [{"seconds": 3.0}], **{
            name: [{"seconds": 1.5, "ratio": 2.0, "tokens_per_pass": 4.0}] for name in ("siblings", "memory")}}],
        "stragglers": [{"temperature": 1.0, "rows": 4, **{
            name: {"seconds": 2.0, "tail_s": 1.0} for name in ("plain", "drafts")}}],
    },
    "scripts/record_terminal.py": {
        "file": "a.py", "identical": True, "tokens_per_pass": 2.0, "runs": [
            {"title": title, "tokens": 2, "seconds": 1.0, "lines": [["<a & b>", 0.5], ["", 1.0]]} for title in "ab"]},
    "scripts/bench_pass.py": {"passes": [{"context": 256, "pass": "plain", "ms": 2.0, "ratio": 1.0},
                                         {"context": 256, "pass": "static 4", "ms": 1.5, "ratio": 0.75},
                                         {"context": 256, "pass": "ordinary 4", "ms": 2.5, "ratio": 1.25}]},
    "scripts/bench_recorded.py": {
        "answers": 1, "new_tokens": 64, "prompt_tokens": 99,
        "sizes": {"0.1b": {"parameters": 125 * 10**6, "methods": {
            "plain": {**GIVEN, "speedup": speed(1.0)}, "prompt-lookup": {**GIVEN, "speedup": speed(0.9)}, "off": GIVEN,
            "auto": {**GIVEN, "tokens_per_pass": 2.0, "nodes_per_pass": 4.0}}}},
    },
    "scripts/bench_edits.py": {
        "parameters": 125 * 10**6, "files": {"a.jsonl": {"edits": 2, "characters": 90, "variants": {"prediction": {
            **GIVEN, "characters_per_second": 50.0, "tokens_per_pass": 7.0}}}},
    },
    "scripts/bench_datastore.py": {
        "corpus": {"tokens": 10**8, "real_tokens": 10**6}, "open": OPEN, "step": STEP,
        "store": {"tokens_per_second": 2e6, "exact_bytes_per_token": 6.1, "ngram_share_of_exact": 0.24},
        "many_segments": {"segments": 2, "tokens": 20, "bytes": 10**9, "open": OPEN, "step": {"1": STEP, "2": STEP},
                          "manifest_ms": 8.0, "planning": {"seconds": 1.0, "segments": 1.0, "memory_gb": 0.14}},
        "peers": {"suffix_array": {"bytes_per_token": 6.2, "tokens_per_second": 2e6, **STEP},
                  "suffix_decoding": {"skipped": "ImportError: none"}},
    },
    "scripts/bench_store_changes.py": {
        "build": {"tokens": 10**6, "documents": 300, "segments": 2, "same": True, "workers": {
            "1": BUILT, "2": {**BUILT, "seconds": 2.0}}},
        "sorting": {"tokens_per_second": 12e6}, "remove": {"seconds": 0.5}, "sync": {"files": 300, "seconds": 0.25},
    },
    "scripts/bench_dense.py": {
        "vectors": 1000, "dims": 64, "variance_kept": 0.6, "queries": 10, "hidden_size": 384, "indexes": [INDEX],
        "states_per_second": 3400.0, "thinning": [{"keys": "none", "share": 0.0, "with_exact": 0.5}],
    },
    "scripts/bench_typing.py": {
        "drafting": TYPED, "typed_with_real_gaps": {"drafting": {"answered": 3, "replaced": 1}},
        "looping_requests": 4, "visible_ratio": {"250": 2.5}, "visible_ratio_without_loops": {"250": None},
        "setup": {"files": ["a.py"], "package": "uvicorn"},
        "overhead_ms": {"uvicorn": {**{part: {"p50": 1.0, "p95": 2.0} for part in
                                       ("read", "prompt", "drafts", "answer", "total")},
                                    "workspace": {"files": 3, "characters": 10**6}}},
    },
    "tools/compare/compare.py": {
        "machine": MACHINE, "peers": ["p==1"], "command": "compare", "files": {
            "f": {"rows": 1, "tokens": 2, "known_tokens": 3, "tokenizer": "t",
                  "drafters": {"ours: auto": {"tokens_per_pass": 2.0, "nodes_per_pass": 4.0,
                                              "expected_tokens_per_pass": 1.9, **TIMES}}}
        },
    },
}  # fmt: skip
"""Last lines of the scripts that parts run."""


PARTIAL = ("thinning", "expectation", "speedup", "replayed-models", "losing-slower", "losing-elsewhere")
"""Blocks beside another one, or linked to one, that has their command."""

ELSEWHERE = {"census", "census-counts", "vllm", "vllm-replay"}
"""Measured by tests, or where engines of others are installed."""


def read_by_tables(scripts, monkeypatch):
    """Names of the data files that tables ask for."""
    *_, blocks, pictures = scripts
    names = set()
    whole = blocks.measured

    def noted(name, part=""):
        names.add(name)
        return whole(name, part)

    for module in (blocks, pictures):
        monkeypatch.setattr(module, "measured", noted)
    for make in [*blocks.BLOCKS.values(), pictures.pictures]:
        make()
    return names


@pytest.fixture
def asked(scripts, tmp_path, monkeypatch):
    """Commands that parts would run, checked against the program's options; nothing is measured."""
    reproduction, measuring, blocks, _ = scripts
    monkeypatch.setattr(measuring, "OUT", tmp_path / "out")
    monkeypatch.setattr(measuring, "DATA", tmp_path / "data")
    monkeypatch.setattr(measuring, "TRIAL", tmp_path / "trial")
    monkeypatch.setattr(blocks, "DATA", tmp_path / "data")
    monkeypatch.setattr(reproduction.os, "chdir", lambda path: None)
    monkeypatch.setattr(measuring, "suffix_decoding", contextlib.nullcontext)  # it would be fetched and built
    commands = []

    def tool(program, *words):
        commands.append([program, *words])
        if program != "retrieve-spec":
            command = {"machine": MACHINE, "command": f"python {program}"}
            return json.dumps({**command, **SCRIPTS.get(program, {})})
        parse(words)
        if words[:2] == ("bench", "report"):
            return json.dumps(summary(["--methods", "plain,auto"]))
        if words[0] == "build":
            Path(words[1]).mkdir(parents=True)
            (Path(words[1]) / "manifest.json").write_text("{}")
            return ""
        figures = {
            "tokens_per_pass": 2.0,
            "expected_tokens_per_pass": 2.1,
            "nodes_per_pass": 8.0,
            "accepted_by_source": {"context": 3},
        }
        figures["propose_us"] = {"p50": 1.0, "p99": 2.0}
        if "--epochs" in words:
            epochs = [{**figures, "tokens": 1000, "tokens_per_pass": rate} for rate in (2.0, 3.0)]
            alone = [epochs[0], epochs[0]]
            return json.dumps({"epochs": {"groups": 3, "samples": 2, "siblings": alone, "memory": epochs}})
        if "--siblings" in words:
            both = {"off": {**figures, "tokens": 1000}, "share": {**figures, "tokens": 1000, "tokens_per_pass": 2.5}}
            return json.dumps({"siblings": {"8": {"groups": 3, **both, "gain": 0.25}}})
        return json.dumps(summary(words) if words[1] == "run" else figures)

    monkeypatch.setattr(measuring, "tool", tool)
    return commands


def parse(words):
    """Fail where the program would not take the words."""
    command, context = cli.cli, click.Context(cli.cli, **cli.cli.context_settings)
    rest = list(words)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        command = command.get_command(context, name)
        assert command is not None, name
    command.make_context("retrieve-spec", [word for word in rest if word != "--json"], parent=context)


def run(scripts, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["reproduce", *words])
    scripts[0].main()


def test_the_list_names_every_part_with_its_time(scripts, monkeypatch, capsys):
    run(scripts, monkeypatch, "list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*scripts[0].PARTS, "all"]
    assert all(line.split()[2] == "min" for line in lines)


def test_parts_ask_for_what_there_is_and_become_tables(scripts, asked, monkeypatch, tmp_path):
    _, measuring, blocks, pictures = scripts
    for name in measuring.FILES.values():
        (tmp_path / name).write_text(json.dumps({"prompt": "a", "output": "b"}))
    given = ["--traces", str(tmp_path), "--tokenizer", str(tmp_path / "t.json"), "--native", "specbench*=v.json"]
    run(scripts, monkeypatch, "all", *given)
    programs = {command[0] for command in asked}
    assert {"tools/compare/compare.py", "scripts/bench_pass.py", "scripts/generate_docs.py"} <= programs
    text = {name: make() for name, make in blocks.BLOCKS.items() if name not in ELSEWHERE}
    for part in blocks.RUNS:
        assert "Not measured" not in text[part]
        assert text[part].index("**Where it loses.**") < text[part].index("**Methods.**")
        assert "a command" in text[part]
        assert "| p | prose (loops) | auto |" in text[part]
        assert "| p | prose | prompt-lookup |" not in text[part], "a competitor's losses are not ours"
    assert "busy (load 2.5 at the start" in text["reference"]
    assert "changes that are not committed" in text["reference"]
    assert "busy (other processes took 0.90 cores" in text["compare"]
    for name, lines in SHOWN.items():
        for line in lines.splitlines():
            assert line in text[name], name
    assert "2.50 times as many" not in text["typing"]  # all loop
    assert ">1.50</text>" in pictures.larger() and ">2.00</text>" not in pictures.larger()
    assert ">epoch 2</text>" in pictures.epochs()
    for name, found in text.items():
        assert "Not measured" not in found, name
        commands = ("`python scripts/", "`retrieve-spec bench", "`a command`", "`compare`")
        assert name in PARTIAL or any(command in found for command in commands), name
    assert {path.stem for path in (tmp_path / "data").glob("*.json")} == read_by_tables(
        scripts, monkeypatch
    ) - ELSEWHERE
    assert "cost_curves" not in json.loads((tmp_path / "data" / "reference-t0.json").read_text())["header"]
    replays = [command for command in asked if command[1:3] == ["bench", "replay"]]
    native = [command for command in replays if measuring.FILES["spec_bench"] in command[3]]
    assert native and all(any(word.endswith("v.json") for word in command) for command in native)
    assert not any(str(Path.cwd()) in path.read_text() for path in (tmp_path / "data").glob("*.json"))
    made = [sorted(as_published(command, tmp_path).split()) for command in asked]
    for command in published_commands():
        assert sorted(command.split()) in made, command


def published_commands():
    """Commands of the figures that parts measure."""
    found = set()
    for path in (ROOT / "docs" / "data").glob("*.json"):
        if path.stem not in ELSEWHERE:
            made = json.loads(path.read_text())
            found.add(made.get("header", made)["command"])
    return found


def as_published(command, folder):
    """A command as data files have it: files by their names."""
    words = [word.replace(str(folder / "out"), "bench-out/reproduce") for word in command]
    if command[0] == "tools/compare/compare.py":
        traces = [word for word in words if word.endswith(".jsonl")]
        words = [word for word in words if word not in traces]
        words = ["specbench*=llama2_vicuna.tokenizer.json" if "=" in word else word for word in words]
        return f"python {words[0]} TRACES/*.jsonl " + shlex.join(named(words[1:]))
    return shlex.join(named(["python"] * words[0].endswith(".py") + words))


def named(words):
    names = [Path(word).name if Path(word).is_absolute() else word for word in words]
    tokenizers = {"t.json": "qwen2.5.tokenizer.json", "v.json": "llama2_vicuna.tokenizer.json"}
    return [tokenizers.get(name, name) for name in names]


SHOWN = {
    "sources-replay": "| 16 | context | 2.000 | +0.0% |",
    "siblings": "_multisample10 | 8 | 3 | 1,000 | 2.000 | 2.500 | +25.0% |",
    "epochs": "| 2 | 2.000 | 3.000 | +50.0% |",
    "sources": "| `auto` without recycling | 2.00 | +0.0% |\n| `auto` without ngram and exact |",
    "expectation": "5.0% (median)",
    "knowledge": "differ by 5.0% (median)",
    "passes": "| 256 tokens, the model's own forward | 2.0 ms | 1.25 |",
    "rollouts": "| T = 1 | 2 | 1 | 3.0 s | 2.00 | 4.00 | 2.00 | 4.00 |\n| T = 1 | 4 | 2.0 s | 1.0 s | 2.0 s | 1.0 s |",
    "speedup": "(docs/terminal.svg)\n1.50 (1.50-1.50) times as fast with 0.12 B parameters, where prompt lookup",
    "datastores": "| exact index | 6.10 bytes per token |",
    "larger": "| 0.12 B | auto | 1.50 (1.50-1.50) | 1.50 | 1.75 | 0 of 1 | 30.0 | 2.00 | 4.0 | 1/1 |",
    "edits": "| a | prediction | 50.0 | 1.50 (1.50-1.50) | 1.50 | 7.00 |",
    "losing-slower": "| greedy | `auto` | 1 of 1 | 1 of 1 | 0.90 |",
    "losing-elsewhere": "drafting off is faster with these rows: 2 (1.50, off 1.60)",
    "datastores-segments": "| 2 | 1.00 / 2.00 µs | 0.50 µs |",
    "datastores-changes": "| beside one | 1.00 times | 2.00 times |\n| `sync` after a change of one of 300 files |",
    "datastores-peers": "| suffix array | 6.20 | 2.00 M tokens/s |\nSuffixDecoding: skipped (ImportError: none)",
    "dense": "| hnsw | 0.900 | 1.00 / 2.00 ms | 53 | 1 s |",
    "thinning": "| none | 0% |  | 0.50 |",
    "dense-drafting": "| `dresd` | 2.00 |  | 3.0 |\n| `auto` without dense | 2.00 | +0.0% |",
    "typing": "| answer, p50 / p95 | 1.00 / 2.00 ms |",
    "typing-overhead": "| uvicorn: 3 files, 1.00 M characters | 1.00 / 2.00 |",
    "compare": "| ours: auto | 4.0 | 2.00 |",
}
"""Lines of blocks that are made from the figures above."""


def texts(picture):
    return [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_a_recording_is_a_picture_of_itself_alone(scripts, monkeypatch):
    monkeypatch.setattr(scripts[3], "measured", lambda name: SCRIPTS[f"scripts/record_{name}.py"])
    picture = scripts[3].terminal()
    assert picture == scripts[3].terminal()
    assert "<a & b>" in texts(picture)
    assert "prefers-reduced-motion" in picture


def test_a_chart_shows_every_value_within_its_width():
    groups = [("<a & b>", "", [2.0, {"value": 3.0, "low": 1.0, "high": 4.0}])]
    picture = chart.chart("title", "note", [("one", "blue"), ("two", "grey")], groups)
    assert {"<a & b>", "2.00", "3.00", "one", "two", "title", "note"} == set(texts(picture))
    bars = list(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect"))
    one, two = (float(bar.get("width")) for bar in bars if bar.get("height") == str(chart.BAR - 2))
    assert one / two == pytest.approx(2 / 3, abs=1e-3)
    assert chart.LABELS + two * 4 / 3 <= chart.WIDTH - chart.END + 1


def test_pictures_ask_nobody_and_follow_light_and_dark(scripts):
    assert len(scripts[3].pictures()) == len(scripts[3].PICTURES)
    for picture in scripts[3].pictures().values():
        assert re.findall(r"(?:href|src|url)\W", picture) == []
        assert "prefers-color-scheme:dark" in picture


@pytest.mark.parametrize("name", ["peers", "speedup", "larger", "batches", "terminal"])
def test_a_picture_that_differs_from_its_data_is_named(scripts, monkeypatch, name):
    generator = importlib.import_module("generate_docs")
    monkeypatch.setitem(scripts[3].PICTURES, name, lambda: "<svg/>")
    assert [path.name for path in generator.stale()] == [f"{name}.svg"]


@pytest.mark.parametrize("name", ["pass", "datastore", "dense", "typing"])
def test_scripts_that_parts_run_find_what_they_import(scripts, name):
    assert callable(importlib.import_module(f"bench_{name}").main)


def test_a_trial_leaves_published_figures_alone(scripts, asked, monkeypatch, tmp_path):
    run(scripts, monkeypatch, "workloads", "--limit", "1")
    assert not (tmp_path / "data").exists()
    assert (tmp_path / "trial" / "workloads.json").exists()
    assert not any("generate_docs" in command[0] for command in asked)


@pytest.mark.parametrize(
    ("commit", "finished", "expected"),
    [("same", False, "--resume"), ("same", True, "report"), ("other", False, None), ("other", True, None)],
)
def test_an_interrupted_part_goes_on_unless_the_code_changed(
    scripts, asked, monkeypatch, tmp_path, commit, finished, expected
):
    monkeypatch.setattr(scripts[1], "commit", lambda: "same")
    monkeypatch.setattr(scripts[1], "same_code", lambda then, now: then == now)
    run(scripts, monkeypatch, "workloads")
    command = "retrieve-spec " + " ".join(asked[0][1:])
    folder = tmp_path / "out" / "workloads"
    folder.mkdir(parents=True)
    header = {"machine": {"commit": commit}, "command": command, **({"finished": True} if finished else {})}
    (folder / "run.json").write_text(json.dumps(header))
    asked.clear()
    run(scripts, monkeypatch, "workloads")
    assert (folder / "run.json").exists() is (expected is not None)
    assert expected is None or expected in asked[0]
    assert "--resume" not in asked[0] or expected == "--resume"


def test_replays_that_are_done_are_kept(scripts, asked, monkeypatch, tmp_path):
    for name in ("spec_bench", "arena"):
        (tmp_path / scripts[1].FILES[name]).write_text("")
    given = ["sources-replay", "--traces", str(tmp_path), "--tokenizer", str(tmp_path / "t.json")]
    whole = scripts[1].tool

    def cut_off(program, *words):
        if len(asked) == 3:
            raise KeyboardInterrupt
        return whole(program, *words)

    monkeypatch.setattr(scripts[1], "tool", cut_off)
    with pytest.raises(SystemExit, match="130"):
        run(scripts, monkeypatch, *given)
    monkeypatch.setattr(scripts[1], "tool", whole)
    asked.clear()
    run(scripts, monkeypatch, *given)
    assert sum(command[1:3] == ["bench", "replay"] for command in asked) == 16 - 2  # and a store was built
    assert len(json.loads((tmp_path / "data" / "sources-replay.json").read_text())["rows"]) == 16


def test_code_is_the_same_when_only_documents_differ(scripts):
    measuring = scripts[1]
    here = measuring.commit().rstrip("+")
    if not here:
        pytest.skip("this is no checkout")
    assert measuring.same_code(here, here)
    assert not measuring.same_code(here, here + "+")
    assert not measuring.same_code("", here)
    assert not measuring.same_code("0" * 10, here)


def test_what_cannot_be_measured_is_said(scripts, asked, monkeypatch):
    with pytest.raises(SystemExit, match="it needs --traces"):
        run(scripts, monkeypatch, "peers")
    with pytest.raises(SystemExit):
        run(scripts, monkeypatch, "no-such-part")


def test_published_data_names_no_place_on_a_machine():
    for path in (ROOT / "docs" / "data").glob("*"):
        text = path.read_text()
        for place in ("/work/", "/home/", "/tmp/", "/root/", "/mnt/"):
            assert place not in text, f"{path.name} has {place}"
