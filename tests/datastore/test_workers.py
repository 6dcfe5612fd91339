"""Builds by several processes: the same bytes for any number of them, and errors that say what is wrong."""

import multiprocessing
import os
import time

import pytest
from byte_tokenizers import byte_tokenizer
from folders import write
from test_build import contents, digest
from waiting import wait_for

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import build, sources
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, retokenize_datastore
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.errors import BuildError

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
        compact_datastore(store)
        verify_datastore(store)
        found.append((report.skipped, read_manifest(store).content, digest(store)))
    assert found[0][:2] == found[1][:2]
    skipped = {path: reason for path, _, reason in found[0][0]}
    assert skipped == {"27.txt": "duplicate", "28.txt": "duplicate", "29.txt": "duplicate", "empty.txt": "empty"}
    differing = {name for name in found[0][2] if found[0][2][name] != found[1][2].get(name)}
    assert differing <= {"manifest.json"}  # names the folder of the store
    assert len(contents(tmp_path / "s1")) == 27


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
