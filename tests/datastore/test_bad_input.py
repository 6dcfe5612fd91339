"""What goes wrong outside of the library: a clear error each, and nothing half written."""

from __future__ import annotations

import os

import fsspec
import pytest

from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.catalog import write_catalog
from retrieve_spec.datastore.files import FileEntry
from retrieve_spec.datastore.remote import Remote
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import BuildError, ConfigError


def test_a_build_on_a_full_disk_leaves_no_folder(texts, tokenizer, tmp_path):
    resource = pytest.importorskip("resource", reason="this system has no limit on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # larger files fail as they do on a full disk
    try:
        with pytest.raises(BuildError, match="File too large"):
            build_datastore(tmp_path / "s", str(texts), tokenizer, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "s").exists()


def test_a_catalogue_that_cannot_be_written(texts, tokenizer, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer)
    with pytest.raises(BuildError, match="give another place"):
        write_catalog(tmp_path / "s", tmp_path / "nowhere" / "c.sqlite")


def test_a_disk_that_fails_here_is_not_blamed_on_the_remote(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/remote/file", b"content")
    try:
        with pytest.raises(BuildError, match=f"could not write to {tmp_path}/nowhere"):
            Remote("memory://remote").fetch("file", tmp_path / "nowhere" / "file", FileEntry(7, ""), len)
    finally:
        memory.rm("/", recursive=True)


def test_names_that_are_no_text_travel_escaped(tokenizer, tmp_path):
    source = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(source)
    with open(os.path.join(source, os.fsdecode(b"\xfe.txt")), "w") as file:
        file.write("some text")
    build_datastore(tmp_path / "s", source, tokenizer)
    url = f"file://{tmp_path}/remote"
    push_datastore(tmp_path / "s", url)
    assert "Sources: \\udcff." in (tmp_path / "remote" / "README.md").read_text()
    (tmp_path / "more.txt").write_text("more text")
    add_documents(url, str(tmp_path / "more.txt"))
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")
    assert [document.path for document in open_datastore(tmp_path / "t").documents()] == ["\\xfe.txt", "more.txt"]


def test_links_that_lead_to_each_other(texts, tokenizer, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for change in (
        lambda: sync_datastore(tmp_path / "s", [tmp_path / "loop"], tokenizer),
        lambda: build_datastore(tmp_path / "s", str(tmp_path / "loop"), tokenizer),
        lambda: build_datastore(tmp_path / "loop", str(texts), tokenizer),
    ):
        with pytest.raises(BuildError):
            change()
    (texts / "up").symlink_to("..")
    (texts / "loop").symlink_to("loop")
    assert build_datastore(tmp_path / "s", str(texts), tokenizer).documents == 4


def test_a_store_is_no_text(texts, tokenizer, tmp_path):
    build_datastore(texts / "s", str(texts), tokenizer)
    for change in (
        lambda: build_datastore(tmp_path / "t", str(texts / "s"), tokenizer),
        lambda: add_documents(texts / "s", str(texts / "s")),
        lambda: sync_datastore(tmp_path / "t", [texts / "s"], tokenizer),
    ):
        with pytest.raises(BuildError, match="retrieve-spec merge"):
            change()
    assert not (tmp_path / "t").exists()
    assert add_documents(texts / "s", str(texts)).documents == 0  # inside of its source it stays out


@pytest.mark.parametrize("value", ["yesterday", "1e30", "nan"])
def test_a_recorded_time_that_is_none(value, texts, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
    with pytest.raises(ConfigError, match="SOURCE_DATE_EPOCH"):
        build_datastore(tmp_path / "s", str(texts), tokenizer)
    assert not (tmp_path / "s").exists()


def test_files_of_other_times(tokenizer, tmp_path):
    """Clocks go backwards, and files come from the future: what changes is read, whatever its time says."""
    folder, store = tmp_path / "f", tmp_path / "s"
    folder.mkdir()
    for name, time in (("future.txt", 4e9), ("past.txt", -1e9)):
        (folder / name).write_text("before")
        (folder / name).write_text(f"{name} before")
        os.utime(folder / name, (time, time))
    sync_datastore(store, [folder], tokenizer)
    for name, time in (("future.txt", 4e9), ("past.txt", -2e9)):
        (folder / name).write_text(f"{name} AFTER!")
        os.utime(folder / name, (time, time))
    assert sync_datastore(store, [folder]).documents == 2
    assert open_datastore(store).manifest.documents == 2
