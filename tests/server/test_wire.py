"""Requests as editors' plug-ins send them, and whether the answer has what each plug-in reads."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path

import pytest
from scripted import ScriptedBackend

REQUESTS = json.loads((Path(__file__).parent / "wire" / "requests.json").read_text("utf-8"))
SAID = "urn a + b"


@pytest.fixture(scope="module")
def server(tokenizer):
    from live import Live

    from retrieve_spec.server.text import TextCodec

    said = TextCodec(tokenizer).encode(SAID)
    server = Live(ScriptedBackend(lambda prompt: [*said, 0]), tokenizer)
    yield server
    server.stop()


def read(body, path):
    return reduce(lambda value, key: value[key], path, body)


@pytest.mark.parametrize("wire", REQUESTS, ids=lambda wire: wire["client"])
def test_client_reads_what_was_said(server, wire):
    if wire["stream"]:
        events = server.events(wire["path"], wire["body"])
        bodies = [json.loads(event) for event in events if event != "[DONE]"]
        assert "".join(read({"content": "", **body}, wire["reads"]) or "" for body in _with_text(bodies, wire)) == SAID
        return
    raw = server.post(wire["path"], wire["body"], headers=wire.get("headers"))
    assert raw.status_code == 200
    body = raw.json()
    if not wire["reads"]:
        assert body == {} or body["content"] == ""
        return
    assert read(body, wire["reads"]) == SAID
    if "keys" in wire:
        assert set(wire["keys"]) <= set(body)
    for path in wire.get("also", []):
        assert read(body, path) is not None
    first = body[0] if isinstance(body, list) else body
    if "content" in first:
        assert f'"content":{json.dumps(SAID)}' in raw.text


def _with_text(bodies, wire):
    """Events that carry text; a reason to end may stand on one without."""
    if wire["reads"][-1] == "content" and "delta" in wire["reads"]:
        return [body for body in bodies if "content" in body["choices"][0]["delta"]]
    return bodies


@pytest.mark.parametrize("wire", [w for w in REQUESTS if w["stream"]], ids=lambda wire: wire["client"])
def test_streams_have_one_line_events_and_no_pings(server, wire):
    with server.client.stream("POST", wire["path"], json=wire["body"]) as response:
        text = "".join(response.iter_text())
    for block in text.rstrip("\n").split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
    if wire["path"] == "/completion":
        assert all({"content", "stop"} <= set(json.loads(block[6:])) for block in text.rstrip("\n").split("\n\n"))
