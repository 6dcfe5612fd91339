"""Chat templates: what one takes is found out by rendering a few turns, and conversations are given to it so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from hashlib import blake2s
from itertools import product
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
"""What templates are given; some of the time before there were tools fail without `functions` and `datetime`."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a template takes.

    Attributes
    ----------
    system, developer, both
        Whether it shows turns of that role as such, and one of each in one conversation.
    tools, calls
        Whether it has a place for tools, and shows calls.
    single_calls
        Whether it shows one call a turn and no more.
    alternates
        Whether user and assistant must take turns.
    short_ids
        Whether ids of calls must have nine letters and digits.
    text_arguments
        Whether arguments of calls must be spelled in JSON.
    thoughts
        The tags in which it expects the model to think, where it knows of thoughts in a history.
    """

    system: bool = True
    developer: bool = False
    both: bool = False
    tools: bool = False
    calls: bool = False
    single_calls: bool = False
    alternates: bool = False
    short_ids: bool = False
    text_arguments: bool = False
    thoughts: ThoughtTags | None = None


class ChatTemplate:
    """The chat template of a tokenizer.

    Parameters
    ----------
    tokenizer
        Its template may be exchanged at any time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._traits = lru_cache(maxsize=4)(self._tried)

    @property
    def text(self) -> str:
        """The template, of several all; "" without one."""
        return str(getattr(self._tokenizer, "chat_template", None) or "")

    @property
    def traits(self) -> Traits:
        """What it takes."""
        return self._traits(self.text)

    def render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], /, **how: Any) -> str:
        """Return the prompt of a conversation; calls that the template refuses are told as text.

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
        for form in forms:
            try:
                return self._render(turns, tools, **how)
            except Exception:  # templates raise what they like
                turns, tools = form(turns, tools)
        return self._render(turns, tools, **{"tools": [], **how})  # which some look through even where there are none

    def _render(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], /, **how: Any) -> str:
        given = {**how, "tools": list(tools)} if tools and self.traits.tools else how
        return self._rendered(self.shaped(turns, tools), **given)

    def opening(self, **how: Any) -> str:
        """Return what begins the model's turn; "" where none begins."""
        asked: Turn = {"role": "user", "content": "ask"}
        how = {**how, "continue_final_message": False}
        begun = self._tried_with(asked, **how)
        return begun.removeprefix(self._tried_with(asked, **{**how, "add_generation_prompt": False}) or begun)

    def _rendered(self, turns: Sequence[Turn], /, **how: Any) -> str:
        given = {**_VARIABLES, "datetime": date.today().isoformat(), **how, "tokenize": False}
        return str(self._tokenizer.apply_chat_template(turns, **given))

    def shaped(self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()) -> list[Turn]:
        """Return a conversation as the template takes it; without a place for tools, the system message lists them."""
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
        return [_with_calls(turn, traits) for turn in shaped]

    def _tried(self, template: str) -> Traits:
        """What the template does with a few turns of each kind."""
        if not template:
            return Traits()
        traits = self._with_calls_taken(Traits(tools=bool(_TOOLS.search(template)) and self._takes_tools()))
        system: Turn = {"role": "system", "content": "instruct-"}
        shows_system = self._takes("system") and (not traits.calls or self._shows(system, *_called(traits)))
        first, second = ({"role": "user", "content": content} for content in ("first-", "-second"))
        return replace(
            traits,
            system=bool(shows_system),
            developer=self._knows_developers(),
            both=self._knows_developers("system"),
            alternates=bool(self._shows(first)) and not self._shows(first, second),
            thoughts=next((tags for tags in THOUGHTS if tags.close in template and self._knows_thoughts(tags)), None),
        )

    def _shows(self, *turns: Turn) -> str:
        """The prompt of some turns; "" where the template refuses them, or leaves out what one says or calls."""
        text = self._tried_with(*turns)
        said = [turn["content"] for turn in turns]
        said += [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
        return text if all(part in text for part in said) else ""

    def _tried_with(self, *turns: Turn, **how: Any) -> str:
        """The prompt of some turns, with a tool where there is none without; "" where there is none."""
        for tools in ({}, {"tools": [_TOOL]}):
            with suppress(Exception):  # templates raise what they like
                return self._rendered(turns, **tools, **how)
        return ""

    def _takes(self, *roles: str) -> str:
        first = ({"role": role, "content": f"{number}-instruct"} for number, role in enumerate(roles))
        return self._shows(*first, {"role": "user", "content": "-ask"})

    def _takes_tools(self) -> bool:
        """Whether it shows a question beside a tool; some fail. It is taken that it shows the tool."""
        with suppress(Exception):  # templates raise what they like
            return bool(self._rendered(_called(Traits())[:1], tools=[_TOOL]))
        return False

    def _knows_developers(self, *before: str) -> bool:
        """Whether they are more to it than some role, whose name it writes in front of whatever that says."""
        known = self._takes(*before, "developer")
        return bool(known) and self._takes(*before, "stranger").replace("stranger", "developer") != known

    def _knows_thoughts(self, tags: ThoughtTags) -> bool:
        """Whether it shows what was thought of a call, or takes thoughts out of what was said before."""
        asked, called, came = _called(Traits(short_ids=True))
        if "-mused-" in self._tried_with(asked, {**called, "reasoning_content": "-mused-"}, came):
            return True
        past = self._tried_with(asked, {"role": "assistant", "content": f"{tags.opens}-mused-{tags.close}said"}, asked)
        return "said" in past and "-mused-" not in past

    def _with_calls_taken(self, traits: Traits) -> Traits:
        """Return the traits with the form in which the template takes calls, if it takes them in any."""
        if not traits.tools:
            return traits
        for short_ids, text_arguments in product((False, True), repeat=2):
            form = replace(traits, calls=True, short_ids=short_ids, text_arguments=text_arguments)
            if self._shows(*_called(form)):
                return replace(form, single_calls=not self._shows(*_called(form, "look-1", "look-2")))
        return traits


def _called(traits: Traits, *names: str) -> list[Turn]:
    """A question, calls in the form that a template takes, and what came of them."""
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
    return [_with_calls(turn, traits) for turn in turns]


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with descriptions of itself and of its arguments, without which some templates fail."""
    function = {"description": "", **tool["function"]}
    given = function.get("parameters") or {}
    properties = {
        name: {"description": "", **schema} if isinstance(schema, dict) else schema
        for name, schema in given.get("properties", {}).items()
    }
    return {**tool, "function": {**function, "parameters": {**given, "properties": properties}}}


def instructed(turns: Sequence[Turn], traits: Traits) -> list[Turn]:
    """Return a conversation with all instructions in its first turn, those of a developer after the system's.

    Templates show a system message that stands elsewhere in its place, nowhere, or refuse it. A developer is the system
    where a template does not know it.
    """
    roles = {turn["role"] for turn in turns}
    own = traits.developer and (traits.both or "system" not in roles)
    first, others = dict[str, Turn](), list[Turn]()
    for turn in turns:
        role = turn["role"] if own or turn["role"] != "developer" else "system"
        if role in ("system", "developer"):
            turn = {**turn, "role": role}
            first[role] = joined(first[role], turn) if role in first else turn
        else:
            others.append(turn)
    return [*(first[role] for role in ("system", "developer") if role in first), *others]


def behind_their_calls(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation in which what came of a call follows it; what came of none is told by the user.

    Agents that shorten a history leave calls out of it, and templates leave out, or refuse, what came of those.
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
    """Return a conversation in which what came of a call follows it, and no turn makes two."""
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


def alternating(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation in which user and assistant take turns: those in a row are joined, missing ones empty."""
    shaped = list[Turn]()
    for turn in turns:
        role, before = turn["role"], shaped[-1]["role"] if shaped else "system"
        if role == before and role in ("user", "assistant"):
            shaped[-1] = joined(shaped[-1], turn)
            continue
        if (role, before) == ("user", "tool"):
            shaped.append({"role": "assistant", "content": ""})
        elif role == "assistant" and before in ("system", "developer"):
            shaped.append({"role": "user", "content": ""})
        shaped.append(turn)
    return shaped


def plain(turns: Sequence[Turn]) -> list[Turn]:
    """Return a conversation of roles and texts alone: calls are told as text, and what was thought is left out."""
    told = list[Turn]()
    for turn in with_tools_told(turns, ()):
        if turn["role"] == "assistant":
            turn = {**turn, "content": without_thoughts(turn["content"])}
            if not turn["content"]:  # some templates refuse empty answers
                continue
        told.append(turn)
    return alternating(told)


def _with_calls(turn: Turn, traits: Traits) -> Turn:
    """A turn with the ids and arguments of its calls in the form that a template takes."""
    changed = dict(turn)
    if traits.short_ids and "tool_call_id" in turn:
        changed["tool_call_id"] = _short(turn["tool_call_id"])
    if calls := turn.get("tool_calls"):
        changed["tool_calls"] = [_formed(call, traits) for call in calls]
    return changed


def _formed(call: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
    function, formed = call["function"], dict(call)
    if traits.short_ids:
        formed["id"] = _short(call["id"])
    if traits.text_arguments:
        formed["function"] = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return formed


def _short(call_id: Any) -> str:
    """An id as templates of Mistral's models take it: the same for a call and what came of it, in every request."""
    known = str(call_id)
    return known if _SHORT_ID.fullmatch(known) else blake2s(known.encode(), digest_size=5).hexdigest()[:9]
