"""Conversations of every dialect as the turns that chat templates read.

Nothing in a history is refused, because the client would send it again with every request. Parts without text become a
placeholder or are dropped, and the answer's header names them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2s
from typing import Any

import pydantic_core

Turn = dict[str, Any]
"""A message as chat templates read it: `role`, `content` as text, and further keys."""
Tool = dict[str, Any]
"""A function that is offered, in the form of chat completions."""

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_FIELDS = dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text") | {
    "refusal": "refusal"
}
"""The field with the text, by kind of content part."""
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
_HOSTED = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call"}
)
"""Calls that OpenAI's servers run themselves; their results are not in the history."""
_CHANGING_LINE = re.compile(r"\A\s*(x-[\w-]+-header):[^\n]*\n*", re.ASCII | re.IGNORECASE)
"""A line before the instructions that agents change with every request, so that no prompt would share a prefix with
the one before."""


def read_arguments(given: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object; anything else is put into one as `input`."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            given = pydantic_core.from_json(given) if given.strip() else {}
    if isinstance(given, dict):
        return given
    return {} if given in (None, []) else {"input": given}  # PHP's form of an empty object


def read_content(content: Any, place: str, left_out: list[str]) -> tuple[str, str]:
    """Return the text of a content, a string or parts in any dialect, and the thoughts in it."""
    texts, thoughts = [], []
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        if isinstance(part, dict) and _kind_of(part) in _THOUGHTS:
            thoughts.append(_thought(part, place, left_out))
        else:
            texts.append(_part_text(part, place, left_out))
    return "".join(texts), "\n".join(filter(None, thoughts))


def _kind_of(part: Mapping[str, Any]) -> str:
    """Return the kind of a content part or an item."""
    return _plain(part.get("type"))


def _plain(name: Any) -> str:
    """Return a client's name for something in a form that is safe in prompts and headers; `text` without one."""
    return re.sub(r"[^\w.-]+", "_", str(name or "text"), flags=re.ASCII)[:64]


def _part_text(part: Any, place: str, left_out: list[str]) -> str:
    """Return the text of a part; for pictures and the like a placeholder."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return json.dumps(part)
    kind = _kind_of(part)
    source = part.get("source")
    text = part.get(_TEXT_FIELDS.get(kind, "text"))
    if not isinstance(text, str) and kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        text = source.get("data")
    if isinstance(text, str):
        return text
    if isinstance(content := part.get("content"), str | list):  # search results, documents
        return read_content(content, place, left_out)[0]
    left_out.append(f"{place} ({kind})")
    told = {**_object(part.get("file")), **part}
    name = next((told[key] for key in ("tool_name", "name", "filename") if isinstance(told.get(key), str)), "")
    return f"[{kind.removeprefix('input_').removesuffix('_url')}{' ' * bool(name)}{name}]"


def _thought(part: Mapping[str, Any], place: str, left_out: list[str]) -> str:
    """Return the text of a thought; "" if it is encrypted."""
    parts = part.get("thinking") or part.get("content") or part.get("summary") or part.get("text")
    if not parts:
        left_out.append(f"{place} ({_kind_of(part)})")
    return read_content(parts, place, left_out)[0]


def _result_text(result: Any, place: str, left_out: list[str]) -> str:
    """Return the result of a call as text: JSON, unless it is a text or consists of content parts."""
    parts = result if isinstance(result, list) else [result]
    if all(part is None or isinstance(part, str) or _object(part).keys() & {"type", "text"} for part in parts):
        return read_content(result, place, left_out)[0]
    return json.dumps(result, ensure_ascii=False)


def _call(name: Any, given: Any, call_id: Any, place: str) -> dict[str, Any]:
    """Return a call in the form of chats; without an id, it gets one by its position."""
    known = call_id if isinstance(call_id, str) and call_id else blake2s(place.encode(), digest_size=4).hexdigest()
    function = {"name": name if isinstance(name, str) else "unnamed", "arguments": read_arguments(given)}
    return {"id": known, "type": "function", "function": function}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(history: Sequence[Any], name: str, left_out: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield positions and objects of a history; a string is what the user says, null is skipped."""
    for number, entry in enumerate(history):
        place = f"{name}.{number}"
        if entry is None:
            left_out.append(f"{place} (null)")
        else:
            yield place, entry if isinstance(entry, dict) else {"role": "user", "content": entry}


def chat_turns(messages: Sequence[Any], left_out: list[str]) -> list[Turn]:
    """Return the turns of a chat's messages, at least one; further fields are passed to the chat template."""
    turns, waiting = list[Turn](), list[str]()
    for place, message in _entries(messages, "messages", left_out):
        role = _role(message, place, left_out)
        if role in ("system", "developer"):
            turns += _system_turns(role, message, place, left_out)
        else:
            turn = _chat_turn(role, message, place, left_out)
            if role == "tool" and not turn.get("tool_call_id") and waiting:
                turn["tool_call_id"] = waiting.pop(0)  # Ollama's clients send results in the order of the calls
            waiting = [call["id"] for call in turn["tool_calls"]] if "tool_calls" in turn else waiting
            turns.append(turn)
    if turns and turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()  # an empty answer
    return turns or [{"role": "user", "content": ""}]


def _role(message: Mapping[str, Any], place: str, left_out: list[str]) -> str:
    """Return the role of a message; without one it follows from its calls or results, else it is the user."""
    role = message.get("role")
    if isinstance(role, str) and role in _ROLES:
        return role
    if role == "function":
        return "tool"
    left_out.append(f"{place}.role ({_plain(role or 'none')})")
    return "assistant" if message.get("tool_calls") else "tool" if "tool_call_id" in message else "user"


def _system_turns(role: str, message: Mapping[str, Any], place: str, left_out: list[str]) -> Iterator[Turn]:
    """Yield the parts of instructions as turns, without a line that changes with every request."""
    content = message.get("content")
    others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    for part in content if isinstance(content, list) else [content]:
        text, _ = read_content(part, place, left_out)
        if changing := _CHANGING_LINE.match(text):
            left_out.append(f"{place} ({changing[1]})")
            text = text[changing.end() :]
        if text:
            yield {**others, "role": role, "content": text}


def _chat_turn(role: str, message: Mapping[str, Any], place: str, left_out: list[str]) -> Turn:
    content = message.get("content")
    content = _result_text(content, place, left_out) if role == "tool" else content
    text, thought = read_content(content, place, left_out)
    known = ("role", "content", "tool_calls", "function_call", "audio", "refusal", "reasoning", "reasoning_content")
    turn: Turn = {key: value for key, value in message.items() if key not in known and value not in (None, [])}
    thoughts = (thought, message.get("reasoning_content"), message.get("reasoning"))
    thought = next((one for one in thoughts if isinstance(one, str) and one), "")
    if message.get("audio") and not text:
        text = _part_text({"type": "audio"}, place, left_out)
    refusal = message.get("refusal")
    calls = _chat_calls(message, place)
    return {
        "role": role,
        **turn,
        "content": text or (refusal if isinstance(refusal, str) else ""),
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _chat_calls(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return the calls in a message, also custom tools and the older `function_call`."""
    given, calls = message.get("tool_calls"), []
    for number, one in enumerate(given if isinstance(given, list) else []):
        called = _object(_object(one).get("function") or _object(one).get("custom"))
        arguments = called.get("arguments", called.get("input"))
        calls.append(_call(called.get("name"), arguments, _object(one).get("id"), f"{place}.tool_calls.{number}"))
    if old := _object(message.get("function_call")):
        calls.append(_call(old.get("name"), old.get("arguments"), None, f"{place}.function_call"))
    return calls


def message_turns(messages: Sequence[Any], found: Mapping[str, Tool], left_out: list[str]) -> list[Turn]:
    """Return the turns of Anthropic's messages; each result of a call is a turn, with the tools that a search found."""
    turns = list[Turn]()
    for place, message in _entries(messages, "messages", left_out):
        content = message.get("content")
        blocks = content if isinstance(content, list) else [content]
        results = [block for block in map(_object, blocks) if block.get("type") == "tool_result"]
        calls = [block for block in map(_object, blocks) if block.get("type") == "tool_use"]
        others = [block for block in blocks if block is not None and block not in (*results, *calls)]
        for block in results:
            text = _result_text(_with_definitions(block.get("content"), found), place, left_out)
            turns.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        said: Turn = {"role": message.get("role"), "content": others}
        if calls:
            said["tool_calls"] = [
                _call(block.get("name"), block.get("input"), block.get("id"), f"{place}.tool_use.{at}")
                for at, block in enumerate(calls)
            ]
        if others or calls or not results:
            turns.append(said)
    return turns


def _referenced(messages: Sequence[Any]) -> set[str]:
    """Return the names of tools to which results of calls refer."""
    contents = [_object(message).get("content") for message in messages]
    blocks = [_object(block) for content in contents if isinstance(content, list) for block in content]
    parts = [part for block in blocks if isinstance(block.get("content"), list) for part in block["content"]]
    return {str(_object(part).get("tool_name")) for part in parts}


def _with_definitions(result: Any, found: Mapping[str, Tool]) -> Any:
    """Return the result of a search with the definitions of the tools that it refers to."""
    if not isinstance(result, list):
        return result
    named = [found.get(str(_object(part).get("tool_name"))) for part in result]
    return [
        part if tool is None else f"<function>{json.dumps(tool['function'], ensure_ascii=False)}</function>\n"
        for part, tool in zip(result, named, strict=True)
    ]


def response_turns(items: Sequence[Any], names: Names, left_out: list[str]) -> list[Turn]:
    """Return the turns of a response's input items; consecutive items of the assistant are one turn."""
    turns, thought = list[Turn](), ""
    for place, item in _entries(items, "input", left_out):
        kind = _kind_of(item) if item.get("type") else "message"
        if kind == "reasoning":
            thought = "\n".join(filter(None, (thought, _thought(item, place, left_out))))
            continue
        turn = _item_turn(item, kind, names, place, left_out)
        if turn and turn["role"] == "assistant" and thought:
            turn["reasoning_content"] = thought
        thought = "" if turn else thought  # a thought without an answer belongs to no later one
        if turn and turn["role"] == "assistant" and turns and turns[-1]["role"] == "assistant":
            turns[-1] = joined(turns[-1], turn)
        elif turn:
            turns.append(turn)
    return turns


def _item_turn(item: Mapping[str, Any], kind: str, names: Names, place: str, left_out: list[str]) -> Turn:
    """Return the turn of an item; empty for an item without meaning for the model."""
    call_id = item.get("call_id") or item.get("id")
    if kind == "message":
        content = item.get("content")
        if item.get("role") not in ("system", "developer"):
            content = read_content(content, place, left_out)[0]
        return {"role": item.get("role"), "content": content}
    if kind.endswith("_output"):
        output = _result_text(item.get("output", item.get("content")), place, left_out)
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    if kind.endswith("_call") and kind not in _HOSTED:
        given = next((item[key] for key in ("arguments", "input", "action", "operation") if key in item), None)
        namespace, name = item.get("namespace"), str(item.get("name") or kind.removesuffix("_call"))
        offered = names.get((namespace if isinstance(namespace, str) else None, name), name)
        return {"role": "assistant", "content": "", "tool_calls": [_call(offered, given, call_id, place)]}
    if kind != "additional_tools":  # these are also in the request's tools
        left_out.append(f"{place} ({kind})")
    return {}


def joined(first: Turn, second: Turn) -> Turn:
    """Return two turns of one role as one."""
    turn = {**second, **first}
    for name in ("content", "reasoning_content"):
        texts = [one[name] for one in (first, second) if one.get(name)]
        if texts or name == "content":
            turn[name] = "\n\n".join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        turn["tool_calls"] = calls
    return turn


# ── tools ──

Names = dict[tuple[str | None, str], str]
"""The name under which a function is offered, by namespace and own name."""


def chat_tools(tools: Sequence[Any], left_out: list[str]) -> list[Any]:
    """Return the functions among a chat's tools; of two with one name, the first."""
    kept, names = list[Any](), set[Any]()
    for number, tool in enumerate(tools):
        known = _object(tool)
        kind = known.get("type") or "function"
        if isinstance(kind, str) and kind != "function":
            left_out.append(f"tools.{number} ({_plain(kind)})")
            continue
        if "function" not in known and "name" in known:  # another dialect's form
            tool = _function(known["name"], {"parameters": known.get("input_schema"), **known})
        elif known:
            tool = {**known, "type": kind}
        name = _object(_object(tool).get("function")).get("name")
        if isinstance(name, str) and name in names:
            left_out.append(f"tools.{number} (again)")
        else:
            names.add(str(name))
            kept.append(tool)
    return kept


def read_choice(choice: Any) -> Any:
    """Return a tool choice of any dialect in the form of chats; anything unknown is unchanged."""
    if isinstance(choice, str):
        return {"any": "required", "": None}.get(choice, choice)
    known = _object(choice)
    if known.get("type") in ("auto", "none", "any", "required"):
        return read_choice(known["type"])
    if known.get("type") in ("function", "tool") and "name" in known:
        return {"type": "function", "function": {"name": known["name"]}}
    return choice or None


def only(tools: Any, allowed: Mapping[str, Any]) -> list[Any]:
    """Return the tools that a choice of `allowed_tools` names."""
    listed = allowed.get("tools")
    named = [_object(one) for one in (listed if isinstance(listed, list) else [])]
    names = [_object(one.get("function")).get("name", one.get("name")) for one in named]
    return [tool for tool in tools or () if _object(_object(tool).get("function")).get("name") in names]


def message_tools(
    tools: Sequence[Mapping[str, Any]], messages: Sequence[Any], left_out: list[str]
) -> tuple[list[Tool], dict[str, Tool]]:
    """Return the tools of Anthropic's dialect that the client describes itself, and which of them its search found.

    A deferred tool is offered when a message refers to it. The message describes it, so that the prompt begins as
    before. If the provider is to search, which is not done here, no tool is deferred.
    """
    kept, found, names = list[Tool](), dict[str, Tool](), _referenced(messages)
    searched = any(_kind_of(tool).startswith("tool_search") for tool in tools)
    for number, tool in enumerate(tools):
        name = tool.get("name")
        described = _function(name, {**tool, "parameters": tool.get("input_schema") or {}})
        if tool.get("type") not in (None, "custom"):
            left_out.append(f"tools.{number} ({_kind_of(tool)})")
        elif searched or not tool.get("defer_loading"):
            kept.append(described)
        elif str(name) in names:
            kept.append(described)
            found[str(name)] = described
    return kept, found


def response_tools(
    tools: Sequence[Any], items: Sequence[Any], left_out: list[str], is_right: Callable[[Tool], bool]
) -> tuple[list[Tool], Names]:
    """Return the functions among a response's tools and input items, and the name of each.

    Invalid tools in the input are dropped, because the input is a history, and those of MCP servers, which the provider
    calls.
    """
    listed = [item.get("tools") for item in map(_object, items) if item.get("type") != "mcp_list_tools"]
    added = [tool for own in listed if isinstance(own, list) for tool in own]
    kept, names = list[Tool](), Names()
    for tool, namespace in _functions(tools, "tools", left_out):
        kept.append(_function(_offered(tool.get("name"), namespace, names), tool))
    for tool, namespace in _functions(added, "input.tools", left_out):
        place = namespace, str(tool.get("name"))
        if place in names:
            continue
        function = _function(_offered(tool.get("name"), namespace, names), tool)
        if is_right(function):
            kept.append(function)
        else:
            del names[place]
            left_out.append(f"input.tools ({_plain(tool.get('name'))})")
    return kept, names


def _functions(
    tools: Sequence[Any], place: str, left_out: list[str], namespace: str | None = None
) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Yield the functions among tools, with the name of their namespace."""
    for number, tool in enumerate(tools):
        here, known = f"{place}.{number}", _object(tool)
        if known.get("type") == "namespace" and isinstance(known.get("tools"), list):
            yield from _functions(known["tools"], f"{here}.tools", left_out, str(known.get("name")))
        elif (known.get("type") or "function") == "function":
            yield _object(known.get("function")) or known, namespace  # also in the form of chats
        else:
            left_out.append(f"{here} ({_kind_of(known)})")


def _offered(name: Any, namespace: str | None, names: Names) -> Any:
    """Return the name under which a function is offered: its own, unless another namespace has the same."""
    offered = f"{namespace}__{name}" if namespace is not None and name in names.values() else name
    names[(namespace, str(name))] = offered
    return offered


def _function(name: Any, tool: Mapping[str, Any]) -> Tool:
    """Return a function in the form of chats."""
    told = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": {"name": name, **told}}
