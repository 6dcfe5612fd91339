"""Tool calls: finds them in an answer as it is generated, and makes grammars that allow calls only.

transformers parses answers by a tokenizer's `response_template`. This is not used, because few tokenizers have one, an
invalid call is an error there and its text is lost, and a closing tag inside an argument ends the call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic_core
import regex

from retrieve_spec.server.call_formats import HERMES, Tags, ToolFormat


def with_tools_told(turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation for a template without tools.

    The system message describes the tools and how to call them. Calls become text of the assistant, results text of the
    user.
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
    """A call: function and arguments."""

    name: str
    arguments: dict[str, Any]


Said = str | ToolCall
_DECODER = json.JSONDecoder()
LENIENT = {"lenient": True, "coerce_one_of": True}
"""Options of llguidance: unknown keywords of a schema are ignored, and `oneOf` is treated as `anyOf`."""
_BLANKS = {"x-guidance": {"whitespace_pattern": " ?", **LENIENT}}
_PYTHON = {"True": True, "False": False, "None": None}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class CallParser:
    """Divides an answer into text and calls; the result does not depend on how the answer is cut into pieces.

    A possible call is held back until it is complete, or cannot become a call any more and is text. Blanks before a
    call, and after one at the end, are dropped.

    Parameters
    ----------
    fmt
        How the model writes calls.
    schemas
        JSON schemas of the arguments, by function; calls of other functions are text.
    """

    def __init__(self, fmt: ToolFormat, schemas: Mapping[str, Any]) -> None:
        self._fmt, self._schemas = fmt, schemas
        self._mark, self._head = _beginning(fmt), _named_call(fmt, schemas)
        self._read_arguments: Callable[[str], tuple[Any, int]] = _read_json
        if fmt.tags is not None:
            self._tagged = _tagged_call(fmt.tags, fmt.close, schemas)
            self._read_arguments = self._read_tagged
        elif fmt.quote:
            self._read_arguments = QuotedReader(fmt.quote).read
        elif fmt.python:
            self._read_arguments = _read_python
        self._held = ""
        self._at = -1  # start of a call in the held text, or -1
        self._bare = fmt.bare  # whether a bare call may begin here
        self._called = False  # whether only whitespace followed a call

    def feed(self, text: str) -> list[Said]:
        """Return what is certain with more of the answer."""
        self._held += text
        return list(self._certain(ended=False))

    def finish(self) -> list[Said]:
        """Return what was held back, at the end of the answer."""
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
                yield from self._text(count)  # an incomplete mark is text
            else:
                yield from calls
                self._held, self._at = rest, -1
                self._bare, self._called = self._fmt.bare, True

    def _text_length(self, ended: bool) -> int:
        """Return how much of the buffer is text, without blanks before a possible call, and where that call begins."""
        if self._called and self._fmt.section_end and self._awaits_section_end(ended):
            return 0
        held = self._held
        blank = " \t\r\n;" if self._called else " \t\r\n"
        lead = len(held) - len(held.lstrip(blank)) if self._bare else -1
        if held[lead : lead + 1] == ("[" if self._fmt.python else "{") and lead >= 0:
            self._at = lead
            return 0
        if lead == len(held) and not ended:
            return 0
        found = self._mark.search(held, partial=not ended)
        if found is None:
            return len(held) if ended else len(held.rstrip())
        count = len(held[: found.start()].rstrip())
        if not found.partial:
            self._at = found.start() - count
        return count

    def _awaits_section_end(self, ended: bool) -> bool:
        """Remove the end of the section after the last call; return whether it may be incomplete."""
        rest, end = self._held.lstrip(), self._fmt.section_end
        if rest.startswith(end):
            self._held = rest[len(end) :]
        return bool(rest) and end.startswith(rest) and rest != end and not ended

    def _text(self, count: int) -> Iterator[str]:
        text, self._held = self._held[:count], self._held[count:]
        if text and not (self._called and text.isspace()):
            self._bare = self._called = False
            yield text

    def _read(self, ended: bool) -> tuple[list[ToolCall], str]:
        """Return the call that has begun, and the text after it; raises the errors of `_read_json`."""
        fmt, name = self._fmt, ""
        begun = self._held[self._at :]
        mark = self._mark.match(begun)
        body = begun[mark.end() :].lstrip() if mark else begun
        if self._head is not None:
            head = _complete(self._head.match(body, partial=True), body)
            name, body = head["name"], body[head.end() :].lstrip()
        value, end = self._read_arguments(body)
        if name:
            value = {fmt.function: name, fmt.arguments: value}
        calls = list(map(self._call, value if (fmt.listed or fmt.python) and isinstance(value, list) else [value]))
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
        """Return a function's name and arguments in tags, and where they end; raises the errors of `_read_json`."""
        assert self._fmt.tags is not None
        found = _complete(self._tagged.match(body, partial=True), body)
        name, edge = found["name"], self._fmt.tags.value_close.partition("<")[0]
        pairs = zip(found.captures("key"), found.captures("value"), strict=True)
        arguments = {key: _value(text.removesuffix(edge), self._schemas[name], key) for key, text in pairs}
        return {"name": name, "arguments": arguments}, found.end()

    def _call(self, value: Any) -> ToolCall:
        """Return the call that a JSON value describes.

        Small models write arguments as a string of JSON, and leave them out for a function without any.

        Raises
        ------
        ValueError
            It is no call.
        """
        called = value if isinstance(value, dict) else {}
        name, arguments = called.get(self._fmt.function), called.get("arguments", called.get("parameters"))
        if isinstance(arguments, str):
            arguments = pydantic_core.from_json(arguments)
        elif arguments is None and not self._fmt.bare:
            arguments = {}
        if not (isinstance(name, str) and isinstance(arguments, dict) and name in self._schemas):
            raise ValueError
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # 1e999 is not valid JSON
        return ToolCall(name, arguments)


