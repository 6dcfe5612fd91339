"""The worker behind a scheduler that does what SGLang's does, as far as a worker sees it; SGLang is not needed."""

import json
import logging
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_up_model import asked, plain
from sglang_engine import (
    WIDTH,
    NgramWorker,
    Request,
    Scheduler,
    links,
    pretend_modules,
)

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import ConfigError
from retrieve_spec.integrations import hosted, sglang
from retrieve_spec.integrations.sglang import TreeCorpus, mask_of


class Worker(sglang.Drafting, NgramWorker):
    """As `worker_class` makes it, over the stand-in of SGLang's worker."""


@pytest.fixture
def make(monkeypatch):
    def worker(given=None, overlap=True, topk=10):
        pretend_modules(monkeypatch)
        monkeypatch.setenv(sglang.PLACE, json.dumps(given or {}))
        return Worker(overlap=overlap, topk=topk)

    return worker


@pytest.mark.parametrize(("overlap", "topk", "given"), [(True, 10, {}), (False, 10, {"session": True}), (True, 1, {})])
def test_texts_are_those_without_drafts(make, overlap, topk, given):
    scheduler = Scheduler(make(given, overlap, topk), seed=overlap + topk, retracts=0.05)
    wanted = asked(16, "max_new_tokens")
    for i, (name, request) in enumerate(wanted.items()):
        scheduler.add(name, **request, top_k=1 + i % 2)
    assert scheduler.serve() == {name: plain(*request.values()) for name, request in wanted.items()}
    assert scheduler.accepted > scheduler.steps / 2
    counts = scheduler.worker.ngram_corpus.statistics()
    assert counts["failures"] == 0 and counts["requests"] >= 12, "but for those of one token"
    scheduler.add("last", prompt=[1])
    for _ in range(2):
        scheduler.step()
    assert scheduler.worker.ngram_corpus.statistics()["under_way"] == 1, "those that ended are forgotten"


def check(token_ids, parent):
    """A tree that any verifier takes: parents first, children of a node all different."""
    assert parent[0] == -1 and (parent[1:] < np.arange(1, len(parent))).all() and (parent[1:] >= 0).all()
    assert len({(int(p), int(t)) for p, t in zip(parent[1:], token_ids[1:], strict=True)}) == len(parent) - 1


def test_trees_are_filled_up_with_a_path(make):
    corpus = make().ngram_corpus
    branched = DraftTree(np.array([5, 6, 7, 8], np.int32), np.array([-1, 0, 0, -1], np.int32))
    for tree in (branched, branched.first(2), DraftTree(), branched.first(1)):
        corpus._draft = lambda *_, tree=tree: {0: tree}
        token_ids, parent = corpus.trees([Request("a", [7, 7])], [[]])
        check(token_ids[0], parent[0])
        assert token_ids[0, 0] == 7
        assert token_ids[0, 1 : 1 + len(tree)].tolist() == tree.token_ids.tolist()
        assert parent[0, 1 : 1 + len(tree)].tolist() == (tree.parent + 1).tolist()
        child, _ = links(mask_of(parent))
        assert (child[0] == -1).sum() == max(len(set(range(len(tree))) - set(tree.parent.tolist())), 1)


def test_wishes_of_requests(make):
    """They are read where SGLang has room for them; `test_vllm_contract` asks for every one."""
    worker = make({"session": True})
    scheduler = Scheduler(worker, rows=8)
    scheduler.add("off", prompt=list(range(9)) * 3, retrieve_spec_draft=0)
    scheduler.add("pictures", prompt=[1, 2, 3] * 5, embeds=[[0.0]])
    scheduler.add("secret", prompt=[80, 81, 82], retrieve_spec_keep="false")
    assert scheduler.serve()["pictures"] == plain([1, 2, 3] * 5)
    counts = worker.ngram_corpus.statistics()
    assert counts["requests"] == 1 and counts["failures"] == 0
    assert not worker.ngram_corpus.drafter.session.texts


def corpus_of(**given):
    return TreeCorpus(hosted.Hosted(hosted.Options(**given), "tree"), WIDTH, "tree")


