"""Builds on a cluster: the same store as one process makes, whoever ran the stages and whatever died meanwhile.

Slurm and Ray need what `make test-cluster` installs; Slurm is played by a script that runs what it is given, so what is
tested of it are the tasks and not the queue.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import threading
import time
import types

import pytest
from dying_worker import RANK
from test_build import digest

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import cluster, pool, shards
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.change import utc_now
from retrieve_spec.datastore.manifest import read_manifest
from retrieve_spec.datastore.share import pull_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.stages import Stages
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.errors import BuildError

CONFIG = StoreConfig(segment_tokens=400)


@pytest.fixture(autouse=True)
def _environment_stays():
    """What datatrove and Ray set for their workers is taken back without a complaint."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    monkeypatch.setattr(shards, "SHARD_BYTES", 200)
    assert utc_now().startswith("2023")


@pytest.fixture
def sources(texts, records, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for i in range(20):
        (many / f"f{i:02d}.txt").write_text(f"file number {i} says {i * i} and nothing else\n" * (1 + i % 4))
    return [Source(str(texts)), Source(str(many)), Source(str(records), field="output")]


@pytest.fixture
def alone(sources, tokenizer, tmp_path):
    """What one process makes."""
    build_datastore(tmp_path / "alone", sources, tokenizer, config=CONFIG, workers=1)
    return digest(tmp_path / "alone")


@pytest.mark.parametrize("where", ["pbs:x", "local:0", "local:x", "slurm", "slurm:"])
def test_what_is_no_cluster_is_an_error(where, sources, tokenizer, tmp_path):
    with pytest.raises(BuildError, match="local:WORKERS"):
        build_datastore(tmp_path / "s", sources, tokenizer, cluster=where)


def test_without_the_engine_the_error_says_what_to_install(sources, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datatrove", None)
    with pytest.raises(BuildError, match=r"retrieve-spec\[cluster\]"):
        build_datastore(tmp_path / "s", sources, tokenizer, cluster="slurm:any")


@pytest.fixture
def engine():
    pytest.importorskip("datatrove", reason="the extra `cluster` is not installed")


@pytest.mark.usefixtures("engine")
def test_without_sbatch_the_error_says_so(sources, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="sbatch"):
        build_datastore(tmp_path / "s", sources, tokenizer, cluster="slurm:any")
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_local_workers_make_the_same_store(sources, tokenizer, tmp_path, alone, monkeypatch):
    started = []
    start = pool._start
    monkeypatch.setattr(pool, "_start", lambda work: started.append(start(work)) or started[-1])
    report = build_datastore(tmp_path / "s", sources, tokenizer, config=CONFIG, cluster="local:2")
    assert report.segments > 3
    assert digest(tmp_path / "s") == alone
    (tmp_path / "new.txt").write_text("a new text")
    add_documents(tmp_path / "s", str(tmp_path / "new.txt"), cluster="local:1")
    verify_datastore(tmp_path / "s")
    assert len(started) == 2 and all(process.poll() is not None for process in started)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "address"])
def test_a_killed_worker_is_named_and_nothing_is_done_twice(place, sources, tokenizer, tmp_path, alone, monkeypatch):
    store = tmp_path / "s" if place == "folder" else f"file://{tmp_path}/s"
    monkeypatch.setattr(pool, "_MODULE", "dying_worker")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # a store at an address is built there
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    for beside in (tmp_path, tmp_path / "tmp"):
        (beside / "kill").touch()
    with pytest.raises(BuildError, match=rf"finish stage 'tokens' of rank {RANK}.*signal 9"):
        build_datastore(store, sources, tokenizer, config=CONFIG, cluster="local:2")
    assert sorted(os.listdir(tmp_path / "tmp")) == ["kill"]  # though workers were ended amid their ranks
    pattern = "shard-*.json" if place == "folder" else "done-tokens-*"
    done = {int(path.stem.rpartition("-")[2]) for path in (tmp_path / "s" / "work").glob(pattern)}
    assert done and RANK not in done
    seen = []
    original = Stages.tokens
    monkeypatch.setattr(Stages, "tokens", lambda self, rank: seen.append(rank) or original(self, rank))
    build_datastore(store, resume=True, cluster="local:1")  # this process
    assert seen and not done & set(seen)
    assert read_manifest(tmp_path / "s").content == read_manifest(tmp_path / "alone").content


@pytest.mark.slow
def test_local_workers_make_the_same_store_at_an_address(sources, tokenizer, tmp_path, alone):
    """Nothing but the sources and the address of the store is known to the workers."""
    url = f"file://{tmp_path}/remote"
    build_datastore(url, sources, tokenizer, config=CONFIG, cluster="local:2")
    assert read_manifest(tmp_path / "remote").content == read_manifest(tmp_path / "alone").content
    assert not (tmp_path / "remote" / "work").exists()
    pull_datastore(url, tmp_path / "s")
    verify_datastore(tmp_path / "s")


@pytest.fixture
def in_its_pool(engine, monkeypatch):
    """Slurm is played by datatrove's executor for one machine, which runs the same steps."""
    from datatrove.executor.local import LocalPipelineExecutor

    def engine_of(kind, rest, task, logs, memory):
        return LocalPipelineExecutor(pipeline=[task], tasks=len(task.ranks), logging_dir=logs, workers=2)

    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.2)
    monkeypatch.setattr(cluster, "_engine", engine_of)
    monkeypatch.setattr(cluster.shutil, "which", lambda name: name)


