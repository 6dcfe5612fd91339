"""Datastores by name: a request drafts from the one it asks for, of those that the server was given names for."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from live import Live

import retrieve_spec as rs
from retrieve_spec.cli import cli
from retrieve_spec.config import ServeConfig
from retrieve_spec.reference_model import load_model
from retrieve_spec.server.run import assemble

PROMPT = "def area(width, height):\n"


@pytest.fixture(scope="module")
def served(reference_live, tmp_path_factory):
    model, tokenizer = load_model("reference")
    folder = tmp_path_factory.mktemp("named")
    asked = {"prompt": PROMPT, "max_tokens": 48}
    said = reference_live.post("/v1/completions", asked).json()["choices"][0]["text"]
    (folder / "a.txt").write_text(PROMPT + said)
    rs.build_datastore(folder / "store", [str(folder / "a.txt")], tokenizer)
    mine = {"mine": folder / "store"}
    own = assemble(model, tokenizer, "reference", ServeConfig(), named_stores=mine, shared=True)
    server = Live(own.backend, tokenizer, service=own, keys=(b"alice", b"bob"))
    yield server, said
    server.stop()


def ask(server, key, **fields):
    return server.ask(key.encode(), "POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 48, **fields})


def test_a_request_drafts_from_the_store_it_names(served):
    server, said = served
    for key, name in (("alice", None), ("alice", "mine"), ("bob", None), ("bob", "mine"), ("alice", None)):
        fields = {} if name is None else {"store": name}
        answer = ask(server, key, cache_prompt=False, **fields).json()
        assert answer["choices"][0]["text"] == said
        found = answer["timings"]["accepted_by_source"]
        assert (found.get("exact", 0) + found.get("ngram", 0) > 0) == (name is not None)


@pytest.mark.parametrize("name", ["other", "", "../store", "/etc", "mine2", "MINE"])
def test_another_name_opens_nothing_and_tells_none(served, name):
    answer = ask(served[0], "alice", store=name)
    assert answer.status_code == 404
    assert "mine'" not in answer.text.replace(repr(name), "")
    assert ask(served[0], "alice", store=["mine"]).status_code == 400


@pytest.mark.parametrize(
    ("given", "told"), [(["a=.", "a=."], "given twice"), (["a=/no/such/folder"], "does not exist"), (["="], "does not")]
)
def test_serve_says_what_is_wrong_with_a_name(given, told):
    options = [part for store in given for part in ("--store", store)]
    result = CliRunner().invoke(cli, ["serve", *options])
    assert result.exit_code == 2 and told in result.output
