"""With the bundled model: JSON is what is asked for, the same with drafts and without."""

import json
import re
import sys

import numpy as np
import pytest

from retrieve_spec.config import MAX_NODES
from retrieve_spec.engine.budget import Costs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["area", "volume"]},
        "sides": {"type": "array", "items": {"enum": ["width", "height", "depth"]}, "minItems": 4, "maxItems": 5},
        "exact": {"type": "boolean"},
    },
    "required": ["name", "sides", "exact"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": 'Describe {"name": "area", "sides": ["width", "height"]} as JSON.'}]
CHAT = {"messages": MESSAGES, "max_tokens": 200, "response_format": FORMAT}


def content(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.fixture
def library():
    return pytest.importorskip("llguidance", reason="pip install 'retrieve-spec[json]'")


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
def test_an_answer_is_json_under_its_schema_with_drafts_and_without(library, reference_live, sampling, monkeypatch):
    a_second = np.ones(MAX_NODES + 1, np.float32)  # however many nodes: on a busy machine, forced ones may not pay
    monkeypatch.setattr(Costs, "seconds", lambda *_: a_second)
    expected = {"type": "content", "content": '{"name": "area", "sides": ["width", "height", "width", "height"]'}
    on = reference_live.post("/v1/chat/completions", {**CHAT, **sampling, "prediction": expected})
    off = reference_live.post("/v1/chat/completions", {**CHAT, **sampling, "speculative": False})
    said = json.loads(content(on))
    assert content(on) == content(off)
    assert set(said) == {"name", "sides", "exact"} and 4 <= len(said["sides"]) <= 5
    assert on.json()["choices"][0]["finish_reason"] == "stop"
    assert on.json()["timings"]["accepted_by_source"]["forced"] > 3


def test_the_openai_client_and_llama_cpp_ask_for_it_their_ways(library, reference_live, official):
    streamed = official(reference_live).chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=200, stream=True, response_format=FORMAT
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert set(json.loads(text)) == set(SCHEMA["properties"])
    answer = reference_live.post("/completion", {"prompt": "shape = ", "n_predict": 200, "json_schema": SCHEMA}).json()
    assert set(json.loads(answer["content"])) == set(SCHEMA["properties"])
    body = {"prompt": "shape = sha", "suffix": "\n", "max_tokens": 200, "response_format": FORMAT}
    text = reference_live.post("/v1/completions", body).json()["choices"][0]["text"]
    assert set(json.loads(text)) == set(SCHEMA["properties"]), "at a cursor it begins where the prompt ends"
    start = reference_live.post("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}})
    assert content(start).startswith("{")


def test_without_the_library_the_extra_is_named(reference_live, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = reference_live.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 400
    assert "retrieve-spec[json]" in answer.json()["error"]["message"]


@pytest.mark.parametrize("older", [False, True], ids=["structured_outputs", "guided"])
def test_vllms_clients_ask_for_it_their_way(library, reference_live, older):
    def ask(kind, wanted, path="/v1/chat/completions", **more):
        held = {f"guided_{kind}": wanted} if older else {"structured_outputs": {kind: wanted}}
        body = {"max_tokens": 200, **({"messages": MESSAGES} if "chat" in path else {"prompt": "shape = "}), **held}
        answer = reference_live.post(path, {**body, **more})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"] if "chat" in path else choice["text"]

    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert set(json.loads(ask("json", schema))) == set(SCHEMA["properties"])
    assert ask("choice", ["not this (one)", "a|b"]) in ("not this (one)", "a|b")
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", ask("regex", "[0-9]{3}-[0-9]{4}", "/v1/completions"))
    assert ask("choice", ["sphere"], "/v1/completions", suffix="\n") == "sphere", "a begun word is no part of it"
    refused = {"guided_grammar": "root ::= x"} if older else {"structured_outputs": {"grammar": "root ::= x"}}
    answer = reference_live.post("/v1/chat/completions", {"messages": MESSAGES, **refused})
    assert answer.status_code == 400 and "grammar" in answer.json()["error"]["message"]
    wrong = reference_live.post("/v1/chat/completions", {"messages": MESSAGES, "guided_regex": "(a"})
    assert wrong.status_code == 400 and "structured_outputs" in wrong.json()["error"]["message"]
