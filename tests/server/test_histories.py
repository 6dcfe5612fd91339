"""Histories: what stands in one is never refused, in any dialect, and what has no text is told of."""

import copy
import json
import random

import pytest
from templates import FAMILIES, GPT_OSS, HERMES, MINISTRAL

USER = {"role": "user", "content": "Go on."}
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
NAMES = "x-retrieve-spec-ignored"


def called(arguments, name="f"):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def block(*blocks, role="user"):
    return {"role": role, "content": list(blocks)}


PAST = [
    # (path, history, what the model reads of it, what is told of)
    (CHAT, [{"role": "assistant", "content": None, "tool_calls": [called("[")]}], '{"input": "["}', ""),
    (CHAT, [{"role": "assistant", "content": "", "tool_calls": [called("[1]")]}], '{"input": [1]}', ""),
    (CHAT, [{"role": "assistant", "content": "", "tool_calls": [called(None)]}], '"f", "arguments": {}', ""),
    (CHAT, [{"role": "assistant", "content": "", "tool_calls": [called("null")]}], '"f", "arguments": {}', ""),
    (CHAT, [{"role": "assistant", "content": "", "tool_calls": [called("")]}], '"f", "arguments": {}', ""),
    (CHAT, [{"role": "assistant", "function_call": {"name": "g", "arguments": '{"a": 1}'}}],
     '"g", "arguments": {"a"', ""),
    (CHAT, [{"role": "function", "name": "g", "content": "came"}], "came", ""),
    (CHAT, [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "p", "input": "x"}}]}],
     '{"name": "p", "arguments": {"input": "x"}}', ""),
    (CHAT, [block({"type": "image_url", "image_url": {"url": "data:"}})], "[image]", "messages.0 (image_url)"),
    (CHAT, [block({"type": "input_audio", "input_audio": {}})], "[audio]", "messages.0 (input_audio)"),
    (CHAT, [{"role": "assistant", "content": None, "refusal": "I will not."}], "I will not.", ""),
    (CHAT, [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "No.", ""),
    (CHAT, [block({"type": "file", "file": {"filename": "a.pdf", "file_data": "data:"}})], "[file a.pdf]",
     "messages.0 (file)"),
    (CHAT, [{"role": "assistant", "tool_calls": [called({})]},
            {"role": "tool", "tool_call_id": "c1", "content": {"n": "é"}}],
     'tool\n{"n": "é"}', ""),
    (CHAT, [{"role": "assistant", "tool_calls": [called({})]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"n": 3}]}],
     'tool\n[{"n": 3}]', ""),
    (MESSAGES, [block({"type": "tool_use", "id": "1", "name": "f", "input": {}}, role="assistant"),
                block({"type": "tool_result", "tool_use_id": "1", "content": {"n": 3}})], 'tool\n{"n": 3}', ""),
    (CHAT, [{"role": "critic", "content": "Hm."}], "user\nHm.", "messages.0.role (critic)"),
    (CHAT, [{"role": "assistant", "audio": {"id": "a"}}], "[audio]", "messages.0 (audio)"),
    (CHAT, [None, "a text", {"content": "nobody's"}], "user\na text<|im_end|>\n<|im_start|>user\nnobody's",
     "messages.0 (null), messages.2.role (none)"),
    (CHAT, [{"tool_calls": [called({})]}, {"tool_call_id": "c1", "content": "came"}],
     '"arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>tool\ncame',
     "messages.0.role (none), messages.1.role (none)"),
    (CHAT, [{"role": "system", "content": "Rule.", "tool_calls": "x"}], "system\nRule.", ""),
    (CHAT, [{"role": "assistant", "content": None}], "assistant\n<|im_end|>", ""),
    (OLLAMA, [None, 1, {"content": "x"}], "user\n1", "messages.0 (null), messages.2.role (none)"),
    (MESSAGES, [None, "a text"], "a text", "messages.0 (null)"),
    (MESSAGES, [block({"type": "image", "source": {}}, {"type": "text", "text": "x"})], "[image]x",
     "messages.0 (image)"),
    (MESSAGES, [block({"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "said"},
                      role="assistant")], "assistant\nsaid", ""),
    (MESSAGES, [block({"type": "redacted_thinking", "data": "xx"}, {"type": "text", "text": "said"}, role="assistant")],
     "assistant\nsaid", "messages.0 (redacted_thinking)"),
    (MESSAGES, [block({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {}}]})],
     "[image]", "messages.0 (image)"),
    (MESSAGES, [block({"type": "tool_result", "tool_use_id": "1",
                       "content": [{"type": "tool_reference", "tool_name": "look"}]})],
     "[tool_reference look]", "messages.0 (tool_reference)"),
    (MESSAGES, [block({"type": "tool_use", "id": "1", "name": "f", "input": "x"}, role="assistant")],
     '"arguments": {"input": "x"}', ""),
    (MESSAGES, [block({"type": "document", "source": {"type": "text", "data": "a page"}})], "a page", ""),
    (MESSAGES, [block({"type": "document", "source": {"type": "base64"}, "title": "t"})], "[document]",
     "messages.0 (document)"),
    (MESSAGES, [block({"type": "server_tool_use", "name": "web_search", "input": {}}, {"type": "text", "text": "found"},
                      role="assistant")], "[server_tool_use web_search]found", "messages.0 (server_tool_use)"),
    (MESSAGES, [block({"type": "search_result", "content": [{"type": "text", "text": "hit"}]})], "hit", ""),
    (RESPONSES, [{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "", "input.0 (reasoning)"),
    (RESPONSES, [{"type": "item_reference", "id": "msg_1"}], "", "input.0 (item_reference)"),
    (RESPONSES, [{"type": "web_search_call", "id": "w", "action": {"query": "q"}}], "", "input.0 (web_search_call)"),
    (RESPONSES, [{"type": "local_shell_call", "call_id": "1", "action": {"command": ["ls"]}},
                 {"type": "local_shell_call_output", "call_id": "1", "output": "came"}],
     '{"name": "local_shell", "arguments": {"command": ["ls"]}}', ""),
    (RESPONSES, [{"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
                 {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}],
     '{"name": "apply_patch", "arguments": {"input": "*** Begin"}}', ""),
    (RESPONSES, [{"type": "shell_call_output", "call_id": "1", "output": [{"stdout": "came", "stderr": ""}]}],
     '"stdout": "came"', ""),
    (RESPONSES, [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}], '{"input": "["}', ""),
    (RESPONSES, [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "No.", ""),
    (RESPONSES, [block({"type": "input_image", "image_url": "data:"})], "[image]", "input.0 (input_image)"),
    (RESPONSES, [block({"type": "input_file", "filename": "a.pdf"})], "[file a.pdf]", "input.0 (input_file)"),
    (RESPONSES, [{"type": "compaction", "encrypted_content": "x"}], "", "input.0 (compaction)"),
    (RESPONSES, [{"type": ["a"], "role": "user"}], "", "input.0 (_a_)"),
    (RESPONSES, [None, "a text", {"type": "message", "content": "x"}], "a text",
     "input.0 (null), messages.1.role (none)"),
    (RESPONSES, [{"type": "additional_tools", "tools": [{"type": "function", "name": "a!b"}, 1]}], "",
     "input.tools (a_b), input.tools (text)"),
    (RESPONSES, [{"type": "of tomorrow", "id": "1"}], "", "input.0 (of_tomorrow)"),
]  # fmt: skip


def asked(path, history):
    if path == RESPONSES:
        return {"input": [*history, USER]}
    return {"messages": [*history, USER], **({"max_tokens": 9} if path == MESSAGES else {})}


def test_every_item_is_read_or_told_of(served):
    server = served("said")
    for path, history, read, told in PAST:
        answer = server.post(path, asked(path, history))
        assert (answer.status_code, answer.headers.get(NAMES, "")) == (200, told), (history, answer.text)
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert read in prompt and "Go on." in prompt, (history, prompt)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (FAMILIES["qwen3"], "<think>\nI muse\n</think>\n\n<tool_call>"),
        (GPT_OSS, "<|channel|>analysis<|message|>I muse<|end|><|start|>assistant to=functions.f"),
        (MINISTRAL, "[THINK]I muse[/THINK][TOOL_CALLS]f"),
    ],
    ids=["qwen3", "gpt-oss", "ministral"],
)
def test_thoughts_of_the_past_reach_templates_that_show_them(served, templated, template, shown):
    templated.chat_template = template
    server = served("said")
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    for path, history in (
        (CHAT, [{"role": "assistant", "content": "", "reasoning_content": "I muse", "tool_calls": [called({})]}]),
        (CHAT, [{"role": "assistant", "content": "", "reasoning": "I muse", "tool_calls": [called({})]}]),
        (MESSAGES, [block({"type": "thinking", "thinking": "I muse", "signature": ""}, use, role="assistant")]),
        (RESPONSES, [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "I muse"}]}, call]),
        (RESPONSES, [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "I muse"}]}, call]),
    ):
        assert server.post(path, asked(path, history)).status_code == 200
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert shown in prompt, (history, prompt)
    said = {"role": "assistant", "content": "Text.", "reasoning_content": "I muse"}
    assert server.post(CHAT, asked(CHAT, [said])).status_code == 200
    assert "Text." in server.service.codec.decode(server.backend.prompts[-1])


