"""Workloads: the prompts that `--prompts` names, and their token ids.

The built-in ones are for the bundled model, and are made from files on this machine, so nothing is downloaded. There
are five kinds, labelled in `task`:

`unseen`
    Files of installed packages that were held out of the bundled model's training.
`seen`
    Files of the interpreter's standard library, which the model was trained on.
`edit`
    An unseen file, to be rewritten with one name changed; the old text is the prediction.
`structured`
    Generated tables of numbers (fixed seed): much repetition, little language.
`prose`
    Beginnings of long module docstrings: little to copy, so drafting should lose (greedily, so small a model loops).

The `everyday` ones are for chat models: summarise, correct, add type hints, extract as JSON, and questions with answers
that repeat nothing.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import random
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from retrieve_spec.errors import TraceError, in_a_line, nearest
from retrieve_spec.reference_model import reference_path

BUILTIN, BUILTIN_PER_TASK = "builtin", 6
EVERYDAY = "everyday"
SPEC_BENCH = "spec-bench:"
OTHER = "other"
"""Task of prompts without one."""
MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
TASKS = ("unseen", "seen", "edit", "structured", "prose")
LOOP_TAIL = 600
LOOP_RATIO = 0.15


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a workload.

    Attributes
    ----------
    name
        Unique within the workload, for example the file it was cut from.
    task
        Kind of prompt, by which figures are grouped.
    turns
        The user's texts; more than one for a conversation.
    prediction
        Text that the user expects, if any.
    raw
        Whether to use the turns without a chat template.
    """

    name: str
    task: str
    turns: tuple[str, ...]
    prediction: str | None = None
    raw: bool = True


def holdout() -> frozenset[str]:
    """Return packages that the bundled model was not trained on, from the list written at training."""
    return frozenset(json.loads((reference_path() / "corpus.json").read_text())["holdout"])


def unseen_files() -> dict[str, str]:
    """Return the files of installed packages that were held out of training: texts by path."""
    found: dict[str, str] = {}
    for name in sorted(holdout()):
        try:
            listed = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for entry in listed:
            if entry.suffix == ".py" and not {"tests", "test"} & set(entry.parts):
                found[str(entry)] = _usable(Path(str(entry.locate())))
    return {path: text for path, text in sorted(found.items()) if text}


def seen_files() -> dict[str, str]:
    """Return the top-level files of the interpreter's standard library: texts by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return {path.name: text for path in sorted(folder.glob("*.py")) if (text := _usable(path))}


def completion_prompt(path: str, text: str) -> str:
    """Return the first 40 % of a file, cut at a line end, in the form of the bundled model's documents.

    At most 2,400 characters, so that the prompt stays well below the model's 2,048 positions.
    """
    shown = text[: text.rfind("\n", 0, min(int(len(text) * 0.4), 2400)) + 1]
    return f"<|file_sep|>{path}\n{shown}"


def edit_prompt(path: str, text: str) -> Prompt | None:
    """Return a prompt for a file with its most frequent name changed; the unchanged file is the prediction.

    The bundled model does not follow instructions, so the prompt is the file and the beginning of a second copy with
    the new name.
    """
    body = text[: text.rfind("\n", 0, 1600) + 1]
    names = re.findall(r"\bdef ([a-z]\w{3,})", body)
    if not names or len(body) < 600:
        return None
    old = max(names, key=lambda name: (len(re.findall(rf"\b{name}\b", body)), name))
    changed = re.sub(rf"\b{old}\b", f"new_{old}", body)
    begun = changed[: changed.rfind("\n", 0, max(changed.find(f"new_{old}"), len(changed) // 4) + 80) + 1]
    if len(begun) > 0.7 * len(changed):
        return None
    turn = f"<|file_sep|>{path}\n{body}<|endoftext|><|file_sep|>new_{path}\n{begun}"
    return Prompt(f"edit of {path}", "edit", (turn,), prediction=body)


def structured_prompts(count: int) -> Iterator[Prompt]:
    """Yield Python tables of random measurements, cut in the middle."""
    for seed in range(count):
        rng = random.Random(seed)
        keys = rng.sample(["host", "port", "name", "size", "state", "owner", "price", "weight", "city"], 4)
        rows = ["    {" + ", ".join(f'"{key}": {rng.randint(0, 99)}' for key in keys) + "}," for _ in range(14)]
        text = "\n".join([f"<|file_sep|>data/table_{seed}.py", "ROWS = [", *rows, ""])
        yield Prompt(f"table {seed}", "structured", (text,))


def prose_prompts(files: Sequence[tuple[str, str]]) -> Iterator[Prompt]:
    """Yield module docstrings of at least 500 characters, cut in the middle."""
    for path, source in files:
        try:
            text = ast.get_docstring(ast.parse(source)) or ""
        except SyntaxError:
            continue
        if len(text) >= 500 and ">>>" not in text:
            shown = text[: text.rfind(" ", 0, min(len(text) // 2, 1200))]
            yield Prompt(f"docstring of {path}", "prose", (f'<|file_sep|>{path}\n"""{shown}',))


def builtin(per_task: int = 6, tasks: tuple[str, ...] = TASKS) -> list[Prompt]:
    """Return the built-in workload, which is the same for the same packages and Python release.

    Parameters
    ----------
    per_task
        Most prompts of each kind; fewer if too few files are installed.
    tasks
        Kinds of prompts.
    """
    unseen, seen = _spread(unseen_files(), 400), _spread(seen_files(), 100)
    made: dict[str, Iterator[Prompt]] = {
        "unseen": (Prompt(path, "unseen", (completion_prompt(path, text),)) for path, text in unseen),
        "seen": (Prompt(f"{path} (seen in training)", "seen", (completion_prompt(path, text),)) for path, text in seen),
        "edit": (prompt for file in reversed(unseen) if (prompt := edit_prompt(*file)) is not None),
        "structured": structured_prompts(per_task),
        "prose": prose_prompts(unseen + seen),
    }
    return [prompt for task in tasks for prompt in islice(made[task], per_task)]


