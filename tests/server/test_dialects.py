"""Anthropic's messages, and OpenAI's responses: raw, and by the official packages where they are."""

import json

import pytest

SAID = "One, two, three."
ASKED = [{"role": "user", "content": "Count to three."}]
MESSAGE = {"model": "tiny", "max_tokens": 40, "messages": ASKED}


@pytest.fixture
def server(live, say):
    return live(say(SAID))


def named(server, path, body):
    """The events of a stream, each named by its type."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        blocks = "".join(response.iter_text()).strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def prompts(server, path, body):
    """What the model is shown."""
    server.post(path, body)
    return server.backend.prompts.pop()


def test_a_message_is_the_chats_answer(server):
    body = server.post("/v1/messages", MESSAGE).json()
    assert body["content"] == [{"type": "text", "text": SAID}] and body["role"] == "assistant"
    assert (body["type"], body["model"], body["stop_reason"]) == ("message", "tiny", "end_turn")
    assert body["usage"]["output_tokens"] > 3
    shown = prompts(server, "/v1/messages", {**MESSAGE, "system": [{"type": "text", "text": "Be brief."}]})
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *ASKED]}
    assert shown == prompts(server, "/v1/chat/completions", chat)
    counted = server.post("/v1/messages/count_tokens", {"system": "Be brief.", "messages": ASKED}).json()
    assert counted == {"input_tokens": len(shown)}


@pytest.mark.parametrize(
    ("fields", "text", "reason", "word"),
    [
        ({}, SAID, "end_turn", None),
        ({"max_tokens": 2}, None, "max_tokens", None),
        ({"stop_sequences": [" two"]}, "One,", "stop_sequence", " two"),
    ],
)
def test_a_streamed_message_is_the_whole_one(server, fields, text, reason, word):
    body = {**MESSAGE, **fields}
    whole, events = server.post("/v1/messages", body).json(), named(server, "/v1/messages", body)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    begun, ended = events[0]["message"]["usage"], events[-2]["usage"]
    assert begun == {**ended, "output_tokens": 0} and ended["cache_read_input_tokens"] > 0
    read = [
        sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens")) for usage in (whole["usage"], ended)
    ]
    assert read[0] == read[1]
    streamed = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert streamed == whole["content"][0]["text"] and text in (None, streamed)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": word}
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, word)


def test_errors_of_messages_have_anthropics_shape(live, say):
    server = live(say("x"), keys=(b"one",))
    refused = server.post("/v1/messages", MESSAGE)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    server.client.headers["x-api-key"] = "one"
    assert server.client.get("/v1/messages").json()["type"] == "error"
    server.backend.fail = True
    failed = server.post("/v1/messages", MESSAGE)
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")
    assert named(server, "/v1/messages", MESSAGE)[-1]["error"]["type"] == "api_error"
    failed = named(server, "/v1/responses", {"input": "a"})[-1]
    assert failed["type"] == "response.failed" and failed["response"]["error"]["code"] == "server_error"


# ── tools ──

CALLS = """Both.
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": "é\\n😀"}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>"""
GIVEN = {"a": 1, "b": "é\n😀"}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
CHAT_TURNS = [
    {"role": "system", "content": "Be brief."},
    *ASKED,
    {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": GIVEN}},
            {"id": "2", "type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "21"},
    {"role": "tool", "tool_call_id": "2", "content": ""},
    {"role": "user", "content": "Go on."},
]
MESSAGES_TOOLS = {
    **MESSAGE,
    "max_tokens": 200,
    "tools": [{"name": "add", "description": "Sum.", "input_schema": ADD, "cache_control": {"type": "ephemeral"}},
              {"name": "now", "input_schema": {}}],
}  # fmt: skip
MESSAGES_PAST = [
    *ASKED,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Both."},
            {"type": "tool_use", "id": "1", "name": "add", "input": GIVEN},
            {"type": "tool_use", "id": "2", "name": "now", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "21"}]},
            {"type": "tool_result", "tool_use_id": "2", "is_error": False},
            {"type": "text", "text": "Go on."},
        ],
    },
]
RESPONSES_TOOLS = {
    "model": "tiny",
    "input": "Count to three.",
    "tools": [{"type": "function", "name": "add", "description": "Sum.", "parameters": ADD, "strict": False},
              {"type": "function", "name": "now", "parameters": {}}],
}  # fmt: skip
RESPONSES_PAST = [
    *ASKED,
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Both."}], "id": "msg_1"},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": json.dumps(GIVEN), "status": "completed"},
    {"type": "function_call", "call_id": "2", "name": "now", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "21"}]},
    {"type": "function_call_output", "call_id": "2", "output": ""},
    {"role": "user", "content": "Go on."},
]


def test_tools_and_calls_are_shown_as_a_chats(served):
    server = served(CALLS)
    chat = {"messages": CHAT_TURNS, "tools": CHAT_TOOLS}
    expected = server.post("/apply-template", chat).json()["prompt"]
    assert '"b": "é' in expected and "ephemeral" not in expected
    message = {**MESSAGES_TOOLS, "system": "Be brief.", "messages": MESSAGES_PAST}
    response = {**RESPONSES_TOOLS, "instructions": "Be brief.", "input": RESPONSES_PAST}
    for path, body in (("/v1/messages", message), ("/v1/responses", response)):
        assert server.service.codec.decode(prompts(server, path, body)) == expected
    counted = server.post("/v1/messages/count_tokens", message).json()["input_tokens"]
    assert counted == len(prompts(server, "/v1/messages", message))
    silent = {**message, "tool_choice": {"type": "none"}}
    assert "Sum." not in server.service.codec.decode(prompts(server, "/v1/messages", silent))
    begun = {**MESSAGE, "messages": [*ASKED, {"role": "assistant", "content": "One"}]}
    assert server.service.codec.decode(prompts(server, "/v1/messages", begun)).endswith("<|im_start|>assistant\nOne")


