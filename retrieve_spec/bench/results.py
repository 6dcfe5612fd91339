"""Results folder of `bench run`: a header and one record per answer, appended as they are measured.

::

    OUT/run.json        what was measured: command, machine, model, methods, options, prompts
    OUT/results.jsonl   one line per (run, prompt, method), written when all methods have answered the prompt
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retrieve_spec.errors import ConfigError, TraceError

RUN_FILE, RESULTS_FILE = "run.json", "results.jsonl"
PARTS = ("prefill", "draft", "verify", "commit", "learn")
"""What the time of a generation goes to."""
FORMAT = 2


@dataclass(slots=True)
class Record:
    """One method's answer to one prompt, over all its turns.

    Attributes
    ----------
    run, prompt, task, method
        Which one; runs count from 1.
    prompt_tokens, new_tokens
        Token ids fed (last turn) and generated.
    token_ids, texts
        The answers, per turn.
    passes, nodes
        Forward passes, prompts' included; draft tokens verified (None: not reported).
    seconds, first_token_s
        Wall time over all turns, prompts' included; until the first token of each turn, summed.
    split_ms
        Milliseconds in prefill, draft, verify, commit, learn.
    accepted_by_source, mode, reason
        As in `GenerationReport`.
    looping
        Whether the last answer ends in a loop.
    divergence
        Where the answers first differ from the reference method's, None if nowhere: `{"turn", "position", "gap"}`, gap
        being the difference of the two highest logits there.
    """

    run: int
    prompt: str
    task: str
    method: str
    prompt_tokens: int = 0
    new_tokens: int = 0
    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    passes: int = 0
    nodes: int | None = None
    seconds: float = 0.0
    first_token_s: float = 0.0
    split_ms: dict[str, float] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    mode: str = ""
    reason: str = ""
    looping: bool = False
    divergence: dict[str, Any] | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens by wall time, prompt included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token after the first of each turn, prompts excluded."""
        later = self.new_tokens - len(self.token_ids)
        return (self.seconds - self.first_token_s) / later * 1e3 if later > 0 else 0.0


class ResultsFolder:
    """A folder that results are added to as they come, so that an interrupted run can be reported.

    Parameters
    ----------
    path
        Made if it is not there.
    header
        What is going to be measured.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.answered = path, 0
        self.header = {"format": FORMAT, **header}
        path.mkdir(parents=True, exist_ok=True)
        self.note()

    def add(self, records: list[Record]) -> None:
        """Write all methods' answers to one prompt."""
        self.answered += 1
        with open(self.path / RESULTS_FILE, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(record)) + "\n" for record in records))

    def note(self, **facts: Any) -> None:
        """Add facts to the header."""
        self.header |= facts
        (self.path / RUN_FILE).write_text(json.dumps(self.header, indent=1) + "\n", encoding="utf-8")


def check_new(path: Path) -> None:
    """Refuse a folder that holds results.

    Raises
    ------
    ConfigError
        It does.
    """
    if (path / RUN_FILE).exists():
        raise ConfigError("a new folder", f"results in {path}", "Give another --out.")


def read_header(path: Path) -> dict[str, Any]:
    """What a folder's results were measured with.

    Raises
    ------
    TraceError
        The folder holds no results, or those of another version.
    """
    try:
        header = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError("results of `bench run`", f"none in {path}", "Give its --out folder.") from error
    if header.get("format") != FORMAT:
        got = f"format {header.get('format')} in {path}"
        raise TraceError(f"results of format {FORMAT}", got, "Use the version that wrote them.")
    return dict(header)


def read_records(path: Path) -> list[Record]:
    """All records of a folder."""
    file = path / RESULTS_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Record(**json.loads(line)) for line in lines]
