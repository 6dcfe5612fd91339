"""Builds, by any number of processes, and readers beside a writer: every opening is a consistent snapshot."""

import hashlib
import multiprocessing
import os
import shutil
import sqlite3
import stat
import time
from contextlib import closing

import numba
import numpy as np
import pytest
from byte_tokenizers import byte_tokenizer
from children import exit_code, start
from filelock import FileLock
from folders import write
from numba import njit
from waiting import wait_for

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import build, sources
from retrieve_spec.datastore.build import add_documents, build_datastore, open_or_build
from retrieve_spec.datastore.change import writer
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, remove_documents, retokenize_datastore
from retrieve_spec.datastore.inspection import search_datastore, verify_datastore, write_catalog
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.sources import Recipe, Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.sync import sync_datastore
from retrieve_spec.errors import (
    BuildError,
    StoreLockedError,
)
from retrieve_spec.kernels.compiled_code import WHY_IT_TAKES_LONG


def contents(store):
    """Every document of a store as text, by path."""
    opened = open_datastore(store)
    return {
        row.path: opened.tokenizer.decode(segment.text_ids(row.number).tolist())
        for segment in opened.segments
        for row in segment.documents.live()
    }


def digest(folder):
    """Hash of every file but the lock."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_build_and_open(tokenizer, texts, tmp_path):
    report = build_datastore(tmp_path / "s", Source(str(texts), "MIT"), tokenizer)
    assert (report.documents, report.segments, report.skipped) == (4, 1, ())
    store = open_datastore(tmp_path / "s", tokenizer=tokenizer)
    assert contents(tmp_path / "s") == {
        str(p.relative_to(texts)): p.read_text() for p in texts.rglob("*") if p.is_file()
    }
    assert store.manifest.tokens == report.tokens == sum(map(len, contents(tmp_path / "s").values()))
    assert verify_datastore(tmp_path / "s")["documents"] == 4


@pytest.mark.parametrize(("most", "lengths"), [(100, [73, 40 + 30 + 24]), (50, [73, 40, 30, 24])])
def test_segments_are_cut_by_order_and_length(tokenizer, texts, tmp_path, most, lengths):
    """A document that is longer than a segment is one by itself."""
    sync_datastore(tmp_path / "s", [texts], tokenizer, config=StoreConfig(segment_tokens=most))
    for change in (lambda: sync_datastore(tmp_path / "s", [texts]), lambda: compact_datastore(tmp_path / "s")):
        assert [len(segment.tokens) for segment in open_datastore(tmp_path / "s").segments] == lengths
        change()
    verify_datastore(tmp_path / "s")


def test_duplicates_are_kept_once(tokenizer, texts, tmp_path):
    (texts / "z.txt").write_text((texts / "a.txt").read_text())
    report = build_datastore(tmp_path / "s", str(texts), tokenizer)
    assert report.skipped_by_reason == {"duplicate": 1}
    assert add_documents(tmp_path / "s", str(texts)).skipped_by_reason == {"duplicate": 5}


def test_max_tokens(tokenizer, texts, tmp_path):
    report = build_datastore(tmp_path / "s", str(texts), tokenizer, max_tokens=120)
    assert (report.documents, report.tokens) == (2, 72 + 39)


def test_wide_ids_are_packed_by_segment(texts, tmp_path):
    tokenizer = byte_tokenizer(offset=200_000)
    build_datastore(tmp_path / "s", str(texts), tokenizer)
    (segment,) = open_datastore(tmp_path / "s", tokenizer=tokenizer).segments
    assert segment.tokens.dtype == np.uint16
    assert segment.to_global[1:].min() >= 200_000
    assert contents(tmp_path / "s")["c.py"] == (texts / "c.py").read_text()
    assert segment.localise(np.array([-1, 0, 200_000, 10**7])).max() == 0
    verify_datastore(tmp_path / "s")


def test_one_writer_at_a_time(store, texts):
    with FileLock(store / "lock"), pytest.raises(StoreLockedError, match="another process"):
        add_documents(store, str(texts))
    open_datastore(store)


def test_read_only_store_opens(store, texts):
    assert open_datastore(store).calibration_path("a model/v1") == store / "calibration" / "a-model-v1.npy"
    (store / "calibration").rmdir()
    paths = [store, *store.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    try:
        opened = open_datastore(store)
        assert opened.document_at(0, 0).path == "a.txt"
        if os.geteuid():  # root may write anywhere
            assert opened.calibration_path("m") is None
            with pytest.raises(BuildError, match="Permission denied"):
                add_documents(store, str(texts))
    finally:
        for path in paths:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def test_catalogue_can_be_searched_by_path(store):
    found = "select d.path from documents d join documents_fts f on f.rowid = d.id where documents_fts match 'sub'"
    with closing(sqlite3.connect(write_catalog(store))) as database:
        assert database.execute(found).fetchall() == [("sub/d.txt",)]


@pytest.mark.parametrize("name", ["notes.txt", "work/thesis.tex", "segments/audio.wav", "work/shard-000000.bin"])
def test_a_folder_with_other_files_is_left_alone(tokenizer, texts, tmp_path, name):
    mine = write(tmp_path / "mine", {name: "precious"}) / name
    with pytest.raises(BuildError, match=f"empty folder.*{name.partition('/')[0]}"):
        build_datastore(tmp_path / "mine", str(texts), tokenizer)
    assert mine.read_text() == "precious"


@pytest.fixture
def recipe(texts):
    return Recipe("mine", (Source(str(texts), "MIT"),), StoreConfig())


@pytest.fixture
def opened(recipe, tokenizer, tmp_path):
    """Opens the store; says whether it had to be built."""

    def call(with_tokenizer=tokenizer):
        told = []
        store = open_or_build(
            tmp_path / "cache" / "s",
            recipe,
            with_tokenizer,
            before=lambda: told.append("before"),
            after=lambda report: told.append(report.documents),
        )
        assert store.manifest.documents == 4
        return told

    return call


def test_built_once_and_anew_after_damage_or_for_another_tokenizer(opened, tmp_path):
    assert opened() == ["before", 4]
    assert opened() == []
    next((tmp_path / "cache" / "s").glob("segments/*/tokens.bin")).unlink()
    assert opened() == ["before", 4]
    assert opened(byte_tokenizer(offset=9)) == ["before", 4]


def test_a_build_under_way_is_left_alone(opened, tmp_path):
    with writer(tmp_path / "cache" / "s") as work:
        work.begin()
        with pytest.raises(StoreLockedError):
            opened()
        assert work.path.is_dir()


ROUNDS = 4


def test_a_reader_keeps_what_it_opened(store, tokenizer):
    opened = open_datastore(store)
    before = search_datastore(open_datastore(store), "the cat")
    retokenize_datastore(store, byte_tokenizer(offset=300), workers=1)
    assert search_datastore(opened, "the cat") == before
    shutil.rmtree(store)
    assert opened.tokenizer.encode("cat").ids == tokenizer.encode("cat").ids
    assert opened.document_at(0, 0).path == "a.txt"


def change_again_and_again(store, answers):
    for _ in range(ROUNDS):
        add_documents(store, answers)
        compact_datastore(store)
        remove_documents(store, ["answers*"])


def test_readers_see_one_state_or_the_next(tokenizer, texts, records, tmp_path):
    store = tmp_path / "s"
    answers = Source(str(records), field="output")
    build_datastore(store, str(texts), tokenizer, config=StoreConfig(segment_tokens=80))
    before = contents(store)
    add_documents(store, answers)
    after = contents(store)
    remove_documents(store, ["answers*"])
    writer = start(change_again_and_again, store, answers)
    seen = []
    while writer.is_alive():
        seen.append(contents(store))
        verify_datastore(store)
        assert seen[-1] in (before, after)
    assert exit_code(writer) == 0
    assert contents(store) == before
    assert after in seen


SMALL = StoreConfig(segment_tokens=200)


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A folder of which every few files make a shard, and processes of their own for however little work."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(sources, "SHARD_BYTES", 150)
    monkeypatch.setattr(build, "SPAWN_WORK", 0)
    files = {f"{i:02}.txt": f"file {i % 27} says {i % 27} things\n" * (1 + i % 27 % 4) for i in range(30)}
    return write(tmp_path / "many", files | {"empty.txt": ""})


@pytest.mark.slow
def test_one_process_and_two_write_the_same_bytes(tokenizer, many, tmp_path):
    found = []
    for workers in (1, 2):
        store = tmp_path / f"s{workers}"
        report = build_datastore(store, str(many), tokenizer, config=SMALL, workers=workers)
        add_documents(store, str(tmp_path), workers=workers)
        retokenize_datastore(store, byte_tokenizer(offset=300), workers=workers)
        compact_datastore(store, workers=workers)
        verify_datastore(store)
        found.append((report.skipped, read_manifest(store).content, digest(store)))
    assert found[0][:2] == found[1][:2]
    skipped = {path: reason for path, _, reason in found[0][0]}
    assert skipped == {"27.txt": "duplicate", "28.txt": "duplicate", "29.txt": "duplicate", "empty.txt": "empty"}
    differing = {name for name in found[0][2] if found[0][2][name] != found[1][2].get(name)}
    assert differing <= {"manifest.json"}  # names the folder of the store
    assert len(contents(tmp_path / "s1")) == 27


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
def test_it_is_said_that_kernels_are_compiled_before_workers_need_them(many, tokenizer, tmp_path, monkeypatch, caplog):
    compiled = []

    def kernel():
        return 1

    kernel.__module__ = "retrieve_spec.kernels.as_yet_unknown"

    def index(tokens, *_):
        compiled.append(njit(kernel)())

    monkeypatch.setattr(build, "index_text", index)
    build_datastore(tmp_path / "s", str(many), tokenizer, workers=1)
    assert compiled == [1]
    assert [record.getMessage() for record in caplog.records] == [WHY_IT_TAKES_LONG]


def test_no_more_processes_than_there_is_room_for(many, tokenizer, tmp_path, monkeypatch):
    needed = []
    monkeypatch.setattr(build, "ProcessPoolExecutor", None)
    monkeypatch.setattr(build, "processes", lambda each: needed.append(each) or 1)
    build_datastore(tmp_path / "s", str(many), tokenizer)
    add_documents(tmp_path / "s", str(tmp_path / "many"), config=StoreConfig(segment_tokens=10))
    compact_datastore(tmp_path / "s")
    assert needed[0] > 250 >= needed[1] > 0, "memory of the tokens of one segment"


def die(job, given):
    os._exit(1)


@pytest.mark.slow
def test_a_worker_that_dies_is_told(many, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(build, "read_shard", die)
        with pytest.raises(BuildError, match=r"a worker process ended.*fewer processes"):
            build_datastore(tmp_path / "s", str(many), byte_tokenizer(), workers=2)
    assert build_datastore(tmp_path / "s", str(many), byte_tokenizer()).documents == 27


def build_slowly(store, source):
    """A build of two workers, which wait for ever."""
    build.SPAWN_WORK, sources.SHARD_BYTES, build.read_shard = 0, 150, wait_for_ever
    build_datastore(store, source, byte_tokenizer(), workers=2)


def wait_for_ever(job, given):
    (job.work.parent.parent / f"pid-{os.getpid()}").touch()
    time.sleep(600)


@pytest.mark.slow
def test_workers_end_with_their_parent(many, tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=build_slowly, args=(tmp_path / "s", str(many)))
    parent.start()
    wait_for(lambda: any(tmp_path.glob("pid-*")))
    parent.kill()
    parent.join()
    wait_for(lambda: not any(running(int(path.name[4:])) for path in tmp_path.glob("pid-*")))


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_parts_that_machines_build_are_merged(many, tokenizer, tmp_path):
    build_datastore(tmp_path / "whole", str(many), tokenizer, workers=1)
    parts = [tmp_path / f"part{rank}" for rank in range(3)]
    for rank, part in enumerate(parts):
        build_datastore(part, str(many), tokenizer, part=(rank, 3), workers=1)
    assert all(0 < len(contents(part)) < 27 for part in parts)
    assert [read_manifest(part).history[0]["part"] for part in parts] == [[0, 3], [1, 3], [2, 3]]
    with pytest.raises(BuildError, match="Number the parts from 0"):
        build_datastore(tmp_path / "part3", str(many), tokenizer, part=(3, 3))
    merge_datastores(tmp_path / "merged", parts)
    verify_datastore(tmp_path / "merged")
    assert sorted(contents(tmp_path / "merged").values()) == sorted(contents(tmp_path / "whole").values())
