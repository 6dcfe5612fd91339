"""Stores that follow folders: afterwards they say what the folders say, whatever was done to the files."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from folders import write
from processes import running
from test_build import contents
from waiting import HANG_S, wait_for

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


def test_a_folder_named_by_a_relative_path_is_itself_and_no_other_of_its_name(texts, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(texts.parent)
    build_datastore(tmp_path / "s", [texts.name], tokenizer)
    before = contents(tmp_path / "s")
    (texts / "a.txt").unlink()
    sync_datastore(tmp_path / "s", [texts.name], tokenizer)
    del before["a.txt"]
    assert contents(tmp_path / "s") == before
    push_datastore(tmp_path / "s", f"file://{tmp_path}/there")
    pull_datastore(f"file://{tmp_path}/there", tmp_path / "pulled")
    write(tmp_path / "elsewhere" / texts.name, {"mine.txt": "said here alone"})
    monkeypatch.chdir(tmp_path / "elsewhere")
    for store in (tmp_path / "s", tmp_path / "pulled"):
        sync_datastore(store, [texts.name])
        assert contents(store) == before | {"mine.txt": "said here alone"}


def test_in_a_folder_with_other_files_no_store_is_made(texts, tokenizer):
    before = sorted(texts.rglob("*"))
    with pytest.raises(BuildError, match="an empty folder"):
        sync_datastore(texts, [texts], tokenizer)
    assert sorted(texts.rglob("*")) == before


def test_only_what_changed_is_read(texts, tokenizer, tmp_path, monkeypatch):
    store = tmp_path / "s"
    for path in texts.rglob("*"):
        os.utime(path, (1e9, 1e9))
    sync_datastore(store, [texts], tokenizer)
    read = []
    original = EntryFilter.read
    monkeypatch.setattr(
        EntryFilter, "read", lambda self, path, *how: read.append(path.name) or original(self, path, *how)
    )
    generation = read_manifest(store).generation
    assert sync_datastore(store, [texts]).documents == 0
    assert (read, read_manifest(store).generation) == ([], generation)
    (texts / "b.txt").write_text("another text")
    report = sync_datastore(store, [texts])
    assert (set(read), report.documents) == ({"b.txt"}, 1)
    read.clear()
    sync_datastore(store, [texts])
    assert read == ["b.txt"]  # so shortly after its change it might have changed again within one tick of the clock
    os.rename(texts / "a.txt", texts / "moved.txt")
    (texts / "c.py").unlink()
    sync_datastore(store, [texts])
    assert set(contents(store)) == {"b.txt", "moved.txt", "sub/d.txt"}
    (store / "sync.json").unlink()  # a cache
    assert sync_datastore(store, [texts]).documents == 0
    verify_datastore(store)


def test_a_file_put_in_the_place_of_one_as_large_and_as_old_is_read(texts, tokenizer, tmp_path):
    for name in ("old.txt", "new.txt"):
        (texts / name).write_text(f"the {name[:3]} one")
        os.utime(texts / name, (1e9, 1e9))  # as archives do that are made to be the same each time
    sync_datastore(tmp_path / "s", [texts], tokenizer)
    os.replace(texts / "new.txt", texts / "old.txt")
    sync_datastore(tmp_path / "s", [texts])
    assert contents(tmp_path / "s")["old.txt"] == "the new one"
    assert "the old one" not in contents(tmp_path / "s").values()


def test_other_documents_stay(texts, tokenizer, records, tmp_path):
    store = tmp_path / "s"
    sync_datastore(store, [texts], tokenizer)
    add_documents(store, Source(str(records), field="output"))
    other = write(tmp_path / "other", {"own.txt": "of another folder"})
    before = set(contents(store))
    sync_datastore(store, [other])
    assert set(contents(store)) == before | {"own.txt"}
    (other / "own.txt").unlink()
    sync_datastore(store, [other])
    assert set(contents(store)) == before
    with pytest.raises(BuildError, match="a folder at"):
        sync_datastore(store, [tmp_path / "nowhere"])


def test_records_are_what_build_takes_them_for(texts, tokenizer, tmp_path):
    """Of a file of records every record is a document, as for `build`; of one that changed, what changed is added."""
    rows = [json.dumps({"text": f"record {i} of the file"}) for i in range(4)]
    (texts / "r.jsonl").write_text("\n".join([*rows, "no JSON"]))
    (texts / "t.txt.gz").write_bytes(gzip.compress(b"a compressed text"))
    store = tmp_path / "s"
    build_datastore(tmp_path / "built", str(texts), tokenizer)
    sync_datastore(store, [texts], tokenizer)
    assert contents(store) == contents(tmp_path / "built")
    for _ in range(2):
        report = sync_datastore(store, [texts])
        assert (report.documents, report.skipped_by_reason) == (0, {"no JSON": 1})
    rows[1] = json.dumps({"text": "another record"})
    (texts / "r.jsonl").write_text("\n".join([*rows[:3], "no JSON"]))
    report = sync_datastore(store, [texts])
    assert (report.documents, report.skipped_by_reason) == (1, {"no JSON": 1})
    found = contents(store)
    assert {name: text for name, text in found.items() if name.startswith("r.")} == {
        "r.jsonl#1": "record 0 of the file",
        "r.jsonl#2": "another record",
        "r.jsonl#3": "record 2 of the file",
    }
    (texts / "r.jsonl").unlink()
    sync_datastore(store, [texts])
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
def test_a_damaged_memory_of_folders_is_no_loss(texts, tokenizer, tmp_path, written):
    store = tmp_path / "s"
    sync_datastore(store, [texts], tokenizer)
    before = contents(store)
    place = written.replace("RULES", RULES).replace("ROOT", str(texts.resolve()))
    (store / "sync.json").write_text(place)
    (texts / "new.txt").write_text("a new text")
    assert sync_datastore(store, [texts]).documents == 1
    assert contents(store) == before | {"new.txt": "a new text"}


def test_command(texts, command, tmp_path):
    assert command("sync", tmp_path / "s", texts, "--tokenizer", "reference", "-q")[0] == 0
    (texts / "a.txt").unlink()
    assert '"verb": "sync"' in command("sync", tmp_path / "s", texts, "-q", "--json")[1]
    assert "a.txt" not in contents(tmp_path / "s")


def test_a_watcher_goes_on_beside_other_writers_and_misses_nothing(texts, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("watchfiles")
    told, ended = [], []
    looked = threading.Event()
    original = sync.sync_datastore

    def slow(*arguments, **options):
        report = original(*arguments, **options)
        if not told:
            (texts / "meanwhile.txt").write_text("written while the first report was made")
        return report

    def tell(report):
        told.append(report)
        looked.set()
        if (texts / "end.txt").exists() and "end.txt" in contents(tmp_path / "s"):
            raise InterruptedError

    def run_watcher():
        try:
            watch_folders(tmp_path / "s", [texts], tokenizer=tokenizer, tell=tell)
        except BaseException as error:
            ended.append(error)

    monkeypatch.setattr(sync, "sync_datastore", slow)
    with writer(tmp_path / "s"):
        watcher = threading.Thread(target=run_watcher, daemon=True)
        watcher.start()
        assert not looked.wait(2) and not ended
    while len(told) < 2:
        assert looked.wait(HANG_S), ended
        looked.clear()
    assert "meanwhile.txt" in contents(tmp_path / "s")
    (texts / "end.txt").write_text("the last one")
    watcher.join(HANG_S)
    assert isinstance(ended[0], InterruptedError)


LIMITS = {
    "max_inotify_watches": "fs.inotify.max_user_watches=1048576",
    "max_inotify_instances": "fs.inotify.max_user_instances=1024",
}


def namespace_with(limit):
    """Words before a command, for which a limit of the system is used up."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    words = ["unshare", "-Ur", "sh", "-c", f'echo 0 > /proc/sys/user/{limit} && exec "$@"', "sh"]
    if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    return words


@pytest.mark.parametrize("limit", LIMITS)
def test_folders_are_looked_through_and_the_limit_is_named(limit, texts, tmp_path):
    words = [*namespace_with(limit), sys.executable, "-m", "retrieve_spec.cli", "sync", str(tmp_path / "s"), str(texts)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (tmp_path / "said").open("w+b") as said:
        with running([*words, "--watch", "--tokenizer", "reference"], stderr=said, env=environment) as command:
            wait_for(lambda: (tmp_path / "s" / "sync.json").exists())
            (texts / "new.txt").write_text("a new text")
            wait_for(lambda: contents(tmp_path / "s").get("new.txt") == "a new text")
            command.send_signal(signal.SIGINT)
            command.wait()
        said.seek(0)
        assert re.search(rf"to raise the limits: sudo sysctl .*{LIMITS[limit]}".encode(), said.read())