def samples(tokenizer: Any) -> list[Prompt]:
    """Return a prompt of each kind: everyday ones if the tokenizer has a chat template, else built-in ones."""
    if not tokenizer.chat_template:
        return builtin(1)
    by_task = {prompt.task: prompt for prompt in reversed(read_prompts(EVERYDAY))}
    return list(reversed(by_task.values()))


def loops(text: str) -> bool:
    """Whether a text ends in a loop: its last 600 characters compress to less than 15 %."""
    tail = text[-LOOP_TAIL:].encode()
    return len(tail) >= LOOP_TAIL // 2 and len(zlib.compress(tail, 9)) < LOOP_RATIO * len(tail)


def _usable(path: Path) -> str:
    """Return a file's text if it is long enough to be cut and short enough to be handwritten code, else nothing."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    return text if 1500 <= len(text) <= 100_000 else ""


def _spread(files: dict[str, str], most: int) -> list[tuple[str, str]]:
    """Shuffle with a fixed seed, so that the first few items come from everywhere."""
    chosen = list(files.items())
    random.Random(0).shuffle(chosen)
    return chosen[:most]


def read_prompts(what: str, limit: int | None = None, tasks: Sequence[str] | None = None) -> list[Prompt]:
    """Read the prompts of a workload.

    Parameters
    ----------
    what
        `"builtin"`, `"everyday"`, a JSON Lines file with `prompt` or `turns` and optionally `id`, `task` and
        `prediction`, or `spec-bench:` and the path of its `question.jsonl`, with `question_id` and `category` instead.
    limit
        Most prompts, in order; for built-in ones, most of each kind.
    tasks
        Only prompts of these tasks (for Spec-Bench: categories).

    Raises
    ------
    TraceError
        The file does not exist, or a line has none of the formats.
    """
    if what == BUILTIN:
        return _of_tasks(builtin(limit or BUILTIN_PER_TASK), tasks, what)
    path = Path(what.removeprefix(SPEC_BENCH)).expanduser()
    if what == EVERYDAY:
        path = Path(__file__).parent / "everyday.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Give FILE.jsonl in UTF-8, spec-bench:PATH, builtin or everyday."
        raise TraceError(f"to read {path}", in_a_line(error), remedy) from error
    prompts = [_prompt(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise TraceError("at least one prompt", f"none in {path}", "Give a file with one JSON object per line.")
    twice = [name for name, count in Counter(prompt.name for prompt in prompts).items() if count > 1]
    if twice:
        raise TraceError("an id of its own for each prompt", f"{twice[0]!r} more than once in {path}", "Rename it.")
    return _of_tasks(prompts, tasks, str(path))[:limit]


def _of_tasks(prompts: list[Prompt], tasks: Sequence[str] | None, what: str) -> list[Prompt]:
    known = {prompt.task for prompt in prompts}
    missing = [task for task in tasks or () if task not in known]
    if missing:
        hint = nearest(missing[0], known) or "Name some of these."
        raise TraceError(f"tasks of {what}: {', '.join(sorted(known))}", ", ".join(map(repr, missing)), hint)
    return [prompt for prompt in prompts if tasks is None or prompt.task in tasks]


def _prompt(line: str, number: int, path: Path) -> Prompt:
    """Parse a line with the field names of Spec-Bench or of this library."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is neither a prompt nor a name
        name, task = row.get("question_id", row.get("id", number)), row.get("category", row.get("task", OTHER))
        raw, prediction = "turns" not in row, row.get("prediction")
        turns = [row["prompt"]] if raw else row["turns"]
        well_formed = isinstance(turns, list) and bool(turns) and all(isinstance(t, str) and t for t in turns)
        well_formed &= isinstance(prediction, str | None)
    except (ValueError, KeyError, TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        expected = "one JSON object per line with 'prompt' (a string) or 'turns' (a list of strings)"
        got = f"line {number} of {path}: {line[:60].rstrip()!r}"
        raise TraceError(expected, got, "Write the file in that form (docs/benchmarks.md).")
    return Prompt(str(name), str(task), tuple(turns), prediction, raw)


def subtask(category: str) -> str:
    """Return Spec-Bench's subtask of a category: the eight MT-Bench categories are one."""
    return "mt_bench" if category in MT_BENCH else category


def render(tokenizer: Any, prompt: Prompt, answers: Sequence[str]) -> str:
    """Render a conversation up to the next answer, by the tokenizer's chat template if it has one.

    Parameters
    ----------
    answers
        The model's answers so far.
    """
    turns = list(zip(prompt.turns, [*answers, ""], strict=False))[: len(answers) + 1]
    if not _templated(tokenizer, prompt):
        return "".join(turn + answer for turn, answer in turns)
    pairs = [({"role": "user", "content": said}, {"role": "assistant", "content": answer}) for said, answer in turns]
    messages = list(chain(*pairs))[:-1]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode(tokenizer: Any, prompt: Prompt, answers: Sequence[str]) -> Any:
    """Encode a conversation up to the next answer as (1, L) ids; chat templates contain their special tokens."""
    text = render(tokenizer, prompt, answers)
    return tokenizer(text, return_tensors="pt", add_special_tokens=not _templated(tokenizer, prompt))["input_ids"]


def _templated(tokenizer: Any, prompt: Prompt) -> bool:
    return not prompt.raw and bool(tokenizer.chat_template)
