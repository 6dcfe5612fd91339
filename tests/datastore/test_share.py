"""Sharing: what travels, what must not, what happens when two push or a remote breaks, and verbs at an address."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import fsspec
import pytest
from byte_tokenizers import byte_tokenizer
from folders import flip
from test_build import contents

from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.remote import Remote, public_name
from retrieve_spec.datastore.share import name_of, pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import (
    BuildError,
    StoreCorruptError,
    StoreLockedError,
    StoreNotFoundError,
    TokenizerMismatchError,
)


def test_a_word_is_no_address(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for share in (lambda: push_datastore(store, "word"), lambda: pull_datastore("word", tmp_path / "t")):
        with pytest.raises(BuildError, match=f"Write {(tmp_path / 'word').as_uri()} for that folder"):
            share()
    assert not (tmp_path / "word").exists() and not (tmp_path / "t").exists()


def test_only_what_is_missing_travels(store, url, records, tmp_path):
    first = push_datastore(store, url)
    assert (first.version, first.kept) == (1, 0)
    again = push_datastore(store, url)
    assert (again.version, again.files, again.kept) == (1, 0, first.files)
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")
    assert contents(tmp_path / "t") == contents(store)
    segment = open_datastore(store).segments[0].name
    add_documents(store, Source(str(records), field="output"))
    remove_documents(store, ["c.py"])
    second = push_datastore(store, url)
    assert second.kept == 1 + len(read_manifest(store).segments[0].files)
    with breaking("fetch", lambda: None) as moved:
        report = pull_datastore(url, tmp_path / "t")
    assert report.segments == 2
    assert moved and not any(place.startswith(f"segments/{segment}") for place, *_ in moved)
    verify_datastore(tmp_path / "t")
    assert contents(tmp_path / "t") == contents(store)
    assert read_manifest(tmp_path / "t").content == read_manifest(store).content
    assert (tmp_path / "t" / "segments" / segment).is_dir()
    assert pull_datastore(url, tmp_path / "t").documents == 0
    compact_datastore(store)
    push_datastore(store, url)
    pull_datastore(url, tmp_path / "t")
    assert len(read_manifest(tmp_path / "t").segments) == 1


def test_places_of_this_machine_stay_here(store, texts, url, tmp_path):
    (texts / "empty.txt").write_text("")
    (texts / "new.txt").write_text("something new")
    add_documents(store, str(texts))
    remove_documents(store, where=f"source = '{texts}' and path = 'new.txt'")
    push_datastore(store, url)
    fs, root = fsspec.core.url_to_fs(url)
    sent = b"".join(fs.cat_file(name) for name in fs.find(root))
    assert str(tmp_path).encode() not in sent
    card = fs.cat_file(f"{root}/README.md").decode()
    assert "| MIT | 4 | " in card and "texts" in card
    pull_datastore(url, tmp_path / "t")
    assert {document.source for document in open_datastore(tmp_path / "t").documents()} == {"texts"}
    assert [event["verb"] for event in read_manifest(tmp_path / "t").history] == ["pull"]


def test_what_others_wrote_at_a_remote_stays(store, url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/manifest.json", b'{"name": "a web page"}')
    with pytest.raises(BuildError, match="one that holds manifest"):
        push_datastore(store, url)
    with pytest.raises(BuildError, match="one that holds manifest"):
        push_datastore(store, store.as_uri())
    fs.rm_file(f"{root}/manifest.json")
    fs.pipe_file(f"{root}/README.md", b"# My notes")
    push_datastore(store, url)
    assert fs.cat_file(f"{root}/README.md") == b"# My notes"
    fs.rm_file(f"{root}/README.md")
    cards = set()
    for change in (lambda: remove_documents(store, where="path LIKE 'a%'"), lambda: compact_datastore(store)):
        change()
        push_datastore(store, url)
        cards.add(fs.cat_file(f"{root}/README.md"))
    assert len(cards) == 2 and all(b"# Datastore" in card for card in cards)


def test_what_a_store_has_not_seen_is_not_pushed_over(store, url, tokenizer, records, tmp_path):
    push_datastore(store, url)
    pull_datastore(url, tmp_path / "t")
    add_documents(tmp_path / "t", Source(str(records), field="output"))
    push_datastore(tmp_path / "t", url)
    (tmp_path / "mine.txt").write_text("this is mine")
    add_documents(store, str(tmp_path / "mine.txt"))
    with pytest.raises(StoreLockedError, match="has not seen"):
        push_datastore(store, url)
    pull_datastore(url, store)
    verify_datastore(store)
    assert {"mine.txt", "a.txt", "answers.jsonl#1"} <= set(contents(store)) and len(contents(store)) == 10
    assert push_datastore(store, url).version == 3
    build_datastore(tmp_path / "o", str(tmp_path / "mine.txt"), byte_tokenizer(offset=9))
    with pytest.raises(TokenizerMismatchError):
        pull_datastore(url, tmp_path / "o")
    with pytest.raises(StoreNotFoundError):
        pull_datastore(url + "/nothing", tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("place", ["file", "s3"])
def test_of_two_that_push_at_once_one_is_told(store, tmp_path, place, request):
    url = f"file://{tmp_path}/remote" if place == "file" else request.getfixturevalue("bucket") + "/remote"
    copies = [shutil.copytree(store, tmp_path / f"copy{i}") for i in range(6)]
    for i, copy in enumerate(copies):
        (tmp_path / f"{i}.txt").write_text(f"text of copy {i}")
        add_documents(copy, str(tmp_path / f"{i}.txt"))

    def push(copy):
        try:
            return push_datastore(copy, url).version
        except StoreLockedError:
            return None

    with ThreadPoolExecutor(6) as executor:
        versions = list(executor.map(push, copies))
    assert versions.count(1) == 1 and set(versions) == {1, None}
    winner = copies[versions.index(1)]
    pull_datastore(url, tmp_path / "t")
    assert contents(tmp_path / "t") == contents(winner)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache of its own, where copies of what lies at addresses are kept."""
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))