def test_a_thought_without_an_answer_belongs_to_no_later_one(served, templated):
    templated.chat_template = FAMILIES["qwen3"]
    server = served("said")
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I muse"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    assert server.post(RESPONSES, asked(RESPONSES, [thought, USER, call])).status_code == 200
    assert "I muse" not in server.service.codec.decode(server.backend.prompts[-1])


def test_a_result_without_an_id_belongs_to_the_call_before_it(served):
    server = served("said")
    for given in ({}, {"id": "", "tool_call_id": ""}):
        call = {**called({}), "id": given.get("id")}
        came = {"role": "tool", "content": "came", **given}
        assert server.post(CHAT, asked(CHAT, [{"role": "assistant", "tool_calls": [call]}, came])).status_code == 200
        assert "tool\ncame<|im_end|>" in server.service.codec.decode(server.backend.prompts[-1])


def test_tools_of_a_provider_in_a_history_are_not_offered(served):
    server = served("said")
    tools = [{"name": "search", "input_schema": {"type": "object"}}]
    for kind, offered in (("mcp_list_tools", False), ("additional_tools", True), ("tool_search_output", True)):
        item = {"type": kind, "call_id": "1", "tools": tools}
        assert server.post(RESPONSES, asked(RESPONSES, [item])).status_code == 200
        assert ('"search"' in server.service.codec.decode(server.backend.prompts[-1])) == offered, kind


