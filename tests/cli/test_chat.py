"""`retrieve-spec chat`: its text is that of plain `generate`; its commands; Ctrl-C and Ctrl-D in a terminal."""

import io
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

import retrieve_spec as rs
from retrieve_spec import cli
from retrieve_spec.engine import first_passes
from retrieve_spec.engine.first_passes import learn_bigrams
from retrieve_spec.errors import ConfigError
from retrieve_spec.reference_model import load_model, reference_path

TEMPLATE = """\
{% for message in messages %}{% if message['role'] == 'system' and loop.index > 1 %}{{ raise_exception('late') }}\
{% endif %}# {{ message['role'] }}: {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"""
pytestmark = pytest.mark.usefixtures("loaded_once")
TURNS = ["def add(a, b):", "Grüße, 漢字", "def sub(a, b):"]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with a chat template; it answers in something like Python."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    shutil.copytree(reference_path(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def run(words: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said) + "\n"))
    code = cli.run(["chat", "--device", "cpu", "--max-new-tokens", "12", *words])
    return code, *capsys.readouterr()


def answers(folder: str, turns: list[str], messages: list[dict[str, str]]) -> list[str]:
    """What plain `generate` says."""
    model, tokenizer = load_model(folder, device="cpu", dtype="float32")
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        text = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(text, skip_special_tokens=True)})
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("system", [None, "Write Python."])
def test_lines_of_a_pipe_are_turns(chatty: str, system: str | None, monkeypatch: Any, capsys: Any) -> None:
    words = [] if system is None else ["--system", system]
    code, out, err = run(["--model", chatty, "--stats", *words], [*TURNS[:2], "", TURNS[2]], monkeypatch, capsys)
    told = [] if system is None else [{"role": "system", "content": system}]
    assert code == 0 and out == "".join(text + "\n" for text in answers(chatty, TURNS, told))
    assert err.count("tokens per pass") == 3


def test_what_is_learned_between_messages_changes_no_text(chatty: str, monkeypatch: Any, capsys: Any) -> None:
    learned: list[int] = []

    def learn(speculation: Any, goes_on: Any) -> None:
        learned.append(len(speculation.drafters.bigrams.known))
        learn_bigrams(speculation, goes_on)

    monkeypatch.setattr(first_passes, "learn_bigrams", learn)
    code, out, _ = run(["--model", chatty, "--learn-idle"], TURNS, monkeypatch, capsys)
    assert code == 0 and out == "".join(text + "\n" for text in answers(chatty, TURNS, []))
    assert len(learned) == 1 + len(TURNS)


def test_learning_that_fails_ends_no_conversation(chatty: str, monkeypatch: Any, capsys: Any) -> None:
    def learn(*_: Any) -> None:
        raise ValueError("a pass failed")

    monkeypatch.setattr(first_passes, "learn_bigrams", learn)
    code, out, err = run(["--model", chatty, "--learn-idle"], TURNS, monkeypatch, capsys)
    assert code == 0 and out == "".join(text + "\n" for text in answers(chatty, TURNS, []))
    assert err.count("is off: ValueError: a pass failed") == 1


