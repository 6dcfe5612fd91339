"""What goes wrong outside of the library: a clear error each, and nothing half written."""

import gzip
import json
import os
import secrets
from pathlib import Path

import pytest
from planned_builds import planned_then
from test_build import contents

from retrieve_spec.datastore import sources
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.entry_filter import zstd
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.inspection import verify_datastore, write_catalog
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.errors import BuildError


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


def test_names_that_are_no_text_travel_escaped(tokenizer, tmp_path):
    source = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(source)
    with open(os.path.join(source, os.fsdecode(b"\xfe.txt")), "w") as file:
        file.write("some text")
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
    folder = tmp_path / "f"
    (folder / "sub").mkdir(parents=True)
    for name in ("gone.txt", "linked.txt", "other.txt", "pipe.txt", "folder.txt", "sub/below.txt", "stays.txt"):
        (folder / name).write_text(f"the text of {name}")
    rows = "".join(f'{{"text": "record number {i}"}}\n' for i in range(40))
    (folder / "cut.jsonl").write_text(rows)
    (folder / "gone.jsonl").write_text(rows.replace("record", "row"))
    (folder / "binary.jsonl").write_text('{"text": "was text"}\n')
    for name in ("linked.jsonl", "pipe.jsonl", "folder.jsonl", "sub/below.jsonl"):
        (folder / name).write_text(f'{{"text": "a record of {name}"}}\n')
    (folder / "linked.gz").write_bytes(gzip.compress(b"a text that was compressed"))
    monkeypatch.setattr(sources, "SHARD_BYTES", 200)  # the larger ones are read in parts

    def change():
        (folder / "gone.txt").unlink()
        (folder / "linked.txt").unlink()
        (folder / "linked.txt").symlink_to(folder / "stays.txt")
        (folder / "other.txt").write_text("another text, and longer than it was when it was listed")
        (folder / "pipe.txt").unlink()
        os.mkfifo(folder / "pipe.txt")
        (folder / "folder.txt").unlink()
        (folder / "folder.txt").mkdir()
        (folder / "sub").rename(tmp_path / "moved")
        (folder / "sub").symlink_to(tmp_path / "moved")
        (folder / "cut.jsonl").write_text(rows[:300])
        (folder / "gone.jsonl").unlink()
        (folder / "binary.jsonl").write_bytes(b"\0\xff\n")
        for name, target in (("linked.jsonl", "secret.jsonl"), ("linked.gz", "secret.gz")):
            (folder / name).rename(tmp_path / target)
            (folder / name).symlink_to(tmp_path / target)
        (folder / "pipe.jsonl").unlink()
        os.mkfifo(folder / "pipe.jsonl")
        (folder / "folder.jsonl").unlink()
        (folder / "folder.jsonl").mkdir()

    report = planned_then(change, str(folder), tokenizer, tmp_path / "s", monkeypatch)
    found = contents(tmp_path / "s")
    texts = {name: text for name, text in found.items() if "#" not in name}
    assert texts == {"other.txt": (folder / "other.txt").read_text(), "stays.txt": "the text of stays.txt"}
    assert set(found.values()) <= {*texts.values(), *(f"record number {i}" for i in range(40))}
    reasons = {}
    for path, _, reason in report.skipped:
        reasons.setdefault(path, set()).add(reason)
    assert reasons.pop("cut.jsonl") == {Reason.CHANGING}
    assert reasons == {
        "gone.txt": {Reason.GONE},
        "gone.jsonl": {Reason.GONE},
        "linked.txt": {Reason.LINK},
        "linked.jsonl": {Reason.LINK},
        "linked.gz": {Reason.LINK},
        "sub/below.txt": {Reason.LINK},
        "sub/below.jsonl": {Reason.LINK},
        "pipe.txt": {Reason.NOT_A_FILE},
        "pipe.jsonl": {Reason.NOT_A_FILE},
        "folder.jsonl": {Reason.NOT_A_FILE},
        "folder.txt": {Reason.NOT_A_FILE},
        "binary.jsonl#1": {"no JSON"},
    }


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_records_cut_short(end, tokenizer, tmp_path):
    """Those in front of the cut enter, the rest is counted."""
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[end]
    rows = [f'{{"text": "record {i}: {secrets.token_hex(3000)}"}}\n' for i in range(40)]
    content = pack("".join(rows).encode())
    (tmp_path / f"a.jsonl{end}").write_bytes(content[: len(content) * 2 // 3])
    (tmp_path / "b.txt").write_text("a text")
    given = [str(tmp_path / f"a.jsonl{end}"), str(tmp_path / "b.txt")]
    report = build_datastore(tmp_path / "s", given, tokenizer, workers=1)
    found = contents(tmp_path / "s")
    whole = len(found) - 1
    assert 1 < whole < 40 and "b.txt" in found
    assert all(found[f"a.jsonl{end}#{i + 1}"] == json.loads(rows[i])["text"] for i in range(whole))
    expected = ("a.jsonl" + (f"{end}" if end else f"#{whole + 1}"), str(Reason.DAMAGED) if end else "no JSON")
    assert [(path, reason) for path, _, reason in report.skipped] == [expected]


def test_a_place_where_no_store_can_be(texts, tokenizer, tmp_path):
    for place in (tmp_path / "texts" / "a.txt" / "s", Path("/proc/s")):
        with pytest.raises(BuildError, match="choose another place") as told:
            build_datastore(place, str(texts), tokenizer)
        assert "run the change again" not in str(told.value) and "the store is" not in str(told.value)


def test_all_frames_of_a_compressed_file_are_read(tokenizer, tmp_path):
    """As of files put behind one another, and of those with frames that say nothing between."""
    pack = zstd.compress
    skipped = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    content = pack(b"one ") + skipped + pack(b"") + pack(b"two " * 100_000) + skipped
    (tmp_path / "a.txt.zst").write_bytes(content)
    (tmp_path / "b.txt.zst").write_bytes(content[: -len(skipped) - 9])
    report = build_datastore(tmp_path / "s", str(tmp_path), tokenizer, workers=1)
    assert contents(tmp_path / "s") == {"a.txt.zst": "one " + "two " * 100_000}
    assert report.skipped_by_reason == {str(Reason.UNREADABLE): 1}
