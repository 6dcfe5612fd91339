"""Parameters of sampling: the same as in `generate`, with drafts and without, streamed or not."""

import json

import numpy as np
import pytest
import torch

from retrieve_spec.generation.templates import Templates

PROMPT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
BODY = {"prompt": PROMPT, "max_tokens": 24}


@pytest.fixture
def greedy(reference):
    """`greedy(...)`: the text of plain `generate`, and the log-probabilities of its tokens."""
    _, plain, tokenizer = reference

    def decode(**options):
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        out = plain.generate(
            ids, do_sample=False, max_new_tokens=24, return_dict_in_generate=True, output_logits=True, **options
        )
        new = out.sequences[0, ids.shape[1] :]
        assert plain.generation_config.eos_token_id not in new.tolist()
        scores = plain.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)[0]
        return tokenizer.decode(new), new, scores.numpy(), torch.stack(out.logits).log_softmax(-1)[:, 0]

    return decode


def assert_alike(*values):
    """That two JSON values are the same but for the last digits of their numbers."""
    numbers = [[], []]
    same, other = (
        json.loads(json.dumps(value), parse_float=kept.append) for value, kept in zip(values, numbers, strict=True)
    )
    assert same == other
    np.testing.assert_allclose(*(np.array(kept, float) for kept in numbers), atol=2e-4)


def choices(server, path, body):
    """The choices of an answer, which its stream tells as well."""
    whole = server.post(path, body)
    assert whole.status_code == 200, whole.text
    told = {}
    for event in server.events(path, {**body, "stream": True})[:-1]:
        for choice in json.loads(event)["choices"]:
            one = told.setdefault(choice["index"], {"text": "", "logprobs": []})
            one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            one["logprobs"] += [choice["logprobs"]] if choice["logprobs"] else []
    whole = whole.json()["choices"]
    for choice in whole:
        one = told[choice["index"]]
        assert one["text"] == choice.get("text", choice.get("message", {}).get("content"))
        if choice["logprobs"]:
            for name in set(choice["logprobs"]) - {"refusal"}:
                assert_alike([entry for part in one["logprobs"] for entry in part[name]], choice["logprobs"][name])
    return whole


def test_log_probabilities_are_those_of_the_models_own_logits(reference, reference_live, greedy):
    _, _, tokenizer = reference
    text, ids, scores, every = greedy(repetition_penalty=1.3)
    body = {**BODY, "logprobs": 3, "repetition_penalty": 1.3}
    for speculative in (True, False):
        (choice,) = choices(reference_live, "/v1/completions", {**body, "speculative": speculative})
        told = choice["logprobs"]
        assert choice["text"] == text == "".join(told["tokens"])
        assert told["tokens"] == [tokenizer.decode([token]) for token in ids]
        assert told["text_offset"] == [0, *np.cumsum([len(token) for token in told["tokens"]])[:-1].tolist()]
        np.testing.assert_allclose(told["token_logprobs"], scores, atol=2e-4)
        for row, top in zip(every, told["top_logprobs"], strict=True):
            best = row.topk(3)
            for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                assert top[tokenizer.decode([token])] == pytest.approx(value, abs=2e-4)
            assert len(top) in (3, 4)
        assert all(token in top for token, top in zip(told["tokens"], told["top_logprobs"], strict=True))


def test_chats_tell_bytes_and_samples_the_same_with_drafts_and_without(reference_live):
    body = {
        "messages": [{"role": "user", "content": "Größe: é → 中"}], "max_tokens": 30, "temperature": 1.5, "top_k": 50,
        "seed": 4, "logprobs": True, "top_logprobs": 2, "n": 2,
    }  # fmt: skip
    on, off = (choices(reference_live, "/v1/chat/completions", {**body, "speculative": s}) for s in (True, False))
    for one, other in zip(on, off, strict=True):
        told, same = one["logprobs"]["content"], other["logprobs"]["content"]
        assert_alike(told, same)
        said = b"".join(bytes(entry["bytes"]) for entry in told)
        assert said.decode(errors="replace").startswith(one["message"]["content"])
        assert all(len(entry["top_logprobs"]) == 2 for entry in told)
    assert on[0]["message"]["content"] != on[1]["message"]["content"]
    assert {entry["logprob"] < entry["top_logprobs"][1]["logprob"] for entry in told} == {True, False}


