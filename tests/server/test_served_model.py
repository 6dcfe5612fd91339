"""Distilling from the model of a server: the bundled one, and answers in the forms of other servers."""

import hashlib
import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from click.testing import CliRunner

from retrieve_spec.cli import cli
from retrieve_spec.datastore.distilled import distilled_of
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.distilling import distil
from retrieve_spec.errors import ServeError
from retrieve_spec.server.editors import Remote
from retrieve_spec.server.served_model import ServedModel
from retrieve_spec.teachers import Question

PROMPTS = ["def add(a, b):\n", "import os\n"]


def table_of(store):
    """The contexts of a store's table: key → count, top tokens, probabilities."""
    [entry] = (manifest := open_datastore(store).manifest).distilled
    found = distilled_of(store, manifest, entry.model).contexts
    columns = found.keys, found.counts, found.top_ids, found.probs
    return {key: row for key, *row in zip(*map(np.ndarray.tolist, columns), strict=True)}


def test_a_served_model_gives_the_answers_and_the_table_of_the_same_model_here(
    reference, reference_live, tmp_path, monkeypatch
):
    _, plain, tokenizer = reference
    monkeypatch.setattr("retrieve_spec.distilling._ANSWER", 24)
    monkeypatch.setattr("retrieve_spec.distilling.TEMPERATURES", (0.0,))
    teacher = ServedModel(Remote(reference_live.url), tokenizer)
    teacher.vocabulary = 200
    run = partial(distil, tokenizer=tokenizer, prompts=PROMPTS)
    told, own = run(teacher, store=tmp_path / "served"), run(plain, store=tmp_path / "own")
    assert told.answers == own.answers == 3 and told.tokens == own.tokens and told.asked == 200
    stores = [open_datastore(tmp_path / name) for name in ("served", "own")]
    assert len({frozenset(each.sha256 for each in store.documents()) for store in stores}) == 1
    served, local = table_of(tmp_path / "served"), table_of(tmp_path / "own")
    same = [key in local and row[1][0] == local[key][1][0] for key, row in served.items()]
    assert len(same) > 300 and np.mean(same) > 0.95, "but for ties, and contexts for which a full set has no room"


def completion(*choices):
    every = [{"index": number, "text": "ab", **choice} for number, choice in enumerate(choices)]
    return {"choices": every, "usage": {"completion_tokens": 2}}


