"""The commands: one library call each, exit codes, and one JSON object with --json."""

import json

import pytest

from retrieve_spec.cli import run
from retrieve_spec.datastore.store import open_datastore


@pytest.fixture
def command(capfd):
    def call(*arguments):
        code = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def store(command, texts, tmp_path):
    tokenizer = tmp_path / "tokenizer.json"
    from byte_tokenizers import byte_tokenizer

    byte_tokenizer().save(str(tokenizer))
    code, out, _ = command(
        "build", tmp_path / "s", texts, "--tokenizer", tokenizer, "--stated-licence", "MIT", "--json"
    )
    report = json.loads(out)
    assert (code, report["documents"], report["skipped"]) == (0, 4, [])
    return tmp_path / "s"


def test_whole_life(command, store, records, tmp_path):
    assert json.loads(command("info", store, "--json")[1])["documents"] == 4
    assert "4" in command("info", store)[1]
    added = json.loads(command("add", store, records, "--field", "output", "--json")[1])
    assert added["documents"] == 5
    assert json.loads(command("search", store, "the cat", "--json", "--limit", 2)[1])["matched"] == 7
    code, out, _ = command("search", store, "the cat")
    assert code == 0
    assert "a.txt (MIT)" in out
    assert json.loads(command("remove", store, "a.txt", "--json")[1])["tokens"] == 72
    assert json.loads(command("remove", store, "--where", "path like '%#2'", "--json")[1])["documents"] == 1
    assert json.loads(command("compact", store, "--json")[1])["segments"] == 1
    assert json.loads(command("merge", tmp_path / "m", store, "--json")[1])["documents"] == 7
    retokenized = command("retokenize", tmp_path / "m", "--tokenizer", "reference", "--json")
    assert json.loads(retokenized[1])["verb"] == "retokenize"
    for folder in (store, tmp_path / "m"):
        assert json.loads(command("verify", folder, "--json")[1])["sound"] is True
    assert open_datastore(tmp_path / "m", tokenizer="reference").manifest.documents == 7


def skippable(tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.bin").write_bytes(b"\0")
    (folder / "nothing.txt").write_text("")
    return folder


def test_sources_without_text_say_why_and_leave_no_folder(command, tmp_path):
    folder = skippable(tmp_path)
    code, _, err = command("build", tmp_path / "new", folder, "--tokenizer", "reference")
    assert code == 1
    assert "got none: left out 5 binary (first: 0.bin), 1 empty (first: nothing.txt)." in err
    code, _, err = command("build", tmp_path / "new", folder, "--include", "*.rs", "--tokenizer", "reference")
    assert (code, "name no file" in err) == (1, True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "{tmp}/nowhere"], 1, "no such folder"),
        (["build", "{tmp}/s", "{tmp}/texts", "--tokenizer", "reference"], 1, "there is one"),
        (["build", "{tmp}/new", "{tmp}/texts", "--tokenizer", "{tmp}/texts/a.txt"], 1, "tokenizer.json"),
        (["build", "{tmp}/texts/a.txt", "{tmp}/texts", "--tokenizer", "reference"], 1, "Name the store first"),
        (["build", "{tmp}/new", "{tmp}/texts"], 2, "--tokenizer"),
        (["build", "{tmp}/new", "--tokenizer", "reference"], 2, "SOURCE"),
        (["add", "{tmp}/s"], 2, "SOURCE"),
        (["remove", "{tmp}/s"], 2, "--where"),
        (["merge", "{tmp}/new"], 2, "STORE"),
        (["retokenize", "{tmp}/s"], 2, "--tokenizer"),
        (["search", "{tmp}/s"], 2, "TEXT"),
        (["search", "{tmp}/s", ""], 2, "TEXT"),
        (["build", "{tmp}/new", "{tmp}/texts", "--tokenizer", "reference", "--layer", "3"], 2, "--dense"),
        (["build", "{tmp}/new", "{tmp}/texts", "--tokenizer", "reference", "--dims", "64"], 2, "--dense"),
        (["build", "{tmp}/new", "{tmp}/texts", "--tokenizer", "{tmp}/texts"], 1, "a folder without one"),
        (["build", "{tmp}/new", "{tmp}/texts", "--tokenizer", "./nothing"], 1, "nothing there"),
        (["build", "{tmp}/new", "{tmp}/texts", "--tokenizer", "refrence"], 1, "Did you mean 'reference'?"),
        (["build", "{tmp}/new", "{tmp}/texts", "--tokenizer", "reference", "--max-tokens", "1"], 1, "max_tokens"),
        (["build", "{tmp}/new", "--recipe", "{tmp}/none.toml", "--tokenizer", "reference"], 1, "could not read recipe"),
        (["add", "{tmp}/texts/a.txt", "{tmp}/texts"], 1, "got a file"),
        (["remove", "{tmp}/s", "none"], 1, "retrieve-spec catalog {tmp}/s"),
        (["remove", "{tmp}/s", "--where", "1); drop table documents; --"], 1, "an SQL condition"),
    ],
)
def test_errors(command, store, tmp_path, arguments, code, message):
    result = command(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert result[0] == code
    assert message.replace("{tmp}", str(tmp_path)) in result[2]
    assert not (tmp_path / "new").exists()


def test_recipe(command, tmp_path):
    recipe = tmp_path / "r.toml"
    (tmp_path / "doc.txt").write_text("some words")
    recipe.write_text(f'name = "mine"\nindex = "ngram"\n[[source]]\npath = "{tmp_path}/doc.txt"\nlicence = "CC0"')
    assert command("build", tmp_path / "s", "--recipe", recipe, "--tokenizer", "reference")[0] == 0
    history = json.loads(command("info", tmp_path / "s", "--json")[1])["history"]
    assert history[0]["recipe"] == "mine"
    code, _, err = command("search", tmp_path / "s", "x")
    assert (code, "n-grams only" in err) == (1, True)
