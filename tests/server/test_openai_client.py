"""The `openai` Python client against a live server."""

from __future__ import annotations

import threading

import pytest
from waiting import wait_for

openai = pytest.importorskip("openai", reason="pip install openai")


@pytest.fixture
def client(live, say):
    server = live(say("one two three four five six seven"))
    made = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    made.server = server
    yield made
    made.close()


def test_prediction_with_usage(client):
    stream = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "again"}],
        prediction={"type": "content", "content": "one two three four five six"},
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=30,
        store=False,
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "one two three four five six seven"
    details = chunks[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens is not None


def test_closing_mid_stream_stops_the_model(client, codec):
    backend = client.server.backend
    backend.script = lambda prompt: codec.encode("word " * 300)
    backend.run = 1
    backend.gate = threading.Semaphore(5)
    stream = client.completions.create(model="any", prompt="x", max_tokens=300, stream=True)
    for _ in range(3):
        next(stream)
    (job,) = client.server.service.queue._jobs
    stream.close()
    wait_for(job.cancel.is_set)
    spent = backend.passes
    backend.gate.release(1000)
    wait_for(lambda: not client.server.service.queue.begun)
    assert backend.passes <= spent + 1
    assert client.server.done[-1][1].outcome == "cancelled"


def test_errors_are_the_clients_own_types(client):
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="any", prompt=None)
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")
