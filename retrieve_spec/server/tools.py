"""Calls of tools: how models write them, found in an answer as it comes, and grammars that let nothing else through.

transformers reads answers by a tokenizer's `response_template`. That does not do here: there a call that is none is an
error and its text is lost, an argument that spells the closing tag ends the call, and few tokenizers have a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
import regex


@dataclass(frozen=True, slots=True)
class Tags:
    """How arguments are written that are no JSON: each in tags, as it is where it is a string. Ends of lines may lack.

    Attributes
    ----------
    head, key
        What stands in front of all arguments, and of the value of one; `{}` is the function's name, and the argument's.
    value_close
        What a value ends with.
    end
        What stands behind all arguments.
    """

    head: str
    key: str
    value_close: str
    end: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes a call.

    Attributes
    ----------
    name
        What `serve --tool-format` takes.
    tell
        What stands in the chat templates of these models, and of none of those below it in `FORMATS`.
    opens
        What a call begins with.
    named
        What stands between a function's name and its arguments; "" where one JSON object has both.
    close
        What a call ends with.
    arguments
        What the arguments are called in that object.
    bare
        The first call may begin without anything in front, and others behind a semicolon.
    listed
        All calls stand in one JSON list.
    tags
        What stands between `opens` and `close` where arguments are no JSON.
    """

    name: str
    tell: str
    opens: str
    named: str = ""
    close: str = ""
    arguments: str = "arguments"
    bare: bool = False
    listed: bool = False
    tags: Tags | None = None


