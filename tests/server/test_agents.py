"""Agents: their first requests, and those after a call, are answered whatever the model's chat template takes."""

import json
import operator
import random
import re
from functools import reduce

import pytest
from first_requests import ASKED, CLIENTS, RULES, SCHEMA
from templates import FAMILIES, called

SAID = ("choices", "content", "output", "message")
"""What an answer says, in the dialects."""
CAME = r"a\.py(?:\n|\\n)b\.py"


@pytest.fixture(params=FAMILIES)
def agent(request, served, templated):
    """A server whose model calls a function twice and then answers, with the template of a family."""
    templated.chat_template = FAMILIES[request.param]
    call = called(request.param, "exec", {"cmd": "ls"})
    thought = "I must look.</think>\n" if request.param == "qwen3.5" else ""

    def say(prompt):
        came = len(re.findall(CAME, prompt))
        return thought + (call if came < 2 else "There are two.")

    return served(say, 7)


def streamed(server, client, body):
    """The answer of a stream, as its client puts it together."""
    with server.client.stream("POST", client.path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        text = "".join(response.iter_text())
    if client.path == "/api/chat":
        parts = [json.loads(line)["message"] for line in text.splitlines()]
        calls = [call for part in parts for call in part.get("tool_calls", ())]
        return {
            "message": {"role": "assistant", "content": "".join(part["content"] for part in parts), "tool_calls": calls}
        }
    blocks = text.strip().split("\n\n")
    events = [json.loads(line[6:]) for block in blocks for line in block.split("\n") if line.startswith("data: {")]
    if client.path == "/v1/responses":
        return events[-1]["response"]
    if client.path == "/v1/messages":
        return {"content": message_content(events)}
    message = {"role": "assistant", "content": "", "tool_calls": []}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"choices": [{"message": {key: value for key, value in message.items() if value}}]}


def message_content(events):
    content = []
    for event in events:
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            (name,) = event["delta"].keys() - {"type"}
            content[-1][name] = content[-1].get(name, "") + event["delta"][name]
    return [
        {
            **{key: value for key, value in block.items() if key != "partial_json"},
            "input": json.loads(block["partial_json"]),
        }
        if block["type"] == "tool_use"
        else block
        for block in content
    ]


def test_an_agent_makes_two_calls_and_ends(agent):
    for client in CLIENTS:
        turns = []
        for ask in (lambda client, body: agent.post(client.path, body).json(), lambda *it: streamed(agent, *it)):
            body, made = client.body, []
            for _ in range(3):
                answer = ask(client, body)
                made.append(client.calls(answer))
                body = client.after(body, answer)
                prompt = agent.service.codec.decode(agent.backend.prompts[-1])
                assert RULES in prompt and ASKED in prompt, (client.path, prompt)
            turns.append(made)
        call = [("exec", {"cmd": "ls"})]
        assert turns[0] == turns[1] == ([call, call, []] if "tools" in client.body else [[], [], []]), client


@pytest.mark.parametrize("family", FAMILIES)
def test_names_with_blanks_and_geminis_names_of_types_are_taken(served, templated, family):
    """Servers of MCP have names with blanks; Gemini's packages write the types of JSON Schema in capitals."""
    templated.chat_template = FAMILIES[family]
    call = called(family, "Web Search: find", {"type": "A", "of": [1]})
    server = served(("I look.</think>" if family == "qwen3.5" else "") + call)
    parts = {"type": {"type": "STRING", "enum": ["A"]}, "of": {"type": "ARRAY", "items": {"type": "INTEGER"}}}
    given = {"name": "Web Search: find", "parameters": {"type": "OBJECT", "properties": parts, "required": ["of"]}}
    answer = server.post(
        "/v1/chat/completions", {"messages": [USER], "tools": [{"type": "function", "function": given}]}
    )
    assert answer.status_code == 200, answer.text
    [made] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == given["name"]
    prompt = server.service.codec.decode(server.backend.prompts[-1])
    assert '"array"' in prompt and '"ARRAY"' not in prompt and '"A"' in prompt