@contextmanager
def answering(answer, models=("m",)):
    """A server that answers completions by a function of the request; `(address, requests)`."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def reply(self, body):
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.reply({"data": [{"id": name} for name in models]})

        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.reply(answer(asked[-1]))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


VLLM = {
    "tokens": ["token_id:5", "token_id:7"],
    "token_logprobs": [-0.7, -3.0],
    "top_logprobs": [{"token_id:5": -0.7, "token_id:6": -0.9}, {"token_id:7": -3.0, "token_id:8": -0.1}],
}
FIRST = [{"id": 5, "logprob": -0.7}, {"id": 6, "logprob": -0.9}]
SECOND = [{"id": 8, "logprob": -0.1}, {"id": 7, "logprob": -3.0}]
LLAMA_CPP = {
    "content": [
        {"id": 5, "token": "a", "logprob": -0.7, "top_logprobs": FIRST},
        {"id": 7, "token": "b", "logprob": -3.0, "top_logprobs": SECOND},
    ]
}
TEXTS = {"tokens": ["a", "b"], "token_logprobs": [-0.7, -3.0], "top_logprobs": [{"a": -0.7}, {"c": -0.1}]}
CHAT = {"content": [{"token": "a", "logprob": -0.7, "top_logprobs": []}]}


@pytest.mark.parametrize("logprobs", [VLLM, LLAMA_CPP], ids=["vLLM", "llama.cpp"])
def test_top_tokens_are_read_where_ids_are_named(logprobs, reference_tokenizer):
    with answering(lambda _: completion({"logprobs": logprobs})) as (url, asked):
        teacher = ServedModel(Remote(f"{url}/v1"), reference_tokenizer)
        [(number, answer)] = teacher.answers([Question([1, 2], 16, 0.7, 3)])
    assert number == 0 and answer.text == "ab" and answer.tokens == 2
    assert answer.shown.ids.tolist() == [1, 2, 5, 7] and answer.shown.first == 1
    assert answer.shown.top_ids[:, :3].tolist() == [[5, 6, -1], [8, 7, -1]]
    assert np.allclose(answer.shown.probs[:, :2], np.exp([[-0.7, -0.9], [-0.1, -3.0]]), rtol=1e-3)
    [body] = asked
    assert body["prompt"] == [1, 2] and body["model"] == "m" and body["seed"] == 3 and body["max_tokens"] == 16


@pytest.mark.parametrize("choice", [{"logprobs": TEXTS}, {"logprobs": CHAT}, {}], ids=["texts", "chat", "none"])
def test_elsewhere_answers_are_kept_alone(choice, reference_tokenizer, tmp_path):
    with answering(lambda _: completion(choice)) as (url, _):
        teacher = ServedModel(Remote(url), reference_tokenizer)
        report = distil(teacher, reference_tokenizer, tmp_path / "store", prompts=PROMPTS)
    assert report.answers >= 2 and report.asked == report.contexts == 0
    [document] = open_datastore(tmp_path / "store").documents()
    assert document.sha256 == hashlib.sha256(b"ab").hexdigest()


def test_texts_are_read_by_prompt_logprobs(reference_tokenizer):
    told = [None, {"5": {"logprob": -0.7}, "6": {"logprob": -0.1}}, {"7": {"logprob": -0.2}}]
    with answering(lambda _: completion({"logprobs": None, "prompt_logprobs": told})) as (url, asked):
        shown = ServedModel(Remote(url), reference_tokenizer).read(np.array([4, 5, 7], np.int32))
    assert shown.first == 0 and shown.top_ids[:, :2].tolist() == [[6, 5], [7, -1]]
    assert asked[0]["prompt_logprobs"] == 8
    with answering(lambda _: completion({"logprobs": None})) as (url, _), pytest.raises(ServeError, match="vLLM"):
        ServedModel(Remote(url), reference_tokenizer).read(np.array([4, 5], np.int32))


def test_a_model_is_chosen_by_name(reference_tokenizer):
    with answering(completion, models=("x", "y")) as (url, _):
        assert ServedModel(Remote(url), reference_tokenizer, "y").title == "y"
        with pytest.raises(ServeError, match="x, y"):
            ServedModel(Remote(url), reference_tokenizer, "z")


def test_the_command_asks_a_server_and_says_why_it_cannot(tmp_path):
    given = ["distil", str(tmp_path / "store"), "--tokens", "12", "--json", "--connect"]
    with answering(lambda _: completion({"logprobs": TEXTS})) as (url, _):
        result = CliRunner().invoke(cli, [*given, f"{url}/v1"], catch_exceptions=False)
    assert result.exit_code == 0 and json.loads(result.stdout)["tokens"] == 12
    with pytest.raises(ServeError, match="nobody answers"):
        CliRunner().invoke(cli, [*given, url], catch_exceptions=False)


def in_one(choices):
    return {**completion(*choices), "choices": completion(*choices)["choices"][::-1]}


def in_a_list(choices):  # llama.cpp
    return [completion(choice) for choice in choices]


@pytest.mark.parametrize("form", [in_one, in_a_list])
def test_what_follows_each_token_is_kept_in_the_order_of_prompts(form, reference_tokenizer):
    def answer(body):
        tops = (
            {"tokens": ["token_id:1"], "top_logprobs": [{f"token_id:{token}": -0.1}]} for [*_, token] in body["prompt"]
        )
        return form([{"logprobs": top} for top in tops])

    with answering(answer) as (url, asked):
        every = np.arange(40, dtype=np.int32)
        tokens, top_ids, _ = ServedModel(Remote(url), reference_tokenizer).after_each(every, lambda: len(asked) < 2)
    assert tokens.tolist() == top_ids[:, 0].tolist() == list(range(32))
