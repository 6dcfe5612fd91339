"""Prompts that `--prompts` names: built in, JSON Lines, or Spec-Bench's questions, with their token ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from retrieve_spec.bench.workloads import Prompt, builtin
from retrieve_spec.errors import ConfigError, TraceError, nearest

BUILTIN = "builtin"
BUILTIN_PER_TASK = 6
SPEC_BENCH = "spec-bench:"
OTHER = "other"
"""Task of prompts whose line names none."""
TEMPLATES = ("auto", "vicuna", "none")
MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def read_prompts(what: str, limit: int | None = None, tasks: Sequence[str] | None = None) -> list[Prompt]:
    """Read a workload.

    Parameters
    ----------
    what
        `"builtin"`, a JSON Lines file with `prompt` or `turns` and optionally `id`, `task` and `prediction`, or
        `spec-bench:` and the path of its `question.jsonl`.
    limit
        Take at most so many, in order; of the built-in ones so many of each kind.
    tasks
        Take only prompts of these tasks (of Spec-Bench: its categories).

    Raises
    ------
    TraceError
        The file is not there, or a line is not in one of the formats.
    """
    if what == BUILTIN:
        return _of_tasks(builtin(limit or BUILTIN_PER_TASK), tasks, what)
    spec_bench = what.startswith(SPEC_BENCH)
    path = Path(what.removeprefix(SPEC_BENCH)).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TraceError("a file of prompts in UTF-8", f"other bytes in {path}", "Convert the file.") from error
    except OSError as error:
        raise TraceError(
            f"to read {path}", error.strerror or str(error), "Give FILE.jsonl, spec-bench:PATH or builtin."
        ) from error
    parse = _question if spec_bench else _prompt
    prompts = [parse(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
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
    row = _object(line, number, path)
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    if not _are_turns(turns):
        raise _wrong(number, path, "'prompt' (a string) or 'turns' (a list of strings)", line)
    if not isinstance(row.get("prediction"), str | None):
        raise _wrong(number, path, "'prediction' (a string)", line)
    return Prompt(
        name=str(row.get("id", number)),
        task=str(row.get("task", OTHER)),
        turns=tuple(turns),
        prediction=row.get("prediction"),
        raw="turns" not in row,
    )


def _question(line: str, number: int, path: Path) -> Prompt:
    row = _object(line, number, path)
    if not {"question_id", "category", "turns"} <= set(row) or not _are_turns(row["turns"]):
        raise _wrong(number, path, "'question_id', 'category' and 'turns' (a list of strings)", line)
    return Prompt(str(row["question_id"]), str(row["category"]), tuple(row["turns"]), raw=False)


def _are_turns(turns: Any) -> TypeGuard[list[str]]:
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) and turn for turn in turns)


def _object(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is neither a prompt nor a name
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise _wrong(number, path, "one JSON object per line", line)
    return row


def _wrong(number: int, path: Path, expected: str, line: str) -> TraceError:
    got = f"line {number} of {path}: {line[:60].rstrip()!r}"
    return TraceError(expected, got, "Write the file in that form (docs/benchmarks.md).")


def subtask(category: str) -> str:
    """Spec-Bench's subtask of a category: the eight MT-Bench categories are one."""
    return "mt_bench" if category in MT_BENCH else category


def render(tokenizer: Any, prompt: Prompt, answers: Sequence[str], template: str = "auto") -> str:
    """Text of a conversation up to the next answer.

    Parameters
    ----------
    answers
        What the model said to the turns so far.
    template
        `"auto"`: the tokenizer's chat template, the bare turns when it has none; `"vicuna"`: the one that Spec-Bench
        hard-codes; `"none"`: the bare turns. A raw prompt is never wrapped.
    """
    if template not in TEMPLATES:
        raise ConfigError(f"a template among {', '.join(TEMPLATES)}", repr(template), "Leave it at 'auto'.")
    turns = prompt.turns[: len(answers) + 1]
    if prompt.raw or template == "none" or (template == "auto" and not tokenizer.chat_template):
        return "".join(turn + answer for turn, answer in zip(turns, [*answers, ""], strict=True))
    if template == "vicuna":
        said = "".join(
            f"USER: {turn} ASSISTANT:" + (f" {answer}</s>" if answer else "")
            for turn, answer in zip(turns, [*answers, ""], strict=True)
        )
        return f"{VICUNA_SYSTEM} {said}"
    messages = []
    for turn, answer in zip(turns, [*answers, ""], strict=True):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    return str(text)


def encode(tokenizer: Any, prompt: Prompt, answers: Sequence[str], template: str = "auto") -> Any:
    """(1, L) token ids of a conversation up to the next answer; a chat template brings its special tokens itself."""
    text = render(tokenizer, prompt, answers, template)
    templated = not prompt.raw and template == "auto" and bool(tokenizer.chat_template)
    return tokenizer(text, return_tensors="pt", add_special_tokens=not templated)["input_ids"]
