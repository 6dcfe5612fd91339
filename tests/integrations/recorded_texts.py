"""What other engines are asked: texts that stay what they are, since greedy text turns on rounding, and a store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import retrieve_spec

_PACKAGE = Path(retrieve_spec.__file__).parent
_ANSWERS = Path(__file__).parents[1] / "bench" / "guard" / "answers.jsonl"


def recorded_texts() -> list[str]:
    """Prompts of the guard with their answers, about 500 tokens of the bundled model each."""
    rows = map(json.loads, _ANSWERS.read_text(encoding="utf-8").splitlines())
    return [row["prompt"] + row["output"] for row in rows]


def token_prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    """64 prompts of token ids: of one token, of as many as a draft and one more, alike, longer than a step reads."""
    ids = [token for text in recorded_texts() for token in encode(text)]
    made = [ids[80 * i :][: (1, 9, 60, 200, 300)[i % 5]] for i in range(60)]
    return [*made, *made[2:6]]


def built_store(folder: Path) -> str:
    """A store of part of the library, by another process: vLLM's CPU build starts no engine behind Numba."""
    build = "import sys; from retrieve_spec.datastore.build import build_datastore; build_datastore(*sys.argv[1:])"
    given = [str(folder / "store"), str(_PACKAGE / "sources"), str(_PACKAGE / "reference")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", build, *given], check=True)
    return given[0]
