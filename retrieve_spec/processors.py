"""Processors and memory that this process may use, by affinity and by limits of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_MEMBERSHIP, _GROUPS = "proc/self/cgroup", "sys/fs/cgroup"
_PROCESS_BYTES = 256 << 20
"""Memory of a process of this library before any work."""


def processors() -> int:
    """Return the processors that this process may use: by affinity, or fewer by the quota of its control group."""
    quotas = (int(quota) / int(period) for quota, period in _quotas() if quota.isdecimal())
    return max(1, int(min((_affinity(), *quotas))))


def memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or fewer by its control group's limit."""
    limits = (*_values("", "memory.max"), *_values("memory", "memory.limit_in_bytes"))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((machine, *(int(limit) for limit, *_ in limits if limit.isdecimal())))


def processes(each: int) -> int:
    """Return how many processes to run at once if each takes `each` bytes of memory; at least one."""
    return max(1, min(processors(), memory() // (_PROCESS_BYTES + each)))


def limit_threads() -> None:
    """Limit the threads of libraries, which do not know of the quota; called before they are imported."""
    if processors() < _affinity():
        os.environ.setdefault("OMP_NUM_THREADS", str(processors()))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> Iterator[tuple[str, str]]:
    """Yield quota and period of each control group of this process."""
    yield from ((quota, period) for quota, period in _values("", "cpu.max"))
    quotas, periods = (_values("cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    yield from ((quota, period) for (quota,), (period,) in zip(quotas, periods, strict=True))


def _values(controller: str, name: str) -> list[list[str]]:
    """Return the words of a file of the process's control group and of each group above that has it; all limits hold.

    Parameters
    ----------
    controller
        Controller of version 1; empty for version 2.
    name
        The file.
    """
    try:
        memberships = (_ROOT / _MEMBERSHIP).read_text().splitlines()
    except OSError:  # no Linux
        return []
    found = []
    for _, controllers, group in (line.split(":", 2) for line in memberships):
        if controller in controllers.split(","):
            top = _ROOT / _GROUPS / controller
            # A container sees its own group as the root, whatever its name outside.
            for folder in (top / group.lstrip("/"), *(top / group.lstrip("/")).parents):
                if folder.is_relative_to(top) and (folder / name).is_file():
                    found.append((folder / name).read_text().split())
    return found