def _unsure(text: str) -> json.JSONDecodeError:
    """Return the error for a text that may still become complete."""
    return json.JSONDecodeError("more is to come", text, len(text))


def _complete(found: regex.Match[str] | None, text: str) -> regex.Match[str]:
    """Return a complete match; raises the errors of `_read_json`."""
    if found is None:
        raise ValueError
    if found.partial:
        raise _unsure(text)
    return found


def _beginning(fmt: ToolFormat) -> regex.Pattern[str]:
    """Return an expression for the beginning of a call, with that of its section if there is one."""
    section = rf"(?:{regex.escape(fmt.section)}\s*)?" if fmt.section else ""
    return regex.compile(section + "|".join(filter(None, (regex.escape(fmt.opens), fmt.also))))


def _any_of(names: Collection[str]) -> str:
    """Return an expression for the longest of some names."""
    return "|".join(map(regex.escape, sorted(names, key=len, reverse=True)))


def _named_call(fmt: ToolFormat, names: Collection[str]) -> regex.Pattern[str] | None:
    """Return an expression for a function's name before its arguments, after the beginning of a call."""
    if not fmt.names_apart:
        return None
    name = _any_of(names)
    named = regex.escape(fmt.named.strip("\n")) or r"(?=\{)"
    return regex.compile(rf"{regex.escape(fmt.lead)}(?P<name>{name}){fmt.between}\s*{named}")


def _read_json(body: str) -> tuple[Any, int]:
    """Return the JSON value at the beginning of a text, and where it ends.

    Raises
    ------
    json.JSONDecodeError
        The text may still become complete.
    ValueError
        It cannot.
    """
    pydantic_core.from_json(body or "{", allow_partial=True, allow_inf_nan=False)
    return _DECODER.raw_decode(body)


