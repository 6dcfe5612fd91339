"""With the bundled model: nothing that one key sent can be told from the answers to another, and each forgets alone."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live import Live
from waiting import HANG_S, wait_for

from retrieve_spec.config import ServeConfig
from retrieve_spec.server.run import assemble

SOURCE = "".join(
    f"def area_{i}(width, height):\n    total = width * height + {i}\n    return total\n\n\n" for i in range(12)
)
INFILL = {"input_prefix": SOURCE, "input_suffix": "\n", "prompt": "def area_13(", "n_predict": 16}


@pytest.fixture(scope="module")
def shared(reference):
    """The bundled model behind a server with two keys."""
    served, _, tokenizer = reference
    own = assemble(served.backend.model, tokenizer, "reference", ServeConfig(), shared=True)
    server = Live(own.backend, tokenizer, service=own, keys=(b"alice", "bänker".encode()))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def clean(shared):
    for key in (ALICE, BOB):
        assert shared.ask(key, "DELETE", "/v1/workspace").status_code == 200


ALICE, BOB = b"alice", "bänker".encode()


def infill(server, key, **fields):
    answer = server.ask(key, "POST", "/infill", {**INFILL, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_what_is_cached_of_one_key_is_not_cached_for_another(shared):
    assert infill(shared, ALICE)["timings"]["cache_n"] == 0
    assert infill(shared, ALICE)["timings"]["cache_n"] > 100
    guessed = infill(shared, BOB)
    assert guessed["timings"]["cache_n"] == 0
    assert guessed["tokens_evaluated"] == guessed["timings"]["prompt_n"]


def test_a_request_of_one_key_leaves_the_cache_of_another_as_it_was(shared):
    infill(shared, ALICE)
    before = infill(shared, ALICE)["timings"]["cache_n"]
    infill(shared, BOB, prompt="", input_prefix=SOURCE[: len(SOURCE) * 2 // 3])  # the same beginning, cut off
    for _ in range(8):
        infill(shared, BOB, prompt="", input_prefix="x" * 50 + SOURCE)
    assert infill(shared, ALICE)["timings"]["cache_n"] >= before


def test_what_the_model_said_to_one_key_is_not_drafted_for_another(shared):
    recycling = shared.service.backend.model.speculation.drafter().sources.recycling
    said = shared.service.codec.encode(infill(shared, ALICE)["content"])

    def known():
        return sum(recycling.lookup(said[at - 3 : at])[2] == 3 for at in range(3, len(said)))

    assert known() > 5
    infill(shared, BOB, input_prefix="import os\n", prompt="", n_predict=2)
    assert known() == 0


def test_identical_requests_of_two_keys_are_two(shared):
    chat = {"messages": [{"role": "user", "content": SOURCE}], "max_tokens": 200, "stream": True}

    def read(key, lines):
        headers = {b"authorization": b"Bearer " + key}
        with httpx.stream("POST", shared.url + "/v1/chat/completions", json=chat, headers=headers, timeout=HANG_S) as r:
            return list(itertools.islice(filter(None, r.iter_lines()), lines))

    with ThreadPoolExecutor() as threads:
        gone, stays = threads.submit(read, ALICE, 3), threads.submit(read, BOB, None)
    assert len(gone.result()) == 3
    assert len(stays.result()) > 5 and stays.result()[-1] == "data: [DONE]"


def test_each_key_forgets_its_own(shared):
    chunk = [{"text": "def helper():\n    return 42\n", "filename": "h.py"}]
    for key in (ALICE, BOB):
        infill(shared, key, input_extra=chunk)
    kept = shared.ask(ALICE, "GET", "/v1/workspace").json()
    assert kept["caches"] >= 1 and kept["session_tokens"] > 0 and kept["encodings"] > 0
    told = shared.ask(ALICE, "DELETE", "/v1/workspace").json()
    assert told == {"forgotten": True, "kept": kept}
    left = shared.ask(ALICE, "GET", "/v1/workspace").json()
    assert set(left.values()) == {0}
    assert shared.service.beginnings.agreeing.cache_info().currsize == 0, "words that were begun"
    assert infill(shared, BOB, input_extra=chunk)["timings"]["cache_n"] > 100
    assert infill(shared, ALICE, input_extra=chunk)["timings"]["cache_n"] == 0


def test_forgetting_holds_for_what_is_under_way(shared):
    chat = {"messages": [{"role": "user", "content": SOURCE}], "max_tokens": 150}
    with ThreadPoolExecutor() as threads:
        talk = threads.submit(shared.ask, ALICE, "POST", "/v1/chat/completions", chat)
        wait_for(lambda: shared.service.queue.begun)
        shared.ask(ALICE, "DELETE", "/v1/workspace")
    assert talk.result().status_code == 200
    assert set(shared.ask(ALICE, "GET", "/v1/workspace").json().values()) == {0}
