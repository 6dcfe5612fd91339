"""Verbs at an address: they do what they do to a folder that is then pushed, or say what to do instead."""

from __future__ import annotations

import json

import fsspec
import pytest
from test_build import contents
from test_remote_build import Machines, machines  # noqa: F401 (a fixture)
from test_share import store  # noqa: F401 (a fixture)

from retrieve_spec.cli import run
from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import remote_change
from retrieve_spec.datastore.addresses import public_name
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.card import name_of
from retrieve_spec.datastore.edit import merge_datastores, remove_documents
from retrieve_spec.datastore.entry_filter import Reason
from retrieve_spec.datastore.exchange import Exchange
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.remote import Remote
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import BuildError, StoreCorruptError, StoreIncompleteError, StoreLockedError

# ruff: noqa: F811 (fixtures of other modules)


@pytest.fixture(autouse=True)
def _fixed(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def memory(store):
    push_datastore(store, "memory://remote")
    yield "memory://remote"
    fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.mark.parametrize("cluster", ["", "ray"])
def test_adding_at_an_address_is_adding_and_pushing(url, store, records, texts, machines, tmp_path, cluster):
    remove_documents(store, ["b.txt"])
    push_datastore(store, url)
    (texts / "new.txt").write_text("something new")
    sources = [Source(str(texts), "MIT"), Source(str(records), field="output")]
    report = add_documents(url, sources, cluster=cluster, workers=1)
    assert (report.verb, report.segments, report.skipped_by_reason) == ("add", 2, {"duplicate": 3})
    assert report.documents == 7  # what was removed comes again
    assert bool(machines.ran) == bool(cluster)
    add_documents(store, sources)
    push_datastore(store, url + "2")
    here, there = Remote(url), Remote(url + "2")
    assert here.manifest(2) == there.manifest(1)
    assert here.fs.cat_file(here.path("README.md")) == there.fs.cat_file(there.path("README.md"))
    stale = {place for place in here.sizes() if place.startswith(("versions", "manifest.json"))}
    assert here.sizes().items() - there.sizes().items() <= {(place, here.sizes()[place]) for place in stale}
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")
    assert contents(tmp_path / "t") == contents(store)
    assert add_documents(url, sources, cluster=cluster).documents == 0
    assert here.newest() == 2 and Exchange(url).plan() is None


def test_of_two_that_add_at_once_one_is_told(memory, records, tmp_path, machines, monkeypatch):
    (tmp_path / "mine.txt").write_text("this is mine")
    publish = remote_change._publish

    def slower(*arguments):
        monkeypatch.setattr(remote_change, "_publish", publish)
        add_documents(memory, str(tmp_path / "mine.txt"))
        publish(*arguments)

    for cluster in ("", "ray"):
        monkeypatch.setattr(remote_change, "_publish", slower)
        with pytest.raises(StoreLockedError, match="Run the command again"):
            add_documents(memory, Source(str(records), field="output"), cluster=cluster)
        (tmp_path / "mine.txt").write_text("and this")
    assert Remote(memory).newest() == 3
    assert add_documents(memory, Source(str(records), field="output"), cluster="ray").documents == 5
    pull_datastore(memory, tmp_path / "t")
    assert len(contents(tmp_path / "t")) == 4 + 2 - 1 + 5


def test_an_addition_that_was_interrupted_goes_on(memory, records, machines, texts, monkeypatch):
    source = Source(str(records), field="output")
    machines.broken["segment", 0] = True
    with pytest.raises(BuildError, match="rank 0"):
        add_documents(memory, source, cluster="ray")
    assert Remote(memory).newest() == 1
    with pytest.raises(StoreIncompleteError, match="--resume"):
        add_documents(memory, source, cluster="ray")
    with pytest.raises(BuildError, match="version 1 of one"):
        build_datastore(memory, resume=True, cluster="ray")
    machines.broken = {}

    def stop(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "end", stop)
        with pytest.raises(KeyboardInterrupt):
            add_documents(memory, resume=True, cluster="ray")
    assert Remote(memory).newest() == 2 and Exchange(memory).plan() is not None
    machines.ran.clear()
    assert add_documents(memory, resume=True, cluster="ray").documents == 5
    assert (Remote(memory).newest(), machines.ran, Exchange(memory).plan()) == (2, [], None)
    machines.broken["tokens", 0] = True
    (texts / "new.txt").write_text("something new")
    with pytest.raises(BuildError, match="rank 0"):
        add_documents(memory, str(texts), cluster="ray")
    add_documents(memory, str(texts))
    with pytest.raises(BuildError, match="Delete memory://remote/work"):
        add_documents(memory, resume=True, cluster="ray")


def test_what_is_left_of_an_ended_change_is_not_taken_for_the_next_one(memory, texts, machines, tmp_path, monkeypatch):
    def half(self):
        self.remote.fs.rm_file(self._place("plan.json"))
        raise KeyboardInterrupt  # a kill amid tidying up

    (texts / "one.txt").write_text("this is the first one")
    with monkeypatch.context() as patch:
        patch.setattr(Exchange, "end", half)
        with pytest.raises(KeyboardInterrupt):
            add_documents(memory, str(texts / "one.txt"), cluster="ray")
    (texts / "two.txt").write_text("and that is the second")
    machines.broken["segment", 0] = True
    with pytest.raises(BuildError, match="rank 0"):
        add_documents(memory, str(texts / "two.txt"), cluster="ray")
    machines.broken = {}
    assert add_documents(memory, resume=True, cluster="ray").documents == 1
    pull_datastore(memory, tmp_path / "t")
    assert set(contents(tmp_path / "t")) > {"one.txt", "two.txt"}


def test_what_cannot_be_added_at_an_address(memory, texts):
    with pytest.raises(BuildError, match="--cluster to resume"):
        add_documents(memory, resume=True)
    with pytest.raises(BuildError, match="nothing there"):
        add_documents(memory, "nowhere")
    with pytest.raises(BuildError, match="dense index"):
        add_documents(memory, str(texts), config=StoreConfig(dense={"model": "m"}))
    assert Remote(memory).newest() == 1


def test_commands_at_an_address(memory, store, records, tmp_path, capsys):
    def said(*words, code=0):
        assert run([*words]) == code
        out, err = capsys.readouterr()
        return err if code else out

    assert json.loads(said("info", memory, "--json"))["documents"] == 4
    assert f"{memory}\n" in said("info", memory)
    assert json.loads(said("verify", memory, "-q", "--json"))["tokens"] == read_manifest(store).tokens
    assert "add: 5 documents" in said("add", memory, str(records), "--field", "output", "-q")
    assert "answer number 3" in said("search", memory, "answer number 3")
    assert said("catalog", memory).startswith(str(tmp_path / "cache"))
    assert "9 documents" in said("merge", str(tmp_path / "m"), memory, "-q")
    assert read_manifest(tmp_path / "m").history[-1]["stores"] == [memory]
    for words in (
        ["remove", memory, "a.txt"], ["compact", memory], ["retokenize", memory, "--tokenizer", "reference"],
        ["convert", memory], ["sync", memory, str(tmp_path)], ["merge", memory, str(store)],
        ["push", memory, "memory://other"], ["pull", memory, memory],
    ):  # fmt: skip
        assert f"got the address {memory}. " in said(*words, "-q", code=1), words
    assert Remote(memory).newest() == 2
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


@pytest.mark.parametrize("text", ["Is a server at http://host:8012/v1? See it.", "'https://h/x?'", "s3://b/what?/me"])
def test_errors_leave_other_addresses_as_they_are(text):
    assert BuildError(text, text, text).remedy == text


def test_a_store_inside_of_a_source_stays_out(url, texts, tokenizer, tmp_path):
    """As in a folder: it is no text, and named itself it is an error."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(str(texts), f"{root}/texts", recursive=True)
    build_datastore(tmp_path / "s", str(texts), tokenizer, workers=1)
    push_datastore(tmp_path / "s", f"{url}/texts/sub/store")
    fs.makedirs(f"{root}/texts/sub/segments", exist_ok=True)
    fs.pipe_file(f"{root}/texts/sub/segments/more.txt", b"no store: it has no manifest")
    report = build_datastore(tmp_path / "t", f"{url}/texts", tokenizer, workers=1)
    assert set(contents(tmp_path / "t")) == {*contents(tmp_path / "s"), "sub/segments/more.txt"}
    assert report.skipped == ()
    for source in (f"{url}/texts/sub/store", f"{url}/texts/sub/store/"):
        with pytest.raises(BuildError, match="retrieve-spec merge"):
            build_datastore(tmp_path / "u", source, tokenizer)
    assert not (tmp_path / "u").exists()


def test_links_are_not_followed(texts, tokenizer, tmp_path):
    """Neither by a path nor by an address: what lies behind one may be anybody's."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "diary.txt").write_text("dear diary")
    (texts / "diary.txt").symlink_to(tmp_path / "outside" / "diary.txt")
    (texts / "outside").symlink_to(tmp_path / "outside")
    (texts / "up").symlink_to("..")
    for number, source in enumerate((str(texts), f"file://{texts}")):
        report = build_datastore(tmp_path / f"s{number}", source, tokenizer, workers=1)
        assert set(contents(tmp_path / f"s{number}")) == {"a.txt", "b.txt", "c.py", "sub/d.txt"}
        assert report.skipped_by_reason == {str(Reason.LINK): 3}
    report = build_datastore(tmp_path / "named", f"file://{texts}/diary.txt", tokenizer, workers=1)
    assert report.documents == 1  # as a path that is named