class QuotedReader:
    """Reads JSON with unquoted keys and strings between special marks.

    Parameters
    ----------
    quote
        The mark around strings.
    """

    def __init__(self, quote: str) -> None:
        mark = regex.escape(quote)
        self._parts = regex.compile(
            rf"""{mark}(?P<text>.*?){mark}|(?P<json>"(?:[^"\\]|\\.)*")|(?P<open>{mark}|")|(?P<signs>[\s,:]+)"""
            rf"""|(?P<begin>[\{{\[])|(?P<end>[\}}\]])|(?P<word>(?:(?!{mark})[^\s{{}}\[\],:"])+)(?P<key>\s*:)?""",
            regex.DOTALL,
        )

    def read(self, body: str) -> tuple[Any, int]:
        """Return an object, and where it ends; raises the errors of `_read_json`."""
        if body and not body.startswith("{"):
            raise ValueError
        spelled, depth = list[str](), 0
        for part in self._parts.finditer(body):
            kind = part.lastgroup
            if kind == "open":
                break
            spelled.append(self._in_json(part))
            depth += (kind == "begin") - (kind == "end")
            if depth == 0:
                return pydantic_core.from_json("".join(spelled), allow_inf_nan=False), part.end()
        raise _unsure(body)

    @staticmethod
    def _in_json(part: regex.Match[str]) -> str:
        if part["text"] is not None:
            return json.dumps(part["text"])
        word = part["word"]
        if word is None:
            return str(part[0])
        if part["key"]:
            return f"{json.dumps(word)}:"
        try:
            pydantic_core.from_json(word, allow_inf_nan=False)
        except ValueError:
            return json.dumps(word)
        return str(word)


_BRACKETED = regex.compile(
    r"""(?P<nest>[\[({](?:[^\][(){}"']|"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|(?&nest))*+[\])}])""", regex.DOTALL
)