def test_answers_are_remembered_whole_and_once():
    """The tokens of the last step come when the request has left the batch; what is read again is no answer twice."""
    corpus = corpus_of(session=True)
    request = Request("a", [1, 2, 3])
    corpus.trees([request], [[]])
    request.output_ids.extend([11, 12])
    corpus.trees([request], [[13]])
    request.is_retracted = True
    corpus.end_those_gone()
    assert not list(corpus.drafter) and not corpus.drafter.session.texts
    request.is_retracted = False
    request.output_ids.extend([13, 14, 15])
    corpus.trees([request], [[]])
    request.output_ids.extend([16, 17])
    request.finished_reason = "stop"
    corpus.end_those_gone()
    assert [text.tolist() for text in corpus.drafter.session.texts] == [[11, 12, 13, 14, 15, 16, 17]]


def test_tokens_taken_back_and_names_that_come_back():
    corpus = corpus_of()
    request = Request("a", list(range(9)) * 3)
    corpus.trees([request], [[0, 1, 2]])
    request.output_ids = array("q", [5])
    corpus.trees([request], [[]])
    assert corpus.drafter.length("a") == 27 + 1
    other = Request("a", [50] * 40)
    token_ids, _ = corpus.trees([other], [[]])
    assert set(token_ids[0]) == {50} and corpus.statistics()["failures"] == 0


def test_a_failure_leaves_the_answer_and_ends_drafting(make, monkeypatch, caplog):
    worker = make()
    monkeypatch.setattr(worker.ngram_corpus.drafter, "draft", lambda *_, **__: 1 / 0)
    scheduler = Scheduler(worker)
    scheduler.add("a", prompt=list(range(9)) * 3)
    with caplog.at_level(logging.CRITICAL):
        assert scheduler.serve() == {"a": plain(list(range(9)) * 3)}
    assert worker.ngram_corpus.statistics()["failures"] == 3


def test_the_first_rank_drafts_for_all(make, monkeypatch):
    batch = SimpleNamespace(reqs=[Request("a", list(range(9)) * 3)], grammar_needs_sync=lambda: True)
    drafts = make(overlap=False)._prepare_draft_tokens(batch)
    wire = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda drafted, **_: wire.append(drafted.clone()))
    pretend_modules(monkeypatch, rank=0, world=2)
    Worker(overlap=False)._prepare_draft_tokens(batch)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda drafted, **_: drafted.copy_(wire[0]))
    pretend_modules(monkeypatch, rank=1, world=2)
    second = Worker(overlap=False)
    assert not isinstance(second.ngram_corpus, TreeCorpus)
    for one, other in zip(drafts, second._prepare_draft_tokens(batch), strict=True):
        assert (one == other).all()
    scheduler = Scheduler(second)
    scheduler.add("a", prompt=[1, 2, 3])
    scheduler.step()  # what the worker calls is there


ARGUMENTS = {
    "device": "cuda",
    "pp_size": 1,
    "speculative_num_draft_tokens": None,
    "speculative_ngram_external_corpus_path": None,
}


def test_mistakes_are_named(monkeypatch):
    monkeypatch.setattr(hosted, "version", lambda name: "0.5.23.post1")
    for wrong, message in (
        ({}, None),
        ({"speculative_ngram_external_corpus_path": "x.jsonl"}, "Build a store"),
        ({"speculative_num_draft_tokens": 1}, "2 … 1025"),
        ({"pp_size": 2}, "--pp-size 1"),
        ({"device": "npu"}, "cuda, cpu, xpu"),
    ):
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            sglang.validate(SimpleNamespace(**ARGUMENTS | wrong))
    monkeypatch.setattr(hosted, "version", lambda name: "0.6.0")
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.23, got 0\.6\.0"):
        sglang.validate(SimpleNamespace(**ARGUMENTS))
    monkeypatch.setenv(sglang.PLACE, '{"any_version": true}')
    sglang.validate(SimpleNamespace(**ARGUMENTS))
