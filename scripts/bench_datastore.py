"""Benchmark of a datastore: what building, opening and changing it takes, by the commands of a user.

    python scripts/bench_datastore.py --text FOLDER [--tokens 20e6] [--workers 1 2]

The text is the Python source below FOLDER. Every command runs in a process of its own, whose start is included; of
changes the median of five counts. What drafting from a store takes is measured by `bench_drafting.py --store`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from retrieve_spec.datastore.store import open_datastore

COMMAND = [sys.executable, "-c", "import sys; from retrieve_spec.cli import main; sys.exit(main())"]
REPEATS = 5
OPENINGS = 20


def command(*words: str | Path) -> tuple[dict[str, Any], float]:
    """Run a command of the library: its JSON object, and the seconds it took."""
    began = time.perf_counter()
    done = subprocess.run([*COMMAND, *map(str, words), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), time.perf_counter() - began


def building(folder: Path, text: str, tokens: int, workers: list[int]) -> dict[str, Any]:
    """Build the same store by different numbers of workers."""
    made, contents = {}, set()
    for number in workers:
        words = ["--tokenizer", "reference", "--include", "**/*.py", "--max-tokens", str(tokens)]
        report, seconds = command("build", folder / f"store-{number}", text, *words, "--workers", str(number))
        made[str(number)] = {"seconds": seconds, "tokens_per_second": report["tokens"] / seconds}
        manifest = open_datastore(folder / f"store-{number}").manifest
        contents.add(manifest.content)
    counts = {name: getattr(manifest, name) for name in ("tokens", "documents", "bytes")}
    return {**counts, "segments": len(manifest.segments), "workers": made, "same": len(contents) == 1}


def synchronising(folder: Path, text: str, count: int) -> dict[str, Any]:
    """Seconds to make a store follow a change of one file of so many; the first sync builds it."""
    source, store = folder / "source", folder / "followed"
    for number, path in enumerate(sorted(Path(text).rglob("*.py"))[:count]):
        place = source / str(number % 100) / f"{number}.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    command("sync", store, source, "--tokenizer", "reference")
    seconds = []
    for number, path in enumerate(sorted(source.rglob("*.py"))[: REPEATS + 1]):
        path.write_text(f"# change {number}\n" * 20, encoding="utf-8")
        seconds.append(command("sync", store, source)[1])
    return {"files": count, "seconds": statistics.median(seconds[1:])}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Builds, and openings and changes of what the last of them built."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built = building(folder, options.text, int(options.tokens), options.workers)
        store, times = folder / f"store-{options.workers[-1]}", []
        for _ in range(OPENINGS):
            began = time.perf_counter()
            opened = open_datastore(store)
            times.append((time.perf_counter() - began) * 1e3)
        paths = [document.path for document in opened.documents()]
        chosen = paths[:: len(paths) // (REPEATS + 1)][: REPEATS + 1]
        removing = [command("remove", store, path)[1] for path in chosen]
        return {
            "build": built,
            "open": {"first_ms": times[0], "median_ms": statistics.median(times)},
            "remove_s": statistics.median(removing[1:]),  # the first one compiles
            "sync": synchronising(folder, options.text, options.files),
        }


def main() -> None:
    """Measure and print."""
    harness.run(measure, __doc__, text=str, tokens=20e6, workers=[1, 2], files=5000)


if __name__ == "__main__":
    main()