def _read_python(body: str) -> tuple[Any, int]:
    """Return a list of calls in Python's syntax, and where it ends; raises the errors of `_read_json`."""
    if body and not body.startswith("["):
        raise ValueError
    found = _complete(_BRACKETED.match(body or "[", partial=True), body)
    try:
        listed = ast.parse(found[0], mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError from error
    if not isinstance(listed, ast.List):
        raise ValueError
    return list(map(_python_call, listed.elts)), found.end()


def _python_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    given = {keyword.arg: _python_value(keyword.value) for keyword in node.keywords}
    if None in given:  # **others
        raise ValueError
    return {"name": ast.unparse(node.func), "arguments": given}


def _python_value(node: ast.expr) -> Any:
    """Return a value in Python's or JSON's syntax as JSON."""
    if isinstance(node, ast.List | ast.Tuple):
        return list(map(_python_value, node.elts))
    if isinstance(node, ast.Dict):
        return {str(ast.literal_eval(key or node)): _python_value(value)
                for key, value in zip(node.keys, node.values, strict=True)}  # fmt: skip
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError
    return value


def _tagged_call(tags: Tags, close: str, names: Collection[str]) -> regex.Pattern[str]:
    """Return an expression for a call's name and arguments; a value ends before another argument or the end."""

    def spelled(text: str, group: str = "") -> str:
        parts = [r"\s*".join(map(regex.escape, part.strip("\n").split("\n"))) for part in text.split("{}")]
        return group.join(parts)

    name = _any_of(names)
    key, end = (
        spelled(tags.key, "(?P<key>[^<>]+)").replace(r"\*", '[^<>"]*'),
        spelled(tags.end) or rf"(?=\s*{regex.escape(close)})",
    )
    begun = "\n?" if tags.key.endswith("\n") else ""
    next_key = spelled(tags.key.partition("{}")[0])
    one = rf"(?>\s*{key}{begun}(?P<value>.*?){spelled(tags.value_close)}(?=\s*(?:{next_key}|{end})))"
    return regex.compile(rf"{spelled(tags.head, f'(?P<name>{name})')}{one}*\s*{end}", regex.DOTALL)


def referenced(path: str, root: Any) -> Any:
    """Return what a reference within a schema points to, None if it is missing."""
    part = root
    for name in path.removeprefix("#/").split("/"):
        part = part.get(name) if isinstance(part, dict) else None
    return part


def _cases(schema: Any, argument: str) -> list[dict[str, Any]]:
    """Return the alternatives of an argument's schema: unions are split, every reference is followed once."""
    try:
        waiting = [schema["properties"][argument]]
    except (KeyError, TypeError):
        return []
    cases, followed = list[dict[str, Any]](), set[str]()
    for case in waiting:  # grows during iteration
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
    """Return all values that a schema allows, if it lists them."""
    if "const" in case:
        return [case["const"]]
    if isinstance(values := case.get("enum"), list):
        return values
    return [None] if case.get("type") == "null" else None


def _all_listed(cases: list[dict[str, Any]]) -> list[Any]:
    """Return all values of an argument, if each of its schemas lists them."""
    listed = [_listed(case) for case in cases]
    return [] if None in listed else [value for values in listed for value in values or ()]


def _may_be(kind: str, case: dict[str, Any]) -> bool:
    """Whether a schema allows a JSON type."""
    kinds = case.get("type")
    if kinds is None and kind == "string":
        return any(isinstance(value, str) for value in _listed(case) or ())
    return kinds == kind or (isinstance(kinds, list) and kind in kinds)


def _value(text: str, schema: Any, argument: str) -> Any:
    """Return the value between tags: a string if the schema says so, else JSON or Python, as templates show values."""
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
    """Return a grammar of llguidance (Lark's notation) for one call or more, without other text.

    Parameters
    ----------
    fmt
        How the model writes calls.
    schemas
        JSON schemas of the arguments, by function.
    mark
        Writes a text in the grammar's notation, control tokens as tokens.
    several
        Whether more than one call is allowed, if the format can express it.
    """
    rules = []
    for number, (name, schema) in enumerate(schemas.items()):
        rules += _call_rules(f"call_{number}", name, schema or {}, fmt, mark)
    one = " | ".join(f"call_{number}" for number in range(len(schemas)))
    opens, close = "" if fmt.bare else mark(fmt.opens), f"GAP? {mark(fmt.close)}" if fmt.close else ""
    if fmt.listed or fmt.python:
        further = '("," GAP? one)*' if several else ""
        start = f'{opens} GAP? "[" one {further} "]" {close}'
    else:
        start = "whole (GAP? whole)*" if several and not fmt.single else "whole"
    if fmt.section:
        start = f"{mark(fmt.section)} GAP? {start} GAP? {mark(fmt.section_end)}"
    gap = "" if fmt.names_apart or fmt.tags else "GAP?"
    rules += [f"start: {start}", f"whole: {opens} {gap} one {close}", f"one: {one}"]
    return "\n".join(["%llguidance {}", "GAP: /[ \\n]/", *rules, ""])


def _call_rules(
    call: str, name: str, schema: Mapping[str, Any], fmt: ToolFormat, mark: Callable[[str], str]
) -> list[str]:
    """Return the rules for a call of one function."""
    if fmt.tags is not None:
        return _tagged_rules(call, name, schema, fmt.tags, mark)
    if fmt.quote or fmt.python:
        return _keyword_rules(call, name, schema, fmt, mark)
    closed = {} if schema and "properties" not in schema else {"additionalProperties": False}
    given = json.dumps({"type": "object", **closed, **schema, **_BLANKS})
    spelled = json.dumps(name, ensure_ascii=False)
    if fmt.names_apart:
        parts = [mark(part) for part in (fmt.lead + name + fmt.written, fmt.named) if part]
        head, tail = " ".join([*parts, "GAP?"]), ""
    else:
        head = json.dumps(f'{{"{fmt.function}": {spelled}, "{fmt.arguments}": ', ensure_ascii=False)
        tail = '"}"'
    return [f"{call}: {head} {call}_arguments {tail}", f"{call}_arguments: %json {given}"]


def _value_rule(value: str, schema: Mapping[str, Any], key: str, spell: Callable[[Any], str]) -> str:
    """Return the rule of an argument's value: listed values or JSON; "" for any text."""
    given, cases = schema["properties"][key], _cases(schema, key)
    if listed := _all_listed(cases):
        return f"{value}: {' | '.join(map(spell, listed))}"
    if any(_may_be("string", case) for case in cases):
        return ""
    wanted = json.dumps({**given, **_BLANKS} if isinstance(given, dict) else {})
    if '"$ref": "#' in wanted:  # references to the root of all arguments' schema
        wanted = json.dumps({**given, **_BLANKS, "$defs": {"all": schema}})
        wanted = wanted.replace('"$ref": "#', '"$ref": "#/$defs/all')
    return f"{value}: %json {wanted}"


def _keyword_rules(
    call: str, name: str, schema: Mapping[str, Any], fmt: ToolFormat, mark: Callable[[str], str]
) -> list[str]:
    """Return the rules for a call with named arguments: required ones first, in their order."""
    begin, equals, end = ("(", "=", ")") if fmt.python else ("{", ":", "}")
    quote = mark(fmt.quote) if fmt.quote else ""
    needed, others, rules = list[str](), list[str](), list[str]()

    def spell(value: Any) -> str:
        if isinstance(value, str) and quote:
            return f"{quote} {mark(value) if value else ''} {quote}"
        return mark(repr(value) if fmt.python else json.dumps(value, ensure_ascii=False))

    for number, key in enumerate(schema.get("properties", {})):
        value = f"{call}_{number}"
        text = (
            f"{value}: {quote} /(?s:.*)/ {quote}" if quote.startswith("<[") else f'{value}: %json {{"type": "string"}}'
        )
        rules.append(_value_rule(value, schema, key, spell) or text)
        (needed if key in schema.get("required", ()) else others).append(f"{mark(key + equals)} {value}")
    comma = '"," " "? '
    given = f" {comma}".join(needed)
    if others:
        one = f"({' | '.join(others)})"
        given += f" ({comma} {one})*" if needed else f"({one} ({comma} {one})*)?"
    return [f"{call}: {mark(fmt.lead + name + begin)} {given} {mark(end)}", *rules]


def _tagged_rules(call: str, name: str, schema: Mapping[str, Any], tags: Tags, mark: Callable[[str], str]) -> list[str]:
    """Return the rules for a call with arguments in tags, in the schema's order."""

    required = schema.get("required", ())

    def spelled(text: str) -> str:
        return " ".join(mark(part) for part in re.split("(<[^<>]*>)", text) if part)

    arguments, rules, close = list[str](), list[str](), spelled(tags.value_close)
    text, token, rest = close.partition("<[")
    suffix = tags.value_close if not token else json.loads(text) if text else ""  # beginning of a text's end
    for number, key in enumerate(schema.get("properties", {})):
        value, end = f"{call}_{number}", close
        rule = _value_rule(value, schema, key, lambda one: mark(one if isinstance(one, str) else json.dumps(one)))
        is_text = not rule
        if is_text and suffix:
            rule, end = f"{value}[suffix={json.dumps(suffix)}]: /(?s:.*)/", token + rest
        rules.append(rule or f"{value}: /(?s:.*)/")
        kind = '"true"' if is_text else '"false"' if "%json" in rule else '("true" | "false")'
        head = f" {kind} ".join(map(spelled, tags.key.replace("{}", key).split("*")))
        argument = f'{head} {value} {end} "\\n"'
        arguments.append(argument if key in required else f"({argument})?")
    return [f"{call}: {' '.join([spelled(tags.head.replace('{}', name)), *arguments, spelled(tags.end)])}", *rules]