def test_tools_of_a_history_whose_names_are_too_long_are_told(served):
    server = served("said")
    spaces = [{"type": "namespace", "name": one * 100, "tools": [{"name": "f" * 100}]} for one in "ab"]
    answer = server.post(RESPONSES, {"input": [USER, {"type": "additional_tools", "tools": spaces}]})
    assert answer.status_code == 200 and "input.tools" in answer.headers[NAMES]


def test_numbers_that_python_does_not_read_are_texts(served):
    server, digits = served("said", n_ctx=1 << 14), "-" + "9" * 4301
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"n": "NUMBER", "text": 'say "1"', "more": [1, "é"]}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": {"n": "NUMBER"}}
    body = json.dumps(asked(MESSAGES, [block(call, role="assistant"), block(result)])).replace('"NUMBER"', digits)
    answer = server.client.post(MESSAGES, content=body)
    assert answer.status_code == 200, answer.text
    prompt = server.service.codec.decode(server.backend.prompts[-1])
    assert prompt.count(f'"n": "{digits}"') == 2 and r'"text": "say \"1\""' in prompt
    for wrong in (body[:-1], body.replace('"role"', '"' + r"\"" * 50_000, 1)):  # in less than a second
        assert server.client.post(MESSAGES, content=wrong).status_code == 400


@pytest.mark.parametrize("number", ["-0." + "9" * 5000, "1e-" + "0" * 5000 + "1", "1.5E+" + "0" * 50_000 + "1"])
def test_digits_of_a_fraction_or_an_exponent_are_no_numbers(served, number):
    server = served("said")
    body = json.dumps(asked(MESSAGES, []))[:-1] + f', "number": {number}, "cut": "\\ud800"}}'
    assert server.client.post(MESSAGES, content=body).status_code == 200


