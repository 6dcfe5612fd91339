"""What goes wrong outside of the library: a clear error each, and nothing half written."""

import errno
import gzip
import json
import os
import secrets
from contextlib import contextmanager
from pathlib import Path

import pytest
from folders import write
from test_build import contents

from retrieve_spec.datastore import build, sources
from retrieve_spec.datastore import change as change_module
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.change import by_reason
from retrieve_spec.datastore.edit import compact_datastore
from retrieve_spec.datastore.entry_filter import zstd
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.inspection import verify_datastore, write_catalog
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.errors import BuildError


@contextmanager
def full_disk():
    """Larger files fail as they do on a full disk, which is told."""
    resource = pytest.importorskip("resource", reason="this system has no limit on the size of files")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(BuildError, match=r"File too large.*what was written is deleted"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_build_on_a_full_disk_leaves_no_folder(texts, tokenizer, tmp_path):
    with full_disk():
        build_datastore(tmp_path / "s", str(texts), tokenizer, workers=1)
    assert not (tmp_path / "s").exists()


def files_of(store):
    return {path.relative_to(store) for path in store.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_change_on_a_full_disk_leaves_nothing_behind(store, tmp_path, monkeypatch):
    more = write(tmp_path / "more", {"more.txt": "what does not fit any more"})
    before = files_of(store)
    changes = (lambda: add_documents(store, str(more)), lambda: compact_datastore(store, workers=1))
    for change in changes:
        with full_disk():
            change()
        assert files_of(store) == before and not (store / "work").exists()

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(change_module, "write_manifest", fails)  # segments are in their places then
    for change in changes:
        with pytest.raises(BuildError, match="No space left"):
            change()
        assert files_of(store) == before
    monkeypatch.undo()
    verify_datastore(store)
    assert add_documents(store, str(more)).documents == 1


def test_names_that_are_no_text_travel_escaped(tokenizer, tmp_path):
    source = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    write(Path(source), {os.fsdecode(b"\xfe.txt"): "some text"})
    build_datastore(tmp_path / "s", source, tokenizer)
    url = f"file://{tmp_path}/remote"
    push_datastore(tmp_path / "s", url)
    assert "Sources: \\udcff." in (tmp_path / "remote" / "README.md").read_text()
    pull_datastore(url, tmp_path / "t")
    verify_datastore(tmp_path / "t")
    assert [document.path for document in open_datastore(tmp_path / "t").documents()] == ["\\xfe.txt"]
    write_catalog(tmp_path / "s")


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


def test_sources_that_vanish_or_change_once_planned(tokenizer, tmp_path, monkeypatch):
    """Each is read as it is then, or counted; documents of others enter as ever."""
    rows = "".join(f'{{"text": "record number {i}"}}\n' for i in range(40))
    plain = ("gone.txt", "linked.txt", "other.txt", "pipe.txt", "folder.txt", "sub/below.txt", "stays.txt")
    records = ("linked.jsonl", "pipe.jsonl", "folder.jsonl", "sub/below.jsonl")
    files = {name: f"the text of {name}" for name in plain}
    files |= {name: f'{{"text": "a record of {name}"}}\n' for name in records}
    files |= {"cut.jsonl": rows, "gone.jsonl": rows.replace("record", "row"), "binary.jsonl": '{"text": "was text"}\n'}
    folder = write(tmp_path / "f", files | {"linked.gz": gzip.compress(b"a text that was compressed")})
    monkeypatch.setattr(sources, "SHARD_BYTES", 200)  # the larger ones are read in parts
    grow = build.grow

    def change(*arguments, **options):
        for name in ("gone.txt", "gone.jsonl", "pipe.txt", "pipe.jsonl", "folder.txt", "folder.jsonl"):
            (folder / name).unlink()
        for end in ("txt", "jsonl"):
            os.mkfifo(folder / f"pipe.{end}")
            (folder / f"folder.{end}").mkdir()
        for name in ("linked.txt", "linked.jsonl", "linked.gz", "sub"):
            (folder / name).rename(tmp_path / name)
            (folder / name).symlink_to(tmp_path / name)
        write(folder, {"other.txt": "another text, and longer than it was", "cut.jsonl": rows[:300]})
        write(folder, {"binary.jsonl": b"\0\xff\n"})
        return grow(*arguments, **options)

    monkeypatch.setattr(build, "grow", change)  # what it is handed was listed
    report = build_datastore(tmp_path / "s", str(folder), tokenizer, workers=1)
    verify_datastore(tmp_path / "s")
    found = contents(tmp_path / "s")
    texts = {name: text for name, text in found.items() if "#" not in name}
    assert texts == {"other.txt": "another text, and longer than it was", "stays.txt": "the text of stays.txt"}
    assert set(found.values()) <= {*texts.values(), *(f"record number {i}" for i in range(40))}
    reasons = {
        Reason.LINK: {"linked.txt", "linked.jsonl", "linked.gz", "sub/below.txt", "sub/below.jsonl"},
        Reason.UNREADABLE: {f"{name}.{end}" for name in ("gone", "pipe", "folder") for end in ("txt", "jsonl")},
        "no JSON": {"binary.jsonl#1", "cut.jsonl#11"},
    }
    assert {reason: set(paths) for reason, paths in by_reason(report.skipped).items()} == reasons


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_records_cut_short(end, tokenizer, tmp_path):
    """Those in front of the cut enter, the rest is counted."""
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[end]
    rows = [f'{{"text": "record {i}: {secrets.token_hex(3000)}"}}\n' for i in range(40)]
    content = pack("".join(rows).encode())
    folder = write(tmp_path / "f", {f"a.jsonl{end}": content[: len(content) * 2 // 3], "b.txt": "a text"})
    report = build_datastore(tmp_path / "s", str(folder), tokenizer, workers=1)
    found = contents(tmp_path / "s")
    whole = len(found) - 1
    assert 1 < whole < 40 and "b.txt" in found
    assert all(found[f"a.jsonl{end}#{i + 1}"] == json.loads(rows[i])["text"] for i in range(whole))
    expected = ("a.jsonl" + (f"{end}" if end else f"#{whole + 1}"), str(Reason.DAMAGED) if end else "no JSON")
    assert [(path, reason) for path, _, reason in report.skipped] == [expected]


def test_a_place_where_no_store_can_be(texts, tokenizer, tmp_path):
    for place in (tmp_path / "texts" / "a.txt" / "s", Path("/proc/s")):
        with pytest.raises(BuildError, match="choose another place"):
            build_datastore(place, str(texts), tokenizer)


def test_all_frames_of_a_compressed_file_are_read(tokenizer, tmp_path):
    """As of files put behind one another, and of those with frames that say nothing between."""
    pack = zstd.compress
    skipped = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    content = pack(b"one ") + skipped + pack(b"") + pack(b"two " * 100_000) + skipped
    write(tmp_path, {"a.txt.zst": content, "b.txt.zst": content[: -len(skipped) - 9]})
    report = build_datastore(tmp_path / "s", str(tmp_path), tokenizer, workers=1)
    assert contents(tmp_path / "s") == {"a.txt.zst": "one " + "two " * 100_000}
    assert report.skipped_by_reason == {str(Reason.DAMAGED): 1}
