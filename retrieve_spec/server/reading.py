"""Divides an answer, as it is generated, into thoughts, text and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from retrieve_spec.server.tools import CallParser, ToolCall


@dataclass(frozen=True, slots=True)
class ThoughtTags:
    """How one family of models marks its thoughts.

    Attributes
    ----------
    opens, close
        The beginning and end of a thought.
    answers
        Texts that may precede an answer, in this order.
    final
        That of them which directly precedes an answer that is no call.
    """

    opens: str
    close: str
    answers: tuple[str, ...] = ()
    final: str = ""


THOUGHTS = (
    ThoughtTags("<think>", "</think>"),
    ThoughtTags("[THINK]", "[/THINK]"),
    ThoughtTags("<seed:think>", "</seed:think>"),
    ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtTags("<|channel>thought", "<channel|>"),
    ThoughtTags(
        "<|channel|>analysis<|message|>", "<|end|>",
        ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
        "<|channel|>final<|message|>",
    ),
)  # fmt: skip


def without_thoughts(answer: str) -> str:
    """Return a model's text after its last thought."""
    for tags in THOUGHTS:
        answer = answer.rpartition(tags.close)[2]
    return answer


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thoughts that may follow a prompt.

    Attributes
    ----------
    begun
        Tags of a thought that the prompt has opened.
    may_begin
        Tags of a thought with which the answer may begin, by the template.
    """

    begun: ThoughtTags | None = None
    may_begin: ThoughtTags | None = None

    @property
    def final(self) -> str:
        """Text between the thoughts and an answer that is no call."""
        tags = self.begun or self.may_begin
        return tags.final if tags else ""


def thinking_after(prompt: str, known: ThoughtTags | None, said: str) -> Thinking:
    """Return the thought that may follow a prompt.

    ``known`` are the template's tags, ``said`` is the text of this answer so far.
    """
    end = prompt.rstrip()
    begun = next(
        (tags for tags in THOUGHTS if end.endswith(tags.opens) or said.rfind(tags.opens) > said.rfind(tags.close)), None
    )
    over = begun is not None or said or (known is not None and end.endswith(known.close))
    return Thinking(begun, None if over else known)


NO_THOUGHTS = Thinking()


def after_thoughts(grammar: str, thinking: Thinking, mark: Callable[[str], str], before: str = "") -> str:
    """Return a grammar of llguidance (JSON, or Lark's notation) that begins after the thoughts.

    ``mark`` writes a text in the grammar's notation, control tokens as tokens; ``before`` is a text that the grammar's
    answers must follow.
    """
    tags = thinking.begun or thinking.may_begin
    if tags is None:
        return grammar
    answer, *parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    close = mark(tags.close)
    answers = " ".join(map(mark, tags.answers[:1]))
    is_token = close.startswith("<[")  # a special token without text
    thought = f"thought: /(?s:.*)/ {close}" if is_token else f"thought[suffix={close}]: /(?s:.*)/"
    begins = f"{mark(tags.opens)} thought" if thinking.begun is None else "thought"
    start = f"start: ({begins} /[ \\n]{{0,4}}/ {answers}){'?' if thinking.begun is None else ''} {mark(before)} @answer"
    lark = "\n".join(["%llguidance {}", start, thought])
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**answer, "name": "answer"}, *parts]})


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of a thought."""

    text: str


Said = Thought | str | ToolCall


class AnswerReader:
    """Divides an answer into thoughts, text and calls; the result does not depend on how the answer is cut into pieces.

    A thought is only at the beginning, without blanks around it; calls are only looked for after it.

    Parameters
    ----------
    begun
        Tags of a thought that the prompt has opened.
    calls
        Finds calls; None if no tools are offered.
    """

    def __init__(self, begun: ThoughtTags | None, calls: CallParser | None) -> None:
        self._calls = calls
        self._tags = begun
        self._state: Literal["start", "thought", "gap", "answer"] = "start" if begun is None else "thought"
        self._held = ""
        self._thought_told = False

    def feed(self, text: str) -> list[Said]:
        """Return what is certain with more of the answer."""
        return list(self._certain(text, ended=False))

    def finish(self) -> list[Said]:
        """Return what was held back, at the end of the answer."""
        return list(self._certain("", ended=True))

    def _certain(self, text: str, *, ended: bool) -> Iterator[Said]:
        self._held += text
        if self._state == "start":
            self._begin(ended)
        if self._state == "thought":
            yield from self._thought(ended)
        if self._state == "gap":
            self._pass_gap(ended)
        answer = ""
        if self._state == "answer":
            answer, self._held = self._held, ""
        if self._calls is not None:
            yield from self._calls.feed(answer)
            yield from self._calls.finish() if ended else ()
        elif answer:
            yield answer

    def _begin(self, ended: bool) -> None:
        """Decide by its first characters whether the answer begins with a thought, or with text to skip."""
        first = self._held.lstrip()
        self._tags = next((tags for tags in THOUGHTS if first.startswith((tags.opens, *tags.answers))), None)
        if self._tags is not None and first.startswith(self._tags.opens):
            self._state, self._held = "thought", first.removeprefix(self._tags.opens)
        elif self._tags is not None:
            self._state = "gap"
        elif ended or not any(mark.startswith(first) for tags in THOUGHTS for mark in (tags.opens, *tags.answers)):
            self._state = "answer"

    def _pass_gap(self, ended: bool) -> None:
        """Skip blanks, and the text that may precede an answer."""
        assert self._tags is not None
        for mark in self._tags.answers:
            self._held = self._held.lstrip().removeprefix(mark)
        self._held = self._held.lstrip()
        may_be_mark = any(mark.startswith(self._held) for mark in self._tags.answers)
        self._state = "gap" if not self._held or (may_be_mark and not ended) else "answer"

    def _thought(self, ended: bool) -> Iterator[Thought]:
        """Yield the certain part of a thought, without blanks around it."""
        assert self._tags is not None
        close, thought = self._tags.close, self._held
        end = thought.find(close)
        if end >= 0:
            self._state, thought, rest = "gap", thought[:end], thought[end + len(close) :]
        elif not ended:
            begun = next((size for size in range(len(close) - 1, 0, -1) if thought.endswith(close[:size])), 0)
            thought = thought[: len(thought) - begun]
        said = thought.rstrip()
        self._held = rest if end >= 0 else self._held[len(said) :]
        said = said if self._thought_told else said.lstrip()
        if said:
            self._thought_told = True
            yield Thought(said)