def test_a_thread_that_is_not_kept_is_asked_for_whole(served):
    server = served("said")
    asked = {"max_tokens": 9, "messages": [USER], "thread": {"type": "continue", "previous_message_id": "msg_1"}}
    answer = server.post("/v1/messages", asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (404, "not_found_error")
    assert error["details"] == {"error_code": "thread_not_found"}


def test_a_response_that_is_not_kept_is_asked_for_whole(served):
    """Copilot looks for OpenAI's code before it sends all items again."""
    server = served("said")
    for stream in (False, True):
        answer = server.post("/v1/responses", {"input": [USER], "previous_response_id": "resp_1", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert server.post("/v1/responses", {"input": [USER], "previous_response_id": None}).status_code == 200


def test_a_tool_that_a_search_finds_is_described_where_it_was_found(served):
    """Claude Code adds it to its tools: at the beginning, all that was said would have to be read again."""
    server = served(lambda prompt: called("qwen2.5", "fetch", {"url": "x"}) if "Fetches" in prompt else "said")

    def tool(name, **fields):
        return {"name": name, "description": f"{name.title()}es.", "input_schema": SCHEMA, **fields}

    first = {"messages": [USER], "max_tokens": 99, "tools": [tool("search"), tool("hold", defer_loading=True)]}
    assert server.post("/v1/messages", first).json()["content"] == [{"type": "text", "text": "said"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "fetch"}]}
    said = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]}
    asked = {
        **first, "tools": [tool("search"), tool("fetch", defer_loading=True), tool("hold", defer_loading=True)],
        "messages": [USER, said, {"role": "user", "content": [result]}],
    }  # fmt: skip
    answer = server.post("/v1/messages", asked)
    assert [(block["name"], block["input"]) for block in answer.json()["content"]] == [("fetch", {"url": "x"})]
    assert "x-retrieve-spec-ignored" not in answer.headers
    before, after = map(server.service.codec.decode, server.backend.prompts)
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n")) and '<function>{"name": "fetch"' in after
    assert "Holdes." not in after
    by_provider = [*asked["tools"], {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}]
    assert server.post("/v1/messages", {**first, "tools": by_provider}).status_code == 200
    assert "Holdes." in server.service.codec.decode(server.backend.prompts[-1])


def test_what_is_left_out_is_told(agent):
    for client in CLIENTS:
        told = agent.post(client.path, client.body).headers.get("x-retrieve-spec-ignored", "")
        assert told.split(", ") == (client.left_out or [""])


WRONG = [None, "", 0, -1, True, [], {}, "x", [None], [1], {"a": 1}, [[]], [{}], "\ud800", {"type": "картина\r\n"}, 3.5]


