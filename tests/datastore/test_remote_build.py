"""Builds at an address: what machines that share no folder make of it is what one process makes and pushes.

The cluster is played by this process, which runs each task with nothing but the address; `test_cluster` has real ones.
"""

from __future__ import annotations

import fsspec
import pytest
from test_build import contents

from retrieve_spec.cli import run as run_command
from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import cluster, pool, shards
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.exchange import Exchange
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.remote import Remote
from retrieve_spec.datastore.share import pull_datastore, push_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import BuildError, StoreCorruptError, StoreIncompleteError

CONFIG = StoreConfig(segment_tokens=600)


class Machines:
    """Runs the ranks of a stage one by one, but for those that are broken, as an engine does that ends all the same."""

    def __init__(self):
        self.broken, self.ran = {}, []

    def __call__(self, kind, rest, task, logs, memory):
        assert not task.store and str(task.url) in logs
        machines = self

        class Engine:
            def run(self):
                for i, rank in enumerate(task.ranks):
                    broken = machines.broken.get((task.stage, rank))
                    if broken is None:
                        machines.ran.append((task.stage, rank))
                        task(None, i, len(task.ranks))
                    elif broken is not True:
                        broken()

        return Engine()


@pytest.fixture
def machines(monkeypatch):
    """A cluster of which nothing is installed."""
    made = Machines()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(shards, "SHARD_BYTES", 200)
    monkeypatch.setattr(cluster, "import_module", lambda name: None)
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(cluster, "_engine", made)
    for name, value in pool.ALONE.items():  # tasks set them, for the process that they have to themselves
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def sources(texts, records, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for i in range(12):
        (many / f"f{i:02d}.txt").write_text(f"file number {i} says {i * i} and nothing else\n" * (1 + i % 4))
    (many / "f99.txt").write_text((many / "f00.txt").read_text())
    return [Source(str(texts), "MIT"), Source(str(many)), Source(str(records), field="output")]


@pytest.fixture
def alone(sources, tokenizer, tmp_path, machines):
    """What one process makes."""
    build_datastore(tmp_path / "alone", sources, tokenizer, config=CONFIG, workers=1)
    return tmp_path / "alone"


def test_the_store_is_that_of_one_process_pushed(url, sources, tokenizer, alone, machines, tmp_path):
    report = build_datastore(url, sources, tokenizer, config=CONFIG, cluster="ray")
    assert report.segments > 2 and report.skipped_by_reason == {"duplicate": 1}
    assert len(machines.ran) > 10
    pushed = f"{url}-pushed"
    push_datastore(alone, pushed)
    here, there = Remote(url), Remote(pushed)
    assert here.sizes() == there.sizes()
    assert here.manifest(1) == there.manifest(1)
    for name in ("README.md", "manifest.json"):
        assert here.fs.cat_file(here.path(name)) == there.fs.cat_file(there.path(name))
    pull_datastore(url, tmp_path / "pulled")
    verify_datastore(tmp_path / "pulled")
    assert contents(tmp_path / "pulled") == contents(alone)
    with pytest.raises(BuildError, match="version 1 of one"):
        build_datastore(url, sources, tokenizer, config=CONFIG, cluster="ray")


@pytest.fixture
def memory():
    yield "memory://remote"
    fs = fsspec.filesystem("memory")
    fs.rm("/", recursive=True)


@pytest.mark.parametrize("stage", ["tokens", "segment"])
def test_a_missing_rank_is_named_and_only_it_is_run_again(stage, memory, sources, tokenizer, alone, machines):
    machines.broken[stage, 2] = True
    with pytest.raises(BuildError, match=rf"stage '{stage}'.*nothing came from rank 2\b"):
        build_datastore(memory, sources, tokenizer, config=CONFIG, cluster="ray")
    assert Remote(memory).newest() == 0
    with pytest.raises(StoreIncompleteError, match="--resume"):
        build_datastore(memory, sources, tokenizer, config=CONFIG, cluster="ray")
    done, machines.broken, machines.ran = set(machines.ran), {}, []
    build_datastore(memory, resume=True, cluster="ray")
    assert (stage, 2) in machines.ran and not done & set(machines.ran)
    assert Remote(memory).manifest(1).content == read_manifest(alone).content
    with pytest.raises(BuildError, match="an interrupted build at"):
        build_datastore("memory://other", resume=True, cluster="ray")


def test_the_error_of_a_rank_is_the_error_of_the_build(memory, sources, tokenizer, machines, monkeypatch):
    monkeypatch.setattr(cluster, "_python", iter(["3.99", *["3.98"] * 99]).__next__)
    with pytest.raises(BuildError, match="on every machine") as caught:
        build_datastore(memory, sources, tokenizer, config=CONFIG, cluster="ray")
    assert memory in caught.value.__notes__[0]


@pytest.mark.parametrize("name", ["shard-000001.bin", "shard-000001.json", "cut.json", "done-tokens-000001"])
def test_what_was_damaged_on_its_way_is_not_used(name, memory, sources, tokenizer, machines, monkeypatch):
    fs = fsspec.filesystem("memory")
    original = Exchange.needs

    def damaging(self, stages, stage, ranks):
        found = original(self, stages, stage, ranks)
        if stage == "segment":
            content = bytearray(fs.cat_file(f"/remote/work/{name}"))
            content[-3] ^= 1
            fs.pipe_file(f"/remote/work/{name}", bytes(content))
        return found

    monkeypatch.setattr(Exchange, "needs", damaging)
    with pytest.raises(StoreCorruptError, match=name):
        build_datastore(memory, sources, tokenizer, config=CONFIG, cluster="ray")
    assert Remote(memory).newest() == 0


def test_a_rank_whose_output_was_lost_is_run_again(memory, sources, tokenizer, alone, machines):
    machines.broken["segment", 0] = True
    with pytest.raises(BuildError, match="rank 0"):
        build_datastore(memory, sources, tokenizer, config=CONFIG, cluster="ray")
    fs = fsspec.filesystem("memory")
    lost = sorted(name for name in fs.find("/remote/segments") if name.endswith("tokens.bin"))[0]
    fs.rm_file(lost)
    machines.broken, machines.ran = {}, []
    build_datastore(memory, resume=True, cluster="ray")
    assert len(machines.ran) == 2
    assert fs.exists(lost) and Remote(memory).manifest(1).content == read_manifest(alone).content


def test_of_two_that_begin_at_once_one_is_told(memory, sources, tokenizer, machines, monkeypatch):
    monkeypatch.setattr(Exchange, "plan", lambda self: None)

    def second():
        with pytest.raises(StoreIncompleteError, match="one that is running"):
            build_datastore(memory, sources[:1], tokenizer, config=CONFIG, cluster="ray")

    machines.broken["tokens", 1] = second
    with pytest.raises(BuildError, match="rank 1"):
        build_datastore(memory, sources, tokenizer, config=CONFIG, cluster="ray")


def test_what_cannot_be_built_at_an_address(memory, texts, tokenizer, machines, capsys):
    with pytest.raises(BuildError, match="--cluster"):
        build_datastore(memory, str(texts), tokenizer)
    with pytest.raises(BuildError, match="standard input"):
        build_datastore(memory, "-", tokenizer, cluster="ray")
    (texts / "a.txt").write_text(" ")
    with pytest.raises(BuildError, match="none: left out 1 empty"):
        build_datastore(memory, str(texts / "a.txt"), tokenizer, cluster="ray")
    assert Exchange(memory).plan() is None
    with pytest.raises(BuildError, match="could not reach nothing"):
        build_datastore("nothing://x", str(texts), tokenizer, cluster="ray")
    command = ["build", memory, str(texts), "--tokenizer", "reference", "--cluster", "ray", "-q"]
    assert run_command(command) == 0
    assert f"{memory} has 1 segment" in capsys.readouterr().out
