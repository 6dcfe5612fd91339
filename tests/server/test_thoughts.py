"""Thoughts: apart from the answer in every dialect, whole and streamed, and no call stands in one."""

import copy
import json

import pytest
from templates import FAMILIES, GPT_OSS, TOOLS, is_right

from retrieve_spec.server.call_formats import HERMES, find_tool_format
from retrieve_spec.server.reading import THOUGHTS, AnswerReader, Thought
from retrieve_spec.server.tools import CallParser, ToolCall

USER = {"role": "user", "content": "Go on."}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>'
THOUGHT = f"I could {CALL}\n\nor not. <b>"
OPENED = f"<think>\n{THOUGHT}\n</think>\n\nSo be it.\n{CALL}"
RUNS = [1, 7, 400]
"""Tokens of a pass."""


def read(text, begun=None, pieces=1, fmt=HERMES):
    reader, out = AnswerReader(begun, CallParser(fmt, {"add": {}})), []
    for at in range(0, len(text), pieces):
        out += reader.feed(text[at : at + pieces])
    return [*out, *reader.finish()]


def joined(parts):
    out = []
    for part in parts:
        if out and type(out[-1]) is type(part) and isinstance(part, str):
            out[-1] += part
        elif out and type(out[-1]) is type(part) is Thought:
            out[-1] = Thought(out[-1].text + part.text)
        else:
            out.append(part)
    return out


@pytest.mark.parametrize("tags", THOUGHTS, ids=lambda tags: tags.opens)
def test_thoughts_are_found_wherever_the_text_is_cut(tags):
    call = ToolCall("add", {"a": 1, "b": True})
    cases = {
        (f"\n{tags.opens}\n{THOUGHT}\n{tags.close}\n\nSo be it. {CALL}", None): [Thought(THOUGHT), "So be it.", call],
        (f"{THOUGHT}\n{tags.close}\n{CALL}", tags): [Thought(THOUGHT), call],
        (f"{tags.opens}\n\n{tags.close}\n\nYes. ", None): ["Yes. "],
        (f"{tags.opens}cut {tags.close[:-1]}", None): [Thought(f"cut {tags.close[:-1]}")],
        (f"cut {CALL}", tags): [Thought(f"cut {CALL}")],
        (f"{tags.opens[:-1]} no thought", None): [f"{tags.opens[:-1]} no thought"],
        (f"Said. {tags.opens}x{tags.close}", None): [f"Said. {tags.opens}x{tags.close}"],
        (tags.opens[:-1], None): [tags.opens[:-1]],
    }
    for (text, begun), expected in cases.items():
        for pieces in (1, 2, 3, 5, 11, len(text)):
            assert joined(read(text, begun, pieces)) == expected, (text, pieces)


def test_channels_are_told_apart_wherever_the_text_is_cut():
    """As gpt-oss writes: what it thinks, says before a call, calls, and says at last, each in a channel."""
    analysis, next_message = "<|channel|>analysis<|message|>I muse.<|end|>", "<|start|>assistant"
    final, preamble = "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
    calls = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    call = ToolCall("add", {"a": 1})
    cases = {
        f"{analysis}{next_message}{final}Said. <b>": [Thought("I muse."), "Said. <b>"],
        f"{final}Said.": ["Said."],
        f"{analysis}{next_message}{calls}": [Thought("I muse."), call],
        f"{analysis}{next_message}{calls}<|call|>": [Thought("I muse."), call],
        f"{analysis}{next_message} to=functions.add<|channel|>commentary json<|message|>{{}}": [
            Thought("I muse."), ToolCall("add", {})],
        f"{preamble}I look.<|end|>{next_message}{calls}": ["I look.", call],
        f"{calls[:-1]}": [calls[:-1]],
    }  # fmt: skip
    for text, expected in cases.items():
        for pieces in (1, 2, 3, 5, 11, len(text)):
            assert joined(read(text, None, pieces, find_tool_format("", "gpt-oss"))) == expected, (text, pieces)


@pytest.fixture(params=["opened by the model", "opened by the template"])
def thinker(request, served, templated):
    """A server whose model thinks first."""
    by_model = request.param == "opened by the model"
    templated.chat_template = FAMILIES["qwen3" if by_model else "qwen3.5"]
    return served(OPENED if by_model else OPENED.removeprefix("<think>\n"))


