"""Tools: what a model calls is what it wrote, whatever pieces that came in; nothing else is called."""

import copy
import json
import re
from dataclasses import replace
from functools import partial
from itertools import cycle
from time import perf_counter

import pytest
from pydantic import BaseModel
from templates import CHATML, HERMES, TOOLS, is_right

from retrieve_spec.config import TOOL_FORMATS, ServeConfig
from retrieve_spec.reference_model import load_model
from retrieve_spec.server.call_formats import FORMATS, find_tool_format
from retrieve_spec.server.run import assemble
from retrieve_spec.server.schemas import ChatRequest
from retrieve_spec.server.tools import CallParser, ToolCall, calls_grammar

F, G = ToolCall("f", {"a": "</tool_call> ]}"}), ToolCall("get", {"b": [1, {"c": None}], "é": "\n"})
NAMES = dict.fromkeys(("f", "fu", "get", "g", "Web Search:find-it"))
formats = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
tagged = pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.tags], ids=lambda fmt: fmt.name)
CODER = find_tool_format("", "qwen-coder")


def spelled(fmt, calls):
    """Calls as models of a format write them."""
    listed = [{fmt.function: call.name, fmt.arguments: call.arguments} for call in calls]
    if fmt.tags:
        text = "\n".join(map(partial(in_tags, fmt), calls))
    elif fmt.python:
        text = f"{fmt.opens}[{', '.join(map(in_python, calls))}]{fmt.close}"
    elif fmt.quote:
        text = "".join(f"{fmt.opens}{fmt.lead}{c.name}{quoted(c.arguments, fmt.quote)}{fmt.close}" for c in calls)
    elif fmt.listed:
        text = f"{fmt.opens} {json.dumps(listed)}{fmt.close}"
    elif fmt.names_apart:
        parts = (fmt.opens, fmt.lead, "{}", fmt.written, fmt.named, "{}", "\n" * fmt.named.endswith("\n"), fmt.close)
        text = "".join("".join(parts).replace("{}", c.name, 1).replace("{}", json.dumps(c.arguments)) for c in calls)
    elif fmt.bare:
        text = "; ".join(map(json.dumps, listed))
    else:
        text = "\n".join(f"{fmt.opens}\n{json.dumps(one)}\n{fmt.close}" for one in listed)
    return f"{fmt.section}{text}{fmt.section_end}"


