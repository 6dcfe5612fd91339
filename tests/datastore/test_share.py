"""Sharing: what travels, what must not, and what happens when two push, a remote breaks or a process is killed."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import fsspec
import pytest
from byte_tokenizers import byte_tokenizer
from test_build import contents

from retrieve_spec.datastore import remote as remotes
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import (
    BuildError,
    StoreCorruptError,
    StoreLockedError,
    StoreNotFoundError,
    TokenizerMismatchError,
)


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


@contextmanager
def breaking(name, act):
    """Let something happen at the third file that travels; the calls that were made."""
    moved, original = [], getattr(remotes.Remote, name)

    def method(self, *arguments):
        moved.append(arguments)
        if len(moved) == 3:
            act()
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remotes.Remote, name, method)
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
    path = next(store.glob("segments/*/top.bin"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreCorruptError, match="checksum"):
        push_datastore(store, url)
    path.write_bytes(whole)
    push_datastore(store, url)
    fs, root = fsspec.core.url_to_fs(url)
    name = next(name for name in fs.find(root) if name.endswith("top.bin"))
    fs.pipe_file(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreCorruptError, match="checksum"):
        pull_datastore(url, tmp_path / "t")
    fs.pipe_file(name, whole)
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")


def test_opening_an_address(store, url, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))
    push_datastore(store, url)
    assert open_datastore(url, tokenizer=tokenizer).manifest.documents == 4
    remove_documents(store, ["a.txt"])
    push_datastore(store, url)
    assert open_datastore(url).manifest.documents == 3

    def unreachable(_):
        raise OSError("no network")

    monkeypatch.setattr(remotes.Remote, "newest", unreachable)
    assert open_datastore(url).manifest.documents == 3
    with pytest.raises(BuildError, match="no network"):
        open_datastore(url + "other")
