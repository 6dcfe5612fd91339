"""Facts about the machine that are published with every figure: processor, versions, commit, load, other work."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from retrieve_spec.processors import processors

BUSY_LOAD = 0.5
"""Load per core at the start above which it is reported."""
BUSY_OTHERS = 0.05
"""Share of the machine used by other processes above which times are only a rough guide."""
NOT_MEASURED = (":(exclude)docs", ":(exclude)tests", ":(exclude)*.md")
"""Folders whose changes do not affect figures; data files are written there during measurements."""
PACKAGES = ("retrieve-spec", "torch", "transformers", "tokenizers", "numpy", "numba", "faiss-cpu")


def machine_facts() -> dict[str, Any]:
    """Return processor, memory, accelerator, load, versions, commit and date."""
    import torch

    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": _processor(),
        "cores": processors(),
        "torch_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def summary(facts: dict[str, Any]) -> str:
    """Return the facts in one line."""
    packages = facts["packages"]
    threads = f"{facts['torch_threads']} thread{'s' if facts['torch_threads'] != 1 else ''}"
    where = facts.get("gpu") or f"{facts['processor']}, {facts['cores']} cores, {threads}"
    versions = f"torch {packages['torch']}, transformers {packages['transformers']}, Python {facts['python']}"
    changed = " with changes that are not committed" if "+" in facts["commit"] else ""
    commit = facts["commit"] or "unknown"
    return f"{where}{_other_work(facts)}; {versions}; commit {commit}{changed}; {facts['date']}"


def _other_work(facts: dict[str, Any]) -> str:
    """Describe the machine's other work; by the load only if nothing was counted."""
    others, busy_others = facts.get("others"), BUSY_OTHERS * facts["cores"]
    if others is not None:
        note, busy = f"other processes took {others:.2f} cores meanwhile", others > busy_others
    else:
        note, busy = f"load {facts.get('load')} at the start", facts.get("load", 0.0) > BUSY_LOAD * facts["cores"]
        note = note if busy else ""
    return f", busy ({note}: times are for orientation only)" if busy else f" ({note})" if note else ""


class OtherWork:
    """Counts the processor time of other processes from its creation on, including other guests of the host."""

    def __init__(self) -> None:
        self._began = _other_seconds()

    def cores(self) -> float | None:
        """Average number of cores used by others (0.5: one of them half of the time); None if unknown."""
        now = _other_seconds()
        if self._began is None or now is None or now[0] <= self._began[0]:
            return None
        return round(max(now[1] - self._began[1], 0.0) / (now[0] - self._began[0]), 2)


def resident_bytes(process: int | str = "self") -> int:
    """Return the bytes of memory that a process, this one by default, holds now; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def _other_seconds() -> tuple[float, float] | None:
    """Return the time, and the processor seconds since boot not used by this process and its children."""
    try:
        _cpu, *jiffies = Path("/proc/stat").read_text().splitlines()[0].split()
        user, nice, system, _idle, _waiting, irq, softirq, steal = (int(number) for number in jiffies[:8])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    return time.monotonic(), busy - sum(os.times()[:4])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of this package's checkout, with a plus sign if files differ from it; empty without one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return ""
    try:
        commit = _git(folder, "rev-parse", "--short=10", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_MEASURED)
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
