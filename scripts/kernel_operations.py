"""Operation counts of the drafting kernels over replayed answers, whatever machine they run on.

::

    NUMBA_DISABLE_JIT=1 python scripts/kernel_operations.py ANSWERS.jsonl STORE

With the compiler off the kernels are plain Python, and the interpreter itself reports every call, so that counting
costs nothing where it is not done. Prints one JSON object: operations of each kind, and the tokens they were done for.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import checkout  # noqa: F401
from tokenizers import Tokenizer

from retrieve_spec.bench.replay import Replay, TraceRow, read_trace
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.reference_model import reference_path

NODES = 16
ROWS = 3
OPERATIONS = {
    "nodes expanded": ["blend.blend"],
    "levels weighed": ["levels.evidence"],
    "levels read": ["levels.read_level"],
    "candidates pushed": ["expand._push"],
    "cursors advanced": ["levels.advance_row"],
    "automaton edges looked up": ["automaton.find_edge"],
    "recycling contexts looked up": ["recycling.find"],
    "n-gram contexts looked up": ["ngram.ngram_find"],
    "suffix array reads": ["suffix_array.sa_token", "suffix_array._block_token"],
}
"""Kind of operation to the kernels (module.function) whose calls are counted as it."""


class Counting:
    """Counts calls of kernels while it is open."""

    def __init__(self) -> None:
        self.kinds: dict[CodeType, str] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(OPERATIONS, 0))
        for kind, names in OPERATIONS.items():
            for name in names:
                self.kinds[code_of(name)] = kind

    def __enter__(self) -> Counting:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in self.kinds:
            self.counts[self.kinds[frame.f_code]] += 1


def code_of(name: str) -> CodeType:
    """Code of a kernel, `module.function` of `retrieve_spec.kernels`.

    Raises
    ------
    SystemExit
        There is no such kernel any more.
    """
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] | None = getattr(
        importlib.import_module(f"retrieve_spec.kernels.{module}"), function, None
    )
    if found is None:
        sys.exit(f"kernel {name} is gone: say in OPERATIONS of scripts/kernel_operations.py what took its place")
    return getattr(found, "py_func", found).__code__


def count(rows: Iterable[TraceRow], store: str) -> dict[str, int]:
    """Operations of `auto` over some rows, with a session and a store."""
    tokenizer = Tokenizer.from_file(str(reference_path() / "tokenizer.json"))
    drafter: Any = build_drafter(
        SpeculationConfig(session=True), datastores=[open_datastore(store, tokenizer=tokenizer)]
    )
    with Counting() as counting:
        result = Replay(drafter, NODES).run(rows)
    return {"tokens": result["tokens"], "passes": result["passes"], **counting.counts}


def main() -> None:
    """Count and print."""
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        sys.exit("set NUMBA_DISABLE_JIT=1: calls inside compiled kernels cannot be counted")
    tokenizer = Tokenizer.from_file(str(reference_path() / "tokenizer.json"))
    print(json.dumps(count(list(read_trace(Path(sys.argv[1]), tokenizer, ROWS)), sys.argv[2])))


if __name__ == "__main__":
    main()
