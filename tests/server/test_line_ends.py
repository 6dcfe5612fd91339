"""Documents whose lines end in CRLF: read as LF, answered in their own ends."""

import json

import pytest

from retrieve_spec.server.text import line_end, with_line_feeds

SAID = "one\n    two\n"
ABOVE, LINE, BELOW = "import os\ndef f():\n", "    ret", "\n\nx = 1\n"
INFILL = {"input_prefix": ABOVE, "prompt": LINE, "input_suffix": BELOW, "n_predict": 50}
PREDICTED = {"type": "content", "content": ABOVE}
REQUESTS = [
    ("/infill", {**INFILL, "input_extra": [{"text": "other = 1\n", "filename": "b.py"}]}),
    ("/completion", {"prompt": ABOVE + LINE, "n_predict": 50}),
    ("/v1/completions", {"prompt": ABOVE + LINE, "suffix": BELOW, "max_tokens": 50, "stop": ["\nthree"]}),
    ("/v1/completions", {"prompt": f"<|fim_prefix|>{ABOVE}<|fim_suffix|>{BELOW}<|fim_middle|>", "max_tokens": 50}),
    ("/v1/fim/completions", {"prompt": ABOVE + LINE, "suffix": BELOW, "max_tokens": 50}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ABOVE}], "prediction": PREDICTED}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": ABOVE}]}]}),
]


def crlf(body):
    return json.loads(json.dumps(body).replace("\\n", "\\r\\n"))


def text_of(body):
    choice = body["choices"][0] if "choices" in body else body
    return (
        choice.get("content") or choice.get("text") or choice.get("message", choice.get("delta", {})).get("content", "")
    )


@pytest.fixture
def backend(say):
    return say(SAID + "three")


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_model_is_shown_line_feeds_and_the_client_its_own_ends(live, backend, path, body):
    server = live(backend)
    expected = text_of(server.post(path, body).json())
    assert expected.startswith(SAID.rstrip())
    shown = backend.prompts.pop()
    server.service.forget()
    assert text_of(server.post(path, crlf(body)).json()) == expected.replace("\n", "\r\n")
    assert backend.prompts.pop() == shown
    events = [json.loads(event) for event in server.events(path, {**crlf(body), "stream": True}) if event != "[DONE]"]
    assert "".join(map(text_of, events)) == expected.replace("\n", "\r\n")


def test_most_lines_say_how_a_document_ends_its_own():
    assert line_end("a\r\nb\r\n", "c\n") == "\r\n"
    assert line_end("a\r\n", "b\nc\n") == line_end("a") == "\n"
    assert with_line_feeds({"a": ["b\r\n", 1, None]}) == {"a": ["b\n", 1, None]}
