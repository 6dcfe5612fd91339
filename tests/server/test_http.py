import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from scripted import ScriptedBackend
from waiting import wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.workspace import Workspace


@pytest.fixture
def server(live, say):
    return live(say("urn a + b\n"))


HELLO = [{"role": "user", "content": "hello"}]
INFILL = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    ret"}


# ── /infill ──


def test_infill_answer_has_every_field_clients_read(server):
    """llama.vscode asks for three by default, and takes an object for one."""
    raw = server.post("/infill", {**INFILL, "n_cmpl": 3})
    assert raw.status_code == 200 and raw.text.startswith("{") and "\n" not in raw.text
    body = raw.json()
    expected = {
        "content": "urn a + b\n", "stop": True, "stop_type": "eos", "has_new_line": True, "truncated": False,
        "tokens_evaluated": len(server.backend.prompts[0]),
    }  # fmt: skip
    assert expected.items() <= body.items()
    assert body["generation_settings"]["n_ctx"] == 4096
    for name in ("n", "ms", "per_token_ms", "per_second"):
        assert isinstance(body["timings"][f"prompt_{name}"], (int, float))
        assert isinstance(body["timings"][f"predicted_{name}"], (int, float))
    assert body["timings"]["draft_n_accepted"] > 0
    assert body["timings"]["draft_n"] >= body["timings"]["draft_n_accepted"]


def test_infill_prompt_appends_the_cursor_line_to_the_prefix(server, codec):
    server.post("/infill", {**INFILL, "input_extra": [{"text": "x = 1\n", "filename": "x.py", "time": [1, 2]}]})
    assert codec.decode(server.backend.prompts[0]) == (
        "<|repo_name|>myproject\n<|file_sep|>x.py\nx = 1\n<|file_sep|>filename\n"
        "<|fim_prefix|>def add(a, b):\n    ret<|fim_suffix|>\n<|fim_middle|>"
    )


def test_response_fields_project_and_keep_paths_as_keys(server):
    body = server.post("/infill", {**INFILL, "response_fields": ["content", "timings/prompt_n", "nothing"]}).json()
    assert set(body) == {"content", "timings/prompt_n"}
    assert server.post("/infill", {**INFILL, "response_fields": [""]}).json() == {}


def test_prewarm_reads_the_prompt_and_says_nothing(server, codec):
    extra = [{"text": "def helper():\n    return 42\n", "filename": "h.py"}]
    warm = {"input_prefix": "", "input_suffix": "", "prompt": "", "input_extra": extra, "n_predict": 0, "samplers": []}
    body = server.post("/infill", warm).json()
    assert (body["content"], body["tokens_predicted"]) == ("", 0)
    assert server.service.kept("")["session_tokens"] > 5
    body = server.post("/infill", {**INFILL, "input_extra": extra}).json()
    assert body["timings"]["cache_n"] > 15
    fresh = server.post("/infill", {**INFILL, "input_extra": extra, "cache_prompt": False}).json()
    assert (fresh["timings"]["cache_n"], fresh["content"]) == (0, body["content"])


def test_infill_stream_ends_with_an_empty_stop_event(server, codec):
    events = [
        json.loads(event) for event in server.events("/infill", {**INFILL, "stream": True, "return_tokens": True})
    ]
    assert "".join(event["content"] for event in events) == "urn a + b\n"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["content"] == ""
    assert "timings" in events[-1]
    whole = server.post("/infill", INFILL).json()
    assert events[-1]["prompt"] == whole["prompt"] == codec.decode(server.backend.prompts[0])


def test_a_model_without_fim_says_501_and_what_is_missing(live, say, tokenizer, monkeypatch):
    monkeypatch.setattr("retrieve_spec.server.service.find_format", lambda codec: None)
    raw = live(say("x")).post("/infill", INFILL)
    assert raw.status_code == 501
    assert "Infill is not supported by this model" in raw.json()["error"]["message"]


# ── /v1/completions and /v1/chat/completions ──


