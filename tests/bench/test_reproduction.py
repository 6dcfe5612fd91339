"""Every part of the reproduction asks for what the programs offer, and measures what the docs publish."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import blocks
import charts
import click
import harness
import pytest
import reproduction

from retrieve_spec import cli

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data"
ELSEWHERE = {"census", "gpu", "near_ties", "vllm"}
"""Measured by tests, on a GPU, of a model that is not here, or where vLLM is installed."""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Commands that parts run, refused where the program would; nothing is measured."""
    asked = []

    def tool(program, *words, environment=None):
        asked.append(shlex.split(reproduction.published(["python"] * program.endswith(".py") + [program, *words])))
        if program == "retrieve-spec":
            check_command(list(words))
        elif "generate_docs" not in program:
            check_script(Path(program).stem, words, monkeypatch)
        return {"header": {}}

    monkeypatch.setattr(reproduction, "tool", tool)
    monkeypatch.setattr(reproduction, "DATA", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduction.os, "chdir", lambda path: None)
    for name in reproduction.FILES.values():
        (tmp_path / name).write_text("")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["reproduce", *words])
        reproduction.main()
        return asked

    return run


def check_command(words):
    command, context = cli.cli, click.Context(cli.cli, **cli.cli.context_settings)
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, name
    command.make_context("retrieve-spec", words, parent=context)


def check_script(name, words, monkeypatch):
    """Parse a script's command line with the options that it declares."""
    with monkeypatch.context() as patch:
        patch.setattr(harness, "run", lambda measure, *names, **named: harness.arguments(*names, **named))
        patch.setattr(sys, "argv", [name, *words])
        importlib.import_module(name).main()


def test_all_parts_ask_for_what_there_is_and_measure_what_is_published(commands, tmp_path):
    native = ["--native", "specbench*=llama2_vicuna.tokenizer.json"]
    asked = commands("all", "--traces", str(tmp_path), "--tokenizer", str(tmp_path / "qwen2.5.tokenizer.json"), *native)
    asked = [sorted(words) for words in asked]
    for path in DATA.glob("*.json"):
        made = json.loads(path.read_text())
        if path.stem not in ELSEWHERE:
            assert sorted(shlex.split(made.get("header", made)["command"])) in asked, path.name
    written = {path.stem for path in (tmp_path / "data").glob("*.json")}
    assert written == {path.stem for path in DATA.glob("*.json")} - ELSEWHERE


def test_published_commands_of_scripts_are_taken(monkeypatch):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").glob("*.py")]
    command = re.compile(r"python scripts/(bench_\w+|near_ties)\.py([^`#\n]*)")
    found = {match.group(1, 2) for page in pages for match in command.finditer(page.read_text("utf-8"))}
    found = {(name, words) for name, words in found if not re.search(r"[\[…]", words) and name != "bench_llama_cpp"}
    assert len(found) > 8
    for name, words in found:
        check_script(name, shlex.split(words), monkeypatch)


def test_every_table_is_drawn_from_the_data_and_every_chart(tmp_path):
    assert all(make().strip() for make in blocks.BLOCKS.values())
    charts.draw(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.svg")} == set(charts.CHARTS)
