"""The command line starts light, finds its commands, and turns errors into exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest

from retrieve_spec import cli
from retrieve_spec.errors import ConfigError

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "numba",
    "faiss",
    "fastapi",
    "starlette",
    "pygls",
)


def imported_by(*words: str) -> list[str]:
    """Modules that a fresh interpreter holds after one command line."""
    code = f"import sys, json, retrieve_spec.cli as c; c.run({list(words)!r}); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(words):
    modules = imported_by(*words)
    assert not [name for name in modules if name.split(".")[0] in HEAVY]
    assert [name for name in modules if name.startswith("retrieve_spec")] == [
        "retrieve_spec",
        "retrieve_spec._version",
        "retrieve_spec.cli",
        "retrieve_spec.errors",
    ]


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_of_a_command_imports_no_model_library(command):
    modules = imported_by(command, "--help")
    assert not [name for name in modules if name.split(".")[0] in ("torch", "transformers", "numba", "faiss")]


@pytest.mark.parametrize("group", [cli.cli, cli.bench], ids=["top", "bench"])
def test_the_table_of_commands_says_what_each_command_says(group):
    context = click.Context(group)
    for name, (_, text) in group.table.items():
        command = group.get_command(context, name)
        assert command.name == name
        assert command.get_short_help_str(200) == text


def test_no_arguments_show_the_help(capsys):
    assert cli.run([]) in (0, 2)
    streams = capsys.readouterr()
    assert "generate" in streams.out + streams.err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a cat", "a dog", "Feed it."), 1, "Error: expected a cat, got a dog. Feed it."),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (click.UsageError("Not like this."), 2, "Not like this."),
        (click.ClickException("No."), 1, "No."),
    ],
)
def test_errors_become_exit_codes_without_a_traceback(error, code, text, capsys, monkeypatch):
    @click.command()
    def fail():
        raise error

    monkeypatch.setitem(cli.cli.commands, "fail", fail)
    assert cli.run(["fail"]) == code
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err
