"""What the dialects answer with the bundled model behind them: a scripted model hides what a real one hands over."""

import json

import pytest

pytestmark = pytest.mark.threads

SOURCE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    "
INFILL = {"input_prefix": SOURCE, "input_suffix": "\n", "prompt": "", "n_predict": 12}
COMPLETION = {"prompt": SOURCE, "n_predict": 12}


@pytest.mark.parametrize(("path", "body"), [("/infill", INFILL), ("/completion", COMPLETION)])
def test_tokens_are_returned(reference_live, path, body):
    codec = reference_live.service.codec
    raw = reference_live.post(path, {**body, "return_tokens": True})
    assert raw.status_code == 200, raw.text
    answer = raw.json()
    assert answer["tokens"] and codec.decode(answer["tokens"]) == answer["content"]
    events = [json.loads(e) for e in reference_live.events(path, {**body, "return_tokens": True, "stream": True})]
    assert [token for event in events for token in event["tokens"]] == answer["tokens"]
    assert events[-1]["stop"] is True


SAMPLED = {"temperature": 1.0, "max_tokens": 24}
CHAT = {"messages": [{"role": "user", "content": SOURCE}], **SAMPLED}


def texts(answer):
    return [c["message"]["content"] if "message" in c else c["text"] for c in answer["choices"]]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": SOURCE, **SAMPLED}), ("/v1/chat/completions", CHAT)]
)
def test_several_samples_differ_and_a_seed_repeats_them(reference_live, path, body):
    first = reference_live.post(path, {**body, "n": 3, "seed": 11}).json()
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert len(set(texts(first))) == 3
    again = reference_live.post(path, {**body, "n": 3, "seed": 11}).json()
    assert texts(again) == texts(first)
    assert texts(reference_live.post(path, {**body, "seed": 11}).json()) == texts(first)[:1]
    assert first["usage"]["prompt_tokens"] == reference_live.post(path, body).json()["usage"]["prompt_tokens"]
    greedy = reference_live.post(path, {**body, "n": 2, "temperature": 0}).json()
    assert len(set(texts(greedy))) == 1


def test_without_a_seed_every_answer_is_another_sample(reference_live):
    body = {"prompt": SOURCE, "temperature": 1.0, "n_predict": 24}
    answers = [reference_live.post("/completion", body).json() for _ in range(4)]
    seeds = [answer["generation_settings"]["seed"] for answer in answers]
    assert len(set(seeds)) == 4 and len({answer["content"] for answer in answers}) > 1
    again = reference_live.post("/completion", {**body, "seed": seeds[0]}).json()
    assert again["content"] == answers[0]["content"]


def test_a_deadline_that_ends_something_says_so(reference_live):
    body = {"prompt": SOURCE * 20, "n_predict": 400, "deadline_ms": 1}
    assert reference_live.post("/completion", body).json()["deadline"] is True
    assert "deadline" not in reference_live.post("/completion", COMPLETION).json()
