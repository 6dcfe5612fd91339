"""What of the machine this process may use: processors and memory, by affinity and by the limits of control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_MEMBERSHIP, _GROUPS = "proc/self/cgroup", "sys/fs/cgroup"
_PROCESS_BYTES = 256 << 20
"""Memory of a process of this library before it has anything to work on."""


def processors() -> int:
    """Processors that this process may keep busy: those of its affinity, or fewer by a quota of its control group."""
    quotas = (int(quota) / int(period) for quota, period in _quotas() if quota.isdecimal())
    return max(1, int(min((_affinity(), *quotas))))


def memory() -> int:
    """Bytes of memory that this process may use: the machine's, or fewer by a limit of its control group."""
    limits = (*_values("", "memory.max"), *_values("memory", "memory.limit_in_bytes"))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((machine, *(int(limit) for limit, *_ in limits if limit.isdecimal())))


def processes(each: int) -> int:
    """How many processes to run at once that take `each` bytes of memory: at least one."""
    return max(1, min(processors(), memory() // (_PROCESS_BYTES + each)))


def limit_threads() -> None:
    """Let libraries that compute in threads know of a quota, which they do not ask for; before they are imported."""
    if processors() < _affinity():
        os.environ.setdefault("OMP_NUM_THREADS", str(processors()))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> Iterator[tuple[str, str]]:
    """Processor time that the process's control groups may use in a period, each with the period."""
    yield from ((quota, period) for quota, period in _values("", "cpu.max"))
    quotas, periods = (_values("cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    yield from ((quota, period) for (quota,), (period,) in zip(quotas, periods, strict=True))


def _values(controller: str, name: str) -> list[list[str]]:
    """Words of a file of the process's control group and of every group above that has it; the limits of all hold.

    Parameters
    ----------
    controller
        Of version 1; empty for version 2.
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
            # A container sees its own group as the top, whatever its name is outside.
            for folder in (top / group.lstrip("/"), *(top / group.lstrip("/")).parents):
                if folder.is_relative_to(top) and (folder / name).is_file():
                    found.append((folder / name).read_text().split())
    return found
