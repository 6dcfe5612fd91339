"""Stages of a build: the same bytes for any number of processes, in any order, resumed or not."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from functools import partial

import pytest
from byte_tokenizers import byte_tokenizer
from test_build import contents, digest

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import build, sources, stages
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.change import WorkFolder
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, retokenize_datastore
from retrieve_spec.datastore.files import FileEntry
from retrieve_spec.datastore.manifest import Manifest, read_manifest
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.stages import SegmentShard, Stages, segment_shards
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import BuildError, StoreCorruptError

SMALL = StoreConfig(segment_tokens=200)


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A folder of which every few files make a shard, and processes of their own for however little work."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(sources, "SHARD_BYTES", 150)
    monkeypatch.setattr(build, "SPAWN_WORK", 0)
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(f"file {i % 27} says {i % 27} things\n" * (1 + i % 27 % 4))
    (folder / "empty.txt").write_text("")
    return folder


@pytest.mark.slow
def test_one_process_and_four_write_the_same_bytes(tokenizer, many, tmp_path):
    found = []
    for workers in (1, 4):
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


def test_ranks_in_any_order_and_repeated_write_the_same_bytes(tokenizer, many, tmp_path, monkeypatch):
    build_datastore(tmp_path / "a", str(many), tokenizer, config=SMALL, workers=1)

    def backwards(self, stage, ranks, size):
        return [getattr(Stages(WorkFolder(tmp_path / "b")), stage)(rank) for rank in [*ranks[::-1], *ranks[:2]]]

    monkeypatch.setattr(build.Workers, "run", backwards)
    build_datastore(tmp_path / "b", str(many), tokenizer, config=SMALL, workers=1)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_what_is_done_is_not_done_again(tokenizer, many, tmp_path, monkeypatch):
    build_datastore(tmp_path / "a", str(many), tokenizer, config=SMALL, workers=1)
    read = []
    tokens = Stages.tokens

    def some(self, rank):
        read.append(rank)
        if len(read) == 4:
            raise KeyboardInterrupt
        return tokens(self, rank)

    monkeypatch.setattr(Stages, "tokens", some)
    with pytest.raises(KeyboardInterrupt):
        build_datastore(tmp_path / "b", str(many), tokenizer, config=SMALL, workers=1)
    build_datastore(tmp_path / "b", resume=True, workers=1)
    assert sorted(read) == [*range(3), 3, *range(3, len(set(read)))]
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_a_limit_of_tokens_reads_no_more_than_it_needs(tokenizer, many, tmp_path, monkeypatch):
    whole = build_datastore(tmp_path / "a", str(many), tokenizer, workers=1, max_tokens=200)
    ranks = []
    tokens = Stages.tokens
    monkeypatch.setattr(Stages, "tokens", lambda self, rank: ranks.append(rank) or tokens(self, rank))
    report = build_datastore(tmp_path / "b", str(many), tokenizer, workers=1, max_tokens=200)
    assert (report.documents, report.tokens) == (whole.documents, whole.tokens)
    assert ranks == list(range(4))


def die(store, stage, rank):
    os._exit(1)


@pytest.mark.slow
def test_a_worker_that_dies_is_told(many, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_run_rank", die)
    with pytest.raises(BuildError, match=r"finish stage 'tokens': a worker process ended.*--resume"):
        build_datastore(tmp_path / "s", str(many), byte_tokenizer(), workers=2)
    monkeypatch.undo()
    assert build_datastore(tmp_path / "s", resume=True).documents == 27


@pytest.mark.slow
def test_errors_of_workers_are_those_of_the_library(many, tmp_path, monkeypatch):
    original = WorkFolder.begin

    def begin(self, plan, inputs=()):
        plan = original(self, plan, inputs)
        (self.store / plan["tokenizer"]).write_text("{}")
        return plan

    monkeypatch.setattr(WorkFolder, "begin", begin)
    monkeypatch.setattr(build, "first_manifest", lambda store, name: Manifest("", FileEntry(0, ""), 0))
    with pytest.raises(BuildError, match=r"tokenizer\.json"):
        build_datastore(tmp_path / "s", str(many), byte_tokenizer(), workers=2)


def build_slowly(store, source):
    """A build of two workers, which wait for ever."""
    build.SPAWN_WORK, sources.SHARD_BYTES, build._run_rank = 0, 150, wait_for_ever
    build_datastore(store, source, byte_tokenizer(), workers=2)


def wait_for_ever(store, stage, rank):
    (store.parent / f"pid-{os.getpid()}").touch()
    time.sleep(600)


@pytest.mark.slow
def test_workers_end_with_their_parent(many, tmp_path):
    parent = multiprocessing.get_context("spawn").Process(target=build_slowly, args=(tmp_path / "s", str(many)))
    parent.start()
    while not (found := [int(path.name[4:]) for path in tmp_path.glob("pid-*")]):
        time.sleep(0.1)
    parent.kill()
    parent.join()
    for pid in found:
        for _ in range(300):
            if not running(pid):
                break
            time.sleep(0.1)
        assert not running(pid)


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_parts_that_machines_build_are_merged(many, tokenizer, tmp_path):
    build_datastore(tmp_path / "whole", str(many), tokenizer)
    parts = [tmp_path / f"part{rank}" for rank in range(3)]
    for rank, part in enumerate(parts):
        build_datastore(part, str(many), tokenizer, part=(rank, 3))
    assert all(0 < len(contents(part)) < 27 for part in parts)
    assert [read_manifest(part).history[0]["part"] for part in parts] == [[0, 3], [1, 3], [2, 3]]
    with pytest.raises(BuildError, match="Number the parts from 0"):
        build_datastore(tmp_path / "part3", str(many), tokenizer, part=(3, 3))
    merge_datastores(tmp_path / "merged", parts)
    verify_datastore(tmp_path / "merged")
    assert sorted(contents(tmp_path / "merged").values()) == sorted(contents(tmp_path / "whole").values())


def test_a_plan_of_another_version_or_filter_is_not_resumed(tokenizer, many, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_segment", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_datastore(tmp_path / "s", Source(str(many)), tokenizer, workers=1)
    path = tmp_path / "s" / "work" / "plan.json"
    plan = json.loads(path.read_bytes())
    kept = ("path", "licence", "include", "exclude", "field", "prefix", "licences")
    older = [{name: source[name] for name in kept} | {"filtered": False} for source in plan["sources"]]
    unnamed = {name: value for name, value in plan.items() if name != "rules"} | {"sources": older}
    for written, got in (
        (plan | {"version": "0.0"}, r"one of 0\.0"),
        (plan | {"rules": "others"}, "one under others"),
        (unnamed, "one under others"),
    ):
        path.write_text(json.dumps(written))
        with pytest.raises(BuildError, match=rf"(?s){got}.*Delete the folder"):
            build_datastore(tmp_path / "s", resume=True)
    shutil.rmtree(tmp_path / "s")  # as the error says
    build_datastore(tmp_path / "s", Source(str(many)), tokenizer, workers=1)
    assert "rules" not in read_manifest(tmp_path / "s").history[-1]


def test_planning_checks_the_document_table_and_whoever_takes_text_checks_that(tokenizer, many, tmp_path):
    store = tmp_path / "s"
    build_datastore(store, str(many), tokenizer, workers=1)
    manifest = read_manifest(store)
    (record,) = segment_shards(store, manifest)
    place = store / "segments" / manifest.segments[0].name
    rows = SegmentShard(record, manifest.vocabulary).rows
    damage(place / "tokens.bin")
    assert SegmentShard(record, manifest.vocabulary).rows == rows
    with pytest.raises(StoreCorruptError, match="tokens"):
        SegmentShard(record, manifest.vocabulary).ids(0, 1)
    for change in (compact_datastore, partial(retokenize_datastore, tokenizer=byte_tokenizer(offset=300))):
        with pytest.raises(StoreCorruptError, match="tokens"):
            change(store, workers=1)
    damage(place / "document_hashes.bin")
    with pytest.raises(StoreCorruptError, match="document_hashes"):
        _ = SegmentShard(record, manifest.vocabulary).rows


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
