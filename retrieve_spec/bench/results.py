"""Results folder: measured generations as JSON lines, and the records read back from them.

::

    OUT/run.json        what was measured: command, machine, model, methods, options, prompts
    OUT/results.jsonl   one line per (run, prompt, method), written when all methods have answered the prompt
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retrieve_spec.errors import ConfigError, TraceError

RUN_FILE, RESULTS_FILE = "run.json", "results.jsonl"
PARTS = ("prefill", "draft", "verify", "commit", "learn")
"""What the time of a generation goes to."""
FORMAT = 1
_MUST_AGREE = (
    *("format", "model", "prompts", "methods", "stores", "state", "max_new_tokens", "temperature", "top_p", "seed"),
    *("template", "dtype", "device"),
)


@dataclass(slots=True)
class Record:
    """One method's answer to one prompt, over all its turns.

    Attributes
    ----------
    run, prompt, task, method
        Which one; runs count from 1.
    prompt_tokens, new_tokens
        Token ids fed (last turn) and generated; ids are counted, never re-tokenised text.
    token_ids
        The answers' token ids, per turn.
    passes, turn_passes, nodes
        Forward passes, prompts' included, over all turns and per turn; draft tokens verified (None: not said).
    seconds, first_token_s, turn_seconds
        Wall time over all turns, prompts' included; until the first token of each turn, summed; per turn.
    split_ms
        Milliseconds in prefill, draft, verify, commit, learn.
    accepted_by_source, per_pass, mode, reason
        As the library's report has them.
    texts
        The answers.
    retokenized
        Tokens of the answers' texts tokenised again, less one for each turn: how Spec-Bench counts its baseline.
    looping
        Whether the last answer ends in a loop.
    divergence
        Where the answers first differ from the reference method's, None if nowhere: `{"turn", "position", "gap"}`, gap
        being the difference of the two highest logits there.
    memory
        Peak memory of the process during this answer, in bytes; it holds the model and all methods' states.
    """

    run: int
    prompt: str
    task: str
    method: str
    prompt_tokens: int = 0
    new_tokens: int = 0
    token_ids: list[list[int]] = field(default_factory=list)
    passes: int = 0
    turn_passes: list[int] = field(default_factory=list)
    nodes: int | None = None
    seconds: float = 0.0
    first_token_s: float = 0.0
    turn_seconds: list[float] = field(default_factory=list)
    split_ms: dict[str, float] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    per_pass: list[tuple[int, int, float, float]] = field(default_factory=list)
    mode: str = ""
    reason: str = ""
    texts: list[str] = field(default_factory=list)
    retokenized: int = 0
    looping: bool = False
    divergence: dict[str, Any] | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """New tokens by wall time, prompt included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """New tokens by forward passes."""
        return self.new_tokens / self.passes if self.passes else 0.0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds per token after the first of each turn, prompts excluded."""
        later = self.new_tokens - len(self.token_ids)
        return (self.seconds - self.first_token_s) / later * 1e3 if later > 0 else 0.0


class ResultsFolder:
    """A folder that results are added to as they come, so that nothing measured is lost.

    Parameters
    ----------
    path
        Made if it is not there.
    header
        What is going to be measured.
    resume
        Go on with what is there instead of refusing it.

    Raises
    ------
    ConfigError
        The folder holds results and `resume` is off, or holds results of something else.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, resume: bool = False) -> None:
        self.path = path
        self.records: list[Record] = []
        if (path / RUN_FILE).exists():
            if not resume:
                raise ConfigError("a new folder", f"results in {path}", "Give another --out, or --resume to go on.")
            header = self._checked(header)
            self.records = _whole(read_records(path), len(header["methods"]))
        path.mkdir(parents=True, exist_ok=True)
        self.header = {"format": FORMAT, **header}
        (path / RUN_FILE).write_text(json.dumps(self.header, indent=1) + "\n", encoding="utf-8")
        with open(path / RESULTS_FILE, "w", encoding="utf-8") as file:  # a line cut off by an interrupt goes
            file.writelines(json.dumps(asdict(record)) + "\n" for record in self.records)

    def _checked(self, header: dict[str, Any]) -> dict[str, Any]:
        old = read_header(self.path)
        new = {"format": FORMAT, **header}
        for name in _MUST_AGREE:
            if old.get(name) != new.get(name):
                raise ConfigError(
                    f"the {name} of the interrupted run ({_short(old.get(name))})",
                    _short(new.get(name)),
                    "Give the same options to go on with it, or another --out.",
                )
        commits = [old["machine"]["commit"], new["machine"]["commit"]]
        if not commits[0].endswith(commits[1]):
            old["machine"]["commit"] = ", then ".join(commits)
        return {**new, "command": old["command"], "machine": old["machine"], "resumed_on": new["machine"]["date"]}

    def done(self) -> set[tuple[int, str]]:
        """Runs and prompts that are there."""
        return {(record.run, record.prompt) for record in self.records}

    def add(self, records: list[Record]) -> None:
        """Write all methods' answers to one prompt."""
        self.records += records
        with open(self.path / RESULTS_FILE, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(record)) + "\n" for record in records))

    def note(self, name: str, value: Any) -> None:
        """Add a fact to the header."""
        self.header[name] = value
        (self.path / RUN_FILE).write_text(json.dumps(self.header, indent=1) + "\n", encoding="utf-8")

    def note_others(self, cores: float | None) -> None:
        """Add what other processes did meanwhile; of several sittings the busiest counts."""
        machine = self.header["machine"]
        if cores is not None:
            self.note("machine", {**machine, "others": max(cores, machine.get("others", 0.0))})


def read_header(path: Path) -> dict[str, Any]:
    """What a folder's results were measured with.

    Raises
    ------
    TraceError
        The folder holds no results, or those of a newer version.
    """
    try:
        header = json.loads((path / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceError("results of `bench run`", f"none in {path}", "Give its --out folder.") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        got = f"format {header.get('format') if isinstance(header, dict) else None} in {path}"
        raise TraceError(f"results of format {FORMAT}", got, "Use the version that wrote them.")
    return header


def read_records(path: Path) -> list[Record]:
    """All complete records of a folder; a last line cut off by an interrupt is left out."""
    file = path / RESULTS_FILE
    records = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            records.append(Record(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return records


def _whole(records: list[Record], methods: int) -> list[Record]:
    """Records of the prompts that all methods have answered."""
    counts = Counter((record.run, record.prompt) for record in records)
    return [record for record in records if counts[record.run, record.prompt] == methods]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
