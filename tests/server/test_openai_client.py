"""The `openai` Python client against a live server."""

import threading

import pytest
from waiting import wait_for


@pytest.fixture
def server(live, say):
    return live(say("one two three four five six seven"))


def test_prediction_with_usage(server, official):
    *chunks, last = official(server).chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "again"}],
        prediction={"type": "content", "content": "one two three four five six"},
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=30,
        store=False,
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one two three four five six seven"
    details = last.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens is not None


def test_closing_mid_stream_stops_the_model(live, say, official):
    backend = say("word " * 300, run=1)
    backend.gate = threading.Semaphore(5)
    server = live(backend)
    stream = official(server).completions.create(model="any", prompt="x", max_tokens=300, stream=True)
    for _ in range(3):
        next(stream)
    (job,) = server.service.queue._jobs
    stream.close()
    wait_for(lambda: job.turn.cancelled)
    spent = backend.passes
    backend.gate.release(1000)
    wait_for(lambda: bool(server.done))
    assert server.done[-1][1].outcome == "cancelled" and backend.passes <= spent + 1


def test_errors_are_the_clients_own_types(server, official):
    openai = pytest.importorskip("openai", reason="pip install openai")
    with pytest.raises(openai.BadRequestError, match="prompt"):
        official(server).completions.create(model="any", prompt=None)
    with pytest.raises(openai.NotFoundError):
        official(server).moderations.create(input="x")
