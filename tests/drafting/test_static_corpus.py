"""Preset `sam` over static automata drafts what it drafts over suffix arrays."""

from __future__ import annotations

import numpy as np
import pytest

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.published.sam import LONGEST, Sam, SamRecycling
from retrieve_spec.drafting.published.static import AutomatonCorpus, static_automata

BUDGET = Budget(64, 64)
TOKENS = 6


@pytest.fixture(scope="module")
def stores(make_store):
    """The same documents, in two segments: with suffix arrays alone, and with automata too."""
    random = np.random.default_rng(3)
    base = [random.integers(0, TOKENS, 60).tolist() for _ in range(4)]
    documents = [base[random.integers(4)][:30] + random.integers(0, TOKENS, 20).tolist() for _ in range(30)]
    more = [base[0] + random.integers(0, TOKENS + 3, 10).tolist() for _ in range(5)]
    made = []
    for config in (StoreConfig(automaton_tokens=0), StoreConfig(automaton_tokens=1 << 20)):
        made.append(make_store(documents, config, more))
    return made


def test_the_automata_are_used_where_all_segments_have_one(stores):
    assert static_automata([stores[0]]) is None
    assert static_automata([]) is None
    assert static_automata(stores) is None
    assert isinstance(static_automata([stores[1]]), AutomatonCorpus)
    assert len(stores[1].segments) == 2


def test_automata_rest_behind_a_removal_until_the_text_is_written_anew(make_store):
    documents = np.random.default_rng(5).integers(0, TOKENS, (8, 30)).tolist()
    path = make_store(documents, StoreConfig(automaton_tokens=1 << 20)).path
    remove_documents(path, ["003.txt"])
    assert static_automata([open_datastore(path)]) is None
    compact_datastore(path)
    assert static_automata([open_datastore(path)]) is not None


def test_same_trees(stores):
    random = np.random.default_rng(4)
    over_array, over_automaton = Sam([stores[0]]), Sam([stores[1]])
    texts = [segment.text_ids(n) for segment in stores[0].segments for n in range(5)]
    drafted = 0
    for text in texts:
        prompt = np.concatenate([random.integers(0, TOKENS + 4, 8), text[: LONGEST - 8]]).astype(np.int32)
        for drafter in (over_array, over_automaton):
            drafter.start(prompt[:9])
        for token in prompt[9:]:
            trees = [drafter.propose(BUDGET) for drafter in (over_array, over_automaton)]
            for name in ("token_ids", "parent", "depth", "source"):
                assert np.array_equal(*(getattr(tree, name) for tree in trees))
            assert np.allclose(trees[0].log_p, trees[1].log_p)
            drafted += len(trees[0])
            for drafter in (over_array, over_automaton):
                drafter.feed(np.array([token], np.int32))
    assert drafted > 1000


def test_copies_of_sam_recycling_come_from_the_suffix_array(stores):
    prompt = stores[0].segments[0].text_ids(0)[:25].astype(np.int32)
    trees = []
    for store in stores:
        drafter = SamRecycling([store])
        drafter.start(prompt)
        trees.append(drafter.propose(BUDGET))
    assert len(trees[0]) > 0
    assert np.array_equal(trees[0].token_ids, trees[1].token_ids)
