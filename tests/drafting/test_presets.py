"""What holds for every preset."""

from dataclasses import replace

import numpy as np
import pytest
from checked_drafts import check_draft
from fake_dense import state_of, with_dense
from hypothesis import given, settings
from hypothesis import strategies as st

import retrieve_spec as rs
from retrieve_spec.bench.replay import Replay, TraceRow
from retrieve_spec.config import DenseConfig, SpeculationConfig, StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget, Drafter
from retrieve_spec.drafting.presets import PRESETS, build_drafter
from retrieve_spec.errors import MissingSourceError, UnknownPresetError

NAMES = sorted(set(PRESETS) - {"auto"})


@pytest.fixture(scope="module")
def store(make_store):
    texts = ["abcabcabd", "bcdbca", "ddcab" * 4, "the cat sat on the mat. the cat ran."]
    return with_dense(make_store([[ord(c) for c in text] for text in texts]))


def make(name, store, session=False):
    return build_drafter(SpeculationConfig(draft=name, session=session), datastores=[store])


class Checked:
    """A drafter whose drafts are checked."""

    def __init__(self, drafter, nodes):
        self.drafter, self.nodes, self.log = drafter, nodes, []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, budget):
        tree = self.drafter.propose(budget)
        check_draft(tree, budget)
        self.log.append((tree.token_ids.tolist(), tree.parent.tolist()))
        return tree

    def observe(self, verified):
        """Show made-up top tokens and hidden states too, the same for the same draft."""
        k = self.drafter.top_k
        if k:
            n = len(verified.tree) + 1
            shift = np.append(verified.emitted[:1], verified.tree.token_ids).astype(np.int64)
            top = (97 + (shift[:n, None] * 3 + np.arange(k)) % max(k, 5)).astype(np.int32)
            logits = np.tile(-np.arange(k, dtype=np.float32), (n, 1))
            verified = replace(verified, top_ids=top, top_logits=logits)
        if self.drafter.wants_hidden:
            hidden = np.tile(state_of(verified.emitted[:-1]), (len(verified.tree) + 1, 1))
            verified = replace(verified, hidden=hidden)
        self.drafter.observe(verified)


segments = st.lists(st.tuples(st.text("abcd", min_size=1, max_size=40), st.booleans()), min_size=1, max_size=4)


def ids(text):
    return np.array([ord(c) for c in text], np.int32)


@pytest.mark.parametrize("name", ["auto", *NAMES])
@settings(deadline=None, max_examples=15)
@given(
    rows=st.lists(st.tuples(st.text("abcd", min_size=1, max_size=30), segments), min_size=1, max_size=3),
    nodes=st.sampled_from([0, 1, 7, 60, 256]),
    session=st.booleans(),
)
def test_drafts_are_valid_within_the_budget_and_the_same_each_time(name, store, rows, nodes, session):
    trace = [TraceRow("t", ids(prompt), [(ids(t), generated) for t, generated in parts]) for prompt, parts in rows]
    logs = []
    for _ in range(2):
        checked = Checked(make(name, store, session), nodes)
        result = Replay(checked, nodes).run(trace)
        logs.append(checked.log)
        assert result["passes"] == 0 or result["tokens_per_pass"] >= 1.0
    assert logs[0] == logs[1]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_request_reaches_the_next_without_a_session(name, store):
    used, fresh = make(name, store), make(name, store)
    for drafter in (used, fresh):
        assert isinstance(drafter, Drafter)
    used = Checked(used, 60)
    Replay(used, 60).run([TraceRow("t", ids("abcdabcd"), [(ids("dcbadcbadcba"), True)])])
    for drafter in (used, fresh):
        drafter.start(ids("cbadcbbacd"))
    a, b = used.propose(Budget(60, 20)), fresh.propose(Budget(60, 20))
    assert a.token_ids.tolist() == b.token_ids.tolist() and a.parent.tolist() == b.parent.tolist()


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("rest", MissingSourceError, "rest"),
        ("hierarchy", MissingSourceError, "hierarchy"),
        ("prompt-lookupp", UnknownPresetError, "prompt-lookup"),
    ],
)
def test_what_is_missing_is_said_and_the_closest_preset(name, error, said):
    with pytest.raises(error, match=said):
        build_drafter(SpeculationConfig(draft=name))


@pytest.fixture(scope="module")
def plain_output(_reference, reference_tokenizer):
    prompts = [
        "def add(a, b):\n",
        "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def ",
    ]
    inputs = [reference_tokenizer(p, return_tensors="pt") for p in prompts]
    return [(i, _reference.model.generate(**i, max_new_tokens=32, do_sample=False)) for i in inputs]


@pytest.fixture(scope="module")
def reference_store(tmp_path_factory, reference_tokenizer):
    folder = tmp_path_factory.mktemp("reference")
    (folder / "queue.py").write_text("class Queue:\n    def pop(self):\n        return self.items.pop()\n")
    config = StoreConfig(dense=DenseConfig("reference", dims=8))
    build_datastore(folder / "store", str(folder / "queue.py"), reference_tokenizer.backend_tokenizer, config=config)
    return open_datastore(folder / "store")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_output_is_that_of_plain_decoding(name, plain_output, reference_model, reference_store):
    rs.accelerate(reference_model, draft=name, nodes=40, datastores=[reference_store], recorded_pass="off")
    for inputs, expected in plain_output:
        found = reference_model.generate(**inputs, max_new_tokens=32, do_sample=False)
        assert found.tolist() == expected.tolist()
        assert reference_model.speculation.last.mode == "tree"
