"""How much of a machine is taken: no more than affinity and control groups let this process have."""

import os
import sys
from pathlib import Path

import pytest
from processes import running

from retrieve_spec import processors
from retrieve_spec.processors import limit_threads, memory, processes

MACHINE = memory()
VERSION_1 = "4:memory:/slice/job\n3:cpu,cpuacct:/slice/job\n1:name=systemd:/slice\n0::/slice\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes the files of control groups, for a machine of 64 processors."""
    monkeypatch.setattr(processors, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)

    def make(membership: str, files: dict[str, str]) -> None:
        for name, content in {"proc/self/cgroup": membership, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return make


def test_without_control_groups_the_affinity_counts(groups) -> None:
    assert (processors.processors(), memory()) == (64, MACHINE)


@pytest.mark.parametrize(
    ("membership", "files", "expected", "bytes_"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}, 3, MACHINE),  # one above
        ("0::/\n", {"cpu.max": "50000 100000", "memory.max": "1000000"}, 1, 10**6),  # a container's own
        ("0::/outside/name\n", {"cpu.max": "200000 100000", "memory.max": "max"}, 2, MACHINE),
        (
            VERSION_1,
            {
                "cpu/slice/job/cpu.cfs_quota_us": "-1",
                "cpu/slice/job/cpu.cfs_period_us": "100000",
                "cpu/slice/cpu.cfs_quota_us": "400000",
                "cpu/slice/cpu.cfs_period_us": "100000",
                "memory/slice/job/memory.limit_in_bytes": "2000000",
                "memory/slice/memory.limit_in_bytes": "9223372036854771712",
            },
            4,
            2 * 10**6,
        ),
    ],
)
def test_a_quota_of_any_group_around_counts(groups, membership, files, expected, bytes_) -> None:
    groups(membership, {f"sys/fs/cgroup/{name}": content for name, content in files.items()})
    assert (processors.processors(), memory()) == (expected, bytes_)


def test_processes_have_room_for_what_each_takes(groups) -> None:
    groups("0::/\n", {"sys/fs/cgroup/memory.max": str(10 << 30)})
    assert processes(1 << 30) == 8
    assert processes(0) == 40
    assert processes(20 << 30) == 1


def test_libraries_are_told_of_a_quota_and_of_nothing_else(groups, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert "OMP_NUM_THREADS" not in os.environ
    groups("0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000"})
    limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    limit_threads()
    assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_one_processor_starts_one_process() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); from retrieve_spec.processors import *"
    with running([sys.executable, "-c", f"{code}; raise SystemExit(processes(0))"]) as process:
        assert process.wait() == 1
