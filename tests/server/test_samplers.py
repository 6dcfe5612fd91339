from dataclasses import replace

import pytest
import torch
from live import Live
from transformers import GenerationConfig

from retrieve_spec.config import ServeConfig
from retrieve_spec.reference_model import load_model
from retrieve_spec.server.run import assemble
from retrieve_spec.server.sampling import InfillProcessor, Sampling, infill_survivors, sampling_of

END = frozenset({0, 5})


@pytest.mark.parametrize(
    ("candidates", "kept"),
    [
        ([(7, 0.5, " x"), (0, 0.3, ""), (5, 0.2, "")], [0, 5]),  # a likely end
        ([(7, 0.7, "aa"), (8, 0.25, "b"), (9, 0.05, "c")], [7]),
        ([(7, 0.5, "aa"), (8, 0.45, "b"), (9, 0.05, "c")], [7, 8]),
        # " re" and " return" say the same: together they pass the threshold that " re" alone would not
        ([(7, 0.4, "x"), (8, 0.31, " return"), (9, 0.29, " re")], [7, 8]),
        ([(10 + i, 0.1, f"w{i}") for i in range(10)], [0]),  # nothing is likely
    ],
)
def test_what_the_infill_rule_keeps(candidates, kept):
    assert infill_survivors(candidates, END, 0) == kept


@pytest.mark.parametrize(
    ("sampling", "greedy"),
    [
        (Sampling(0.0, 40, 0.9, chain=("top_k", "top_p", "infill")), False),
        (Sampling(0.0, 1, chain=("top_k", "infill")), True),
        (Sampling(0.0), True),
        (Sampling(0.8, top_p=0.0), True),
    ],
)
def test_what_is_greedy(sampling, greedy):
    assert sampling.greedy == greedy


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5}])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40])
def test_hardly_any_temperature_is_none(reference_live, temperature, fields):
    ask = {"prompt": "x = [1, 1, 1, 1,", "max_tokens": 6}
    cold, greedy = (
        reference_live.post("/v1/completions", {**ask, **more}) for more in ({"temperature": temperature, **fields}, {})
    )
    assert cold.status_code == 200, cold.text
    assert cold.json()["choices"] == greedy.json()["choices"]


def test_the_infill_rule_does_not_end_a_text_that_may_not_end(codec):
    """What was begun is still to be said: other processors have made the end impossible."""
    processor = InfillProcessor(codec, frozenset({0}), 0, top_k=40, top_p=1.0)
    scores = torch.full((1, 8192), -torch.inf)
    words = [codec.encode(letter)[0] for letter in "abcdefghij"]
    scores[0, words] = torch.linspace(1.0, 1.1, 10)
    assert torch.isfinite(processor(torch.zeros((1, 1), dtype=torch.long), scores)[0]).nonzero().tolist() == [
        words[-1:]
    ]
    scores[0, 0] = -9.0
    assert torch.isfinite(processor(torch.zeros((1, 1), dtype=torch.long), scores)[0]).nonzero().tolist() == [[0]]


QWEN = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "fields", "chosen"),
    [
        ("/v1/chat/completions", {}, Sampling(0.7, 20, 0.8, repetition=1.05)),
        ("/v1/messages", {}, Sampling(0.7, 20, 0.8, repetition=1.05)),
        ("/v1/responses", {}, Sampling(0.7, 20, 0.8, repetition=1.05)),
        ("/v1/chat/completions", {"top_p": 0.5, "min_p": 0.1}, Sampling(0.7, 20, 0.5, 0.1, repetition=1.05)),
        ("/v1/chat/completions", {"repetition_penalty": 1}, Sampling(0.7, 20, 0.8)),
        ("/v1/chat/completions", {"temperature": 0.2}, Sampling(0.2)),
        ("/v1/chat/completions", {"temperature": 0}, Sampling()),
        ("/v1/chat/completions", {"samplers": []}, Sampling(chain=())),
        ("/v1/completions", {}, Sampling()),
        ("/v1/completions", {"samplers": "kpt", "top_k": 3}, Sampling(0, 3, chain=("top_k", "top_p", "temperature"))),
        ("/infill", {}, Sampling()),
    ],
)
def test_a_chat_that_does_not_say_samples_as_the_model_is_meant_to(live, say, path, fields, chosen):
    server = live(say("said"))
    server.service.chat_sampling = sampling_of(QWEN)
    body = {"messages": [USER], "input": [USER], "prompt": "x", "input_prefix": "", "input_suffix": "", "max_tokens": 9}
    if path == "/v1/responses":
        del body["prompt"]  # there it is one that is kept by the server
    server.post(path, {**body, **fields})
    sampling = server.done[-1][0].sampling
    assert replace(sampling, seed=0) == chosen


@pytest.fixture(scope="module")
def odd():
    """A server of the bundled model with an unusual generation config, and what plain `generate` makes of a prompt."""
    model, tokenizer = load_model("reference")
    plain, _ = load_model("reference")
    ways = {"num_beams": 3, "use_cache": False, "cache_implementation": "static", "prompt_lookup_num_tokens": 3}
    odd = {
        "is_assistant": True,
        "repetition_penalty": 2,
        "pad_token_id": tokenizer(PROMPT).input_ids[1],
        "num_return_sequences": 2,
    }
    for name, value in {**ways, **odd, "token_healing": True, "penalty_alpha": 0.6}.items():
        setattr(model.generation_config, name, value)
    service = assemble(model, tokenizer, "reference", ServeConfig())

    def generated(penalty):
        given = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
        said = plain.generate(**given, do_sample=False, max_new_tokens=9, repetition_penalty=penalty)
        return tokenizer.decode(said[0, given.input_ids.shape[1] :])

    server = Live(service.backend, tokenizer, service=service)
    yield server, generated
    server.stop()


PROMPT = "x = [1, 1, 1, 1, 1, 1,"


def completed(server, path, **fields):
    (choice,) = server.post(path, {"max_tokens": 9, **fields}).json()["choices"]
    return choice.get("text") or choice["message"]["content"]


def test_texts_are_decoded_one_by_one_and_all_their_tokens_are_text(odd):
    server, generated = odd
    for _ in range(2):
        assert completed(server, "/v1/completions", prompt=PROMPT) == generated(1.0)


def test_only_chats_that_do_not_say_have_the_models_own_repetition_penalty(odd):
    """`generate` would take it for every text: at a cursor it forbids the names of the file."""
    server, generated = odd
    assert completed(server, "/v1/completions", prompt=PROMPT) == generated(1.0) != generated(2.0)
    assert completed(server, "/v1/completions", prompt=PROMPT, repetition_penalty=1.5) == generated(1.5)
    chat = "/v1/chat/completions"
    own, without, greedy = (
        completed(server, chat, messages=[{"role": "user", "content": PROMPT}], **fields)
        for fields in ({}, {"repetition_penalty": 1}, {"temperature": 0})
    )
    assert own != without == greedy


@pytest.mark.parametrize(("top_k", "chosen"), [(None, 50), (0, 0), (7, 7)])
def test_a_model_that_samples_without_a_top_k_has_generates(live, say, top_k, chosen):
    server = live(say("said"), generation_config=GenerationConfig(do_sample=True, top_k=top_k))
    server.post("/v1/chat/completions", {"messages": [USER]})
    assert replace(server.done[-1][0].sampling, seed=0) == Sampling(1.0, chosen)


def test_a_model_that_is_not_meant_to_sample_is_greedy(reference):
    served, plain, _ = reference
    assert sampling_of(GenerationConfig(temperature=0.7)).greedy
    assert served.chat_sampling == sampling_of(plain.generation_config)
