"""Requests as editors' plug-ins send them, and whether the answer has what each plug-in reads."""

import json
from functools import reduce
from pathlib import Path

import pytest

REQUESTS = json.loads((Path(__file__).parent / "wire" / "requests.json").read_text("utf-8"))
SAID = "urn a + b"


@pytest.fixture
def server(live, say):
    return live(say(SAID))


def read(body, path):
    """What stands at a path; None for a name that is not there."""
    return reduce(lambda value, key: value.get(key) if isinstance(key, str) else value[key], path, body)


@pytest.mark.parametrize("wire", REQUESTS, ids=lambda wire: wire["client"])
def test_client_reads_what_was_said(server, wire):
    if wire["stream"]:
        bodies = [json.loads(event) for event in server.events(wire["path"], wire["body"]) if event != "[DONE]"]
        assert wire["path"] != "/completion" or all({"content", "stop"} <= set(body) for body in bodies)
        assert "".join(read(body, wire["reads"]) or "" for body in bodies) == SAID
        return
    raw = server.post(wire["path"], wire["body"], headers=wire.get("headers"))
    assert raw.status_code == 200
    body = raw.json()
    if not wire["reads"]:
        assert body == {} or body["content"] == ""
        return
    assert read(body, wire["reads"]) == SAID
    assert set(wire.get("keys", ())) <= set(body)
    assert all(read(body, path) is not None for path in wire.get("also", ()))
    assert "content" not in body or f'"content":{json.dumps(SAID)}' in raw.text
