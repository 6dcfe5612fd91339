"""Stores that follow folders: afterwards they say what the folders say, whatever was done to the files."""

import gzip
import json
import os
import shutil
import threading

import pytest
from test_build import contents

from retrieve_spec.cli import run
from retrieve_spec.datastore import sync
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.change import writer
from retrieve_spec.datastore.entry_filter import RULES, EntryFilter
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.sync import sync_datastore, watch_folders
from retrieve_spec.errors import BuildError


@pytest.fixture
def folder(texts):
    return texts


def test_a_store_built_of_a_relative_folder_forgets_what_is_deleted(folder, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    build_datastore(tmp_path / "s", [folder.name], tokenizer)
    before, gone = contents(tmp_path / "s"), next(folder.rglob("*.txt"))
    gone.unlink()
    sync_datastore(tmp_path / "s", [folder.name], tokenizer)
    del before[str(gone.relative_to(folder))]
    assert contents(tmp_path / "s") == before


def test_what_lies_in_another_folder_of_the_same_name_stays(folder, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    build_datastore(tmp_path / "s", [folder.name], tokenizer)
    push_datastore(tmp_path / "s", f"file://{tmp_path}/there")
    pull_datastore(f"file://{tmp_path}/there", tmp_path / "pulled")
    mine = tmp_path / "elsewhere" / folder.name
    mine.mkdir(parents=True)
    (mine / "mine.txt").write_text("said here alone")
    monkeypatch.chdir(mine.parent)
    for store in (tmp_path / "s", tmp_path / "pulled"):
        before = contents(store)
        sync_datastore(store, [folder.name])
        assert contents(store) == before | {"mine.txt": "said here alone"}


def test_in_a_folder_with_other_files_no_store_is_made(folder, tokenizer):
    before = sorted(folder.rglob("*"))
    with pytest.raises(BuildError, match="an empty folder"):
        sync_datastore(folder, [folder], tokenizer)
    assert sorted(folder.rglob("*")) == before


def test_only_what_changed_is_read(folder, tokenizer, tmp_path, monkeypatch):
    store = tmp_path / "s"
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    sync_datastore(store, [folder], tokenizer)
    read = []
    original = EntryFilter.read
    monkeypatch.setattr(
        EntryFilter, "read", lambda self, path, *how: read.append(path.name) or original(self, path, *how)
    )
    generation = read_manifest(store).generation
    assert sync_datastore(store, [folder]).documents == 0
    assert (read, read_manifest(store).generation) == ([], generation)
    (folder / "b.txt").write_text("another text")
    report = sync_datastore(store, [folder])
    assert (set(read), report.documents) == ({"b.txt"}, 1)
    read.clear()
    sync_datastore(store, [folder])
    assert read == ["b.txt"]  # so shortly after its change it might have changed again within one tick of the clock
    os.rename(folder / "a.txt", folder / "moved.txt")
    (folder / "c.py").unlink()
    sync_datastore(store, [folder])
    assert set(contents(store)) == {"b.txt", "moved.txt", "sub/d.txt"}
    (store / "sync.json").unlink()  # a cache
    assert sync_datastore(store, [folder]).documents == 0
    verify_datastore(store)


def test_a_file_put_in_the_place_of_one_as_large_and_as_old_is_read(folder, tokenizer, tmp_path):
    for name in ("old.txt", "new.txt"):
        (folder / name).write_text(f"the {name[:3]} one")
        os.utime(folder / name, (1e9, 1e9))  # as archives do that are made to be the same each time
    sync_datastore(tmp_path / "s", [folder], tokenizer)
    os.replace(folder / "new.txt", folder / "old.txt")
    sync_datastore(tmp_path / "s", [folder])
    assert contents(tmp_path / "s")["old.txt"] == "the new one"
    assert "the old one" not in contents(tmp_path / "s").values()


def test_other_documents_stay(folder, tokenizer, records, tmp_path):
    store = tmp_path / "s"
    sync_datastore(store, [folder], tokenizer)
    add_documents(store, Source(str(records), field="output"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "own.txt").write_text("of another folder")
    before = set(contents(store))
    sync_datastore(store, [other])
    assert set(contents(store)) == before | {"own.txt"}
    shutil.rmtree(other)
    other.mkdir()
    sync_datastore(store, [other])
    assert set(contents(store)) == before
    with pytest.raises(BuildError, match="a folder at"):
        sync_datastore(store, [tmp_path / "nowhere"])


def test_records_are_what_build_takes_them_for(folder, tokenizer, tmp_path):
    """Of a file of records every record is a document, as for `build`; of one that changed, what changed is added."""
    rows = [json.dumps({"text": f"record {i} of the file"}) for i in range(4)]
    (folder / "r.jsonl").write_text("\n".join([*rows, "no JSON"]))
    (folder / "t.txt.gz").write_bytes(gzip.compress(b"a compressed text"))
    store = tmp_path / "s"
    build_datastore(tmp_path / "built", str(folder), tokenizer)
    sync_datastore(store, [folder], tokenizer)
    assert contents(store) == contents(tmp_path / "built")
    for _ in range(2):
        report = sync_datastore(store, [folder])
        assert (report.documents, report.skipped_by_reason) == (0, {"no JSON": 1})
    rows[1] = json.dumps({"text": "another record"})
    (folder / "r.jsonl").write_text("\n".join([*rows[:3], "no JSON"]))
    report = sync_datastore(store, [folder])
    assert (report.documents, report.skipped_by_reason) == (1, {"no JSON": 1})
    found = contents(store)
    assert {name: text for name, text in found.items() if name.startswith("r.")} == {
        "r.jsonl#1": "record 0 of the file",
        "r.jsonl#2": "another record",
        "r.jsonl#3": "record 2 of the file",
    }
    (folder / "r.jsonl").unlink()
    sync_datastore(store, [folder])
    assert contents(store) == {name: text for name, text in found.items() if not name.startswith("r.")}
    verify_datastore(store)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "[]",
        '{"rules": 1}',
        '{"rules": "RULES"}',
        '{"rules": "RULES", "folders": {"ROOT": [{"a.txt": [1, 2, "", "", null]}, []]}}',  # of releases before
        '{"ROOT": {"a.txt": [1, 2, "", "", null]}}',
    ],
)
def test_a_damaged_memory_of_folders_is_no_loss(folder, tokenizer, tmp_path, written):
    store = tmp_path / "s"
    sync_datastore(store, [folder], tokenizer)
    before = contents(store)
    place = written.replace("RULES", RULES).replace("ROOT", str(folder.resolve()))
    (store / "sync.json").write_text(place)
    (folder / "new.txt").write_text("a new text")
    assert sync_datastore(store, [folder]).documents == 1
    assert contents(store) == before | {"new.txt": "a new text"}


def test_command(folder, tmp_path, capfd):
    assert run(["sync", str(tmp_path / "s"), str(folder), "--tokenizer", "reference", "-q"]) == 0
    (folder / "a.txt").unlink()
    assert run(["sync", str(tmp_path / "s"), str(folder), "-q", "--json"]) == 0
    assert '"verb": "sync"' in capfd.readouterr().out
    assert "a.txt" not in contents(tmp_path / "s")


def test_a_watcher_goes_on_beside_other_writers_and_misses_nothing(folder, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("watchfiles")
    told, ended = [], []
    looked = threading.Event()
    original = sync.sync_datastore

    def slow(*arguments, **options):
        report = original(*arguments, **options)
        if not told:
            (folder / "meanwhile.txt").write_text("written while the first report was made")
        return report

    def tell(report):
        told.append(report)
        looked.set()
        if (folder / "end.txt").exists() and "end.txt" in contents(tmp_path / "s"):
            raise InterruptedError

    def run_watcher():
        try:
            watch_folders(tmp_path / "s", [folder], tokenizer=tokenizer, tell=tell)
        except BaseException as error:
            ended.append(error)

    monkeypatch.setattr(sync, "sync_datastore", slow)
    with writer(tmp_path / "s"):
        watcher = threading.Thread(target=run_watcher, daemon=True)
        watcher.start()
        assert not looked.wait(2) and not ended
    while len(told) < 2:
        assert looked.wait(60), ended
        looked.clear()
    assert "meanwhile.txt" in contents(tmp_path / "s")
    (folder / "end.txt").write_text("the last one")
    watcher.join(60)
    assert isinstance(ended[0], InterruptedError)
