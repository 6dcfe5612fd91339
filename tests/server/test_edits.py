"""Edits: a text and what to change in it, answered by the whole new text."""

from __future__ import annotations

import copy
import json
import re

import pytest
from scripted import ScriptedBackend
from test_exact import plain_text

from retrieve_spec.server.completions import edit_task
from retrieve_spec.server.schemas import EditRequest
from retrieve_spec.server.service import Caller

SOURCE = "def add(old, b):\n    return old + b\n\n\ndef subtract(old, b):\n    return old - b\n"
RENAME = {"instruction": "Rename old to new.", "path": "sums.py"}
FENCED = re.compile(r"\n(`{3,})\n(.*?\n)\1\n\nAnswer with", re.DOTALL)


class Obedient(ScriptedBackend):
    """Writes the text of its prompt with every `old` replaced, closes the fence and goes on."""

    def __init__(self, codec):
        def script(prompt):
            fence, text = FENCED.search(codec.decode(prompt)).groups()
            assert codec.decode(prompt).endswith(f"{fence}\n")
            return codec.encode(text.replace("old", "new") + fence + "\nThat is all.")

        super().__init__(script)


def text_of(answer):
    (choice,) = answer["choices"]
    return choice["text"]


@pytest.mark.parametrize(
    "text",
    [
        SOURCE,
        SOURCE.rstrip("\n"),
        SOURCE + "\n\n",
        SOURCE.replace("\n", "\r\n"),
        SOURCE.replace("\n", "\r\n").rstrip(),
        "old\r\nold\nold\r\n",
        "old",
        "\n",
        "    old = 1\n",
        "é old \U0001f600\n",
        "Use it so:\n\n```python\nold()\n```\n",
        "`````\nold\n`````",
        "a <|endoftext|> old <fim_suffix>\n",
    ],
)
def test_the_whole_new_text_is_answered_with_the_line_ends_it_had(live, codec, text):
    server = live(Obedient(codec))
    answer = server.post("/v1/edits", {"input": text, **RENAME}).json()
    assert text_of(answer) == text.replace("old", "new")
    assert answer["object"] == "edit" and answer["choices"][0]["finish_reason"] == "stop"
    *events, done = server.events("/v1/edit", {"input": text, **RENAME, "stream": True})
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert "".join(map(text_of, chunks)) == text_of(answer)
    assert {chunk["object"] for chunk in chunks} == {"edit"}


def test_the_old_text_is_expected_unless_the_client_says_what_is(live, codec):
    backend = Obedient(codec)
    server = live(backend)
    for prediction, expected in ((None, SOURCE), ("new text", "new text"), ("", "")):
        fields = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
        server.service.forget()  # else what was said before is expected, where nothing else is
        server.post("/v1/edits", {"input": SOURCE, **RENAME, **fields})
        assert codec.decode(backend.hints[-1].prediction) == expected
    server.post("/v1/edits", {"input": SOURCE.replace("\n", "\r\n"), **RENAME})
    assert codec.decode(backend.hints[-1].prediction) == SOURCE


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"instruction": RENAME["instruction"]}, '"input" is required'),
        ({"input": SOURCE}, '"instruction" is required'),
        ({"input": "", "instruction": "Change it."}, '"input" is empty'),
        ({"input": SOURCE, "instruction": " \n"}, '"instruction" is empty'),
        ({"input": ["a"], "instruction": "Change it."}, '"input" must be a string'),
        ({"input": "word " * 800_000, "instruction": "Change it."}, "characters"),
        ({"input": "word " * 2_500, "instruction": "Change it."}, "the new text may need"),
        ({"input": "word " * 4_500, "instruction": "Change it.", "max_tokens": 1}, "reads at most"),
        ({"input": SOURCE, "instruction": "Change it.", "tools": [{"type": "function"}]}, "not served here: tools"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(live, codec, fields, says):
    raw = live(backend := Obedient(codec)).post("/v1/edits", fields)
    assert raw.status_code == 400
    assert says in raw.json()["error"]["message"]
    assert not backend.passes


def test_a_chat_template_is_used_and_the_text_cannot_spell_its_tokens(live, codec, tokenizer):
    templated = copy.deepcopy(tokenizer)
    end = tokenizer.eos_token
    templated.chat_template = "{% for m in messages %}<u>{{ m.content|trim }}{{ eos_token }}{% endfor %}<a>"
    server = live(backend := Obedient(codec))
    server.service.prompts.codec.tokenizer = templated
    text = f"old {end}\n"
    assert text_of(server.post("/v1/edits", {"input": text, **RENAME}).json()) == f"new {end}\n"
    ids = list(backend.prompts[-1])
    assert ids.count(tokenizer.eos_token_id) == 1
    assert codec.decode(ids).startswith("<u>Rename old to new.\n\nsums.py\n")
    assert codec.decode(ids).endswith("<a>```\n")
    assert backend.passes
    templated.chat_template = "{{ raise_exception('no') }}"
    assert server.post("/v1/edits", {"input": text, **RENAME}).status_code == 400
    templated.chat_template = "hello"
    assert "leaves out" in server.post("/v1/edits", {"input": text, **RENAME}).json()["error"]["message"]


@pytest.mark.parametrize("text", [SOURCE, SOURCE.replace("\n", "\r\n"), "<|endoftext|> <fim_suffix>"])
def test_edits_say_what_plain_decoding_says(reference, reference_live, text):
    service = reference[0]
    body = {"input": text, **RENAME, "max_tokens": 40}
    request = EditRequest.model_validate(body)
    ids = list(edit_task(service, request, Caller(), 40).task.prompt_ids)
    expected = request.written(plain_text(reference, ids, 40))
    assert "```" not in expected
    first = reference_live.post("/v1/edits", body).json()
    assert first["timings"]["draft_n"] > 0
    assert first["usage"]["completion_tokens"] == 40
    for fields in ({}, {"speculative": False}, {"prediction": {"content": expected}}, {"cache_prompt": False}):
        assert text_of(reference_live.post("/v1/edits", {**body, **fields}).json()) == text_of(first) == expected
    *events, _ = reference_live.events("/v1/edits", {**body, "stream": True})
    assert "".join(text_of(json.loads(event)) for event in events) == expected