def test_raw_prompts_spell_control_tokens(server, codec):
    text = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    server.post("/v1/completions", {"prompt": text, "max_tokens": 5})
    assert server.backend.prompts[0] == (1, *codec.encode("a"), 3, *codec.encode("b"), 2)
    server.post("/v1/completions", {"prompt": "a = ", "suffix": "\nb = 2", "max_tokens": 20})
    assert codec.decode(server.backend.prompts[1]).endswith("<|fim_prefix|>a = <|fim_suffix|>\nb = 2<|fim_middle|>")
    several = server.post("/v1/completions", {"prompt": ["a", "b"], "suffix": "\n", "max_tokens": 20}).json()
    assert [(choice["index"], choice["text"]) for choice in several["choices"]] == [(i, "urn a + b\n") for i in (0, 1)]


def test_a_stop_that_spells_a_control_token_is_a_token(live, codec):
    file_sep = codec.token_id("<|im_end|>")
    server = live(ScriptedBackend(lambda prompt: [*codec.encode("one"), file_sep, *codec.encode("two")]))
    body = server.post("/v1/completions", {"prompt": "x", "stop": ["<|im_end|>", "def"], "max_tokens": 9}).json()
    assert body["choices"][0]["text"] == "one"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_stream_puts_the_reason_before_done_and_usage_only_on_request(server):
    events = server.events("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 20})
    assert events[-1] == "[DONE]"
    bodies = [json.loads(event) for event in events[:-1]]
    assert bodies[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(body["choices"] for body in bodies)
    assert "".join(body["choices"][0]["text"] for body in bodies) == "urn a + b\n"
    options = {"stream_options": {"include_usage": True}}
    events = server.events("/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 20, **options})
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


def test_a_chat_is_chatml_without_injection_and_its_stream_begins_with_the_role(server, codec):
    request = {"messages": [{"role": "user", "content": "<|im_end|>"}], "stream": True, "max_tokens": 20}
    bodies = [json.loads(event) for event in server.events("/v1/chat/completions", request)[:-1]]
    (prompt,) = server.backend.prompts
    assert codec.decode(prompt).startswith("<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant")
    assert prompt.count(codec.token_id("<|im_end|>")) == 1
    assert bodies[0]["choices"][0]["delta"]["role"] == "assistant"
    assert bodies[0]["object"] == "chat.completion.chunk"
    assert "".join(body["choices"][0]["delta"].get("content", "") for body in bodies) == "urn a + b\n"


def test_as_many_tokens_as_fit(live, codec):
    ids = codec.encode("x")
    server = live(ScriptedBackend(lambda prompt: ids * 5000, n_ctx=6000))
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": -1}),
        ("/v1/chat/completions", {"messages": HELLO}),  # agents let the model end
    ):
        answer = server.post(path, body).json()
        assert answer["usage"]["completion_tokens"] == 5000
        assert answer["choices"][0]["finish_reason"] == "length"
    server.backend.n_ctx = 600
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": -1}).json()["usage"]["total_tokens"] == 600


@pytest.mark.parametrize("path", ["/infill", "/completion"])
def test_llama_cpp_takes_openais_limit_of_tokens_too(live, codec, path):
    server = live(ScriptedBackend(lambda prompt: codec.encode("x") * 500))
    body = {**INFILL, "prompt": "a"}
    assert server.post(path, {**body, "max_tokens": 3}).json()["tokens_predicted"] == 3
    assert server.post(path, {**body, "max_tokens": 3, "n_predict": 5}).json()["tokens_predicted"] == 5


def test_deadlines_are_asked_for_or_the_operators(live, say):
    def deadlines(**options):
        server = live(say("x"), config=ServeConfig(**options))
        for fields in ({}, {"deadline_ms": 90_000}):
            server.post("/v1/chat/completions", {"messages": HELLO, **fields})
            server.post("/infill", {**INFILL, **fields})
        return [task.deadline_s for task, _ in server.done]

    assert deadlines() == [None, 10, 90, 90]
    assert deadlines(deadline_s=5) == [5, 5, 90, 90]


@pytest.mark.parametrize(
    "prompt", ["<fim_prefix>a<fim_suffix>b<fim_middle>", "[SUFFIX]b[PREFIX]a", "<PRE> a <SUF>b <MID>"]
)
def test_a_prompt_in_another_models_format_is_501(server, prompt):
    for path in ("/v1/completions", "/completion"):
        raw = server.post(path, {"prompt": prompt})
        assert raw.status_code == 501, raw.text
        assert "format that this model does not know. Its own is qwen's" in raw.json()["error"]["message"]
    about_it = f"The format is {prompt} for some."
    assert server.post("/v1/completions", {"prompt": about_it}).status_code == 200


# ── small endpoints ──


def test_small_endpoints(server):
    health = server.client.get("/health").json()
    assert (health["status"], health["fim"]) == ("ok", "qwen") and server.client.get("/v1/health").json() == health
    listed = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "tiny-Fast-Apply"]
    assert server.client.get("/v1/models/tiny").json() == listed[0]
    assert server.client.head("/v1/models/tiny").status_code == server.client.head("/v1/models").status_code == 200
    assert "'owner/other'" in server.client.get("/v1/models/owner/other").json()["error"]["message"]
    assert server.client.get("/props").json()["default_generation_settings"]["n_ctx"] == 4096
    tokens = server.post("/tokenize", {"content": "<|fim_prefix|>x"}).json()["tokens"]
    assert tokens[0] == 1 and server.post("/detokenize", {"tokens": tokens}).json()["content"] == "<|fim_prefix|>x"
    pieces = server.post("/tokenize", {"content": "a b", "with_pieces": True}).json()["tokens"]
    assert "".join(token["piece"] for token in pieces) == "a b"
    asked = server.post("/tokenize", {"prompt": "a b", "add_special_tokens": False, "return_token_strs": True}).json()
    assert "".join(asked["token_strs"]) == "a b" and asked["count"] == len(asked["tokens"]) < asked["max_model_len"]
    prompt = server.post("/apply-template", {"messages": HELLO}).json()["prompt"]
    tokens = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == prompt
    assert "<|im_start|>" in server.post("/apply-template", {"messages": HELLO}).json()["prompt"]
    assert server.client.delete("/v1/workspace").json()["forgotten"] is True
    assert server.client.get("/nowhere").json()["error"]["code"] == 404
    assert server.client.get("/infill").status_code == 405


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_last_text_is_sent_with_the_end_of_its_stream(live, say, path):
    server = live(say("one two three", run=30))
    count = server.service.queue._on_done  # what is sent before it, arrives before the rest
    server.service.queue._on_done = lambda task, done: (time.sleep(0.3), count(task, done))
    asked = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 20}
    with server.client.stream("POST", path, json=asked) as response:
        chunks = list(response.iter_raw())
    assert [b"three" in chunk for chunk in chunks] == [b"[DONE]" in chunk for chunk in chunks], chunks


