"""Sources at addresses: the same filter and the same bytes as those of a folder."""

from __future__ import annotations

import gzip

import fsspec
import pytest
from planned_builds import planned_then
from test_build import contents

from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.errors import BuildError


def test_sources_at_an_address(tokenizer, tmp_path, url):
    """Files of an object store, by the same filter and with the same bytes as those of a folder."""
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "b.txt").write_text("another text")
    (folder / "r.jsonl").write_text('{"text": "one record"}\n{"text": "and one more"}\n')
    (folder / ".env").write_text("PASSWORD=hunter2hunter2")
    (folder / "x.min.js").write_text("var a")
    (folder / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(str(folder), root, recursive=True)
    here = build_datastore(tmp_path / "here", str(folder), tokenizer)
    there = build_datastore(tmp_path / "there", f"{url}/", tokenizer)
    assert there.skipped_by_reason == here.skipped_by_reason
    names = [entry.name for entry in read_manifest(tmp_path / "here").segments]
    assert [entry.name for entry in read_manifest(tmp_path / "there").segments] == names
    one = build_datastore(tmp_path / "one", f"{url}/sub/b.txt", tokenizer)
    assert (one.documents, list(contents(tmp_path / "one"))) == (1, ["b.txt"])
    with pytest.raises(BuildError, match="nothing there"):
        build_datastore(tmp_path / "none", f"{url}-none", tokenizer)


@pytest.mark.parametrize("name", ["a.txt", "r.jsonl"])
def test_a_remote_that_breaks_ends_the_build(name, tokenizer, tmp_path, monkeypatch):
    """Its files are not counted as unreadable: they are sound, and somebody should try again."""
    memory = fsspec.filesystem("memory")
    original = type(memory).open

    def broken(self, path, *rest, **named):
        if path.endswith(name):
            raise OSError("the line is dead")
        return original(self, path, *rest, **named)

    try:
        memory.pipe({"/data/r.jsonl": b'{"text": "one record"}\n', "/data/a.txt": b"a text"})
        with monkeypatch.context() as patch:
            patch.setattr(type(memory), "open", broken)
            with pytest.raises(BuildError, match=f"could not reach memory:.*{name}: the line is dead"):
                build_datastore(tmp_path / "s", "memory://data", tokenizer)
        build_datastore(tmp_path / "s", "memory://data", tokenizer)
        assert set(contents(tmp_path / "s")) == {"r.jsonl#1", "a.txt"}
    finally:
        memory.rm("/", recursive=True)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.txt.gz"])
def test_what_vanishes_once_planned_is_gone(name, tokenizer, tmp_path, url, monkeypatch):
    """Here as at an address."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one record"}\n')
    (folder / "a.txt").write_text("another text")
    (folder / "a.txt.gz").write_bytes(gzip.compress(b"and one more"))
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(str(folder), root, recursive=True)
    for source, vanish in ((str(folder), (folder / name).unlink), (url, lambda: fs.rm_file(f"{root}/{name}"))):
        store = tmp_path / f"s{len(list(tmp_path.iterdir()))}"
        report = planned_then(vanish, source, tokenizer, store, monkeypatch)
        assert report.skipped_by_reason.get("gone") == 1
        assert report.documents == 2