@pytest.mark.slow
@pytest.mark.usefixtures("in_its_pool")
def test_steps_of_a_pipeline_make_the_same_store(sources, tokenizer, tmp_path, alone):
    build_datastore(tmp_path / "s", sources, tokenizer, config=CONFIG, cluster="slurm:any")
    assert digest(tmp_path / "s") == alone


@pytest.mark.slow
@pytest.mark.usefixtures("in_its_pool")
@pytest.mark.parametrize("place", ["folder", "address"])
def test_an_error_of_a_rank_is_the_error_of_the_build(place, sources, tokenizer, tmp_path, alone, monkeypatch):
    store = tmp_path / "s" if place == "folder" else f"file://{tmp_path}/s"
    monkeypatch.setattr(cluster, "__version__", "0.0.0")  # of the process that plans; workers import their own
    with pytest.raises(BuildError, match="every machine") as caught:
        build_datastore(store, sources, tokenizer, config=CONFIG, cluster="slurm:any")
    assert "rank" in caught.value.__notes__[0]
    assert not list((tmp_path / "s" / "work").glob("shard-*.json"))
    build_datastore(store, resume=True, cluster="local:2")
    assert read_manifest(tmp_path / "s").content == read_manifest(tmp_path / "alone").content


_SBATCH = """\
    #!/bin/sh
    # sbatch --wait for arrays: runs the script once for every number of the array, and fails where one fails.
    for script; do :; done
    last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
    grep -q '^#SBATCH --wait$' "$script" || exit 3
    for i in $(seq 0 "$last"); do
        SLURM_ARRAY_TASK_ID=$i RUN_OFFSET=0 SLURM_NODELIST=localhost sh "$script" >&2 || exit 1
    done
    echo "Submitted batch job 1"
    """


@pytest.mark.usefixtures("engine")
def test_slurm_tasks_make_the_same_store(sources, tokenizer, tmp_path, alone, monkeypatch):
    tools = tmp_path / "tools"
    tools.mkdir()
    scripts = {"sbatch": _SBATCH, "srun": '#!/bin/sh\nshift 3\nexec "$@"\n', "scontrol": "#!/bin/sh\necho localhost\n"}
    for name, script in scripts.items():
        (tools / name).write_text(textwrap.dedent(script))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(shards, "SHARD_BYTES", 10_000)
    build_datastore(tmp_path / "s", sources, tokenizer, config=StoreConfig(), cluster="slurm:any")
    build_datastore(tmp_path / "one", sources, tokenizer, config=StoreConfig(), workers=1)
    assert digest(tmp_path / "s") == digest(tmp_path / "one")


class ScriptedRay(types.ModuleType):
    """Ray with one node, on which tasks run once it has room: memory of it, at one look after the other."""

    def __init__(self, *memory):
        super().__init__("ray")
        self.memory, self.cancelled = list(memory), []

    def is_initialized(self):
        return True

    def remote(self, function):
        return types.SimpleNamespace(
            options=lambda **asked: types.SimpleNamespace(remote=lambda *given: (function, given))
        )

    def nodes(self):
        memory = self.memory.pop(0) if len(self.memory) > 1 else self.memory[0]
        return [
            {"Alive": True, "Resources": {"CPU": 4.0, "memory": float(memory)}},
            {"Alive": True, "Resources": {"CPU": 4.0}},
            {"Alive": False, "Resources": {"CPU": 4.0, "memory": 1e15}},
        ]

    def wait(self, waiting, timeout):
        time.sleep(0.01)
        return (waiting[:1], waiting[1:]) if self.memory[0] > 1 << 31 else ([], waiting)

    def get(self, task):
        task[0](*task[1])

    def cancel(self, task):
        self.cancelled.append(task)


def test_where_no_node_of_ray_has_the_memory_that_is_said(sources, tokenizer, tmp_path, alone, monkeypatch):
    monkeypatch.setattr(cluster, "_ROOM_SECONDS", 0.2)
    monkeypatch.setitem(sys.modules, "ray", ray := ScriptedRay(1 << 29))
    with pytest.raises(BuildError, match=r"1\.0 GiB of memory.*0\.5 GiB on the largest"):
        build_datastore(tmp_path / "s", sources, tokenizer, config=CONFIG, cluster="ray")
    assert ray.cancelled
    monkeypatch.setitem(sys.modules, "ray", ScriptedRay(0, 0, 1 << 32))  # one that is started when it is asked for
    build_datastore(tmp_path / "s", resume=True, cluster="ray")
    assert digest(tmp_path / "s") == alone


def test_ray_makes_the_same_store_though_a_node_dies(sources, tokenizer, tmp_path, alone):
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    others = [nodes.add_node(num_cpus=1) for _ in range(2)]
    try:
        ray.init(address=nodes.address, log_to_driver=False)

        def kill():
            while not list((tmp_path / "s" / "work").glob("shard-*.json")):
                time.sleep(0.05)
            nodes.remove_node(others[0], allow_graceful=False)

        thread = threading.Thread(target=kill)
        thread.start()
        build_datastore(tmp_path / "s", sources, tokenizer, config=CONFIG, cluster="ray")
        thread.join()
        assert digest(tmp_path / "s") == alone
    finally:
        ray.shutdown()
        nodes.shutdown()