# ── who may call, and how much ──


@pytest.mark.parametrize("ping_s", [0.05, 0])
def test_a_stream_has_comments_while_a_long_prompt_is_read(live, say, ping_s):
    server, seen = live(say("one two"), config=ServeConfig(sse_ping_s=ping_s, prefill_chunk=16)), []
    server.backend.gate = threading.Semaphore(0)
    body = {"messages": [{"role": "user", "content": "word " * 40}], "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            seen += [line] if line else []
            if not ping_s or seen.count(": ping") == 3:
                server.backend.gate.release(100)
    words = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in seen if "{" in line)
    assert words == "one two" and seen[-1] == "data: [DONE]"
    assert seen.count(": ping") >= 3 if ping_s else ": ping" not in seen
    first = next(number for number, line in enumerate(seen) if '"content":"one' in line)
    assert ": ping" not in seen[first:]


def test_what_keeps_a_workspace_from_being_followed_names_no_files_to_everybody(live, say, tokenizer, tmp_path):
    def attach(store):
        raise PermissionError(13, "Permission denied", f"{tmp_path}/private plans.py")

    (tmp_path / "plans.py").write_text("x = 1\n" * 20)
    workspace = Workspace([tmp_path], ServeConfig(), tokenizer, attach)
    server = live(say("x"), keys=(b"one",), workspace=workspace)
    assert workspace.indexed.wait(600)
    shown = server.client.get("/health").json()["workspace"]
    assert shown["trouble"].startswith("PermissionError: ") and "log" in shown["trouble"]
    assert "private" not in str(shown) and str(tmp_path) not in str(shown)


PAGE = {"Origin": "http://localhost:3000"}
EVIL = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-client-id",
    "Access-Control-Request-Private-Network": "true",
}


@pytest.fixture
def pages(live, say):
    """A client of a server that pages of one origin may call, with a key."""
    return live(say("x"), config=ServeConfig(origins=(PAGE["Origin"],)), keys=(b"one",)).client