def blocks(events):
    """The content of a streamed message."""
    content = []
    for event in events:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            (name,) = event["delta"].keys() - {"type"}
            content[-1][name] = content[-1].get(name, "") + event["delta"][name]
        elif event["type"] == "content_block_stop" and content[-1]["type"] == "tool_use":
            content[-1]["input"] = json.loads(content[-1].pop("partial_json"))
        assert event.get("index", len(content) - 1) == len(content) - 1
    return content


@pytest.mark.parametrize("run", [1, 2, 7, 90])
def test_calls_are_blocks_of_a_message(served, run):
    server = served(CALLS, run)
    whole = server.post("/v1/messages", MESSAGES_TOOLS).json()
    events = named(server, "/v1/messages", MESSAGES_TOOLS)
    for content in (whole["content"], blocks(events)):
        assert all(block.pop("id") for block in content[1:])
        assert content == [
            {"type": "text", "text": "Both."},
            {"type": "tool_use", "name": "add", "input": GIVEN},
            {"type": "tool_use", "name": "now", "input": {}},
        ]
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    cut = {**MESSAGES_TOOLS, "max_tokens": 25}
    whole, events = server.post("/v1/messages", cut).json(), named(server, "/v1/messages", cut)
    assert blocks(events) == whole["content"] and whole["content"][0]["text"].startswith("Both.\n<tool_call>")
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_an_answer_of_nothing_is_a_block_of_no_text(served):
    server = served("")
    assert blocks(named(server, "/v1/messages", MESSAGE)) == [{"type": "text", "text": ""}]
    assert server.post("/v1/messages", MESSAGE).json()["content"] == [{"type": "text", "text": ""}]
    assert named(server, "/v1/responses", {"input": "a"})[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_the_official_anthropic_package(served):
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.Anthropic(base_url=served(CALLS).url, api_key="k", max_retries=0)
    whole = client.messages.create(system="Be brief.", **MESSAGES_TOOLS)
    with client.messages.stream(**MESSAGES_TOOLS) as stream:
        assert "".join(stream.text_stream) == "Both."
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert [block.input for block in message.content if block.type == "tool_use"] == [GIVEN, {}]
        assert message.stop_reason == "tool_use" and message.usage.output_tokens == whole.usage.output_tokens
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "1"} for block in streamed.content[1:]]
    past = [*ASKED, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": results}]
    assert client.messages.create(**{**MESSAGES_TOOLS, "messages": past}).stop_reason == "tool_use"
    assert client.messages.count_tokens(model="tiny", messages=ASKED).input_tokens > 0
    foreign = [{"type": "web_search_20250305", "name": "web_search"}]
    assert client.messages.create(tools=foreign, **MESSAGE).content[0].type == "text"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(tools=foreign, tool_choice={"type": "any"}, **MESSAGE)
    with client.messages.stream(thinking={"type": "enabled", "budget_tokens": 1024}, **MESSAGE) as stream:
        assert stream.get_final_message().content[0].type == "text"


@pytest.mark.parametrize("run", [1, 2, 7, 90])
def test_calls_are_items_of_a_response(served, official, run):
    server = served(CALLS, run)
    client = official(server)
    whole = client.responses.create(**RESPONSES_TOOLS)
    with client.responses.stream(**RESPONSES_TOOLS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert response.output_text == "Both." and response.status == "completed"
        calls = [(item.name, json.loads(item.arguments), item.status) for item in response.output[1:]]
        assert calls == [("add", GIVEN, "completed"), ("now", {}, "completed")]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert [event.arguments for event in done] == [event.delta for event in deltas]
    assert [event.output_index for event in done] == [1, 2]
    assert [event.item_id for event in done] == [item.id for item in streamed.output[1:]]
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "1"} for item in whole.output[1:]]
    past = [*ASKED, *whole.output, *outputs]
    assert client.responses.create(**{**RESPONSES_TOOLS, "input": past}).output[1].name == "add"
    ended = named(server, "/v1/responses", {**RESPONSES_TOOLS, "max_output_tokens": 25})
    items = [event["item"] for event in ended if event["type"] == "response.output_item.done"]
    assert ended[-1]["response"]["output"] == items and items[0]["status"] == "incomplete"


def test_a_response_is_the_chats_answer(server, official):
    client = official(server)
    said = client.responses.create(model="tiny", instructions="Be brief.", input="Count to three.")
    assert (said.output_text, said.status) == (SAID, "completed")
    shown = server.backend.prompts.pop()
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *ASKED]}
    assert shown == prompts(server, "/v1/chat/completions", chat)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Count to three."}]}]
    with client.responses.stream(model="tiny", input=items) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == SAID
        assert stream.get_final_response().output_text == SAID
    *_, last = client.responses.create(model="tiny", input=items, max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete" and last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text and SAID.startswith(last.response.output_text)
    events = named(server, "/v1/responses", {"input": "a"})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"]["output_tokens"] > 3