HERMES = ToolFormat("hermes", "<tool_call>", "<tool_call>", close="</tool_call>")
"""Also that of models whose chat template knows of no tools: `with_tools_told` says how they write calls."""
FORMATS = (
    ToolFormat("mistral-args", "[ARGS]", "[TOOL_CALLS]", named="[ARGS]"),
    ToolFormat("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", listed=True),
    ToolFormat(
        "qwen-coder", "<parameter=", "<tool_call>", close="</tool_call>",
        tags=Tags("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>", "</function>\n"),
    ),
    ToolFormat(
        "glm", "<arg_key>", "<tool_call>", close="</tool_call>",
        tags=Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    HERMES,
    ToolFormat("functionary", "<function=", "<function=", named=">", close="</function>"),
    ToolFormat("llama", "<|python_tag|>", "<|python_tag|>", arguments="parameters", bare=True),
    ToolFormat("llama", '"parameters": ', "<|python_tag|>", arguments="parameters", bare=True),
)  # fmt: skip


def find_tool_format(template: str, name: str | None = None) -> ToolFormat | None:
    """The format of that name, else the one that a chat template tells of, None for one that is not known."""
    return next((fmt for fmt in FORMATS if (fmt.name == name if name else fmt.tell in template)), None)


def with_tools_told(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as a template without tools can show it.

    The system message tells of them and how to call one; calls stand in what the assistant says, what came of them in
    what the user says.
    """
    told = list[dict[str, Any]]()
    for turn in turns:
        said, calls = str(turn["content"]), turn.get("tool_calls", ())
        for call in calls:
            function = call["function"]
            given = function["arguments"]
            written = {"name": function["name"], "arguments": json.loads(given) if isinstance(given, str) else given}
            said += f"\n{HERMES.opens}\n{json.dumps(written, ensure_ascii=False)}\n{HERMES.close}"
        if turn["role"] == "tool":
            told.append({"role": "user", "content": f"<tool_response>\n{said}\n</tool_response>"})
        else:
            told.append({"role": turn["role"], "content": said.strip("\n") if calls else said})
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        how = (
            f"You may call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, answer with a JSON object"
            f" between tags: {HERMES.opens}\n"
            f'{{"name": the name of the function, "arguments": an object}}\n{HERMES.close}'
        )
        system = [turn for turn in told[:1] if turn["role"] == "system"]
        content = "\n\n".join([*(turn["content"] for turn in system), how])
        told = [{"role": "system", "content": content}, *told[len(system) :]]
    return told


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that a model calls, and what it gives it."""

    name: str
    arguments: dict[str, Any]


Said = str | ToolCall
_DECODER = json.JSONDecoder()
_BLANKS = {"x-guidance": {"whitespace_pattern": " ?"}}
_PYTHON = {"True": True, "False": False, "None": None}


class CallParser:
    """Divides an answer into text and calls, the same wherever it is cut into pieces.

    What may become a call is held back until it is one, or cannot become one any more and is text. Blanks in front of a
    call, and behind one at the end, are left out.

    Parameters
    ----------
    fmt
        How the model writes calls.
    schemas
        By function that may be called, the JSON schema of its arguments; what names another function is text.
    """

    def __init__(self, fmt: ToolFormat, schemas: Mapping[str, Any]) -> None:
        self._fmt, self._schemas = fmt, schemas
        self._tagged = None if fmt.tags is None else _tagged_call(fmt.tags, fmt.close, schemas)
        self._held = ""
        self._at = -1  # where in what is held a call begins, if one does
        self._bare = fmt.bare  # a call may begin here with nothing in front
        self._called = False  # nothing but blanks has been said since a call

    def feed(self, text: str) -> list[Said]:
        """What became certain with more of the answer."""
        self._held += text
        return list(self._certain(ended=False))

    def finish(self) -> list[Said]:
        """What was held back, when nothing more comes."""
        return list(self._certain(ended=True))

    def _certain(self, *, ended: bool) -> Iterator[Said]:
        while True:
            if self._at < 0:
                yield from self._text(self._text_length(ended))
            if self._at < 0:
                return
            try:
                calls, rest = self._read(ended)
            except ValueError as error:
                if isinstance(error, json.JSONDecodeError) and not ended:
                    return  # more is to come
                count, self._at, self._bare = self._at + 1, -1, False
                yield from self._text(count)  # what is left of the mark is no mark
            else:
                yield from calls
                self._held, self._at = rest, -1
                self._bare, self._called = self._fmt.bare, True

    def _text_length(self, ended: bool) -> int:
        """How much of what is held is text, but for blanks in front of what is or may be a call; where that begins."""
        held, opens = self._held, self._fmt.opens
        blank = " \t\r\n;" if self._called else " \t\r\n"
        lead = len(held) - len(held.lstrip(blank)) if self._bare else -1
        if held[lead : lead + 1] == "{" and lead >= 0:
            self._at = lead
            return 0
        if lead == len(held) and not ended:
            return 0
        end = held.find(opens)
        if end < 0 and ended:
            return len(held)
        if end < 0:
            begun = next((size for size in range(len(opens) - 1, 0, -1) if held.endswith(opens[:size])), 0)
            return len(held[: len(held) - begun].rstrip())
        count = len(held[:end].rstrip())
        self._at = end - count
        return count

    def _text(self, count: int) -> Iterator[str]:
        text, self._held = self._held[:count], self._held[count:]
        if text and not (self._called and text.isspace()):
            self._bare = self._called = False
            yield text

    def _read(self, ended: bool) -> tuple[list[ToolCall], str]:
        """What the call that has begun calls, and what stands behind it; errors are those of `_read_json`."""
        fmt, name = self._fmt, ""
        begun = self._held[self._at :].removeprefix(fmt.opens)
        if fmt.named:
            heads = [known + fmt.named for known in self._schemas]
            head = next((head for head in heads if begun.startswith(head)), "")
            if not head:
                raise _unsure(begun) if any(head.startswith(begun) for head in heads) else ValueError
            name, begun = head.removesuffix(fmt.named), begun[len(head) :]
        body = begun.lstrip()
        value, end = self._read_tagged(body) if self._tagged else _read_json(body)
        if name:
            value = {"name": name, "arguments": value}
        calls = list(map(self._call, value if fmt.listed and isinstance(value, list) else [value]))
        rest = body[end:]
        if fmt.close:
            rest = rest.lstrip()
            if not rest.startswith(fmt.close[: len(rest)]):
                raise ValueError
            if len(rest) < len(fmt.close) and not ended:
                raise _unsure(rest)
            rest = rest[len(fmt.close) :]
        if not calls:
            raise ValueError
        return calls, rest

    def _read_tagged(self, body: str) -> tuple[Any, int]:
        """A function's name and arguments, and where they end; errors are those of `_read_json`."""
        assert self._tagged is not None and self._fmt.tags is not None
        found = self._tagged.match(body, partial=True)
        if found is None:
            raise ValueError
        if found.partial:
            raise _unsure(body)
        name, edge = found["name"], self._fmt.tags.value_close.partition("<")[0]
        pairs = zip(found.captures("key"), found.captures("value"), strict=True)
        arguments = {key: _value(text.removesuffix(edge), self._schemas[name], key) for key, text in pairs}
        return {"name": name, "arguments": arguments}, found.end()

    def _call(self, value: Any) -> ToolCall:
        """A call as JSON has it; a `ValueError` where it is none."""
        named = isinstance(value, dict) and isinstance(value.get("name"), str)
        arguments = value.get("arguments", value.get("parameters")) if named else None
        if not isinstance(arguments, dict) or value["name"] not in self._schemas:
            raise ValueError
        return ToolCall(value["name"], arguments)


def _unsure(text: str) -> json.JSONDecodeError:
    """What is raised where more than this text may make something of it."""
    return json.JSONDecodeError("more is to come", text, len(text))


def _read_json(body: str) -> tuple[Any, int]:
    """What stands at the beginning of a text, and where it ends.

    Raises
    ------
    json.JSONDecodeError
        More may make something of it.
    ValueError
        Nothing can.
    """
    pydantic_core.from_json(body or "{", allow_partial=True, allow_inf_nan=False)
    return _DECODER.raw_decode(body)


def _tagged_call(tags: Tags, close: str, names: Collection[str]) -> regex.Pattern[str]:
    """What finds the name and the arguments of a call; a value ends where another argument, or none, follows."""

    def spelled(text: str, group: str = "") -> str:
        parts = [r"\s*".join(map(regex.escape, part.strip("\n").split("\n"))) for part in text.split("{}")]
        return group.join(parts)

    name = "|".join(map(regex.escape, sorted(names, key=len, reverse=True)))
    key, end = spelled(tags.key, "(?P<key>[^<>]+)"), spelled(tags.end) or rf"(?=\s*{regex.escape(close)})"
    begun = "\n?" if tags.key.endswith("\n") else ""
    next_key = spelled(tags.key.partition("{}")[0])
    one = rf"(?>\s*{key}{begun}(?P<value>.*?){spelled(tags.value_close)}(?=\s*(?:{next_key}|{end})))"
    return regex.compile(rf"{spelled(tags.head, f'(?P<name>{name})')}{one}*\s*{end}", regex.DOTALL)


def referenced(path: str, root: Any) -> Any:
    """What a reference within a schema names; None where there is nothing."""
    part = root
    for name in path.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, dict) else None
    return part


def _cases(schema: Any, argument: str) -> list[dict[str, Any]]:
    """The schemas one of which an argument is under: unions taken apart, every reference followed once."""
    try:
        waiting = [schema["properties"][argument]]
    except (KeyError, TypeError):
        return []
    cases, followed = list[dict[str, Any]](), set[str]()
    for case in waiting:  # which grows
        case = case if isinstance(case, dict) else {}
        options = next((case[union] for union in ("anyOf", "oneOf", "allOf") if union in case), None)
        if isinstance(path := case.get("$ref"), str):
            waiting += [] if path in followed else [referenced(path, schema)]
            followed.add(path)
        elif isinstance(options, list) and "type" not in case:
            waiting += options
        else:
            cases.append(case)
    return cases


def _listed(case: dict[str, Any]) -> list[Any] | None:
    """All values under a schema, where it lists them."""
    if "const" in case:
        return [case["const"]]
    if isinstance(values := case.get("enum"), list):
        return values
    return [None] if case.get("type") == "null" else None


def _all_listed(cases: list[dict[str, Any]]) -> list[Any]:
    """All that an argument may be, where each of its schemas lists that."""
    listed = [_listed(case) for case in cases]
    return [] if None in listed else [value for values in listed for value in values or ()]


def _may_be(kind: str, case: dict[str, Any]) -> bool:
    """Whether a schema takes values of a kind that JSON knows."""
    kinds = case.get("type")
    if kinds is None and kind == "string":
        return any(isinstance(value, str) for value in _listed(case) or ())
    return kinds == kind or (isinstance(kinds, list) and kind in kinds)


def _value(text: str, schema: Any, argument: str) -> Any:
    """What stands between tags: a string, or else what it is in JSON, or in Python, as templates show such values."""
    cases, said = _cases(schema, argument), text.strip()
    listed = _all_listed(cases)
    is_null = said in ("null", "None") and any(_may_be("null", case) for case in cases)
    if text in listed or (not (listed or is_null) and any(_may_be("string", case) for case in cases)):
        return text
    try:
        return _PYTHON[said] if said in _PYTHON else pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        return text


def calls_grammar(fmt: ToolFormat, schemas: Mapping[str, Any], mark: Callable[[str], str], *, several: bool) -> str:
    """A grammar of llguidance (Lark's notation) for one call or more, and nothing besides.

    Parameters
    ----------
    fmt
        How the model writes calls.
    schemas
        By function, the JSON schema of its arguments.
    mark
        Spells a text in the grammar: as a token where it is one that steers the model.
    several
        Whether there may be more than one call, where the format has a way to say that.
    """
    rules, opens = [], "" if fmt.bare else mark(fmt.opens)
    for number, (name, schema) in enumerate(schemas.items()):
        call = f"call_{number}"
        if fmt.tags is not None:
            rules += _tagged_rules(call, name, schema or {}, fmt.tags, mark)
            continue
        closed = {} if schema and "properties" not in schema else {"additionalProperties": False}
        given = {"type": "object", **closed, **(schema or {}), **_BLANKS}
        spelled = json.dumps(name, ensure_ascii=False)
        head, tail = f"{spelled} {mark(fmt.named)} GAP?" if fmt.named else "", ""
        if not fmt.named:
            head, tail = json.dumps(f'{{"name": {spelled}, "{fmt.arguments}": ', ensure_ascii=False), '"}"'
        rules += [f"{call}: {head} {call}_arguments {tail}", f"{call}_arguments: %json {json.dumps(given)}"]
    one = " | ".join(f"call_{number}" for number in range(len(schemas)))
    further = ('("," GAP? one)*' if fmt.listed else "(GAP? whole)*") if several and not fmt.bare else ""
    start = f'{opens} GAP? "[" one {further} "]"' if fmt.listed else f"whole {further}"
    gap = "" if fmt.named or fmt.tags else "GAP?"
    whole = f"{opens} {gap} one" + (f" GAP? {mark(fmt.close)}" if fmt.close else "")
    rules += [f"start: {start}", f"whole: {whole}", f"one: {one}"]
    return "\n".join(["%llguidance {}", "GAP: /[ \\n]/", *rules, ""])


def _tagged_rules(call: str, name: str, schema: Mapping[str, Any], tags: Tags, mark: Callable[[str], str]) -> list[str]:
    """Rules for a call whose arguments stand in tags, in the order of the schema."""

    required = schema.get("required", ())

    def spelled(text: str) -> str:
        return " ".join(mark(part) for part in re.split("(<[^<>]*>)", text) if part)

    arguments, rules, close = list[str](), list[str](), spelled(tags.value_close)
    for number, (key, given) in enumerate(schema.get("properties", {}).items()):
        value, end, cases = f"{call}_{number}", close, _cases(schema, key)
        if listed := _all_listed(cases):
            texts = [one if isinstance(one, str) else json.dumps(one) for one in listed]
            rules.append(f"{value}: {' | '.join(map(mark, texts))}")
        elif not any(_may_be("string", case) for case in cases):
            wanted = json.dumps({**given, **_BLANKS} if isinstance(given, dict) else {})
            if '"$ref": "#' in wanted:  # from the root of the schema of all arguments
                wanted = json.dumps({**given, **_BLANKS, "$defs": {"all": schema}})
                wanted = wanted.replace('"$ref": "#', '"$ref": "#/$defs/all')
            rules.append(f"{value}: %json {wanted}")
        elif "<[" in close:  # a token, which is no part of any text
            rules.append(f"{value}: /(?s:.*)/")
        else:
            rules.append(f"{value}[suffix={json.dumps(tags.value_close)}]: /(?s:.*)/")
            end = ""
        argument = f'{spelled(tags.key.replace("{}", key))} {value} {end} "\\n"'
        arguments.append(argument if key in required else f"({argument})?")
    return [f"{call}: {' '.join([spelled(tags.head.replace('{}', name)), *arguments, spelled(tags.end)])}", *rules]
