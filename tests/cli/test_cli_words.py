"""Words of a command line that are wrong: what was meant, what is allowed, and never a traceback."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from retrieve_spec import cli, cli_serve
from retrieve_spec.acceleration import accelerate, restore
from retrieve_spec.errors import ModelNotFoundError, ServeError
from retrieve_spec.reference_model import load_model
from retrieve_spec.server.run import listen

NOT_UTF8 = b"a\xffb".decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("words", "meant"), [(["genrate"], "generate"), (["bench", "rn"], "run"), (["retokenise"], "retokenize")]
)
def test_a_mistyped_command_is_met_with_the_right_one(words, meant, capsys):
    assert cli.run(words) == 2
    assert f"No such command {words[-1]!r}. Did you mean {meant!r}?" in capsys.readouterr().err


def test_a_word_like_no_command_is_met_with_no_guess(capsys):
    assert cli.run(["xyzzy"]) == 2
    shown = capsys.readouterr().err
    assert "No such command 'xyzzy'." in shown
    assert "Did you mean" not in shown


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "nan"),
        ("--seed", "9" * 23),
        ("--max-new-tokens", "9" * 20),
        ("--top-k", "9" * 20),
        ("--prompt", NOT_UTF8),
    ],
)
def test_numbers_and_text_that_nothing_can_use_are_refused_before_a_model_loads(option, value, capsys, monkeypatch):
    monkeypatch.setattr("retrieve_spec.reference_model.load_model", lambda *_: pytest.fail("loaded a model"))
    assert cli.run(["generate", "--prompt", "x", option, value]) == 2
    assert f"'{option}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--prompt", "x", "--temperature", "hot"], "'hot' is not a valid number."),
        (["generate", "--prompt", "x", "--max-new-tokens", "many"], "'many' is not a valid whole number."),
        (["generate", "--prompt", "x", "--draft", "suffx"], "got 'suffx'. Did you mean 'suffix'?"),
        (["serve", "--host", "0.0.0.0"], "got --host 0.0.0.0 without one. Give --api-key-file."),
        (["serve", "--origin", "*"], "expected the origin of a page, as http://localhost:3000, got '*'."),
        (["build", "store", "--recipe", "./nowhere.toml"], "could not read recipe nowhere.toml: No such file"),
        (["editor", "vim", "--url", "nonsense"], "got 'nonsense'. Give one like it."),
    ],
)
def test_a_mistake_is_said_first_and_alone(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.run(words) in (1, 2)
    shown = capsys.readouterr().err
    *before, message = [line for line in shown.splitlines() if line.strip()]
    assert message.startswith("Error: ") and said in message
    assert all(line.startswith(("Usage: ", "Try ")) for line in before), "nothing was begun"


def test_what_was_to_be_done_and_could_not_is_said_so():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServeError) as refused:
        listen("127.0.0.1", taken.getsockname()[1])
    port = refused.value.expected.rpartition(" ")[2]
    said = f"could not listen on 127.0.0.1, port {port}: Address already in use. "
    assert str(refused.value) == said + "End what listens there, or choose another with --port."


def test_a_store_that_nothing_can_be_checked_by_is_said(reference_model, tmp_path, caplog):
    (tmp_path / "a.py").write_text("class Shelf:\n    pass\n")
    assert (
        cli.run(["build", str(tmp_path / "store"), str(tmp_path / "a.py"), "--tokenizer", "reference", "--quiet"]) == 0
    )
    accelerate(reference_model, datastores=[tmp_path / "store"], draft="off")
    restore(reference_model)
    assert "pass tokenizer= to accelerate" in caplog.text


def test_a_misspelt_reference_is_not_looked_for_on_the_hub():
    with pytest.raises(ModelNotFoundError, match="Did you mean 'reference'"):
        load_model("refrence")


def test_an_empty_trace_and_binary_prompts_are_errors(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    assert cli.run(["bench", "replay", str(tmp_path / "empty.jsonl"), "--tokenizer", "reference", "--quiet"]) == 1
    assert "at least one recorded answer" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert cli.run(["bench", "run", "--prompts", str(tmp_path / "binary"), "--out", str(tmp_path / "out")]) == 1
    assert "in UTF-8" in capsys.readouterr().err


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


def test_addresses_that_are_wrong_are_met_with_the_right_form(capsys):
    assert cli.run(["pull", "store", "s3://a/b"]) == 1
    assert "Give the address first: `retrieve-spec pull s3://a/b FOLDER`." in capsys.readouterr().err
    assert cli.run(["info", "badscheme://x"]) == 1
    assert "Give an address such as s3://, gs://, hf:// or file://" in capsys.readouterr().err