@contextmanager
def breaking(name, act):
    """Let something happen at the third file that travels; the calls that were made."""
    moved, original = [], getattr(Remote, name)

    def method(self, *arguments):
        moved.append(arguments)
        if len(moved) == 3:
            act()
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, name, method)
        yield moved


def break_line():
    raise ConnectionResetError("the line broke")


def test_a_remote_that_breaks_amid_is_told_and_gone_on_with(store, url, tmp_path):
    with breaking("send", break_line), pytest.raises(BuildError, match="the line broke"):
        push_datastore(store, url)
    with pytest.raises(StoreNotFoundError):
        pull_datastore(url, tmp_path / "t")
    report = push_datastore(store, url)
    assert report.kept == 2
    with breaking("fetch", break_line), pytest.raises(BuildError, match="the line broke"):
        pull_datastore(url, tmp_path / "t")
    with breaking("fetch", lambda: None) as moved:
        pull_datastore(url, tmp_path / "t")
    assert len(moved) == report.files + report.kept - 2
    verify_datastore(tmp_path / "t")


def test_a_store_that_changes_while_it_is_pushed_is_told(store, url, tmp_path):
    def change():
        remove_documents(store, ["a.txt"])
        compact_datastore(store)

    with breaking("send", change), pytest.raises(StoreLockedError, match="another process has changed"):
        push_datastore(store, url)
    push_datastore(store, url)
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")
    assert contents(tmp_path / "t") == contents(store) and "a.txt" not in contents(store)


def test_damage_here_and_there_does_not_travel(store, url, tmp_path):
    (path,) = store.glob("segments/*/top.bin")
    whole, damaged = flip(path), path.read_bytes()
    with pytest.raises(StoreCorruptError, match="checksum"):
        push_datastore(store, url)
    path.write_bytes(whole)
    push_datastore(store, url)
    fs, root = fsspec.core.url_to_fs(url)
    name = f"{root}/{path.relative_to(store)}"
    for act, words in (
        (lambda: fs.pipe_file(name, damaged), r"checksum .*top\.bin"),
        (lambda: fs.rm_file(name), "no such file"),
    ):
        act()
        for read in (verify_datastore, lambda url: pull_datastore(url, tmp_path / "t")):
            with pytest.raises(StoreCorruptError, match=words):
                read(url)
    fs.pipe_file(name, whole)
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")


def test_opening_an_address(store, url, tokenizer, monkeypatch):
    push_datastore(store, url)
    assert open_datastore(url, tokenizer=tokenizer).manifest.documents == 4
    remove_documents(store, ["a.txt"])
    push_datastore(store, url)
    assert open_datastore(url).manifest.documents == 3

    def unreachable(_):
        raise OSError("no network")

    monkeypatch.setattr(Remote, "newest", unreachable)
    assert open_datastore(url).manifest.documents == 3
    with pytest.raises(BuildError, match="no network"):
        open_datastore(url + "other")


def test_a_store_on_the_hub(store, hub, records, tmp_path):
    with pytest.raises(StoreNotFoundError):
        pull_datastore(hub, tmp_path / "t")
    push_datastore(store, hub)
    source = Source(str(records), field="output")
    pull_datastore(hub, tmp_path / "t")
    assert add_documents(tmp_path / "t", source, workers=1).documents == 5
    push_datastore(tmp_path / "t", hub)
    verify_datastore(hub)
    with pytest.raises(StoreLockedError, match="has not seen"):
        push_datastore(store, hub)
    pull_datastore(hub, tmp_path / "t")
    verify_datastore(tmp_path / "t")
    add_documents(store, source)
    assert contents(tmp_path / "t") == contents(store)
    assert push_datastore(store, hub + "2").kept == 0


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_commands_at_an_address(url, store, records, command, tmp_path):
    push_datastore(store, url)
    assert json.loads(command("info", url, "--json")[1])["documents"] == 4
    assert f"{url}\n" in command("info", url)[1]
    assert json.loads(command("verify", url, "-q", "--json")[1])["tokens"] == read_manifest(store).tokens
    assert "the cat ran" in command("search", url, "the cat ran")[1]
    assert command("catalog", url)[1].startswith(str(tmp_path / "cache"))
    assert "4 documents" in command("merge", tmp_path / "m", url, "-q")[1]
    assert read_manifest(tmp_path / "m").history[-1]["stores"] == [url]
    for words in (
        ["build", url, records, "--tokenizer", "reference"], ["add", url, records], ["remove", url, "a.txt"],
        ["compact", url], ["retokenize", url, "--tokenizer", "reference"], ["sync", url, tmp_path],
        ["merge", url, store], ["push", url, "memory://other"], ["pull", url, url],
    ):  # fmt: skip
        code, _, err = command(*words, "-q")
        assert code == 1 and f"got the address {url}. " in err, words
    assert Remote(url).newest() == 1


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
