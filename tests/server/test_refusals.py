"""What is asked for in vain is refused by name, in every dialect."""

import json

import pytest
from templates import TOOLS

USER = {"role": "user", "content": "Go on."}
BODIES = {
    "/infill": {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    ret"},
    "/completion": {"prompt": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/fim/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 40},
    "/v1/responses": {"input": "a"},
}
"""What is right, of which each request below changes something; `...` leaves a field out."""


def function(**fields):
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


MALFORMED = {
    "/infill": [
        ({"input_prefix": None}, '"input_prefix": Input should be a valid string'),
        ({"input_suffix": ...}, '"input_suffix": Field required'),
        ({"prompt": 3}, '"prompt": Input should be a valid string'),
        ({"input_extra": "x"}, '"input_extra"'),
        ({"input_extra": [{"filename": "x"}]}, '"input_extra.0.text": Field required'),
        ({"input_extra": [{"text": 1}]}, '"input_extra.0.text": Input should be a valid string'),
        ({"n_predict": "many"}, '"n_predict"'),
        ({"n_cmpl": 17}, '"n_cmpl"'),
        ({"top_p": 2}, '"top_p"'),
        ({"top_p": -0.1}, '"top_p"'),
        ({"min_p": 5}, '"min_p"'),
        ({"samplers": "kpq"}, '"samplers.2"'),
        ({"samplers": ["top_k", "bogus"]}, '"samplers.1": Input should be'),
        ({"temperature": 1e400}, "not JSON"),
    ],
    "/v1/completions": [
        ({"n": 17}, '"n"'),
        ({"echo": True, "logprobs": 0}, "echo with logprobs"),
        ({"logprobs": 21}, '"logprobs'),
        ({"logit_bias": {"999999": 1}}, '"logit_bias"'),
        ({"logit_bias": {"x": 1}}, '"logit_bias'),
        ({"logit_bias": {"5": 101}}, '"logit_bias"'),
        ({"presence_penalty": 3}, '"presence_penalty"'),
        ({"repetition_penalty": 0}, '"repetition_penalty"'),
    ],
    "/completion": [({"repeat_penalty": 0}, '"repeat_penalty"'), ({"logit_bias": {"999999": 1}}, '"logit_bias"')],
    "/v1/fim/completions": [({"echo": True}, '"echo"')],
    "/v1/chat/completions": [
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema is required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no type"}}}}, "response_for"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"messages": []}, '"messages"'),
        ({"messages": []}, '"messages"'),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        (function(name="a\nb"), '"tools.0.function.name"'),
        (function(parameters={"type": "string"}), '"tools.0.function.parameters"'),
        (function(parameters={"$ref": "#/a", "a": {"properties": []}}), '"tools.0.function.parameters"'),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, '"tool_choice"'),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, '"tool_choice'),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}}, "tool_choice"),
    ],
    "/v1/messages": [
        (
            {"tools": [{"name": "web_search", "type": "web_search_20250305"}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_format": {"type": "grammar"}}, "output_format"),
        ({"max_tokens": None}, "max_tokens"),
        ({"top_p": 2}, "top_p"),
    ],
    "/v1/responses": [
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"input": []}, '"input'),
    ],
}
UNSERVED = {
    "/infill": [{"mirostat": 2, "ignore_eos": True, "lora": [{"id": 0, "scale": 1}]}],
    "/completion": [
        {"response_format": {"type": "json_object"}},
        {"grammar": "root ::= 'x'", "n_probs": 5},
        {"n": 2, "n_cmpl": 3},
    ],
    "/v1/completions": [
        {"prompt_logprobs": 1, "best_of": 2},
        {"include_stop_str_in_output": True, "prompt_embeds": "x"},
    ],
    "/v1/chat/completions": [
        {"json_schema": {"type": "object"}, "length_penalty": 0.5},
        {"audio": {"voice": "x"}, "min_tokens": 5, "echo": True},
        {"n_cmpl": 2, "documents": [{"text": "x"}]},
        {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
    ],
    "/v1/messages": [{"compaction": {"type": "summarize"}}],
    "/v1/responses": [{"conversation": "conv_1", "background": True}],
}
NOTHING = {
    "/v1/messages": {"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}, "service_tier": "auto"},
    "/v1/chat/completions": {
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "frequency_penalty": 0.0, "top_p": 1,
        "presence_penalty": 0, "logit_bias": {}, "logprobs": None, "n": 1, "parallel_tool_calls": True, "best_of": 1,
        "n_cmpl": 1, "skip_special_tokens": True, "include_stop_str_in_output": False, "chat_template_kwargs": {},
        "guided_json": {}, "guided_regex": "", "guided_choice": [], "structured_outputs": {},
    },
}  # fmt: skip


@pytest.fixture
def server(served):
    return served("said")


def refused(server, path, fields):
    """The error that a request is answered with."""
    body = {name: value for name, value in {**BODIES[path], **fields}.items() if value is not ...}
    raw = server.client.post(path, content=json.dumps(body))
    assert raw.status_code == 400, raw.text
    assert path != "/v1/messages" or raw.json()["type"] == "error"
    return raw.json()["error"]


@pytest.mark.parametrize("path", MALFORMED)
def test_what_is_wrong_is_named(server, path):
    for fields, told in MALFORMED[path]:
        error = refused(server, path, fields)
        assert told in error["message"] and "alue error" not in error["message"], fields
        assert error["type"] == "invalid_request_error", fields


@pytest.mark.parametrize("path", UNSERVED)
def test_what_is_not_served_is_named(server, path):
    for fields in UNSERVED[path]:
        error = refused(server, path, fields)
        assert all(name in error["message"] for name in fields), error
        assert error["type"] == ("invalid_request_error" if path == "/v1/messages" else "unsupported_field")


@pytest.mark.parametrize("path", NOTHING)
def test_fields_that_ask_for_nothing_are_taken(server, path):
    assert server.post(path, {**BODIES[path], **NOTHING[path]}).status_code == 200