def test_what_asks_for_more_is_left_out_and_told(served):
    server = served("said")
    tools = [
        {"type": "function", "function": {"name": "f"}},
        {"type": "web_search"},
        {"type": "mcp", "server_url": "u"},
    ]
    asks = [
        (CHAT, {"tools": tools, "web_search_options": {}}, "tools.1 (web_search), tools.2 (mcp)"),
        (CHAT, {"tools": [tools[0]] * 2}, "tools.1 (again)"),
        (
            CHAT,
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"type": None, "properties": None, "required": None}},
                    }
                ]
            },
            "",
        ),
        (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ("/v1/completions", {"prompt": "a", "chat_template_kwargs": {"turns": 1}}, "chat_template_kwargs"),
        (MESSAGES, {"context_management": {}, "mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ""),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0 (bash_20250124)"),
        (
            RESPONSES,
            {"truncation": "auto", "include": ["file_search_call.results", "reasoning.encrypted_content"]},
            "truncation, include (file_search_call.results)",
        ),
        (
            RESPONSES,
            {"tools": [{"type": "custom", "name": "p"}, {"type": "function", "name": "f"}]},
            "tools.0 (custom)",
        ),
    ]
    for path, fields, told in asks:
        answer = server.post(path, {**asked(path, []), **fields})
        assert (answer.status_code, answer.headers.get(NAMES, "")) == (200, told), answer.text
    counted = server.post(f"{MESSAGES}/count_tokens", {"messages": [USER], "thinking": {"type": "adaptive"}, "tools": [
        {"type": "web_search_20250305", "name": "web_search"}]})  # fmt: skip
    assert counted.status_code == 200 and counted.headers[NAMES] == "tools.0 (web_search_20250305)"


def test_only_allowed_tools_are_offered(served):
    server = served("said")
    chat_tools = [{"type": "function", "function": {"name": name}} for name in ("first", "second")]
    tools = [{"type": "function", "name": name} for name in ("first", "second")]
    named = {"type": "function", "name": "second"}
    chat_choice = {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "second"}}]}}  # fmt: skip
    for path, fields in (
        (CHAT, {"tools": chat_tools, "tool_choice": chat_choice}),
        (RESPONSES, {"tools": tools, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [named]}}),
    ):
        assert server.post(path, {**asked(path, []), **fields}).status_code == 200
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert "second" in prompt and "first" not in prompt


def test_functions_of_a_namespace_are_called_by_its_name(served):
    said = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    space = {"type": "namespace", "name": "others", "tools": [{"type": "function", "name": "f"},
                                                               {"type": "function", "name": "only"}]}  # fmt: skip
    tools = [{"type": "function", "name": "f"}, space]
    expected = {"f": ("f", None), "others__f": ("f", "others"), "only": ("only", "others")}
    for name, known in expected.items():
        server = served(said % name)
        (call,) = server.post(RESPONSES, {**asked(RESPONSES, []), "tools": tools}).json()["output"]
        assert (call["name"], call.get("namespace")) == known
        came = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        server.post(RESPONSES, {**asked(RESPONSES, [call, came]), "tools": tools})
        assert f'"name": "{name}", "arguments"' in server.service.codec.decode(server.backend.prompts[-1])


def test_more_tools_and_messages_than_one_counts(served):
    server = served("said")
    server.service.backend.n_ctx = server.service.prompts.n_ctx = 1 << 20
    server.service.prompts.most_chars = 1 << 30
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(300)]
    body = {"messages": [USER] * 1500, "tools": tools}
    assert server.post(CHAT, body).status_code == 200


# ── instructions ──


