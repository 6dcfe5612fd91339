"""Prompts that `--prompts` names: built in, JSON Lines, or Spec-Bench's questions, with their token ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    prompts = [_prompt(line, number, path, spec_bench) for number, line in enumerate(lines, 1) if line.strip()]
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


def _prompt(line: str, number: int, path: Path, spec_bench: bool) -> Prompt:
    """Read one line, with the field names of Spec-Bench's questions or with ours."""
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is neither a prompt nor a name
        if spec_bench:
            name, task, prediction, raw = row["question_id"], row["category"], None, False
        else:
            name, task, prediction = row.get("id", number), row.get("task", OTHER), row.get("prediction")
            raw = "turns" not in row
        turns = [row["prompt"]] if raw else row["turns"]
        well_formed = isinstance(turns, list) and bool(turns) and all(isinstance(t, str) and t for t in turns)
        well_formed &= isinstance(prediction, str | None)
    except (ValueError, KeyError, TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        fields = (
            "question_id, category and turns" if spec_bench else "'prompt' (a string) or 'turns' (a list of strings)"
        )
        got = f"line {number} of {path}: {line[:60].rstrip()!r}"
        remedy = "Write the file in that form (docs/benchmarks.md)."
        raise TraceError(f"one JSON object per line with {fields}", got, remedy)
    return Prompt(str(name), str(task), tuple(turns), prediction, raw)


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
    turns = list(zip(prompt.turns, [*answers, ""], strict=False))[: len(answers) + 1]
    if prompt.raw or template == "none" or (template == "auto" and not tokenizer.chat_template):
        return "".join(turn + answer for turn, answer in turns)
    if template == "vicuna":
        ends = [f" {answer}</s>" if answer else "" for _, answer in turns]
        spoken = [f"USER: {turn} ASSISTANT:{end}" for (turn, _), end in zip(turns, ends, strict=True)]
        return f"{VICUNA_SYSTEM} {''.join(spoken)}"
    messages = []
    for turn, answer in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))


def encode(tokenizer: Any, prompt: Prompt, answers: Sequence[str], template: str = "auto") -> Any:
    """(1, L) token ids of a conversation up to the next answer; a chat template brings its special tokens itself."""
    text = render(tokenizer, prompt, answers, template)
    templated = not prompt.raw and template == "auto" and bool(tokenizer.chat_template)
    return tokenizer(text, return_tensors="pt", add_special_tokens=not templated)["input_ids"]