def test_a_chat_has_its_thoughts_apart(thinker):
    for run in RUNS:
        thinker.backend.run, body = run, {"messages": [USER], "tools": TOOLS}
        (choice,) = thinker.post("/v1/chat/completions", body).json()["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "So be it.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in
                  thinker.events("/v1/chat/completions", {**body, "stream": True})[:-1]]  # fmt: skip
        for name in ("reasoning_content", "content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
        assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == 2
        cut = thinker.post("/v1/chat/completions", {**body, "max_tokens": 9}).json()["choices"][0]
        assert THOUGHT.startswith(cut["message"]["reasoning_content"]) and cut["message"]["content"] == ""
        assert cut["finish_reason"] == "length"


def test_a_message_has_a_thinking_block(thinker):
    for run in RUNS:
        thinker.backend.run = run
        tools = [{"name": "add", "input_schema": TOOLS[1]["function"]["parameters"]}]
        body = {"messages": [USER], "max_tokens": 400, "tools": tools}
        content = thinker.post("/v1/messages", body).json()["content"]
        assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
        assert content[0]["thinking"] == THOUGHT and content[1]["text"] == "So be it."
        with thinker.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
            lines = "".join(response.iter_text()).split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        assert begun == ["thinking", "text", "tool_use"]
        thought = [event["delta"].get("thinking", "") for event in events if event["type"] == "content_block_delta"]
        assert "".join(thought) == THOUGHT


def test_a_response_has_a_reasoning_item(thinker, official):
    for run in RUNS:
        thinker.backend.run = run
        tool = {"type": "function", "name": "add", "parameters": TOOLS[1]["function"]["parameters"], "strict": False}
        client, ask = official(thinker), {"model": "m", "input": "Go on.", "tools": [tool]}
        whole = client.responses.create(**ask)
        with client.responses.stream(**ask) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        for response in (whole, streamed):
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
            assert response.output[0].content[0].text == THOUGHT and response.output_text == "So be it."
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == THOUGHT
        only = thinker.post("/v1/responses", {"input": "a", "max_output_tokens": 5}).json()
        assert [item["type"] for item in only["output"]] == ["reasoning", "message"]


def test_how_much_to_think_reaches_the_template(served, templated):
    templated.chat_template = "{{ reasoning_effort }} {{ enable_thinking }}" + FAMILIES["qwen3"]
    server = served("said")
    chat, messages, responses = "/v1/chat/completions", "/v1/messages", "/v1/responses"
    for path, fields, told in (
        (chat, {"reasoning_effort": "high"}, "high True"),
        (chat, {"reasoning_effort": "none"}, "none False"),
        (chat, {"enable_thinking": False}, " False"),
        (chat, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low False"),
        (chat, {}, " "),
        (messages, {"thinking": {"type": "disabled"}}, " False"),
        (messages, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max True"),
        (responses, {"reasoning": {"effort": "minimal", "summary": "auto"}}, "minimal True"),
        (responses, {"reasoning": {"effort": None}}, " "),
        (messages, {"chat_template_kwargs": {"enable_thinking": False}}, " False"),
        (responses, {"chat_template_kwargs": {"enable_thinking": False}}, " False"),
    ):
        body = {"input": [USER]} if path == responses else {"messages": [USER], "max_tokens": 9}
        assert server.post(path, {**body, **fields}).status_code == 200
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert prompt.startswith(f"{told}<|im_start|>")
        assert prompt.endswith("</think>\n\n") == told.endswith("False")


# ── grammars begin after the thought ──


@pytest.fixture(params=[False, True], ids=["text", "tokens"])
def grammars(request, tokenizer):
    """A tokenizer whose tags are text, or tokens, and what decides whether a grammar lets a text through."""
    llguidance = pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    own = copy.deepcopy(tokenizer)
    if request.param:
        own.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel|>", "<|message|>", "<|end|>"])
    vocabulary = pytest.importorskip("llguidance.hf").from_tokenizer(own)

    def lets_through(grammar, text):
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = own.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return own, lets_through


def test_what_is_required_follows_the_thought(grammars, live, say, monkeypatch):
    own, lets_through = grammars
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    for family, thoughts, none in (
        ("qwen3", ["<think>\nHm {\n</think>\n\n", ""], ["Hm </think>", "<think>Hm"]),
        ("qwen3.5", ["Hm {\n</think>\n\n", "</think>"], ["", "Hm"]),
        ("qwen2.5", [""], ["<think>Hm</think>"]),
    ):
        own.chat_template = FAMILIES[family]
        server = live(say("x"), own)
        for fields, answer in ((body, CALL), ({"messages": [USER], "response_format": schema}, '{"a": 1}')):
            server.post("/v1/chat/completions", fields)
            grammar = server.done[-1][0].sampling.grammar
            assert [text for text in [*thoughts, *none] if lets_through(grammar, text + answer)] == thoughts
            assert not lets_through(grammar, thoughts[0] + "no")


def test_json_stands_in_the_final_channel(grammars, live, say):
    own, lets_through = grammars
    own.chat_template = GPT_OSS
    server, thought = live(say("x"), own), "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
    final, call = '<|channel|>final<|message|>{"a": 1}', "<|channel|>commentary to=functions.add <|constrain|>json"
    call += '<|message|>{"a": 1, "b": true}'
    wanted, tools = {"response_format": {"type": "json_object"}}, {"tools": TOOLS}
    for fields, right in (
        (wanted, [final]),
        ({**tools, "tool_choice": "required"}, [call]),
        ({**wanted, **tools}, [final, call]),
    ):
        server.post("/v1/chat/completions", {"messages": [USER], **fields})
        grammar = server.done[-1][0].sampling.grammar
        for answer in (final, call, '{"a": 1}'):
            for before in ("", thought):
                assert lets_through(grammar, before + answer) == (answer in right), (fields, before, answer)


def test_a_required_call_follows_a_thought_with_drafts_and_without(reference_live, monkeypatch):
    pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    monkeypatch.setattr(reference_live.service.tokenizer, "chat_template", FAMILIES["qwen3.5"])
    said = [{"role": "assistant", "content": "<think>\nI must call.</think>"}]
    body = {"messages": [USER, *said], "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    answers = [reference_live.post("/v1/chat/completions", {**body, "speculative": on}).json() for on in (True, False)]
    calls = [answer["choices"][0]["message"]["tool_calls"][0]["function"] for answer in answers]
    assert calls[0] == calls[1] and is_right(calls[0]["name"], json.loads(calls[0]["arguments"]))
