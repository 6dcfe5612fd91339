"""Words of a command line that are wrong: what was meant, what is allowed, and never a traceback."""

from __future__ import annotations

import importlib.util
import time

import pytest

from retrieve_spec import cli, cli_common, cli_serve
from retrieve_spec.errors import ModelNotFoundError
from retrieve_spec.reference_model import load_model

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
    monkeypatch.setattr("retrieve_spec.cli_generate._load", lambda *_: pytest.fail("loaded a model"))
    assert cli.run(["generate", "--prompt", "x", option, value]) == 2
    assert f"'{option}'" in capsys.readouterr().err


def test_a_search_for_bytes_is_refused(tmp_path, capsys):
    assert cli.run(["search", str(tmp_path), NOT_UTF8]) == 2
    assert "expected text in UTF-8" in capsys.readouterr().err


def test_a_misspelt_reference_is_not_looked_for_on_the_hub():
    with pytest.raises(ModelNotFoundError, match="Did you mean 'reference'"):
        load_model("refrence")


def test_an_empty_trace_and_binary_prompts_are_errors(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    assert cli.run(["bench", "replay", str(tmp_path / "empty.jsonl"), "--tokenizer", "reference", "--quiet"]) == 1
    assert "at least one recorded answer" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert cli.run(["bench", "run", "--prompts", str(tmp_path / "binary"), "--out", str(tmp_path / "out")]) == 1
    assert "a file of prompts in UTF-8" in capsys.readouterr().err


def test_forget_without_the_servers_packages_says_what_to_install(monkeypatch, tmp_path, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(cli_serve, "find_spec", lambda name: None if name == "starlette" else found(name))
    assert cli.run(["forget", str(tmp_path)]) == 1
    assert "retrieve-spec[serve]" in capsys.readouterr().err


def test_a_long_start_is_explained_and_a_short_one_is_not(capsys):
    with cli_common.explained_wait(60):
        pass
    assert capsys.readouterr().err == ""
    with cli_common.explained_wait(0.01):
        deadline = time.monotonic() + 30
        shown = ""
        while not shown and time.monotonic() < deadline:
            shown = capsys.readouterr().err
            time.sleep(0.01)
    assert "compiles the kernels" in shown
