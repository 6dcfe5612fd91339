"""Ollama's dialect: what its clients ask, whole and in lines, is what a chat answers."""

import json

import pytest
from templates import FAMILIES, TOOLS

USER = {"role": "user", "content": "Go on."}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": true}}\n</tool_call>'


def lines(server, path, body):
    with server.client.stream("POST", path, json=body) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "application/x-ndjson")
        return [json.loads(line) for line in response.iter_lines()]


@pytest.fixture
def thinker(served, templated):
    templated.chat_template = FAMILIES["qwen3"]
    return served(f"<think>Hm.</think>Both.\n{CALL}", 5)


def test_a_chat_whole_and_in_lines(thinker):
    body = {"model": "tiny:latest", "messages": [USER], "tools": TOOLS}
    whole = thinker.post("/api/chat", {**body, "stream": False}).json()
    streamed = lines(thinker, "/api/chat", body)
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": True}}}
    assert whole["message"] == {"role": "assistant", "content": "Both.", "thinking": "Hm.", "tool_calls": [call]}
    for name in ("content", "thinking"):
        assert "".join(line["message"].get(name, "") for line in streamed) == whole["message"][name]
    assert [line["message"]["tool_calls"] for line in streamed if "tool_calls" in line["message"]] == [[call]]
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    for line in (whole, streamed[-1]):
        assert line["done_reason"] == "stop" and line["eval_count"] > 5 and line["prompt_eval_count"] > 5
        assert all(isinstance(line[name], int) for name in line if name.endswith("duration"))
    assert whole["model"] == "tiny" and whole["created_at"].startswith("20")


def test_results_belong_to_the_calls_before_them(served, templated):
    templated.chat_template = FAMILIES["mistral"]
    server = served("said")
    calls = [{"function": {"name": "f", "arguments": {"n": number}}} for number in (1, 2)]
    results = [{"role": "tool", "tool_name": "f", "content": f"came {number}"} for number in (1, 2)]
    picture = {"role": "user", "content": "What is it?", "images": ["aGk="]}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results, picture]
    answer = server.post("/api/chat", {"messages": messages, "stream": False})
    assert answer.headers["x-retrieve-spec-ignored"] == "messages.4 (image)"
    prompt = server.service.codec.decode(server.backend.prompts[-1])
    for number in (1, 2):
        call_id = prompt.split(f'{{"n": {number}}}}}, "id": "')[1][:9]
        assert f'{{"content": came {number}, "call_id": "{call_id}"}}' in prompt
    assert "What is it?[image]" in prompt


def test_generate_asks_continues_and_fills(served, templated):
    templated.chat_template = FAMILIES["qwen2.5"]
    server, codec = served("said"), served("said").service.codec
    asks = [
        (
            {"prompt": "Hello", "system": "Be brief."},
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello",
        ),
        ({"prompt": "x = 1\ny = ", "raw": True}, "x = 1\ny = "),
        ({"prompt": "a = ", "suffix": "\nb = 2"}, "<|fim_prefix|>a = <|fim_suffix|>\nb = 2<|fim_middle|>"),
    ]
    for fields, begun in asks:
        body = {"model": "any", **fields}
        assert server.post("/api/generate", {**body, "stream": False}).json()["response"] == "said"
        assert begun in codec.decode(server.backend.prompts[-1])
        assert "".join(line["response"] for line in lines(server, "/api/generate", body)) == "said"


def test_options_are_openais(served):
    server = served("one two three four")
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7, "num_predict": 2, "num_ctx": 4096,
               "repeat_penalty": 1.1, "stop": ["four"], "mirostat": 0}  # fmt: skip
    body = {"messages": [USER], "stream": False, "options": options, "keep_alive": "5m"}
    answer = server.post("/api/chat", body).json()
    assert (answer["eval_count"], answer["done_reason"]) == (2, "length")
    sampling = server.done[-1][0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.9, 7)
    assert sampling.repetition == 1.1
    answer = server.post("/api/chat", {**body, "options": {"stop": [" two"], "num_predict": -2}}).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("one", "stop")


def test_json_is_asked_for_by_format(reference_live):
    pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")
    schema = {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"], "additionalProperties": False}
    body = {"messages": [USER], "stream": False, "format": schema, "options": {"num_predict": 200}}
    assert json.loads(reference_live.post("/api/chat", body).json()["message"]["content"]) == {"n": 1}


def test_what_there_is(thinker):
    tags = thinker.client.get("/api/tags").json()["models"]
    running = thinker.client.get("/api/ps").json()["models"]
    assert [model["name"] for model in tags] == ["tiny"] == [model["model"] for model in running]
    shown = thinker.post("/api/show", {"model": "tiny"}).json()
    assert shown["model_info"]["general.basename"] == "tiny"
    assert shown["capabilities"] == ["completion", "tools", "insert", "thinking"]
    assert shown["model_info"]["model.context_length"] == 4096 and "tool_call" in shown["template"]
    assert int(thinker.client.get("/api/version").json()["version"].split(".")[1]) >= 6
    for path in ("/api/pull", "/api/embed"):
        gone = thinker.post(path, {"model": "x"})
        assert gone.status_code == 404 and "/v1" in gone.json()["error"]


def test_a_request_without_a_question_loads_the_model(thinker):
    for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"keep_alive": -1})):
        answer = thinker.post(path, body).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load") and not thinker.backend.prompts


def test_errors_are_texts(thinker):
    for path, body in (("/api/chat", {"messages": "x"}), ("/api/generate", {"prompt": "x", "template": "{{ x }}"})):
        answer = thinker.post(path, body)
        assert answer.status_code == 400 and isinstance(answer.json()["error"], str)
    thinker.backend.fail = True
    assert lines(thinker, "/api/chat", {"messages": [USER]})[-1] == {"error": "RuntimeError: out of memory"}
