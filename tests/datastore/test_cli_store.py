"""The commands: one library call each, exit codes, and one JSON object with --json."""

import json

import pytest
from folders import write

from retrieve_spec.datastore.store import open_datastore


@pytest.fixture
def store(command, texts, tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = ("--tokenizer", tmp_path / "tokenizer.json", "--stated-licence", "MIT", "--json")
    code, out, _ = command("build", tmp_path / "s", texts, *options)
    report = json.loads(out)
    assert (code, report["documents"], report["skipped"]) == (0, 4, [])
    return tmp_path / "s"


def test_whole_life(command, store, records, tmp_path):
    def told(*arguments):
        return json.loads(command(*arguments, "--json")[1])

    assert told("info", store)["documents"] == 4
    assert "4" in command("info", store)[1]
    assert told("add", store, records, "--field", "output")["documents"] == 5
    assert told("search", store, "the cat", "--limit", 2)["matched"] == 7
    assert "a.txt (MIT)" in command("search", store, "the cat")[1]
    assert told("remove", store, "a.txt")["tokens"] == 72
    assert told("remove", store, "--where", "path like '%#2'")["documents"] == 1
    assert told("compact", store)["segments"] == 1
    assert told("merge", tmp_path / "m", store)["documents"] == 7
    assert told("retokenize", tmp_path / "m", "--tokenizer", "reference")["verb"] == "retokenize"
    for folder in (store, tmp_path / "m"):
        assert told("verify", folder)["sound"] is True
    assert open_datastore(tmp_path / "m", tokenizer="reference").manifest.documents == 7


def test_sources_without_text_say_why_and_leave_no_folder(command, tmp_path):
    folder = write(tmp_path / "odd", {f"{number}.bin": b"\0" for number in range(5)} | {"nothing.txt": ""})
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
    recipe = f'name = "mine"\nindex = "ngram"\n[[source]]\npath = "{tmp_path}/doc.txt"\nlicence = "CC0"'
    write(tmp_path, {"doc.txt": "some words", "r.toml": recipe})
    assert command("build", tmp_path / "s", "--recipe", tmp_path / "r.toml", "--tokenizer", "reference")[0] == 0
    assert json.loads(command("info", tmp_path / "s", "--json")[1])["history"][0]["recipe"] == "mine"
    code, _, err = command("search", tmp_path / "s", "x")
    assert (code, "n-grams only" in err) == (1, True)