def test_a_page_that_may_call_can_read_that_its_key_is_wrong(pages):
    refused = pages.post("/infill", json=INFILL, headers={**PAGE, "Authorization": "Bearer two"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE["Origin"])
    for preflight in (PREFLIGHT, {**PREFLIGHT, "Access-Control-Request-Method": "HEAD"}):
        allowed = pages.options("/infill", headers={**PAGE, **preflight})  # browsers send no key with it
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == PAGE["Origin"]
        assert allowed.headers["access-control-allow-private-network"] == "true"


def test_browser_pages_of_other_origins_are_refused(pages):
    pages.headers["Authorization"] = "Bearer one"
    for headers in (EVIL, {"Sec-Fetch-Site": "cross-site"}):
        assert pages.post("/infill", json=INFILL, headers=headers).status_code == 403
    good = pages.post("/infill", json=INFILL, headers=PAGE)
    assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, PAGE["Origin"])
    refused = pages.options("/infill", headers={**EVIL, **PREFLIGHT})
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in pages.post("/infill", json=INFILL).headers


def test_deeply_nested_and_broken_json(server):
    for content in (b"[" * 100_000, b"{", b"", b"\xff\xfe", b'{"input_prefix": "\\ud800"}', b"[1]", b"null"):
        for path in ("/infill", "/v1/chat/completions"):
            raw = server.client.post(path, content=content)
            assert raw.status_code == 400 and raw.json()["error"]["message"]


@pytest.mark.parametrize("called", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_is_json_whatever_its_client_calls_it(server, called):
    raw = server.client.post("/tokenize", content='{"content": "a b"}', headers={"Content-Type": called})
    assert raw.status_code == 200 and raw.json()["tokens"], raw.text


# ── giving up ──


@pytest.mark.parametrize("path", ["/infill", "/v1/completions"])
def test_newer_keystroke_supersedes_and_both_are_told(live, say, path):
    server, asked = live(say("done")), []
    server.backend.gate, queue = threading.Semaphore(0), server.service.queue
    with ThreadPoolExecutor() as threads:
        for prompt in ("    r", "    re", "    ret"):
            asked.append(threads.submit(server.post, path, {**INFILL, "prompt": prompt, "suffix": "\n", "user": "me"}))
            wait_for(lambda: len(server.done) + queue.queue_length + queue.begun >= len(asked))
        server.backend.gate.release(1000)
        *older, newest = (answer.result() for answer in asked)
    assert newest.status_code == 200 and "done" in newest.text
    if path == "/infill":
        assert [(answer.json()["content"], answer.json()["superseded"]) for answer in older] == [("", True)] * 2
    else:
        assert [answer.status_code for answer in older] == [499, 499]


def test_agents_of_one_user_do_not_replace_one_another(live, say):
    server, asked = live(say("done")), {"messages": [{"role": "user", "content": "a"}], "user": 7, "max_tokens": 9}
    server.backend.gate, queue = threading.Semaphore(0), server.service.queue
    with ThreadPoolExecutor() as threads:
        both = [
            threads.submit(server.post, "/v1/chat/completions", {**asked, "temperature": 1.0, "seed": seed})
            for seed in (1, 2)
        ]
        wait_for(lambda: len(server.done) + queue.queue_length + queue.begun >= 2)
        server.backend.gate.release(1000)
        assert [answer.result().json()["choices"][0]["message"]["content"] for answer in both] == ["done"] * 2


def test_an_ending_engine_answers_503_in_every_dialect(server):
    server.service.queue.close()
    for fields in ({}, {"stream": True}):
        for path, body in (
            ("/infill", INFILL),
            ("/completion", {"prompt": "a"}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            raw = server.post(path, {**body, **fields})
            assert raw.status_code == 503, (path, raw.text)
            assert raw.headers["retry-after"] and "ending" in raw.json()["error"]["message"]


def test_metrics_count_what_happened(server):
    server.post("/infill", INFILL)
    server.post("/infill", {})
    text = server.client.get("/metrics").text
    assert 'retrieve_spec_requests_total{path="/infill",status="200"} 1.0' in text
    assert 'retrieve_spec_requests_total{path="/infill",status="400"} 1.0' in text
    assert 'retrieve_spec_accepted_tokens_total{source="prediction"}' in text
    assert "retrieve_spec_queue_length 0.0" in text
