"""Slow, large, broken and foreign connections: what each of them may cost, and that nobody else notices."""

import contextlib
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError
from waiting import HANG_S, wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.server import run, schemas

INFILL = {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    ret"}


def connect(server, data):
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(data)
    return connection


def head(size, path="/infill"):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()


def answer(connection):
    connection.settimeout(HANG_S)
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


# ── time ──


REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", REQUEST[:30], REQUEST[:1], REQUEST + REQUEST[:8]])
def test_heads_that_do_not_come_end_the_connection(live, say, monkeypatch, sent):
    monkeypatch.setattr(run, "HEAD_S", 0.3)
    *answered, last = answer(connect(live(say("x")), sent)).split(b"HTTP/1.1 ")[1:]
    assert last.startswith(b"408") and [one[:3] for one in answered] == [b"200"] * sent.count(REQUEST)


def test_bodies_that_do_not_come_are_408(live, say):
    server = live(say("x"), config=ServeConfig(body_s=0.3))
    data = answer(connect(server, head(1000) + b'{"input_prefix": "'))
    assert data.startswith(b"HTTP/1.1 408")
    assert b'"type":"timeout"' in data


def test_endless_headers_are_431(live, say):
    server = live(say("x"))
    connection = connect(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    with contextlib.suppress(ConnectionError):
        for number in range(10_000):
            connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 1000))
            time.sleep(0.0005)
    assert number < 9_999, "all of it was read"
    assert server.client.get("/health").status_code == 200


# ── memory ──


def test_unfinished_bodies_hold_a_bounded_amount(live, say):
    server = live(say("x"), config=ServeConfig(bodies_bytes=1 << 20, max_body_bytes=4 << 20))
    connections_ = [connect(server, head(4 << 20) + b"x" * (300 << 10)) for _ in range(12)]
    refused = 0
    for connection in connections_:
        connection.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            refused += connection.recv(12) == b"HTTP/1.1 503"
    assert refused >= 6
    assert server.post("/infill", INFILL).status_code == 200  # ordinary requests come through
    for connection in connections_:
        connection.close()
    large = {**INFILL, "input_extra": [{"text": "y = 1\n" * 40_000}]}
    wait_for(lambda: server.post("/infill", large).status_code == 200)  # all of it was given back


def test_bodies_that_are_too_large_are_413(live, say):
    raw = live(say("x"), config=ServeConfig(max_body_bytes=256 << 10)).client.post("/infill", content=b"x" * 300_000)
    assert raw.status_code == 413 and raw.json()["error"]["message"]


# ── clients that go away ──


def test_aborted_uploads_leave_nothing_in_the_log(live, say, caplog, capfd):
    server = live(say("x"))
    with caplog.at_level(logging.INFO):
        for size in (10, 200_000):
            connect(server, head(400_000) + b"x" * size).close()
        time.sleep(0.3)
        assert server.post("/infill", INFILL).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Traceback" not in capfd.readouterr().err


# ── nobody waits for somebody else's large request ──


def test_prompts_that_cannot_fit_are_refused_by_their_length(live, say, monkeypatch):
    server = live(say("x", n_ctx=64))
    monkeypatch.setattr(server.service.codec, "encode_prompt", lambda *_, **__: pytest.fail("encoded it"))
    text = "x = 1\n" * 100_000
    for path in ("/completion", "/v1/completions", "/v1/chat/completions"):
        raw = server.post(path, {"prompt": text, "messages": [{"role": "user", "content": text}]})
        assert raw.status_code == 400 and raw.json()["error"]["n_prompt_tokens"] > 64


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", lambda text: {"content": text}),
        ("/completion", lambda text: {"prompt": text}),
        ("/infill", lambda text: {**INFILL, "input_extra": [{"text": text}]}),
        ("/infill", lambda text: {**INFILL, "prediction": {"content": text}}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/apply-template", lambda text: {"messages": [{"role": "user", "content": text}]}),
    ],
)
def test_others_are_answered_while_a_large_text_is_encoded(live, say, path, body):
    """How often a small request is answered while the large one is: an event loop that encodes answers none."""
    client, answered = live(say("x", n_ctx=1 << 20)).client, 0
    with ThreadPoolExecutor() as threads:
        large = threads.submit(client.post, path, json=body("value = other_value + 1\n" * 20_000))
        while not large.done():
            assert client.get("/health").status_code == 200
            answered += 1
    assert answered >= 10


# ── where bodies are checked ──


@pytest.mark.parametrize(
    ("schema", "name", "of"),
    [
        (schemas.InfillRequest, "input_extra", lambda items: items),
        (schemas.InfillRequest, "response_fields", lambda items: items),
        (schemas.OpenAICompletionRequest, "prompt", lambda items: items),
        (schemas.ChatRequest, "stop", lambda items: items),
        (schemas.DetokenizeRequest, "tokens", lambda items: items),
    ],
)
def test_of_many_wrong_items_only_the_first_is_looked_at(schema, name, of):
    """A small body can hold ten thousands, and a list of their errors takes a fifth of a second of everybody's time."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate({"input_prefix": "", "input_suffix": "", name: of([{"text": 1}] * 1000)})
    assert caught.value.error_count() <= 4  # one for each type that a prompt may have