def test_an_error_of_accelerate_is_shown_after_each_message(chatty: str, monkeypatch: Any, capsys: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConfigError("drafts", "none", "Give others.")

    monkeypatch.setattr(rs, "accelerate", fail)
    terminal = io.StringIO("\n".join(TURNS))
    for stream in (terminal, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert cli.run(["chat", "--device", "cpu", "--model", chatty, "--learn-idle"]) == 0
    assert capsys.readouterr().err.count("Error: expected drafts, got none") == len(TURNS)


def test_commands(chatty: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "file.py").write_text("x = 1")
    said = ["def a():", "/clear", f"/load {tmp_path}/file.py", "def b():", f"/save {tmp_path}/said", "/help"]
    code, _, err = run(["--model", chatty], said, monkeypatch, capsys)
    assert code == 0 and "5 characters" in err and "Ctrl-D" in err
    (answer,) = answers(chatty, ["x = 1\n\ndef b():"], [])
    assert (tmp_path / "said").read_text() == f"user: x = 1\n\ndef b():\n\nassistant: {answer}\n"
    (tmp_path / "picture").write_bytes(b"\xff\xfe\xfd")
    for line, words in (
        ("/nope", "expected a command, got '/nope'"),
        (f"/load {tmp_path}/picture", "a file in UTF-8, got other bytes at 0"),
        ("half a pair \udcff", "messages in UTF-8"),
    ):
        code, _, err = run(["--model", chatty], [line], monkeypatch, capsys)
        assert code == 1 and words in err


def test_a_conversation_too_long_for_the_model_is_refused(chatty: str, monkeypatch: Any, capsys: Any) -> None:
    code, out, err = run(["--model", chatty], ["x = 1; " * 1000], monkeypatch, capsys)
    assert code == 1 and not out and "a conversation of fewer than 2048 tokens, got " in err and "/clear" in err


def test_seeds_and_stores_are_those_of_generate(chatty: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    words = ["--model", chatty, "--temperature", "0.9", "--seed"]
    first, again, other = (run([*words, seed], TURNS, monkeypatch, capsys)[1] for seed in ("1", "1", "2"))
    assert first == again != other
    assert run([*words, "1", "--draft", "off"], TURNS, monkeypatch, capsys)[1] == first
    code, _, err = run(["--model", chatty, "--store", str(tmp_path / "none")], TURNS, monkeypatch, capsys)
    assert code == 1 and "none" in err


def test_a_model_without_a_template_and_a_closed_standard_input_are_refused(monkeypatch: Any, capsys: Any) -> None:
    code, out, err = run(["--model", "reference"], TURNS, monkeypatch, capsys)
    assert code == 1 and not out and "a chat template" in err and "--model smollm2" in err
    monkeypatch.setattr(sys, "stdin", None)
    for command, refused in (("chat", "standard input, got it is closed"), ("generate", "or pipe the prompt")):
        assert cli.run([command]) in (1, 2) and refused in capsys.readouterr().err


def test_single_prompts_in_a_template(chatty: str, capsys: Any) -> None:
    words = ["generate", "--model", chatty, "--device", "cpu", "--max-new-tokens", "12", "--json", "--prompt", TURNS[0]]
    for options, told in ((["--chat"], []), (["--system", "Be."], [{"role": "system", "content": "Be."}])):
        assert cli.run([*words, *options]) == 0
        assert [json.loads(capsys.readouterr().out)["text"]] == answers(chatty, TURNS[:1], told)


def test_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(chatty: str, tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    words = ["-m", "retrieve_spec.cli", "chat", "--model", chatty, "--device", "cpu", "--max-new-tokens", "1800"]
    with pexpect.spawn(sys.executable, [*words, "--draft", "off"], encoding="utf-8", timeout=HANG_S) as terminal:

        def say(line: str, heard: str) -> None:
            terminal.sendline(line)
            terminal.expect(heard)

        terminal.expect("\n> ")
        say("before it is ready", "ready\r\n")
        time.sleep(0.2)
        terminal.sendintr()
        terminal.expect("\n> ")
        say("/not", "got '/not'")  # it is ready
        say("/clear", "\n> ")
        say("class A:", "class A:\r\n")
        terminal.expect(r"\w")  # it answers
        terminal.sendintr()
        terminal.expect("\n> ")
        time.sleep(0.5)  # Python hears Ctrl-C where it waits for a line, not while it begins to
        terminal.sendintr()
        terminal.expect("Ctrl-D ends the conversation")
        say(f"/save {tmp_path}/said", "The conversation is in")
        terminal.expect("\n> ")  # before it, Ctrl-D would end a line of the terminal's own
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
    assert terminal.exitstatus == 0
    assert "user: class A:\n\nassistant: " in (tmp_path / "said").read_text()
