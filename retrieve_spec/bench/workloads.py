"""Built-in workloads: prompts for the bundled model from files on this machine, so that nothing is downloaded.

Four kinds, each labelled in `task`:

`unseen`
    Files of installed packages that the bundled model's card holds out of its training.
`seen`
    Files of the interpreter's standard library, which the model was trained on.
`edit`
    An unseen file to be written again with one name changed; the old text is the prediction.
`structured`
    Tables of numbers, generated with a fixed seed: much repetition, little language.
`prose`
    Long docstrings of modules, begun: little to copy, where drafting should lose (greedy, so small a model loops).
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from retrieve_spec.reference_model import reference_path

TASKS = ("unseen", "seen", "edit", "structured", "prose")
LOOP_TAIL = 600
LOOP_RATIO = 0.15


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a workload.

    Attributes
    ----------
    name
        Unique within the workload, for example the file it was cut from.
    task
        What it is counted under.
    turns
        Texts of the user; more than one for a conversation.
    prediction
        Text the user expects, for tasks where there is one.
    raw
        Whether the turns are fed as they are, without a chat template.
    """

    name: str
    task: str
    turns: tuple[str, ...]
    prediction: str | None = None
    raw: bool = True


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A Python file and the path the model would have known it by."""

    path: str
    text: str


def holdout() -> frozenset[str]:
    """Packages whose files the bundled model never saw, from the list written when it was trained."""
    return frozenset(json.loads((reference_path() / "corpus.json").read_text())["holdout"])


def unseen_files() -> list[SourceFile]:
    """Files of installed packages that were held out, sorted by path."""
    found: dict[str, SourceFile] = {}
    for name in sorted(holdout()):
        try:
            listed = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for entry in listed:
            if entry.suffix == ".py" and not {"tests", "test"} & set(entry.parts):
                text = _usable(Path(str(entry.locate())))
                if text is not None:
                    found[str(entry)] = SourceFile(str(entry), text)
    return [found[path] for path in sorted(found)]


def seen_files() -> list[SourceFile]:
    """Files at the top of the interpreter's standard library, sorted by path."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pairs = ((path.name, _usable(path)) for path in sorted(folder.glob("*.py")))
    return [SourceFile(name, text) for name, text in pairs if text is not None]


def completion_prompt(file: SourceFile, share: float = 0.4, most: int = 2400) -> str:
    """The beginning of a file, cut at the end of a line, as the bundled model's documents begin.

    Parameters
    ----------
    share
        How much of the file is shown.
    most
        Characters shown at most, so that the prompt stays far from the model's 2,048 positions.
    """
    cut = min(int(len(file.text) * share), most)
    shown = file.text[: file.text.rfind("\n", 0, cut) + 1]
    return f"<|file_sep|>{file.path}\n{shown}"


def edit_prompt(file: SourceFile, most: int = 1600) -> Prompt | None:
    """Ask for the file again with its most used name changed; the unchanged file is the prediction.

    The bundled model follows no instructions, so the task is posed as it knows it: a second copy of the file that
    has begun with the new name.
    """
    end = file.text.rfind("\n", 0, most) + 1
    body = file.text[:end]
    names = re.findall(r"\bdef ([a-z]\w{3,})", body)
    if not names or end < 600:
        return None
    old = max(names, key=lambda name: (len(re.findall(rf"\b{name}\b", body)), name))
    changed = re.sub(rf"\b{old}\b", f"new_{old}", body)
    begun = changed[: changed.rfind("\n", 0, max(changed.find(f"new_{old}"), len(changed) // 4) + 80) + 1]
    if len(begun) > 0.7 * len(changed):
        return None
    turn = f"<|file_sep|>{file.path}\n{body}<|endoftext|><|file_sep|>new_{file.path}\n{begun}"
    return Prompt(f"edit of {file.path}", "edit", (turn,), prediction=body)


def structured_prompts(count: int) -> Iterator[Prompt]:
    """Python tables of made-up measurements, cut in the middle."""
    for seed in range(count):
        rng = random.Random(seed)
        keys = rng.sample(["host", "port", "name", "size", "state", "owner", "price", "weight", "city"], 4)
        rows = ["    {" + ", ".join(f'"{key}": {rng.randint(0, 99)}' for key in keys) + "}," for _ in range(14)]
        yield Prompt(
            f"table {seed}", "structured", (f"<|file_sep|>data/table_{seed}.py\nROWS = [\n" + "\n".join(rows) + "\n",)
        )


def prose_prompts(files: list[SourceFile], count: int) -> Iterator[Prompt]:
    """Module docstrings of at least 500 characters, cut in the middle."""
    for file in files:
        if count == 0:
            return
        try:
            text = ast.get_docstring(ast.parse(file.text)) or ""
        except SyntaxError:
            continue
        if len(text) >= 500 and ">>>" not in text:
            count -= 1
            shown = text[: text.rfind(" ", 0, min(len(text) // 2, 1200))]
            yield Prompt(f"docstring of {file.path}", "prose", (f'<|file_sep|>{file.path}\n"""{shown}',))


def builtin(per_task: int = 6, tasks: tuple[str, ...] = TASKS) -> list[Prompt]:
    """The workload that ships: the same prompts on every machine with the same packages and Python release.

    Parameters
    ----------
    per_task
        Prompts of each kind at most; fewer when too few files are installed.
    tasks
        Which kinds.
    """
    unseen, seen = _spread(unseen_files(), 400), _spread(seen_files(), 100)
    edits = [prompt for file in reversed(unseen) if (prompt := edit_prompt(file)) is not None]
    made = {
        "unseen": [Prompt(f.path, "unseen", (completion_prompt(f),)) for f in unseen[:per_task]],
        "seen": [Prompt(f"{f.path} (seen in training)", "seen", (completion_prompt(f),)) for f in seen[:per_task]],
        "edit": edits[:per_task],
        "structured": list(structured_prompts(per_task)),
        "prose": list(prose_prompts(unseen + seen, per_task)),
    }
    return [prompt for task in tasks for prompt in made[task]]


def loops(text: str) -> bool:
    """Whether a text ends in a loop: its last 600 characters compress below 15 %."""
    tail = text[-LOOP_TAIL:].encode()
    return len(tail) >= LOOP_TAIL // 2 and len(zlib.compress(tail, 9)) < LOOP_RATIO * len(tail)


def _usable(path: Path) -> str | None:
    """Text of a file that is long enough to be cut and short enough to be code that a person wrote, else None."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text if 1500 <= len(text) <= 100_000 else None


def _spread(files: list[SourceFile], most: int) -> list[SourceFile]:
    """Shuffle with a fixed seed, so that the first few come from everywhere."""
    chosen = list(files)
    random.Random(0).shuffle(chosen)
    return chosen[:most]
