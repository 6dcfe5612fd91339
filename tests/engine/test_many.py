"""`generate_many`: any number of requests, each of which says what it says alone, whatever the others do."""

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from batch_rows import small_model
from scripted_drafter import ScriptedDrafter

import retrieve_spec as rs
from retrieve_spec.errors import PositionError


def ids_of(row: int, length: int) -> list[int]:
    return [3 + (i * 37 + 11 * row + 7) % 190 for i in range(length)]


RULES: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.9, "seed": 3},
    {"do_sample": True, "top_k": 20, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.2},
    {"do_sample": False, "no_repeat_ngram_size": 2, "max_new_tokens": 7},
    {"do_sample": True, "seed": 11, "draft": "off", "max_new_tokens": 31},
    {"do_sample": False, "draft": "prompt-lookup"},
]


def mixed(count: int = 11) -> list[dict[str, Any]]:
    """Requests of different lengths, each with rules and limits of its own."""
    return [{"inputs": ids_of(i, 1 + i * 7 % 23), **RULES[i % len(RULES)]} for i in range(count)]


def alone(model: Any, request: dict[str, Any], **common: Any) -> list[int]:
    """What a stream of the same request says."""
    own = dict(request)
    said = rs.generate_stream(model, torch.tensor(own.pop("inputs")), **common | own)
    return [int(token) for piece in said for token in piece.token_ids]


@pytest.mark.parametrize("recorded", ["always", "off"])
def test_each_request_says_what_it_says_alone(tiny: Any, recorded: str) -> None:
    rs.accelerate(tiny, recorded_pass=recorded)
    requests = mixed()
    expected = [alone(tiny, request, max_new_tokens=20) for request in requests]
    assert len({tuple(text) for text in expected}) == len(expected)
    begun = tiny.speculation.engine.steps
    finished = list(rs.generate_many(tiny, requests, max_new_tokens=20))
    steps = tiny.speculation.engine.steps - begun
    assert [one.index for one in finished] == list(range(len(requests)))
    assert [one.token_ids.tolist() for one in finished] == expected
    assert [one.request for one in finished] == requests
    assert all(one.outputs[0].report.new_tokens == len(one.token_ids) and one.error is None for one in finished)
    passes = [one.outputs[0].report.passes for one in finished]
    if recorded == "always":
        assert steps < 2 * max(passes), "passes are shared"


def test_requests_are_taken_when_there_is_room(tiny: Any) -> None:
    """Never more than `rows` under way; an endless iterable is read only as far as needed."""
    rs.accelerate(tiny, recorded_pass="always", draft="off")
    taken = itertools.count(1)
    endless = (ids_of(row, 3 + row % 5) for row in taken)
    with rs.generate_many(tiny, endless, rows=3, max_new_tokens=5) as running:
        first = [next(running) for _ in range(4)]
        assert len(tiny.speculation.engine._sequences) <= 3
    assert [one.index for one in first] == [0, 1, 2, 3]
    assert next(taken) <= 9
    assert tiny.speculation.engine._sequences == []
    assert next(running, None) is None


