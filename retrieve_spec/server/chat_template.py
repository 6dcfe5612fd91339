"""Chat templates: test conversations show what a template accepts, and conversations are adapted to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from hashlib import blake2s
from itertools import product, takewhile
from typing import Any

from retrieve_spec.server.history import Turn, joined
from retrieve_spec.server.reading import THOUGHTS, ThoughtTags, without_thoughts
from retrieve_spec.server.tools import with_tools_told

_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ID = "call_0123456789abcdefghi"
_TOOLS = re.compile(r"\btools\b")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "It."}}},
    },
}

_VARIABLES = {"add_generation_prompt": True, "functions": ""}
"""Variables that templates may need; some written before tools existed fail without `functions` and `datetime`."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template accepts.

    Attributes
    ----------
    system, developer, both
        Whether it renders turns of that role, and both in one conversation.
    later_system
        Whether it renders a system turn after other turns in its place.
    tools, calls
        Whether it renders tools, and calls.
    single_calls
        Whether it renders at most one call per turn.
    lone_calls
        Whether it leaves out text in a turn with calls, at once or when an answer follows, but renders it in a turn
        before.
    alternates
        Whether user and assistant must alternate.
    short_ids
        Whether call ids must have nine letters and digits.
    text_arguments
        Whether the arguments of calls must be a string of JSON.
    thoughts
        The tags of thoughts, if it handles thoughts in a history.
    thoughts_in
        Where it looks for a turn's thought: in the field of that name, or, for `content`, in a part of it.
    """

    system: bool = True
    developer: bool = False
    both: bool = False
    later_system: bool = True
    tools: bool = False
    calls: bool = False
    single_calls: bool = False
    lone_calls: bool = False
    alternates: bool = False
    short_ids: bool = False
    text_arguments: bool = False
    thoughts: ThoughtTags | None = None
    thoughts_in: str = "reasoning_content"


class ChatTemplate:
    """The chat template of a tokenizer.

    Parameters
    ----------
    tokenizer
        Its template may be replaced at any time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._traits = lru_cache(maxsize=4)(self._tried)

    @property
    def text(self) -> str:
        """The template's text (all of several); "" without one."""
        return str(getattr(self._tokenizer, "chat_template", None) or "")

    @property
    def traits(self) -> Traits:
        """What it accepts, found by rendering test conversations."""
        return self._traits(self.text)

    def render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], /, **how: Any) -> str:
        """Return the prompt of a conversation; calls that the template rejects are written as text.

        Raises
        ------
        Exception
            Whatever the template raises.
        """
        forms: list[Callable[[Sequence[Turn], Sequence[Mapping[str, Any]]], tuple[Any, Any]]] = []
        if tools:
            forms.append(lambda turns, tools: (turns, list(map(_described, tools))))
        if any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns):
            forms.append(lambda turns, tools: (with_tools_told(turns, ()), tools))
        if all(turn["role"] != "user" for turn in turns):
            forms.append(lambda turns, tools: ([*turns, {"role": "user", "content": ""}], tools))
        forms.append(lambda turns, tools: (plain(turns), tools))
        forms.append(lambda turns, tools: (with_tools_told(turns, tools), ()))
        for form in forms:
            try:
                return self._render(turns, tools, **how)
            except Exception:  # templates may raise anything
                turns, tools = form(turns, tools)
        return self._render(turns, tools, **{"tools": [], **how})  # some always iterate over tools

    def _render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], /, **how: Any) -> str:
        given = {**how, "tools": list(tools)} if tools and self.traits.tools else how
        return self._rendered(self.shaped(turns, tools), **given)

    def opening(self, **how: Any) -> str:
        """Return the text that begins the model's turn; "" if there is none."""
        asked: Turn = {"role": "user", "content": "ask"}
        how = {**how, "continue_final_message": False}
        begun = self._tried_with(asked, **how)
        return begun.removeprefix(self._tried_with(asked, **{**how, "add_generation_prompt": False}) or begun)

    def _rendered(self, turns: Sequence[Turn], /, **how: Any) -> str:
        given = {**_VARIABLES, "datetime": date.today().isoformat(), **how, "tokenize": False}
        return str(self._tokenizer.apply_chat_template(turns, **given))

    def shaped(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Turn]:
        """Return a conversation in the template's form; if that has no tools, the system message lists them."""
        traits = self.traits
        shaped = behind_their_calls(instructed(turns, traits))
        if traits.single_calls:
            shaped = one_by_one(shaped)
        if not traits.calls:
            shaped = with_tools_told(shaped, () if traits.tools else tools)
        if not traits.system and shaped[0]["role"] == "system":
            shaped = alternating([{**shaped[0], "role": "user"}, *shaped[1:]])
        if traits.alternates:
            shaped = alternating(shaped)
        if traits.lone_calls:
            shaped = text_before_calls(shaped, traits)
        return [_formed(turn, traits) for turn in shaped]

    def _tried(self, template: str) -> Traits:
        """Render test conversations of each kind."""
        if not template:
            return Traits()
        traits = self._with_calls_taken(Traits(tools=bool(_TOOLS.search(template)) and self._takes_tools()))
        system: Turn = {"role": "system", "content": "instruct-"}
        shows_system = self._takes("system") and (not traits.calls or self._shows(system, *_called(traits)))
        first, second = ({"role": "user", "content": content} for content in ("first-", "-second"))
        traits = replace(traits, alternates=bool(self._shows(first)) and not self._shows(first, second))
        traits = replace(
            traits,
            lone_calls=traits.calls and self._leaves_out_text(traits),
            system=bool(shows_system),
            developer=self._knows_developers(),
            both=self._knows_developers("system"),
            later_system=self._keeps_systems_in_place(),
        )
        possible = (self._with_thoughts(traits, tags) for tags in THOUGHTS if tags.close in template)
        return next((found for found in possible if found.thoughts), traits)

    def _shows(self, *turns: Turn) -> str:
        """Return the prompt of some turns; "" if the template rejects them or leaves out a text or a call."""
        text = self._tried_with(*turns)
        said = [turn["content"] for turn in turns]
        said += [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
        return text if all(part in text for part in said) else ""

    def _tried_with(self, *turns: Turn, **how: Any) -> str:
        """Return the prompt of some turns, with a tool if the template needs one; "" if it rejects them."""
        for tools in ({}, {"tools": [_TOOL]}):
            with suppress(Exception):  # templates may raise anything
                return self._rendered(turns, **tools, **how)
        return ""

    def _keeps_systems_in_place(self) -> bool:
        """Whether it renders a system turn after the turns before it."""
        said = {
            f"-said-{number}-": role for number, role in enumerate(("system", "user", "assistant", "system", "user"))
        }
        text = self._shows(*({"role": role, "content": content} for content, role in said.items()))
        places = [text.find(content) for content in said]
        return bool(text) and places == sorted(places)

    def _takes(self, *roles: str) -> str:
        first = ({"role": role, "content": f"{number}-instruct"} for number, role in enumerate(roles))
        return self._shows(*first, {"role": "user", "content": "-ask"})

    def _takes_tools(self) -> bool:
        """Whether it renders a question beside a tool (some fail); whether the tool is shown is not checked."""
        with suppress(Exception):  # templates may raise anything
            return bool(self._rendered(_called(Traits())[:1], tools=[_TOOL]))
        return False

    def _knows_developers(self, *before: str) -> bool:
        """Whether `developer` is a role of its own to it, not just any name written before the text."""
        known = self._takes(*before, "developer")
        return bool(known) and self._takes(*before, "stranger").replace("stranger", "developer") != known

    def _with_thoughts(self, traits: Traits, tags: ThoughtTags) -> Traits:
        """Return the traits with the tags if it renders the thought before a call, or removes those of earlier answers.

        Some templates render the parts of a content as they are: then they do not look for thoughts in it.
        """
        known, (asked, called, came) = replace(traits, thoughts=tags), _called(Traits(short_ids=True))
        for name, shown in (("reasoning_content", ""), ("thinking", ""), ("content", tags.opens)):
            form = replace(known, thoughts_in=name)
            if f"{shown}-mused-" in self._tried_with(
                asked, _formed({**called, "reasoning_content": "-mused-"}, form), came
            ):
                return form
        past = self._tried_with(asked, {"role": "assistant", "content": f"{tags.opens}-mused-{tags.close}said"}, asked)
        return known if "said" in past and "-mused-" not in past else traits

    def _with_calls_taken(self, traits: Traits) -> Traits:
        """Return the traits with the form of calls that the template accepts, if it accepts any."""
        if not traits.tools:
            return traits
        for short_ids, text_arguments in product((False, True), repeat=2):
            form = replace(traits, calls=True, short_ids=short_ids, text_arguments=text_arguments)
            if self._shows(*_called(form)):
                single = not self._shows(*_called(form, "look-1", "look-2"))
                return replace(form, single_calls=single)
        return traits

    def _leaves_out_text(self, traits: Traits) -> bool:
        """Whether text beside a call is not rendered, or not where an answer follows, but is in a turn before."""
        asked, called, came = _called(traits)
        turns = [asked, {**called, "content": "-beside-"}, came, {"role": "assistant", "content": "-answer-"}, asked]
        is_shown = self._shows(*turns[:3]) and self._shows(*turns)
        return not is_shown and bool(self._shows(*text_before_calls(turns, traits)))


def _called(traits: Traits, *names: str) -> list[Turn]:
    """Return a question, calls in the form of some traits, and their results."""
    ids = {name: f"{_ID}{number}" for number, name in enumerate(names or ("look-1",))}
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"at": "it"}}}
        for name, call_id in ids.items()
    ]
    turns: list[Turn] = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": f"seen-{i}", "tool_call_id": i, "name": name} for name, i in ids.items()),
    ]
    return [_formed(turn, traits) for turn in turns]


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as the strictest templates read it: all is described, and no argument may be null."""
    function = {"description": "", **tool["function"]}
    given = function.get("parameters") or {}
    properties = {
        name: {"description": "", **schema, **_not_null(schema)} if isinstance(schema, dict) else schema
        for name, schema in given.get("properties", {}).items()
    }
    return {**tool, "function": {**function, "parameters": {**given, "properties": properties}}}


def _not_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of a schema that lists several, without null."""
    kinds = schema.get("type")
    return {"type": [kind for kind in kinds if kind != "null"]} if isinstance(kinds, list) else {}