@pytest.mark.parametrize("family", FAMILIES)
def test_instructions_stand_first_whoever_gives_them(served, templated, family):
    templated.chat_template = FAMILIES[family]
    server = served("said")
    turns = [{"role": "user", "content": "First."}, {"role": "assistant", "content": "Yes."}, USER]
    rules = [{"role": role, "content": f"Rule {number}."} for number, role in enumerate(("system", "developer"), 1)]
    for path, body in (
        (CHAT, {"messages": [*rules, *turns]}),
        (RESPONSES, {"instructions": "Rule 1.", "input": [*rules[1:], *turns]}),
        (MESSAGES, {"max_tokens": 9, "system": "Rule 1.", "messages": [*rules[1:], *turns]}),
    ):
        assert server.post(path, body).status_code == 200, path
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert prompt.count("Rule 1.\n\nRule 2.") == 1 and "developer" not in prompt
        assert prompt.index("Rule 2.") < prompt.index("First.")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"mistral"}))
def test_later_instructions_stay_in_place_and_the_prompt_goes_on_from_the_one_before(served, templated, family, path):
    """Claude Code adds some after most turns; Mistral's template moves even the first ones."""
    templated.chat_template = FAMILIES[family]
    server = served("said")
    answer = {"role": "assistant", "content": "said"}
    turns = [{"role": "system", "content": "Rule 1."}, {"role": "user", "content": "First."}, answer, USER]
    for number, role in ((2, "system"), (3, "developer")):
        turns.append({"role": role, "content": f"Rule {number}."})
        assert server.post(path, {"max_tokens": 9, "messages": turns}).status_code == 200
        turns += [answer, {"role": "user", "content": f"Question {number}."}]
    prompts = list(map(server.service.codec.decode, server.backend.prompts))
    said = ["Rule 1.", "First.", "Go on.", "Rule 2.", "Question 2.", "Rule 3."]
    assert [prompts[1].count(text) for text in said] == [1] * len(said)
    assert sorted(said, key=prompts[1].index) == said
    assert prompts[1].startswith(prompts[0][: prompts[0].index("Rule 2.") + len("Rule 2.")])


def test_a_developer_stays_one_where_the_template_knows_developers(served, templated):
    templated.chat_template = HERMES.replace(
        "{{ message.role }}", "{{ '!developer!' if message.role == 'developer' else message.role }}"
    )
    server = served("said")
    said = [{"role": "developer", "content": "Rule 2."}, {"role": "system", "content": "Rule 1."}, USER]
    server.post(CHAT, {"messages": said})
    prompt = server.service.codec.decode(server.backend.prompts[-1])
    assert "system\nRule 1.<|im_end|>\n<|im_start|>!developer!\nRule 2.<|im_end|>" in prompt


def test_a_line_that_changes_with_every_request_is_left_out(served):
    server = served("said")
    for number, name in ((1, "x-anthropic-billing-header"), (2, "x-anthropic-billing-header")):
        line = f"{name}: cc_version=2.{number};"
        systems = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief. " * 50}]
        body = {**asked(MESSAGES, []), "system": systems}
        answer = server.post(MESSAGES, body)
        assert answer.headers[NAMES] == f"messages.0 ({name})"
    assert answer.json()["usage"]["input_tokens"] == 1
    joined = {"messages": [{"role": "system", "content": f"{line}\nBe brief."}, USER]}
    prompt = server.post("/apply-template", joined).json()["prompt"]
    assert "billing" not in prompt and "system\nBe brief." in prompt


# ── text that is none ──


def test_half_a_character_is_a_replacement_character(served):
    server = served("said")
    for spelled, read in (
        (b"a \\ud83d b", "a � b"), (b"\\ude00", "�"), (b"\\\\ud83d", "\\ud83d"),
        (b"\\ud83d\\ude00", "😀"), (b"\\ud83d\\ud83d\\ude00", "�😀"),
    ):  # fmt: skip
        content = b'{"messages": [{"role": "user", "content": "<%s>"}], "user": "\\ud800"}' % spelled
        assert server.client.post(CHAT, content=content).status_code == 200
        assert f"<{read}>" in server.service.codec.decode(server.backend.prompts[-1])
    marked = "\ufeff" + json.dumps({"messages": [USER]})  # as Windows begins files
    assert server.client.post(CHAT, content=marked).status_code == 200