def test_responses_have_those_of_chats(reference_live, official):
    client, text = official(reference_live), "Größe: é → 中"
    chat = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": text}], max_tokens=12, temperature=0, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    ask = {"model": "any", "input": text, "max_output_tokens": 12, "temperature": 0, "top_logprobs": 2}
    included = {**ask, "include": ["message.output_text.logprobs"]}
    part = client.responses.create(**included).output[0].content[0]
    assert part.text == chat.choices[0].message.content
    assert_alike([entry.model_dump() for entry in part.logprobs], expected)
    events = list(client.responses.create(**included, stream=True))
    told = [
        entry.to_dict() for event in events if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    assert_alike(told, expected)
    for last in (event.response for event in events if event.type == "response.incomplete"):
        assert_alike([entry.to_dict() for entry in last.output[0].content[0].logprobs], expected)
    assert client.responses.create(**ask).output[0].content[0].logprobs == []


def test_ollamas_answers_have_those_of_chats(reference_live):
    ask = {"messages": [{"role": "user", "content": "x = "}], "stream": False}
    wanted = {"logprobs": True, "top_logprobs": 2}
    (chat,) = choices(reference_live, "/v1/chat/completions", {**ask, **wanted, "max_tokens": 9, "temperature": 0})
    ask |= {"options": {"num_predict": 9, "temperature": 0}}
    whole = reference_live.post("/api/chat", {**ask, **wanted}).json()
    lines = reference_live.post("/api/chat", {**ask, **wanted, "stream": True}).text.splitlines()
    told = [entry for line in lines for entry in json.loads(line).get("logprobs", [])]
    for noted in (whole["logprobs"], told):
        assert_alike(noted, chat["logprobs"]["content"])
    assert whole["message"]["content"] == chat["message"]["content"]
    raw = reference_live.post("/api/generate", {**ask, **wanted, "prompt": "x = ", "raw": True}).json()
    assert len(raw["logprobs"]) == 9 and {len(entry["top_logprobs"]) for entry in raw["logprobs"]} == {2}
    assert "logprobs" not in reference_live.post("/api/chat", ask).json()


def test_log_probabilities_at_a_cursor_are_of_all_that_is_said(reference_live):
    body = {"prompt": "def area(width, hei", "suffix": "\n    return width", "max_tokens": 8, "logprobs": 0}
    (choice,) = choices(reference_live, "/v1/completions", body)
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_a_model_that_decodes_by_itself_says_that_it_tells_no_log_probabilities(reference_live, monkeypatch):
    """And costs nobody a cache, as a failure does."""
    plain = {**BODY, "temperature": 0}
    asked = {**plain, "prompt": "import os", "logprobs": 1}
    reference_live.post("/v1/completions", plain)
    with monkeypatch.context() as patch:
        patch.setattr(Templates, "prepare", lambda *_: "the model has a way of decoding of its own")
        refused = reference_live.post("/v1/completions", asked)
        told, *_ = reference_live.events("/v1/completions", {**asked, "stream": True})
        penalised = {"prompt": "import re", "max_tokens": 9, "presence_penalty": 1}
        assert reference_live.post("/v1/completions", penalised).status_code == 200
    assert refused.status_code == 400 and "log-probabilities" in refused.json()["error"]["message"]
    assert "log-probabilities" in json.loads(told)["error"]["message"]
    assert reference_live.post("/v1/completions", plain).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 9


def test_penalties_and_biases_are_generates(reference, reference_live, greedy):
    _, plain, tokenizer = reference
    plain_text, ids, *_ = greedy()
    often = int(torch.mode(ids).values)
    biased, *_ = greedy(sequence_bias=[[[often], -100.0]])
    penalised, *_ = greedy(repetition_penalty=1.4)
    text = list(tokenizer(PROMPT).input_ids)
    begun = len(text)
    for _ in range(24):  # OpenAI's penalties, as its documentation has them
        with torch.no_grad():
            scores = plain(torch.tensor([text])).logits[0, -1]
        for token in set(text[begun:]):
            scores[token] -= 0.3 + 0.6 * text[begun:].count(token)
        text.append(int(scores.argmax()))
    counted = tokenizer.decode(text[begun:])
    assert len({plain_text, biased, penalised, counted}) == 4
    for fields, expected in (
        ({"logit_bias": {str(often): -100}}, biased),
        ({"logit_bias": [[often, -100.0]]}, biased),
        ({"logit_bias": [[often, False]]}, biased),
        ({"repetition_penalty": 1.4}, penalised),
        ({"repeat_penalty": 1.4, "repeat_last_n": -1}, penalised),
        ({"repeat_penalty": 9, "repetition_penalty": 1.4}, penalised),
        ({"repeat_penalty": 1.4, "repeat_last_n": 0}, plain_text),
        ({"presence_penalty": 0.3, "frequency_penalty": 0.6}, counted),
        ({"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1}, plain_text),
        ({"logit_bias": {str(often): 100.0}}, tokenizer.decode([often] * 24)),
    ):
        for speculative in (True, False):
            (choice,) = choices(reference_live, "/v1/completions", {**BODY, **fields, "speculative": speculative})
            assert choice["text"] == expected, fields
    sampled = {"temperature": 1.2, "seed": 9, "presence_penalty": 1.5, "repetition_penalty": 1.2, "top_p": 0.9}
    on, off = (choices(reference_live, "/v1/completions", {**BODY, **sampled, "speculative": s}) for s in (True, False))
    assert on == off


def test_messages_and_responses_take_the_sampling_of_chats(reference_live):
    text, path = "x = width * height", "/v1/chat/completions"
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0}

    def said(path, body):
        answer = reference_live.post(path, body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        if "choices" in whole:
            return whole["choices"][0]["message"]["content"]
        return (whole["content"] if "content" in whole else whole["output"][0]["content"])[0]["text"]

    plain = said(path, asked)
    for fields in (
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"temperature": 1.5, "seed": 3, "min_p": 0.02, "top_k": 50},
        {"stop": [plain[3:6]]},
    ):
        expected = said(path, {**asked, **fields})
        assert expected != plain
        assert said("/v1/messages", {**asked, **fields}) == expected
        response = {"input": text, "max_output_tokens": 24, "temperature": 0, **fields}
        assert said("/v1/responses", response) == expected


@pytest.mark.parametrize(("fields", "last"), [({}, 64), ({"repeat_last_n": 8}, 8)])
def test_llama_cpps_penalty_counts_the_last_tokens(reference, reference_live, greedy, fields, last):
    _, plain, tokenizer = reference
    text = list(tokenizer(PROMPT * 3).input_ids)
    begun = len(text)
    for _ in range(24):
        with torch.no_grad():
            scores = plain(torch.tensor([text])).logits[0, -1]
        for token in set(text[-last:]):
            scores[token] = scores[token] / 1.4 if scores[token] > 0 else scores[token] * 1.4
        text.append(int(scores.argmax()))
    body = {"prompt": PROMPT * 3, "n_predict": 24, "repeat_penalty": 1.4, **fields}
    for speculative in (True, False):
        answer = reference_live.post("/completion", {**body, "speculative": speculative}).json()
        assert answer["content"] == tokenizer.decode(text[begun:])


def test_llama_cpps_dialect_takes_the_same(reference_live):
    edits = {"repeat_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.6, "logit_bias": {"20": -5}}
    typed = {"input_prefix": PROMPT, "input_suffix": "\n"}
    for path, body, same in (
        ("/completion", {"prompt": PROMPT}, {"prompt": PROMPT}),
        ("/infill", typed, {"prompt": PROMPT, "suffix": "\n"}),
    ):
        said, plain, expected = (
            reference_live.post(*asked).json()
            for asked in (
                (path, {**body, **edits, "n_predict": 24}),
                (path, {**body, "n_predict": 24}),
                ("/v1/completions", {**same, **edits, "max_tokens": 24}),
            )
        )
        assert said["content"] == expected["choices"][0]["text"] != plain["content"]


def test_the_openai_client_asks_for_all_of_it(reference_live, official):
    client = official(reference_live)
    ask = {"model": "any", "messages": [{"role": "user", "content": "x = "}], "max_tokens": 6, "temperature": 1.0}
    answer = client.chat.completions.create(**ask, n=16, seed=1, logprobs=True, top_logprobs=5, presence_penalty=0.5)
    assert [choice.index for choice in answer.choices] == list(range(16))
    assert len({choice.message.content for choice in answer.choices}) > 4
    assert all(len(entry.top_logprobs) == 5 for choice in answer.choices for entry in choice.logprobs.content)
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)
    token = client.post("/../tokenize", body={"content": "7"}, cast_to=object)["tokens"][0]
    stream = client.chat.completions.create(
        **ask, n=3, stream=True, logit_bias={str(token): 100}, stream_options={"include_usage": True}
    )
    said, usage = {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said[choice.index] = said.get(choice.index, "") + (choice.delta.content or "")
    assert said == dict.fromkeys(range(3), "7" * 6)
    assert usage.completion_tokens == 18


@pytest.fixture
def server(live, say):
    return live(say("said"))


def test_echoes_stand_in_front_of_every_choice(server, codec):
    body = {"prompt": ["a = ", "b = "], "n": 2, "echo": True, "max_tokens": 9}
    assert [choice["text"] for choice in choices(server, "/v1/completions", body)] == ["a = said"] * 2 + [
        "b = said"
    ] * 2
    (choice,) = choices(server, "/v1/completions", {**body, "prompt": codec.encode("c = "), "n": 1})
    assert choice["text"] == "c = said"
    (choice,) = choices(server, "/v1/completions", {**body, "prompt": "d", "n": 1, "max_tokens": 0})
    assert choice["text"] == "d"


def test_prompts_are_texts_or_token_ids_one_or_several(server, codec):
    first, second = codec.encode("a = "), codec.encode("b = ")
    for prompt, read in (
        (first, [first]),
        ([first], [first]),
        ([first, second], [first, second]),
        (["12", second], [codec.encode_prompt("12"), second]),
    ):
        several = len(read) > 1
        for path in ("/v1/completions", "/completion"):
            body = server.post(path, {"prompt": prompt, "return_tokens": True}).json()
            answers = body["choices"] if path == "/v1/completions" else body if several else [body]
            assert [answer["index"] for answer in answers] == list(range(len(read)))
            assert sorted(server.backend.prompts[-len(read) :]) == sorted(map(tuple, read))
        assert [answer["prompt"] for answer in answers] == [codec.decode(ids) for ids in read]
        told = [json.loads(event) for event in server.events("/completion", {"prompt": prompt, "stream": True})]
        for index in range(len(read)):
            assert "".join(one["content"] for one in told if one["index"] == index) == "said"
            assert [one["stop"] for one in told if one["index"] == index][-1]


@pytest.mark.parametrize("prompt", [[1, "2"], [[1], ["2"]], [1.0], [True], ["a", 1], ["a"] * 17, [None], 5])
def test_what_is_neither_texts_nor_token_ids_is_refused_and_says_what_a_prompt_is(server, prompt):
    for path in ("/v1/completions", "/completion"):
        refused = server.post(path, {"prompt": prompt})
        assert refused.status_code == 400
        said = refused.json()["error"]["message"]
        assert said == '"prompt": expected a text, or token ids as whole numbers, or a list of 1 to 16 of these'


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"suffix": "\n"}])
def test_token_ids_that_the_model_does_not_have_are_refused(server, more):
    unknown = server.service.backend_vocabulary
    for prompt in ([unknown], [[1], [2, unknown]]):
        refused = server.post("/v1/completions", {"prompt": prompt, **more})
        assert refused.status_code == 400 and str(unknown) in refused.json()["error"]["message"]