def in_python(call):
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def quoted(value, quote):
    """JSON with other quotes around texts, and none around keys."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted(inner, quote)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(quoted(inner, quote) for inner in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def in_tags(fmt, call, end="\n"):
    """A call whose arguments stand in tags, each as it is where it is a string."""
    spelled = fmt.tags.head.replace("{}", call.name)
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        head = fmt.tags.key.replace("{}", key).replace("*", "true" if isinstance(value, str) else "false")
        spelled += head + text + fmt.tags.value_close + end
    return f"{fmt.opens}{spelled}{fmt.tags.end}{fmt.close}"


def said(fmt, pieces):
    parser, out = CallParser(fmt, NAMES), []
    for part in [one for piece in pieces for one in parser.feed(piece)] + parser.finish():
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return out


def cut_everywhere(fmt, text):
    """What is said of a text, which must be the same for one character at a time and wherever two cuts are."""
    whole = said(fmt, [text])
    assert said(fmt, text) == whole
    for first in range(0, len(text), 1 + len(text) // 25):
        for second in range(first, len(text), 1 + len(text) // 25):
            assert said(fmt, [text[:first], text[first:second], text[second:]]) == whole
    return whole


@formats
def test_calls_are_found_wherever_the_text_is_cut(fmt):
    assert cut_everywhere(fmt, spelled(fmt, [F])) == [F]
    assert cut_everywhere(fmt, f"\n{spelled(fmt, [G, F])}\n") == [G, F]
    if not fmt.bare:
        assert cut_everywhere(fmt, f"Look: {fmt.opens[:3]}\n\n{spelled(fmt, [F, G])}") == [
            f"Look: {fmt.opens[:3]}",
            F,
            G,
        ]
    behind = cut_everywhere(fmt, f"{spelled(fmt, [F])}\nDone. ")
    assert behind == [F, "\nDone. "]


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if not fmt.python], ids=lambda fmt: fmt.name)
def test_names_of_servers_with_blanks_are_called(fmt):
    call = ToolCall("Web Search:find-it", {"a": "b"})
    assert cut_everywhere(fmt, spelled(fmt, [call])) == [call]


@formats
def test_what_is_no_call_is_text_to_the_last_character(fmt):
    whole = spelled(fmt, [F])
    texts = [whole[:-size] for size in range(len(fmt.close + fmt.section_end) + 2, len(whole), 3)]
    texts += [spelled(fmt, [ToolCall("other", {})]), f"{fmt.opens} is how", " \n ", "{", fmt.opens + "[" * 2000]
    if fmt.tags:
        damaged = [
            whole.replace(fmt.tags.value_close.strip(), "</oops>"),
            whole.replace(fmt.tags.key[:5], "<oops"),
            whole.replace("=a>", "=a<b>").replace(">a<", ">a<b<"),
        ]
    else:
        damaged = [whole.replace(":", "=").replace("(", "[") + " \n", whole.replace('"a"', '"\\ud800"')]
        damaged.append(whole.replace('"</tool_call> ]}"', "NaN"))
        damaged.append(whole.replace('"</tool_call> ]}"', "1e999"))
        damaged.append(whole.replace(f'"{fmt.function}": "f"', f'"{fmt.function}": ["f"]'))
    texts += [text for text in damaged if text != whole]
    for text in texts:
        assert [*said(fmt, [text]), ""][0] == text
        assert "".join(said(fmt, text)) == text
    broken = f"{fmt.opens} {{]\n"
    assert cut_everywhere(fmt, broken + fmt.opens.join(["", spelled(fmt, [F]).removeprefix(fmt.opens)]))[-1] == F


def test_arguments_may_be_a_text_of_json_or_left_out():
    """As small models write them."""
    fmt = next(fmt for fmt in FORMATS if fmt.name == "hermes")
    for given, read in ((', "arguments": "{\\"a\\": 1}"', {"a": 1}), (', "arguments": null', {}), ("", {})):
        text = f'<tool_call>{{"name": "f"{given}}}</tool_call>'
        assert cut_everywhere(fmt, text) == [ToolCall("f", read)]


SCHEMA = {
    "$defs": {"size": {"type": "integer"}},
    "properties": {
        "path": {"type": "string"}, "text": {"type": ["null", "string"]}, "count": {"$ref": "#/$defs/size"},
        "deep": {"type": "array"}, "on": {"type": "boolean"}, "mode": {"enum": ["r", "w"]}, "any": {},
        "loop": {"$ref": "#/properties/loop"}, "one": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}  # fmt: skip


@tagged
@pytest.mark.parametrize("end", ["", "\n"])
def test_values_in_tags_are_what_their_schema_says(fmt, end):
    close = fmt.tags.value_close
    arguments = {
        "path": "12", "text": f"if a < b:\n    print('{close}')\n\n", "count": 7, "deep": [1, {"a": "</b>"}],
        "on": True, "mode": "w", "any": {"b": None}, "loop": "a\u2028b", "one": "3", "more": 2.5,
    }  # fmt: skip
    parser = CallParser(fmt, {"f": SCHEMA})
    assert parser.feed(in_tags(fmt, ToolCall("f", arguments), end)) == [ToolCall("f", arguments)]
    shown = ToolCall("f", {"on": "False", "count": "None", "deep": "no list", "text": "null", "maybe": "None"})
    read = ToolCall("f", {"on": False, "count": None, "deep": "no list", "text": None, "maybe": None})
    assert CallParser(fmt, {"f": SCHEMA}).feed(in_tags(fmt, shown, end)) == [read]


def test_arguments_may_be_a_definition():
    """As Pydantic writes the schema of a model that has itself in it."""

    class Node(BaseModel):
        name: str
        size: int
        next: "Node | None" = None

    tools = [{"type": "function", "function": {"name": "f", "parameters": Node.model_json_schema()}}]
    schemas = ChatRequest(messages=[{"role": "user", "content": "go"}], tools=tools).argument_schemas
    call = ToolCall("f", {"name": "12", "size": 7, "next": {"name": "x", "size": 1}})
    assert CallParser(CODER, schemas).feed(in_tags(CODER, call)) == [call]
    assert "call_0_1: %json" in calls_grammar(CODER, schemas, json.dumps, several=False)


RECURSIVE = {
    "type": "object", "required": ["n"],
    "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}, "other": {"$ref": "#/properties/n"}},
}  # fmt: skip
LISTED = {
    "$defs": {"unit": {"enum": ["c", "f"], "type": "string"}},
    "properties": {
        "unit": {"$ref": "#/$defs/unit"}, "maybe": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
        "kind": {"const": "cat"}, "old": {"allOf": [{"$ref": "#/$defs/unit"}]}, "mixed": {"enum": ["x", 3]},
    },
    "required": ["unit", "maybe", "kind", "old", "mixed"],
}  # fmt: skip
ONE = {"unit": "c", "maybe": None, "kind": "cat", "old": "f", "mixed": 3}
OTHERS = {"unit": "g", "maybe": "n", "kind": "dog", "old": "", "mixed": "3.5"}


@pytest.fixture(params=[False, True], ids=["text", "tokens"])
def lets_through(request, tokenizer):
    """`lets_through(fmt, schema, arguments)`: whether a grammar does, of a model whose tags are text, or tokens."""
    llguidance = pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    own = copy.deepcopy(tokenizer)
    if request.param:
        own.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<arg_key>", "</arg_value>"]})
    added, vocabulary = own.get_added_vocab(), pytest.importorskip("llguidance.hf").from_tokenizer(own)

    def decide(fmt, schema, arguments):
        grammar = calls_grammar(
            fmt, {"f": schema}, lambda text: f"<[{added[text]}]>" if text in added else json.dumps(text), several=False
        )
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = own.encode(spelled(fmt, [ToolCall("f", arguments)]), add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return decide


@tagged
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            SCHEMA | {"required": ["path", "count"], "properties": dict(list(SCHEMA["properties"].items())[:6])},
            [{"path": "a\n<b>", "count": 3}, {"path": "", "text": "x", "count": 3, "mode": "w"}],
            [{"path": "a"}, {"path": "a", "count": "x"}, {"path": "a", "count": 1, "mode": "x"}],
        ),
        # References are from the root of all arguments.
        (RECURSIVE, [{"n": 1, "next": {"n": 2}, "other": 3}], [{"n": 1, "other": "x"}]),
        # Values are listed wherever: Pydantic's enumerations are definitions.
        (LISTED, [ONE], [{**ONE, key: value} for key, value in OTHERS.items()]),
    ],
    ids=["types", "references", "lists"],
)
def test_a_grammar_of_tags_lets_through_what_its_schema_takes(fmt, lets_through, schema, right, wrong):
    assert [one for one in [*right, *wrong] if lets_through(fmt, schema, one)] == right
    for arguments in right:
        call = ToolCall("f", arguments)
        assert CallParser(fmt, {"f": schema}).feed(in_tags(fmt, call)) == [call]


def test_definitions_that_name_one_another_many_times_cost_no_time():
    schema = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 200}}}
    call, began = ToolCall("f", {"a": 1}), perf_counter()
    assert CallParser(CODER, {"f": schema}).feed(in_tags(CODER, call)) == [call]
    assert perf_counter() - began < 8


def test_damage_in_tags_costs_no_time():
    many = in_tags(CODER, ToolCall("f", {f"a{i}": "</parameter>" * 20 for i in range(200)}))
    text = many.replace("</function>", "</fun>")
    assert said(CODER, [text]) == [text]


@tagged
def test_a_long_value_is_read_as_fast_as_it_comes(fmt):
    """It is looked at again with each piece: 56,000 characters took half a minute."""
    call, began = ToolCall("f", {"text": "x = 1  # code\n" * 4000}), perf_counter()
    assert said(fmt, in_tags(fmt, call).splitlines(keepends=True)) == [call]
    assert perf_counter() - began < 8


def test_a_format_is_told_by_a_template_or_named():
    assert {fmt.name for fmt in FORMATS} == set(TOOL_FORMATS)
    for fmt in FORMATS:
        assert find_tool_format(f"… {' '.join(fmt.tells)} …") is fmt
        assert find_tool_format("…", fmt.name).name == fmt.name
    assert find_tool_format(CHATML) is None
    assert find_tool_format("<tool_call><function=f><parameter=a>1</parameter>").name == "qwen-coder"


# ── over HTTP, with scripted answers ──


ASK = [{"role": "user", "content": "Go on."}]
BODY = {"messages": ASK, "tools": TOOLS, "max_tokens": 200}
SAID = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>'


def test_an_answer_with_calls_has_the_shape_that_clients_read(served):
    (choice,) = served(SAID).post("/v1/chat/completions", BODY).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "Let me see.", "refusal": None}
    assert call.pop("id").isalnum()
    assert call == {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": true}'}}
    (choice,) = served(SAID[11:]).post("/v1/chat/completions", BODY).json()["choices"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("run", [1, 2, 3, 7, 50])
def test_a_stream_says_the_name_first_then_the_arguments_for_every_choice(served, run):
    server = served(SAID, run=run)
    events = server.events("/v1/chat/completions", {**BODY, "stream": True, "n": 2})
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["delta"].get("content") or "" for choice in mine) == "Let me see."
        calls = [call for choice in mine for call in choice["delta"].get("tool_calls", ())]
        assert calls[0] == {
            "index": 0, "id": calls[0]["id"], "type": "function", "function": {"name": "add", "arguments": ""},
        }  # fmt: skip
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1, "b": true}'
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["tool_calls"]


def test_what_is_cut_or_not_offered_is_text(served):
    server = served(SAID)
    body = {**BODY, "max_tokens": 20}
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "length" and SAID.startswith(choice["message"]["content"])
    streamed = [json.loads(event) for event in server.events("/v1/chat/completions", {**body, "stream": True})[:-1]]
    told = "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed)
    assert told == choice["message"]["content"]
    for fields in ({"tools": TOOLS[:1]}, {"tool_choice": "none"}, {"tools": []}):
        (choice,) = server.post("/v1/chat/completions", {**BODY, **fields}).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (SAID, "stop")
        assert "tool_calls" not in choice["message"]


def test_a_history_of_calls_reaches_the_template(served, templated):
    server = served("Done.")
    call = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "123456789", "content": [{"type": "text", "text": "21"}]},
    ]
    body = {"messages": messages, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}}
    call = {**call, "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    turns = [messages[0], {**messages[1], "content": "", "tool_calls": [call]}, {**messages[2], "content": "21"}]
    expected = templated.apply_chat_template(
        turns, tools=TOOLS, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert '"arguments": {"a": 1, "b": null}}' in expected and "read_file" in expected
    assert server.post("/apply-template", body).json()["prompt"] == expected
    counted = server.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]
    ids = server.post("/tokenize", {"content": expected}).json()["tokens"]
    assert (counted, list(server.backend.prompts[-1])) == (len(ids), ids)


def test_an_answer_goes_on_with_an_assistants_last_message(served, templated):
    server = served(" there.")
    messages = [*ASK, {"role": "assistant", "content": "Hello"}]
    begun = templated.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    new_turn = templated.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert begun.endswith("assistant\nHello")
    for fields, prompt in (
        ({}, begun),
        ({"continue_final_message": True}, begun),
        ({"chat_template_kwargs": {"turns": 1}}, begun),
        ({"continue_final_message": False}, new_turn),
        ({"add_generation_prompt": True}, new_turn),
    ):
        assert server.post("/apply-template", {"messages": messages, **fields}).json()["prompt"] == prompt
    for fields, told in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": ASK}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages'"),
    ):
        assert told in server.post("/apply-template", {"messages": messages, **fields}).json()["error"]["message"]
    answer = server.post("/v1/chat/completions", {"messages": messages}).json()
    assert answer["choices"][0]["message"]["content"] == " there."
    assert answer["usage"]["prompt_tokens"] == len(server.post("/tokenize", {"content": begun}).json()["tokens"])


@pytest.mark.parametrize("template", [None, CHATML])
def test_the_server_tells_of_tools_where_the_template_does_not(served, templated, template):
    templated.chat_template = template
    server = served(SAID)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": true}'}}
    past = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "Well.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    prompt = server.post("/apply-template", {"messages": past, "tools": TOOLS}).json()["prompt"]
    system, asked, called, came = prompt.split("<|im_end|>")[:4]
    assert (
        system.startswith("<|im_start|>system\nBe brief.\n\nYou may call") and system.count('"type": "function"') == 2
    )
    assert asked.endswith(ASK[0]["content"])
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>'
    assert called.endswith(f"<|im_start|>assistant\nWell.\n{written}")
    assert came.endswith("<|im_start|>user\n<tool_response>\n2\n</tool_response>")
    body = {"messages": ASK, "tools": TOOLS}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["finish_reason"] == "tool_calls"
    for fields in ({"messages": ASK}, {**body, "tool_choice": "none"}):
        assert "You may call" not in server.post("/apply-template", fields).json()["prompt"]


def test_calls_in_an_unknown_format_stay_text_and_are_told_of_unless_it_is_named(served, templated):
    templated.chat_template = HERMES.replace("tool_call>", "call>")
    said = SAID.replace("tool_call>", "call>")
    server = served(said)
    answer = server.post("/v1/chat/completions", BODY)
    assert answer.json()["choices"][0]["message"]["content"] == said and "read_file" in last_prompt(server)
    assert "how the model writes calls is not known" in answer.headers["x-retrieve-spec-ignored"]
    required = server.post("/v1/chat/completions", {**BODY, "tool_choice": "required"})
    assert required.status_code == 400 and "--tool-format hermes|kimi" in required.json()["error"]["message"]
    server = served(SAID, config=ServeConfig(tool_format="hermes"))
    assert server.post("/v1/chat/completions", BODY).json()["choices"][0]["finish_reason"] == "tool_calls"


def last_prompt(server):
    return server.service.codec.decode(server.backend.prompts[-1])


WRITTEN = {
    "kimi": "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    '<|tool_call_begin|>functions.g:12 <|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜>"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>\n"
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"a":"x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.2": "<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "gemma4": '<|tool_call>call:f{}<tool_call|><|tool_call>call:g{a:<|"|>x<|"|>}<tool_call|>',
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n</invoke>\n<invoke name="g">\n'
    '<parameter name="a">x</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral-args": '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]a1b2c3d4e[ARGS]{"a": "x"}',
    "seed-oss": "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=g>\n<parameter=a>x</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>f</tool_call><tool_call>g<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": "x"}}]',
    "phi": 'functools[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": "x"}}]',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {}},\n'
    '    {"tool_call_id": "1", "tool_name": "g", "parameters": {"a": "x"}}\n]<|END_ACTION|>',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": "x"}}]</TOOLCALL>',
    "lfm2": "<|tool_call_start|>[f(), g(a='x')]<|tool_call_end|>",
    "pythonic": '[f(), g(a="x")]',
}
"""Two calls as models write them: of a function without arguments, and of one with a text."""


@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls_of_one_turn_are_read_as_models_write_them(name):
    fmt = find_tool_format("", name)
    assert cut_everywhere(fmt, WRITTEN[name]) == [ToolCall("f", {}), ToolCall("g", {"a": "x"})]


def test_values_in_the_syntax_of_python_and_without_quotes_are_json():
    given = {"a": "it's \n", "b": [1, -2.5, True, None], "c": {"d": [], "e": "}"}}
    for fmt in (find_tool_format("", "lfm2"), find_tool_format("", "gemma4")):
        assert said(fmt, spelled(fmt, [ToolCall("f", given)])) == [ToolCall("f", given)]
    pythonic, gemma = find_tool_format("", "pythonic"), find_tool_format("", "gemma4")
    assert said(pythonic, '[f(a=true, b={"c": null})]') == [ToolCall("f", {"a": True, "b": {"c": None}})]
    assert said(gemma, '<|tool_call>call:f{a:bare,"b":"}<"}<tool_call|>') == [ToolCall("f", {"a": "bare", "b": "}<"})]
    for text in ("[f(1)]", "[f(a=b)]", "[f(**{})]", "[f, 1]", "[f(a=1j)]", "[1]", "[f(a=']"):
        assert said(pythonic, text) == [text]


def test_every_format_is_read_in_streams_as_in_whole_answers(served, templated):
    """Where the template tells of it; and cut by the limit of tokens it is text."""
    text = ""
    server = served(lambda _: text, run=3)
    functions = [{"type": "function", "function": {"name": name}} for name in ("f", "get")]
    for fmt in FORMATS:
        templated.chat_template = f"{{# {' '.join(fmt.tells)} #}}" + HERMES.replace("tool_call>", "call>")
        text = ("" if fmt.bare else "I look.\n") + spelled(fmt, [F] if fmt.single else [F, G])
        body = {"messages": ASK, "tools": functions}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        events = [json.loads(event) for event in server.events("/v1/chat/completions", {**body, "stream": True})[:-1]]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        named = [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
        given = "".join(call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ()))
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        assert (choice["message"]["content"] or "") == "".join(delta.get("content") or "" for delta in deltas), fmt.name
        assert [call["name"] for call in calls] == named == ["f", "get"][: len(calls)], fmt.name
        assert "".join(call["arguments"] for call in calls) == given
        assert [json.loads(call["arguments"]) for call in calls] == [F.arguments, G.arguments][: len(calls)]
        cut = server.post("/v1/chat/completions", {**body, "max_tokens": 12}).json()["choices"][0]
        assert cut["finish_reason"] == "length" and text.startswith(cut["message"]["content"]), fmt.name
        assert "tool_calls" not in cut["message"]


def test_arguments_have_the_line_ends_of_the_document(served):
    said = '<tool_call>{"name": "add", "arguments": {"a": ["x\\ny"], "b\\n": 1}}</tool_call>'
    body = {**BODY, "messages": [{"role": "user", "content": "x\r\ny\r\n"}]}
    (choice,) = served(said).post("/v1/chat/completions", body).json()["choices"]
    arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"a": ["x\r\ny"], "b\n": 1}


# ── an agent, by the official client ──


def take_turns(client, messages, turns, stream=False, **options):
    """What an agent and its two tools say to one another; and how each answer ended."""
    reasons = []
    for turn in range(turns):
        ask = {"model": "any", "messages": messages, "tools": TOOLS, **options}
        if stream:
            with client.chat.completions.stream(**ask) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(**ask).choices
        reasons.append(choice.finish_reason)
        calls = choice.message.tool_calls or []
        assert (choice.finish_reason == "tool_calls") <= bool(calls)
        made = [
            call.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}}) for call in calls
        ]
        said = {"role": "assistant", "content": choice.message.content}
        messages.append({**said, "tool_calls": made} if made else said)
        for call in calls:
            arguments = json.loads(call.function.arguments)
            assert isinstance(arguments, dict) and call.function.name in ("add", "read_file")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{turn}: {sorted(arguments)}"})
        if not calls:
            messages.append({"role": "user", "content": "Go on."})
    return messages, reasons


def without_ids(messages):
    return json.loads(json.dumps(messages), object_hook=lambda one: {k: v for k, v in one.items() if "id" not in k})


@pytest.mark.parametrize("run", [1, 2, 5])
def test_an_agent_of_two_tools_over_five_turns(served, official, run):
    scripted = [
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.py", "line": 2}}\n</tool_call>',
        'Both.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": true}}</tool_call>\n'
        '<tool_call>{"name": "read_file", "arguments": {"path": "b.py", "line": 1}}</tool_call>',
        "<tool_call>add(1, 2)</tool_call>",
        'I call <tool_call>\n{"name": "add", "arguments": {"a": 20, "b": false}}\n</tool_call>',
        "It is 21.",
    ]
    client = official(served(lambda prompt: scripted[prompt.count("<|im_start|>assistant") - 1], run=run))
    whole, reasons = take_turns(client, list(ASK), 5)
    streamed, again = take_turns(client, list(ASK), 5, stream=True)
    assert reasons == again == ["tool_calls", "tool_calls", "stop", "tool_calls", "stop"]
    assert without_ids(whole) == without_ids(streamed)
    assert [m.get("content") for m in whole if m["role"] == "assistant"] == [
        None,
        "Both.",
        scripted[2],
        "I call",
        scripted[4],
    ]
    assert [m["content"] for m in whole if m["role"] == "tool"] == [
        "0: ['line', 'path']", "1: ['a', 'b']", "1: ['line', 'path']", "3: ['a', 'b']",
    ]  # fmt: skip


# ── with models that choose by themselves ──


@pytest.fixture
def grammatical(reference_live, monkeypatch):
    """The bundled model with a template of tools, listening."""
    pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    monkeypatch.setattr(reference_live.service.tokenizer, "chat_template", HERMES)
    return reference_live


SAMPLING = cycle(({}, {"temperature": 1.0, "seed": 5}))


@pytest.mark.parametrize(("name", "sampling"), list(zip(TOOL_FORMATS, SAMPLING, strict=False)))
def test_a_call_that_is_required_is_one_with_drafts_and_without(grammatical, monkeypatch, name, sampling):
    config = replace(grammatical.service.config, tool_format=name)
    monkeypatch.setattr(grammatical.service, "config", config)
    body = {**BODY, "tool_choice": "required", "parallel_tool_calls": False, **sampling}
    on, off = (grammatical.post("/v1/chat/completions", {**body, "speculative": speculative}).json()
               for speculative in (True, False))  # fmt: skip
    (choice,) = on["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert is_right(call["function"]["name"], json.loads(call["function"]["arguments"]))
    assert on["usage"]["completion_tokens"] == off["usage"]["completion_tokens"]
    assert off["choices"][0]["message"]["tool_calls"][0]["function"] == call["function"]
    assert on["timings"]["draft_n"] > 0
    named = {**body, "tool_choice": {"type": "function", "function": {"name": "add"}}}
    (call,) = grammatical.post("/v1/chat/completions", named).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and is_right("add", json.loads(call["function"]["arguments"]))


@pytest.mark.parametrize("name", ["hermes", "llama", "gpt-oss", "gemma4"])
def test_json_beside_tools_is_calls_or_json(grammatical, monkeypatch, name):
    """Whichever the model begins with; that of the bundled one is chance."""
    monkeypatch.setattr(grammatical.service, "config", replace(grammatical.service.config, tool_format=name))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {**BODY, "response_format": wanted, "temperature": 1.5, "n": 12, "seed": 1, "max_tokens": 120}
    called = []
    for choice in grammatical.post("/v1/chat/completions", body).json()["choices"]:
        calls = choice["message"].get("tool_calls", ())
        called.append(bool(calls))
        assert all(is_right(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls)
        assert calls or json.loads(choice["message"]["content"])["n"] in (1, 2)
    assert set(called) == {True, False}


@pytest.mark.parametrize("pattern", ["^(?!a)b", r"\bword\b", r"(?<one>a)\k<one>", "(?>a)b"])
def test_what_no_grammar_says_of_a_schema_is_left_out_and_told_of(grammatical, pattern):
    """As Zod writes addresses and records: an unknown word in one tool of fifty would refuse all of them."""
    parts = {
        "mail": {"type": "string", "pattern": pattern},
        "kinds": {"oneOf": [{"enum": ["x", "y"]}, {"type": "string"}]},
    }
    parts["by"] = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}
    dialect = "https://json-schema.org/draft-07/schema#"  # as it is often written; the standard's is http
    schema = {"$schema": dialect, "type": "object", "properties": parts, "required": ["kinds"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    given = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    for body, name in (
        ({"response_format": wanted}, "response_format"),
        ({**given, "tool_choice": "required"}, "tools"),
    ):
        answer = grammatical.post("/v1/chat/completions", {"messages": ASK, "max_tokens": 9, **body})
        assert answer.status_code == 200, answer.text
        told = answer.headers["x-retrieve-spec-ignored"]
        assert f"{name} (pattern)" in told and f"{name} ($schema)" in told
        assert "propertyNames" in told and "oneOf" in told


def test_a_pattern_with_a_backslash_before_a_digit_refers_to_nothing(grammatical):
    parts = {"path": {"type": "string", "pattern": r"^c:\\1\(?$"}}
    schema = {"type": "object", "properties": parts, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"messages": ASK, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    answer = grammatical.post("/v1/chat/completions", body)
    assert answer.status_code == 200 and "x-retrieve-spec-ignored" not in answer.headers
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch(parts["path"]["pattern"], json.loads(call["function"]["arguments"])["path"])


def test_several_calls_where_several_may_be(grammatical):
    body = {**BODY, "tool_choice": "required", "temperature": 1.0, "n": 4, "seed": 1}
    answer = grammatical.post("/v1/chat/completions", body).json()
    counts = [len(choice["message"]["tool_calls"]) for choice in answer["choices"]]
    assert min(counts) >= 1 and max(counts) > 1
    for choice in answer["choices"]:
        for call in choice["message"]["tool_calls"]:
            assert is_right(call["function"]["name"], json.loads(call["function"]["arguments"]))


def test_a_real_model_as_an_agent(live, official, smollm2):
    """SmolLM2 as it is: each call parses or is text, the same with drafts and without."""
    model, tokenizer = load_model(smollm2, dtype="float32", device="cpu")
    service = assemble(model, tokenizer, "smollm2", ServeConfig())
    client, talks = official(live(service.backend, service=service)), []
    for speculative in (True, False):
        extra = {"extra_body": {"speculative": speculative}, "max_tokens": 48}
        messages, _ = take_turns(client, list(ASK), 2, tool_choice="required", parallel_tool_calls=False, **extra)
        assert any(message["role"] == "tool" for message in messages)
        messages, _ = take_turns(client, messages, 2, **extra)
        messages, _ = take_turns(client, messages, 1, stream=True, temperature=0.7, seed=2, **extra)
        talks.append(without_ids(messages))
    assert talks[0] == talks[1]
