"""Passes per edit of edit predictions: edits of a repository's history, as editors ask for them, are replayed.

    python scripts/bench_edits.py --repository . --edits 200

Each is asked for in Zeta's format after the edit before it; the answer is what was committed. Passes are counted with
the excerpt as what is expected, as the server drafts it, and without.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from retrieve_spec.bench.replay import Replay, TraceRow
from retrieve_spec.config import SpeculationConfig
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.reference_model import load_config_and_tokenizer
from retrieve_spec.server.edits import find_edit

LINES = 12
"""Unchanged lines around a change."""
PROMPT = """### User Edits:

User edited "{path}":
```diff
{before}```

### User Excerpt:

```{path}
<|editable_region_start|>
{excerpt}<|editable_region_end|>
```

### Response:
"""


def edits(repository: Path) -> Iterator[tuple[str, str]]:
    """Prompts and answers of small changes, the latest commits first."""
    command = [
        "git",
        "-C",
        str(repository),
        "log",
        "-p",
        "-300",
        f"-U{LINES}",
        "--no-merges",
        "--format=format:commit",
        "--",
        "*.py",
    ]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for path, hunks in re.findall(r"^\+\+\+ b/(\S+)\n(.*?)(?=^diff |^commit$|\Z)", log, re.MULTILINE | re.DOTALL):
        before = ""
        for hunk in re.split(r"^@@ .*\n", hunks, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
            if before and old != new and 0 < sum(line[0] in "+-" for line in lines) <= 12:
                prompt = PROMPT.format(path=path, before=before, excerpt=old)
                yield prompt, f"<|editable_region_start|>\n{new}<|editable_region_end|>\n"
            before = "".join(line for line in lines if line[0] in "+-")


class Expecting(MixtureDrafter):
    """A drafter that is told what the server expects."""

    expected: np.ndarray | None = None

    def start(self, prompt_ids: np.ndarray, prediction_ids: np.ndarray | None = None) -> None:
        super().start(prompt_ids, self.expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repository", type=Path, default=Path())
    parser.add_argument("--edits", type=int, default=200)
    options = parser.parse_args()
    _, tokenizer = load_config_and_tokenizer("reference")

    def ids(text: str) -> np.ndarray:
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    passes: dict[bool, list[int]] = {True: [], False: []}
    tokens = []
    for _, (prompt, answer) in zip(range(options.edits), edits(options.repository), strict=False):
        row, edit = TraceRow("edit", ids(prompt), [(ids(answer), True)]), find_edit(prompt)
        tokens.append(len(row.segments[0][0]))
        for expects, counted in passes.items():
            drafter = Expecting(SpeculationConfig())
            drafter.expected = ids(edit.expected) if expects and edit else None
            counted.append(Replay(drafter, nodes=32).run([row])["passes"])
    figures = {
        name: statistics.mean(counted)
        for name, counted in zip(("excerpt", "prompt only"), passes.values(), strict=True)
    }
    print(json.dumps({"edits": len(tokens), "tokens per edit": statistics.mean(tokens), "passes per edit": figures}))


if __name__ == "__main__":
    main()
