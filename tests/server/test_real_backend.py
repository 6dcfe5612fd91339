"""What the dialects answer with the bundled model behind them: a scripted model hides what a real one hands over."""

from __future__ import annotations

import json

import pytest

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
