"""The command line starts light, finds its commands, says what is wrong, and turns errors into exit codes."""

import importlib.util
import json
import shlex
import socket
import subprocess
import sys

import click
import pytest

from retrieve_spec import cli, cli_serve
from retrieve_spec.acceleration import accelerate, restore
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
        "retrieve_spec.processors",
    ]


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_of_a_command_imports_no_model_library(command):
    modules = imported_by(command, "--help")
    assert not [name for name in modules if name.split(".")[0] in ("torch", "transformers", "numba", "faiss")]


@pytest.mark.parametrize("group", [cli.cli, cli.bench], ids=["top", "bench"])
def test_the_table_of_commands_says_what_each_command_says(group):
    context = click.Context(group)
    for name, (_, text, _) in group.table.items():
        command = group.get_command(context, name)
        assert command.name == name
        assert command.get_short_help_str(200) == text


EXAMPLES = [example for group in (cli.cli, cli.bench) for *_, example in group.table.values()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_help_ends_with_an_example_that_can_be_typed(example, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers.jsonl").touch()
    (tmp_path / "src").mkdir()
    words, command = [word.replace("~", str(tmp_path)) for word in shlex.split(example)], cli.cli
    for depth in (1, 2):
        if isinstance(command, cli.LazyGroup):
            command = command.get_command(click.Context(command), words[depth - 1])
            name = words[:depth]
    command.make_context(command.name, words[len(name) :]).close()  # as far as options and arguments are checked
    assert cli.run([*name, "--help"]) == 0
    assert capsys.readouterr().out.endswith(f"Example:\n    retrieve-spec {example}\n")


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


def test_a_machine_is_described_without_a_model(capsys):
    assert cli.run(["doctor", "--model", "none"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"machine", "packages", "kernels"} <= words and "model" not in words


NOT_UTF8 = b"a\xffb".decode("utf-8", "surrogateescape")
ASK = ["generate", "--prompt", "x"]
REPLAY = ["bench", "replay", "empty.jsonl", "--tokenizer", "reference", "--quiet"]
MISTAKES = [
    (["genrate"], 2, "No such command 'genrate'. Did you mean 'generate'?"),
    (["bench", "rn"], 2, "No such command 'rn'. Did you mean 'run'?"),
    (["retokenise"], 2, "No such command 'retokenise'. Did you mean 'retokenize'?"),
    (["xyzzy"], 2, "No such command 'xyzzy'."),
    *(([*ASK, option, value], 2, f"'{option}'") for option, value in (
        ("--temperature", "nan"), ("--temperature", "inf"), ("--temperature", "-1"), ("--top-p", "nan"),
        ("--top-p", "0"), ("--seed", "9" * 23), ("--max-new-tokens", "9" * 20), ("--max-new-tokens", "0"),
        ("--top-k", "9" * 20), ("--prompt", NOT_UTF8),
    )),
    ([*ASK, "--temperature", "hot"], 2, "'hot' is not a valid number."),
    ([*ASK, "--max-new-tokens", "many"], 2, "'many' is not a valid whole number."),
    ([*ASK, "--nodes", "many"], 2, "neither 'auto' nor a whole number"),
    ([*ASK, "--nodes", "-1"], 1, "expected nodes"),
    ([*ASK, "--nodse", "3"], 2, "--nodes"),
    ([*ASK, "--draft", "suffx"], 1, "got 'suffx'. Did you mean 'suffix'?"),
    ([*ASK, "--model", "/no/such/folder"], 1, "expected a model folder at '/no/such/folder'"),
    ([*ASK, "--model", "a/b/c"], 1, "expected a model folder"),
    ([*ASK, "--model", "refrence"], 1, "Did you mean 'reference'"),
    ([*ASK, "--model", "empty"], 1, "no config.json"),
    ([*ASK, "--device", "abacus"], 1, "expected a device torch can use"),
    ([*ASK, "--store", "/no/such/store"], 1, "/no/such/store"),
    ([*ASK, "--prompt-file", "binary"], 2, "just one of"),
    (["generate", "--prompt", ""], 1, "expected a prompt of at least one character"),
    (["generate", "--prompt-file", "/no/such/file"], 2, "/no/such/file"),
    (["generate", "--prompt-file", "binary"], 1, "UTF-8"),
    (["serve", "--host", "0.0.0.0"], 1, "got --host 0.0.0.0 without one. Give --api-key-file."),
    (["build", "s", "--recipe", "./no.toml", "--tokenizer", "reference"], 1, "could not read recipe no.toml: No such"),
    (["editor", "vim", "--url", "nonsense"], 1, "got 'nonsense'. Give one like it."),
    (["pull", "store", "s3://a/b"], 1, "Give the address first: `retrieve-spec pull s3://a/b FOLDER`."),
    (["info", "badscheme://x"], 1, "Give an address such as s3://, gs://, hf:// or file://"),
    (REPLAY, 1, "at least one recorded answer"),
    (["bench", "run", "--prompts", "binary", "--out", "out"], 1, "in UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "said"), MISTAKES)
def test_a_mistake_is_said_first_and_alone(words, code, said, capsys, monkeypatch, tmp_path):
    """Nothing is begun, and no model is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert cli.run(words) == code
    streams = capsys.readouterr()
    *before, message = [line for line in streams.err.splitlines() if line.strip()]
    assert message.startswith("Error: ") and said in message and streams.out == ""
    assert all(line.startswith(("Usage: ", "Try ")) for line in before), "nothing was begun"
    assert words != ["xyzzy"] or "Did you mean" not in message


def test_a_port_that_is_taken_is_said_so(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["serve", "--port", str(port), "--quiet"]) == 1
    said = f"could not listen on 127.0.0.1, port {port}: Address already in use. End what listens there, or choose "
    assert said in capsys.readouterr().err


def test_a_store_that_nothing_can_be_checked_by_is_said(reference_model, tmp_path, caplog):
    (tmp_path / "a.py").write_text("class Shelf:\n    pass\n")
    assert (
        cli.run(["build", str(tmp_path / "store"), str(tmp_path / "a.py"), "--tokenizer", "reference", "--quiet"]) == 0
    )
    accelerate(reference_model, datastores=[tmp_path / "store"], draft="off")
    restore(reference_model)
    assert "pass tokenizer= to accelerate" in caplog.text


def test_forget_without_the_servers_packages_says_what_to_install(monkeypatch, tmp_path, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(cli_serve, "find_spec", lambda name: None if name == "fastapi" else found(name))
    assert cli.run(["forget", str(tmp_path)]) == 1
    assert "retrieve-spec[serve]" in capsys.readouterr().err


def test_what_the_system_refuses_is_a_sentence(monkeypatch, capsys):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "/locked/config.json")

    monkeypatch.setattr("retrieve_spec.datastore.sync.sync_datastore", refused)
    assert cli.run(["sync", "store", ".", "--tokenizer", "reference"]) == 1
    said = "Error: could not use /locked/config.json: Permission denied. Check the path, who may read and write there"
    assert said in capsys.readouterr().err
