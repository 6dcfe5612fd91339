"""Verbs at an address: they read what is there, or say what to do instead."""

import json

import fsspec
import pytest

from retrieve_spec.cli import run
from retrieve_spec.datastore.edit import merge_datastores, remove_documents
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.remote import Remote, public_name
from retrieve_spec.datastore.share import name_of, push_datastore
from retrieve_spec.errors import BuildError, StoreCorruptError


@pytest.fixture(autouse=True)
def _fixed(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def memory(store):
    push_datastore(store, "memory://remote")
    yield "memory://remote"
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_commands_at_an_address(memory, store, records, tmp_path, capsys):
    def said(*words, code=0):
        assert run([*words]) == code
        out, err = capsys.readouterr()
        return err if code else out

    assert json.loads(said("info", memory, "--json"))["documents"] == 4
    assert f"{memory}\n" in said("info", memory)
    assert json.loads(said("verify", memory, "-q", "--json"))["tokens"] == read_manifest(store).tokens
    assert "the cat ran" in said("search", memory, "the cat ran")
    assert said("catalog", memory).startswith(str(tmp_path / "cache"))
    assert "4 documents" in said("merge", str(tmp_path / "m"), memory, "-q")
    assert read_manifest(tmp_path / "m").history[-1]["stores"] == [memory]
    for words in (
        ["build", memory, str(records), "--tokenizer", "reference"], ["add", memory, str(records)],
        ["remove", memory, "a.txt"], ["compact", memory], ["retokenize", memory, "--tokenizer", "reference"],
        ["sync", memory, str(tmp_path)], ["merge", memory, str(store)],
        ["push", memory, "memory://other"], ["pull", memory, memory],
    ):  # fmt: skip
        assert f"got the address {memory}. " in said(*words, "-q", code=1), words
    assert Remote(memory).newest() == 1
    with pytest.raises(BuildError, match="merge into that"):
        merge_datastores(memory, [store])


def test_damage_at_an_address_is_found_there(memory, store):
    place = next(name for name in Remote(memory).sizes() if name.endswith("tokens.bin"))
    fs = fsspec.filesystem("memory")
    content = fs.cat_file(f"/remote/{place}")
    fs.pipe_file(f"/remote/{place}", content[:-1] + b"\x07")
    with pytest.raises(StoreCorruptError, match=r"tokens\.bin"):
        verify_datastore(memory)
    fs.rm_file(f"/remote/{place}")
    with pytest.raises(StoreCorruptError, match="no such file"):
        verify_datastore(memory)


@pytest.mark.parametrize(
    ("address", "public", "name"),
    [
        ("ftp://me:sekret@host", "ftp://host", "host"),
        ("webdav://me:sekret@host/notes/", "webdav://host/notes/", "notes"),
        ("https://host/a/notes.jsonl?X-Amz-Signature=sek/ret", "https://host/a/notes.jsonl", "notes.jsonl"),
        ("simplecache::https://sekret@host/x?y", "simplecache::https://host/x", "x"),
        ("s3://bucket/what?/me@home", "s3://bucket/what?/me@home", "me@home"),
        ("/tmp/me:you@home?", "/tmp/me:you@home?", "me:you@home?"),
    ],
)
def test_what_is_shared_names_no_password(address, public, name):
    assert (public_name(address), name_of(address)) == (public, name)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("ftp://me:sekret@host/x", "ftp://me:***@host/x"),
        ("ftp://me:sek@ret@host/x", "ftp://me:***@host/x"),
        ("https://host/x?X-Amz-Signature=sekret&y=1", "https://host/x?***"),
        ("simplecache::https://me:sekret@host/x?sig=sekret", "simplecache::https://me:***@host/x?***"),
    ],
)
def test_errors_name_no_password_nor_signature(address, public):
    with pytest.raises(BuildError) as told:
        remove_documents(address, ["a.txt"])
    assert f"the address {public}. " in str(told.value)
    assert public in told.value.remedy
    assert "sekret" not in str(told.value) + told.value.remedy
    for text in ("Is a server at http://host:8012/v1? See it.", "'https://h/x?'", "s3://b/what?/me"):
        assert BuildError(text, text, text).remedy == text