def fails_at(length: int) -> list[Any]:
    """Processors that raise at a length."""

    def fail(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == length:
            raise ArithmeticError("no more")
        return scores

    return [fail]


def test_errors_end_their_own_request(tiny: Any) -> None:
    """In a processor, in an argument, in a prompt; the others finish."""
    rs.accelerate(tiny, recorded_pass="always")
    requests: list[Any] = [
        {"inputs": ids_of(0, 5)},
        {"inputs": ids_of(1, 5), "logits_processor": fails_at(8)},
        {"inputs": []},
        {"inputs": ids_of(2, 5), "no_such_option": 3},
        {"inputs": ids_of(3, 5), "num_return_sequences": 2, "do_sample": True, "logits_processor": fails_at(7)},
        {"inputs": "text without a tokenizer"},
        {"inputs": ids_of(4, 9)},
    ]
    expected = [alone(tiny, requests[i], max_new_tokens=12) for i in (0, 6)]
    finished = list(rs.generate_many(tiny, requests, max_new_tokens=12))
    assert [one.token_ids.tolist() for one in finished if one.error is None] == expected
    assert [type(one.error).__name__ for one in finished] == [
        "NoneType", "ArithmeticError", "PromptError", "ValueError", "ArithmeticError", "ConfigError", "NoneType",
    ]  # fmt: skip
    assert finished[1].token_ids.tolist() == alone(tiny, {"inputs": ids_of(1, 5)}, max_new_tokens=3)
    assert tiny.speculation.engine._sequences == []


@pytest.mark.parametrize("recorded", ["always", "off"])
def test_a_prompt_longer_than_the_model_ends_its_own_request(recorded: str) -> None:
    """Prompts are read in one pass; when it fails, each is read alone, and all of it is looked at."""
    model = small_model("opt", max_position_embeddings=64, word_embed_proj_dim=32, ffn_dim=48)
    requests = [ids_of(0, 80), ids_of(1, 6), ids_of(2, 60), ids_of(3, 1), ids_of(4, 9)]
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in requests[1::2]]
    rs.accelerate(model, recorded_pass=recorded, nodes=8)
    finished = list(rs.generate_many(model, requests, **options))
    assert [one.token_ids.tolist() for one in finished[1::2]] == expected
    assert all(one.error is None and len(one.token_ids) == 12 for one in (finished[1], finished[3], finished[4]))
    assert len(finished[0].token_ids) == 0 and len(finished[2].token_ids) == 5
    assert all(isinstance(finished[i].error, PositionError) for i in (0, 2))
    assert "at most 64 tokens, for which the model has positions, got 80, of which 80" in str(finished[0].error)
    assert "got 65, of which 60 are the prompt's. Shorten the prompt" in str(finished[2].error)


def test_cancelling_ends_one_request(tiny: Any) -> None:
    """One under way, from another thread and from within a pass, and one that has not begun."""
    rs.accelerate(tiny, recorded_pass="always", draft="off")
    expected = [alone(tiny, {"inputs": ids_of(i, 5)}, max_new_tokens=25) for i in range(5)]
    passes = itertools.count()

    def on_pass(_shown: Any) -> None:
        if next(passes) == 5:
            running.cancel(1)

    requests = [{"inputs": ids_of(i, 5)} for i in range(5)]
    requests[1] |= {"on_pass": on_pass, "draft": "auto"}
    requests[0] |= {"max_new_tokens": 4}
    running = rs.generate_many(tiny, requests, max_new_tokens=25, rows=3, order="completed")
    running.cancel(4)
    finished = {}
    for one in running:
        finished[one.index] = one
        if one.index == 0:
            thread = threading.Thread(target=running.cancel, args=(2,))
            thread.start()
            thread.join()
    assert {i: one.cancelled for i, one in finished.items()} == {0: False, 1: True, 2: True, 3: False, 4: True}
    assert finished[3].token_ids.tolist() == expected[3]
    assert finished[4].outputs == ()
    for i in (1, 2):
        said = finished[i].token_ids.tolist()
        assert 0 < len(said) < 25
        assert said == expected[i][: len(said)]


def test_what_is_left_to_generate(tiny: Any) -> None:
    """Beams, in the middle of others; and a model whose drafter serves one text at a time."""
    prompt = torch.tensor([ids_of(2, 6)])
    beams = tiny.generate(prompt, num_beams=2, max_new_tokens=5, do_sample=False)[0, 6:].tolist()
    rs.accelerate(tiny, recorded_pass="always")
    requests = mixed(3)
    expected = [alone(tiny, request, max_new_tokens=5) for request in requests]
    requests[1:1] = [{"inputs": prompt, "num_beams": 2, "do_sample": False}] * 2
    finished = list(rs.generate_many(tiny, requests, max_new_tokens=5))
    assert [one.token_ids.tolist() for one in finished] == [expected[0], beams, beams, *expected[1:]]
    assert finished[1].outputs[0].report.mode == "delegated"
    rs.accelerate(tiny, recorded_pass="always", drafter=ScriptedDrafter(np.array(expected[0])))
    finished = list(rs.generate_many(tiny, [requests[0], requests[0]], max_new_tokens=5))
    assert [one.token_ids.tolist() for one in finished] == [expected[0]] * 2