def test_a_prompt_that_is_too_long_is_told_in_the_dialects_words(served):
    server = served("said")
    server.service.backend.n_ctx = server.service.prompts.n_ctx = 64
    long = {"role": "user", "content": "word " * 200}
    for path in (CHAT, RESPONSES):
        answer = server.post(path, {"messages": [long], "input": [long]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 64 tokens" in error["message"]
    with server.client.stream("POST", RESPONSES, json={"input": [long], "stream": True}) as answer:
        assert answer.status_code == 200  # Codex knows it, and compacts, by this event alone
        *_, data, _, _ = "".join(answer.iter_text()).split("\n")
    failed = json.loads(data.removeprefix("data: "))
    assert failed["type"] == "response.failed" and failed["response"]["error"]["code"] == "context_length_exceeded"
    answer = server.post(MESSAGES, {"max_tokens": 9, "messages": [long]})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    count = server.post(f"{MESSAGES}/count_tokens", {"messages": [long]}).json()["input_tokens"]
    assert error["message"] == f"prompt is too long: {count} tokens > 63 maximum"
    error = server.post("/completion", {"prompt": "word " * 200}).json()["error"]
    assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == 64 < error["n_prompt_tokens"]


def places(value):
    """Everything in a JSON value that can be another, as what it is in and its place there."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


HISTORIES = {
    CHAT: [
        {"role": "system", "content": "Rule."},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [called({}), called({})]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "came"}]},
        {"role": "assistant", "content": "said", "refusal": None},
    ],
    MESSAGES: [
        block({"type": "text", "text": "a"}, {"type": "image", "source": {"type": "url", "url": "x"}}),
        block({"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "id": "1", "name": "f", "input": {}},
              role="assistant"),
        block({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "came"}]}),
    ],
    RESPONSES: [
        {"type": "additional_tools", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "namespace": None, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "came"}]},
    ],
    OLLAMA: [
        {"role": "user", "content": "a", "images": ["x"]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "tool_name": "f", "content": "came"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", HISTORIES)
def test_no_history_is_refused(served, templated, path):
    """Items that are lost, doubled, in another order, or anything else in any part of them."""
    server, draw = served("said", run=9), random.Random(path)
    odd = [None, True, 1, 1e300, "x", "", "assistant", "tool", [], {}, [None], {"type": None}, {"role": "critic"}]
    for number in range(80):
        templated.chat_template = list(FAMILIES.values())[number % len(FAMILIES)]
        history = copy.deepcopy(HISTORIES[path])
        for _ in range(draw.choice([1, 1, 2, 4, 8])):
            (inside, key), change = draw.choice(list(places(history)) or [([None], 0)]), draw.randrange(5)
            if change == 0:
                del inside[key]
            elif change == 1 and isinstance(inside, list):
                inside.insert(key, copy.deepcopy(inside[key]))
            elif change == 2 and isinstance(inside, list):
                draw.shuffle(inside)
            else:
                inside[key] = copy.deepcopy(draw.choice(odd))
        answer = server.post(path, {**asked(path, history), "stream": False})
        assert answer.status_code == 200, (answer.text, history)


def test_json_of_any_shape_is_answered(served):
    """What clients may send of a request, wrong in every way, is a 200 or a 400."""
    server = served("said")
    odd = [None, 1, "x", [], {}, [1], [None], [{}], {"type": 1}, {"type": {}}, [{"type": [], "text": 1}], True, 1.5]
    for one in odd:
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": one}]}),
            (CHAT, {"messages": [{"role": "assistant", "content": one, "tool_calls": one}, USER]}),
            (CHAT, {"messages": [{"role": "assistant", "function_call": one, "reasoning": one}, USER]}),
            (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": one, "function": one}]}, USER]}),
            (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": one}}]}, USER]}),
            (CHAT, {"messages": [{"role": "tool", "tool_call_id": one, "content": one}, USER]}),
            (CHAT, {"messages": [{"role": one, "content": "x"}, USER], "tools": one, "tool_choice": one}),
            (CHAT, {"messages": [USER], "tool_choice": {"type": "allowed_tools", "allowed_tools": one, "tools": one}}),
            (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": [one]}], "system": one}),
            (MESSAGES, {"max_tokens": 9, "messages": [USER, {"role": "assistant", "content": [
                {"type": "tool_use", "id": one, "name": one, "input": one}]}, USER], "tools": one, "thinking": one}),
            (RESPONSES, {"input": [one, USER]}),
            (RESPONSES, {"input": [{"type": one, "role": one, "content": one}, USER], "tools": one}),
            (RESPONSES, {"input": [{"type": "function_call", "name": one, "namespace": one, "call_id": one,
                                    "arguments": one}, USER], "tools": [{"type": "namespace", "tools": one}]}),
            (RESPONSES, {"input": [{"type": "x_call_output", "output": one}, {"type": "reasoning", "summary": one,
                                    "content": one}, USER], "tool_choice": one, "tools": [one]}),
        ):  # fmt: skip
            answer = server.post(path, json.loads(json.dumps(body)))
            assert answer.status_code in (200, 400), (body, answer.text)


# ── templates with gaps ──

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}{{ more(m) }}<|im_end|>\n"
SHOWN = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
GAPS = {
    "leaves calls out": ("", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>\n<tool_call>"),
    "shows the first call alone": (
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}",
        "{\"name\": \"f\", \"arguments\": {\"n\": 2}}<|im_end|>\n<|im_start|>tool\ncame 2",
    ),
    "fails without a description": (
        "{% for t in tools or [] %}{{ t.function.description + '!' }}{% endfor %}" + SHOWN, "n\": 2"),
    "fails without descriptions of arguments": (
        "{% for t in tools or [] %}{{ t.function.parameters.properties.a.description + '!' }}{% endfor %}" + SHOWN,
        "n\": 2"),
    "wants the arguments as text": (
        "{% for c in m.tool_calls or [] %}{{ 'calls ' + c.function.name + c.function.arguments }}{% endfor %}",
        'calls f{"n": 1}calls f{"n": 2}'),
    "fails with tools": ("{% if tools %}{{ raise_exception('no') }}{% endif %}" + SHOWN, '"arguments": {"n": 2}'),
    "wants functions and the date": ("{{ functions + datetime + '!' }}" + SHOWN, '"n": 2'),
    "refuses empty answers": ("{% if m.role == 'assistant' and not (m.content or m.tool_calls) %}"
                              "{{ raise_exception('no') }}{% endif %}" + SHOWN, '"n": 2'),
    "refuses calls": ("{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}", '"arguments": {"n": 2}'),
    "wants a user": (SHOWN + "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
                     "{{ raise_exception('No user query') }}{% endif %}", '"n": 2'),
}  # fmt: skip


@pytest.mark.parametrize("gap", GAPS)
def test_calls_are_shown_whatever_the_template_leaves_out(served, templated, gap):
    more, shown = GAPS[gap]
    templated.chat_template = (
        "{# tools <tool_call> #}{% macro more(m) %}"
        + more
        + "{% endmacro %}{% for m in messages %}"
        + TURN
        + "{% endfor %}"
    )
    server = served("said")
    calls = [{**called({"n": number}), "id": f"call-{number}"} for number in (1, 2)]
    came = [{"role": "tool", "tool_call_id": f"call-{number}", "content": f"came {number}"} for number in (1, 2)]
    said = [{"role": "assistant", "content": ""}, {"role": "assistant", "content": "", "tool_calls": calls}]
    past = [{"role": "system", "content": "Rule."}, *said[gap != "refuses empty answers" :], *came]
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = {"messages": past, "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}
    assert server.post(CHAT, body).status_code == 200
    prompt = server.service.codec.decode(server.backend.prompts[-1])
    assert shown in prompt and "came 1" in prompt and "came 2" in prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_what_came_of_a_call_follows_it_and_what_came_of_none_is_the_users(served, templated, family):
    templated.chat_template = FAMILIES[family]
    server = served("said")
    calls = [{**called({"n": number}), "id": f"call-{number}"} for number in (1, 2)]
    came = [{"role": "tool", "tool_call_id": f"call-{number}", "content": f"came {number}"} for number in (0, 1, 2)]
    past = [came[0], USER, {"role": "assistant", "content": "", "tool_calls": calls}, USER, *came[1:]]
    assert server.post(CHAT, {"messages": past}).status_code == 200
    prompt = server.service.codec.decode(server.backend.prompts[-1])
    last = prompt.rindex(USER["content"])
    assert prompt.index("came 0") < prompt.index("came 1") < prompt.index("came 2") < last


ODD_SCHEMAS = [
    # (what the template fails at, the schema of an argument, what it shows)
    ("'null' in a.type", {"type": ["string", "null"]}, "<tools>"),
    ("a['$ref']", {"$ref": "#"}, "You may call these functions"),
]


@pytest.mark.parametrize(("fails", "schema", "shown"), ODD_SCHEMAS)
def test_tools_are_shown_whatever_of_a_schema_the_template_fails_at(served, templated, fails, schema, shown):
    """Hermes' own, and Command R's, never end at null among several types."""
    templated.chat_template = (
        "{% for t in tools or [] %}{% set a = t.function.parameters.properties.a %}"
        f"{{% if {fails} %}}{{{{ raise_exception('no') }}}}{{% endif %}}{{% endfor %}}"
    ) + FAMILIES["qwen2.5"]
    server = served("said")
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    assert server.post(CHAT, {"messages": [USER], "tools": tools}).status_code == 200
    prompt = server.service.codec.decode(server.backend.prompts[-1])
    assert shown in prompt and '"look"' in prompt and "Go on." in prompt


REFUSES_EMPTY = FAMILIES["mistral"].replace(
    '{{- " " + message.content + "</s>" }}',
    '{%- if not message.content %}{{- raise_exception("no content") }}{%- endif %}{{- message.content + "</s>" }}',
)
"""As Ministral 3's."""


@pytest.mark.parametrize("results", [1, 0])
@pytest.mark.parametrize("template", [FAMILIES["mistral"], REFUSES_EMPTY])
def test_calls_stay_calls_when_the_user_speaks_after_them(served, templated, template, results):
    """Claude Code sends reminders with results; other agents drop the result of a call that was interrupted."""
    templated.chat_template = template
    server = served("said")
    came = {"role": "tool", "tool_call_id": "c1", "content": "came"}
    past = [USER, {"role": "assistant", "content": "", "tool_calls": [called({})]}, *[came] * results]
    for role in ("user", "system"):
        body = {"messages": [*past, {"role": role, "content": "Be brief."}, *[USER] * (role == "system")]}
        body["tools"] = [{"type": "function", "function": {"name": "f"}}]
        assert server.post(CHAT, body).status_code == 200
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert "[TOOL_CALLS] [" in prompt and "Be brief." in prompt and "<tool_" not in prompt


UNTIL_ANSWERED = HERMES.replace(
    "{{ message.content }}",
    "{% if not (message.tool_calls and messages[loop.index:] | rejectattr('tool_calls', 'defined')"
    " | selectattr('role', 'equalto', 'assistant') | list) %}{{ message.content }}{% endif %}",
)
"""Leaves out text beside a call when an answer follows, as gpt-oss's does."""


@pytest.mark.parametrize("template", [*map(FAMILIES.get, ("qwen3", "llama3", "mistral")), UNTIL_ANSWERED])
def test_text_beside_a_call_is_kept_before_it(served, templated, template):
    """Templates of the Llama 3 and the Mistral kind leave it out."""
    templated.chat_template = template
    server = served("said")
    beside = {"role": "assistant", "content": "First I look.", "tool_calls": [called({}, name="look")]}
    came = {"role": "tool", "tool_call_id": "c1", "content": "came"}
    tools = [{"type": "function", "function": {"name": "look"}}]
    for answers in ([], [{"role": "assistant", "content": "Seen."}, USER]):
        body = {"messages": [USER, beside, came, *answers], "tools": tools}
        assert server.post(CHAT, body).status_code == 200
        prompt = server.service.codec.decode(server.backend.prompts[-1])
        assert prompt.count("First I look.") == 1
        assert prompt.index("First I look.") < prompt.index('"name": "look", ') < prompt.index("came")


def test_a_template_that_looks_through_tools_where_there_are_none_is_given_an_empty_list(served, templated):
    templated.chat_template = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + FAMILIES["chatml"]
    assert served("said").post(CHAT, {"messages": [USER]}).status_code == 200