def places(value, place=()):
    """The paths of all values in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0):
        yield (*place, key)
        yield from places(value[key], (*place, key))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: type(client).__name__)
def test_any_wrong_value_is_answered_and_in_a_history_with_200(served, templated, client):
    templated.chat_template = FAMILIES["qwen3"]
    server, draw = served("All done.", 7), random.Random(1)
    for _ in range(60):
        body = json.loads(json.dumps({**client.body, "stream": False}))
        *above, key = place = draw.choice([place for place in places(body) if place[0] not in ("stream", "model")])
        reduce(operator.getitem, above, body)[key] = draw.choice(WRONG)
        status = server.client.post(client.path, content=json.dumps(body)).status_code
        is_history = place[0] in ("messages", "input") and len(place) > 1
        assert status == 200 or (status == 400 and not is_history), (place, body)


@pytest.mark.parametrize("family", ["qwen3.5", "mistral"])
def test_a_real_model_says_the_same_without_drafts(reference_live, monkeypatch, family):
    monkeypatch.setattr(reference_live.service.tokenizer, "chat_template", FAMILIES[family])
    for client in CLIENTS:
        body = {**client.body, "max_tokens": 12, "max_output_tokens": 12, "tools": client.body.get("tools", [])[:1]}
        body["options"] = {"num_predict": 12, "temperature": 0}  # Ollama's
        on, off = (reference_live.post(client.path, {**body, "speculative": on}).json() for on in (True, False))
        told = [json.dumps(next(answer[part] for part in SAID if part in answer)) for answer in (on, off)]
        assert re.sub(r"(msg|rs|fc)_\w+", "", told[0]) == re.sub(r"(msg|rs|fc)_\w+", "", told[1])


LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CHAT, USER = "/v1/chat/completions", {"role": "user", "content": "Go on."}
NESTED = {"type": "function", "function": LOOK}
UNSET = {"type": "", "properties": [], "required": {}}
"""What Go and PHP make of a schema that says nothing."""
TAKEN = [
    # (path, fields, whether the function is offered)
    (CHAT, {"tools": [{"type": "function", **LOOK}], "tool_choice": {"type": "auto"}}, True),
    (CHAT, {"tools": [{"name": "look", "input_schema": LOOK["parameters"]}], "tool_choice": ""}, True),
    (CHAT, {"tools": [NESTED], "tool_choice": {"type": "none"}}, False),
    (CHAT, {"tools": [NESTED], "tool_choice": {}, "response_format": {}, "logit_bias": []}, True),
    (CHAT, {"tools": [NESTED, {"type": "function", "function": {**LOOK, "description": "Looks again."}}]}, True),
    (CHAT, {"tools": [{"type": "function", "function": {**LOOK, "parameters": UNSET}}]}, True),
    (CHAT, {"tools": [{"type": "function", "function": {**LOOK, "parameters": []}}]}, True),
    (CHAT, {"tools": [NESTED], "user": {"id": 7}, "max_tokens": 1 << 53, "seed": (1 << 64) - 1}, True),
    (CHAT, {"prediction": {"type": "content", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}}, False),
    ("/v1/responses", {"tools": [NESTED], "tool_choice": {"type": "auto"}, "max_output_tokens": 1 << 53}, True),
    ("/v1/responses", {"max_output_tokens": -1}, False),
    ("/v1/messages", {"max_tokens": 0, "top_k": -1}, False),
    ("/api/chat", {"messages": None}, False),
    ("/api/generate", {"prompt": None}, False),
]


@pytest.mark.parametrize(("path", "fields", "offered"), TAKEN)
def test_other_spellings_of_what_is_asked_are_taken(served, path, fields, offered):
    server = served("said")
    asked = {"input": [USER]} if path == "/v1/responses" else {"messages": [USER]}
    answer = server.post(path, {**asked, **fields, "stream": False})
    assert answer.status_code == 200, answer.text
    prompts = map(server.service.codec.decode, server.backend.prompts)
    assert any('"name": "look"' in prompt for prompt in prompts) == offered


@pytest.mark.parametrize(
    "choice", ["any", {"type": "any"}, {"type": "tool", "name": "look"}, {**LOOK, "type": "function"}]
)
def test_a_call_is_required_in_the_words_of_any_dialect(served, choice):
    pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    server = served("said")
    answer = server.post(CHAT, {"messages": [USER], "tools": [NESTED], "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    (task, _), *_ = server.done
    assert task.sampling.grammar


def test_thoughts_are_asked_for_in_objects_too(served):
    server = served("said")
    for fields, off in (
        ({"thinking": {"type": "disabled"}}, True), ({"thinking": {"type": "enabled"}}, False),
        ({"reasoning": {"effort": "none"}}, True), ({"reasoning": {"enabled": False}}, True),
        ({"reasoning": {"effort": "high", "exclude": True}}, False),
    ):  # fmt: skip
        assert server.post(CHAT, {"messages": [USER], **fields}).status_code == 200
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert prompt.endswith("<think></think>") == off, fields