def instructed(turns: Sequence[Turn], traits: Traits) -> list[Turn]:
    """Return a conversation whose leading instructions are its first turn, a developer's after the system's.

    A developer becomes the system if the template does not know that role. Later instructions stay in their place, so
    that the prompt still begins with that of the request before; the user gives them if the template has no system turn
    there (such templates move it to the beginning, drop it, or reject it).
    """
    leading = leading_instructions(turns)
    own = traits.developer and (traits.both or all(turn["role"] == "developer" for turn in leading))
    first = dict[str, Turn]()
    for turn in leading:
        role = turn["role"] if own else "system"
        first[role] = joined(first[role], turn) if role in first else {**turn, "role": role}
    later = "system" if traits.later_system else "user"
    others = [{**turn, "role": later} if _instructs(turn) else turn for turn in turns[len(leading) :]]
    return [*(first[role] for role in ("system", "developer") if role in first), *others]


def leading_instructions(turns: Sequence[Turn]) -> list[Turn]:
    """Return the instructions that a conversation begins with."""
    return list(takewhile(_instructs, turns))


def _instructs(turn: Turn) -> bool:
    return turn["role"] in ("system", "developer")


def behind_their_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation in which each call's result follows it; results without a call become user messages.

    Agents that shorten a history remove calls from it; templates drop, or reject, results without a call.
    """
    blocks, calling = list[list[Turn]](), dict[str, list[Turn]]()
    for turn in turns:
        block = calling.get(str(turn.get("tool_call_id"))) if turn["role"] == "tool" else None
        if block is not None:
            block.append(turn)
            continue
        blocks.append(with_tools_told([turn], ()) if turn["role"] == "tool" else [turn])
        calling.update((call["id"], blocks[-1]) for call in turn.get("tool_calls", ()))
    return [turn for block in blocks for turn in block]


def one_by_one(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation with at most one call per turn, each followed by its result."""
    shaped, left = list[Turn](), list(turns)
    while left:
        said = left.pop(0)
        calls = said.get("tool_calls") or [None]
        for number, call in enumerate(calls):
            turn = said if number == 0 else {"role": "assistant", "content": ""}
            shaped.append(turn if call is None else {**turn, "tool_calls": [call]})
            came = (at for at, other in enumerate(left) if call and other.get("tool_call_id") == call["id"])
            shaped += [left.pop(at) for at in [next(came, -1)] if at >= 0]
    return shaped


def text_before_calls(turns: Sequence[Turn], traits: Traits) -> list[Turn]:
    """Return a conversation in which text beside calls is a turn of its own before them.

    If roles must alternate, an empty user turn follows it: for templates, calls and their results are no such turns.
    """
    shaped = list[Turn]()
    for turn in turns:
        if turn.get("tool_calls") and turn["content"]:
            shaped.append({"role": turn["role"], "content": turn["content"]})
            if traits.alternates:
                shaped.append({"role": "user", "content": ""})
            turn = {**turn, "content": ""}
        shaped.append(turn)
    return shaped


def alternating(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation with alternating roles: consecutive turns are joined, missing ones are blank.

    A user's turn after calls or their results needs an answer before it, since for templates these are no turns.
    """
    shaped = list[Turn]()
    for turn in turns:
        last = shaped[-1] if shaped else {"role": "system"}
        role, before = turn["role"], last["role"]
        if role == before and role in ("user", "assistant"):
            shaped[-1] = joined(shaped[-1], turn)
            continue
        if role == "user" and (before == "tool" or "tool_calls" in last):
            shaped.append({"role": "assistant", "content": " "})  # some templates refuse empty answers
        elif role == "assistant" and before in ("system", "developer"):
            shaped.append({"role": "user", "content": ""})
        shaped.append(turn)
    return shaped


def plain(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation of roles and texts only: calls are written as text, thoughts are left out."""
    told = list[Turn]()
    for turn in with_tools_told(turns, ()):
        if turn["role"] == "assistant":
            turn = {**turn, "content": without_thoughts(turn["content"])}
            if not turn["content"]:  # some templates refuse empty answers
                continue
        told.append(turn)
    return alternating(told)


def _formed(turn: Turn, traits: Traits) -> Turn:
    """Return a turn whose calls (ids and arguments) and thought have the form that the template accepts."""
    changed = dict(turn)
    if traits.short_ids and "tool_call_id" in turn:
        changed["tool_call_id"] = _short(turn["tool_call_id"])
    if calls := turn.get("tool_calls"):
        changed["tool_calls"] = [_formed_call(call, traits) for call in calls]
    if "reasoning_content" in turn:
        thought = changed.pop("reasoning_content")
        if traits.thoughts_in == "content":
            text = [{"type": "text", "text": turn["content"]}] if turn["content"] else []
            thought = [{"type": "thinking", "thinking": thought}, *text]
        changed[traits.thoughts_in] = thought
    return changed


def _formed_call(call: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
    function, formed = call["function"], dict(call)
    if traits.short_ids:
        formed["id"] = _short(call["id"])
    if traits.text_arguments:
        formed["function"] = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return formed


def _short(call_id: Any) -> str:
    """Return an id as Mistral's templates accept it; equal ids give equal results."""
    known = str(call_id)
    return known if _SHORT_ID.fullmatch(known) else blake2s(known.encode(), digest_size=5).hexdigest()[:9]
