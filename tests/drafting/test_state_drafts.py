"""Drafts from similar hidden states: what the model said in another text where its state was alike."""

import numpy as np
import pytest
import torch

import retrieve_spec as rs
from retrieve_spec.datastore.distilled import add_distilled
from retrieve_spec.datastore.edit import merge_datastores
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.observations import Observations
from retrieve_spec.datastore.state_rows import KeyTransform, StateCollector, StateRows
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.distilling import distil
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.distilled import ModelTables

SIZE = 8
TRANSFORM = KeyTransform(np.zeros(SIZE, np.float32), np.eye(SIZE, dtype=np.float32))


def state(direction):
    """Hidden state (1, SIZE) of a meaning."""
    return np.eye(SIZE, dtype=np.float32)[[direction]]


def seen(*texts, transform=TRANSFORM):
    """State rows of texts: lists of (token, meaning after it, next token)."""
    collector = StateCollector(transform)
    for text in texts:
        ids, meanings, following = (list(column) for column in zip(*text, strict=True))
        top_ids = np.full((len(ids), 8), -1, np.int32)
        top_ids[:, 0] = following
        probs = np.zeros((len(ids), 8), np.float16)
        probs[:, 0] = 1
        collector.add(np.array(ids, np.int32), np.concatenate([state(m) for m in meanings]), top_ids, probs)
    return collector.rows()


ELSEWHERE = Observations(
    np.array([98], np.int32), np.array([1]), np.arange(8, dtype=np.int32)[None], np.ones((1, 8), np.float16)
)
TEXTS = (
    [(10, 1, 5), (5, 2, 30), (30, 3, 31), (31, 4, 32)],  # after meaning 1, token 5 goes on with 30 31 32
    [(11, 6, 5), (5, 7, 40), (40, 7, 41)],  # after meaning 6, with 40 41
)


def keep(store, *texts, model="model:1"):
    add_distilled(ELSEWHERE, 1 << 8, store.path, model, seen(*texts))
    return open_datastore(store.path)


@pytest.fixture
def store(make_store):
    return keep(make_store([[90, 91, 92, 93] * 4]), *TEXTS)


def told(drafter, prompt, hidden, token):
    """Start a request, and show a token and the state that it was predicted from."""
    drafter.start(np.array(prompt, np.int32))
    drafter.propose(Budget(0, 0))
    tops = np.array([[token, *range(50, 57)]], np.int32), -np.arange(8, dtype=np.float32)[None]
    drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([token], np.int32), *tops, hidden))


def paths(drafter, nodes=3):
    """Tokens of the most probable path of the next draft, and the sources."""
    tree = drafter.propose(Budget(nodes, nodes))
    path, at = [], -1
    for i, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parent.tolist(), strict=True)):
        if parent == at:
            path.append(token)
            at = i
    return path, {SOURCE_NAMES[number] for number in tree.source}


@pytest.mark.parametrize(("meaning", "follows"), [(1, [30, 31, 32]), (6, [40, 41])])
def test_what_was_said_after_a_similar_state_is_drafted(store, meaning, follows):
    """The same token goes on in two ways; the state before it tells which, although the words before it are new."""
    drafter = MixtureDrafter(datastores=[store])
    assert drafter.wants_hidden == "last"
    told(drafter, [60, 61], state(meaning), 5)
    path, sources = paths(drafter)
    assert path[: len(follows)] == follows and "states" in sources


@pytest.mark.parametrize(("meaning", "follows"), [(4, 77), (0, 78)])
def test_a_rejected_branch_is_told_from_others_by_its_state(store, meaning, follows):
    """Token 31 was followed by 77 in a branch, after meaning 4, and by 78 in the text, after meaning 0."""
    drafter = MixtureDrafter(datastores=[store])
    told(drafter, [60, 61], state(1), 5)
    tree = drafter.propose(Budget(3, 3))
    assert tree.token_ids.tolist() == [30, 31, 32] and tree.parent.tolist() == [-1, 0, 1]

    def observe(tree, token, after, *meanings):
        """The target's top token after one row is known; no draft is accepted."""
        top_ids = np.tile(np.arange(50, 58, dtype=np.int32), (len(tree) + 1, 1))
        top_ids[after[0], 0] = after[1]
        logits = np.tile(np.array([9, *range(-1, -8, -1)], np.float32), (len(tree) + 1, 1))
        hidden = np.concatenate([state(number) for number in meanings])
        emitted = np.array([token], np.int32)
        drafter.observe(VerifiedPass(tree, emitted[:0], emitted, top_ids, logits, hidden))

    observe(tree, 31, (2, 77), 0, 4, 2, 2)
    drafter.propose(Budget(0, 0))
    observe(DraftTree(), 63, (0, 78), 2)
    drafter.propose(Budget(0, 0))
    observe(DraftTree(), 31, (0, 31), meaning)
    assert paths(drafter, 1)[0] == [follows]


def test_a_text_that_went_on_unobserved_has_no_state(store):
    drafter = MixtureDrafter(datastores=[store])
    told(drafter, [60, 61], state(1), 5)
    drafter.feed(np.array([62, 5], np.int32))
    assert 30 not in paths(drafter)[0]


@pytest.mark.parametrize(
    ("model", "follows", "done"), [("model:2", 6, "left out"), ("model:3", 30, "none of this model")]
)
def test_states_and_table_of_the_model_that_runs_come_before_larger_ones(store, caplog, model, follows, done):
    """Another model's are drafted from where there are no others: they may be the same model's in another format."""
    store = keep(store, [(10, 1, 5), (5, 5, 6), (6, 5, 7)], model="model:2")
    with caplog.at_level("INFO", "retrieve_spec"):
        drafter = MixtureDrafter(datastores=[store], distilled=ModelTables([store], lambda: model))
    assert "model:1" in caplog.text and done in caplog.text
    assert len(drafter.sources.distilled) == (1 if model == "model:2" else 2)
    told(drafter, [60, 61], state(1), 5)
    assert paths(drafter)[0][0] == follows


def test_states_of_a_model_of_another_size_are_passed_over(store):
    drafter = MixtureDrafter(datastores=[store])
    told(drafter, [60, 61], np.ones((1, SIZE + 1), np.float32), 5)
    assert "states" not in paths(drafter)[1]


def test_without_logits_no_states_are_asked_for(store):
    assert MixtureDrafter(datastores=[store], recycling=False).wants_hidden is None


def test_a_damaged_file_is_left_out_and_named_by_verify(store, caplog):
    [entry] = store.manifest.distilled
    path = store.path / "distilled" / entry.name / "keys"
    path.write_bytes(path.read_bytes()[:-1])
    assert MixtureDrafter(datastores=[store]).wants_hidden is None and "keys" in caplog.text
    with pytest.raises(StoreCorruptError, match="keys"):
        verify_datastore(store.path)


def test_states_that_were_fitted_apart_cannot_be_joined(caplog):
    moved = KeyTransform(TRANSFORM.mean + 1, TRANSFORM.components)
    joined = StateRows.joined([seen(*TEXTS), seen([(20, 5, 6), (6, 5, 70)], transform=moved)])
    assert len(joined.keys) == 7 and "left out 2 hidden states" in caplog.text


def test_damaged_states_are_not_copied_under_a_new_checksum(store, make_store, tmp_path):
    """They would be found no more: a byte was changed, which opening a store does not notice."""
    [entry] = store.manifest.distilled
    path = store.path / "distilled" / entry.name / "shares"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    other = keep(make_store([[80, 81]]), [(20, 5, 8), (8, 5, 71)])
    with pytest.raises(StoreCorruptError, match="shares"):
        keep(store, [(20, 5, 6), (6, 5, 70)])
    with pytest.raises(StoreCorruptError, match="shares"):
        merge_datastores(tmp_path / "merged", [store.path, other.path])


def test_later_states_are_added_and_stores_merge(store, make_store, tmp_path):
    store = keep(store, [(20, 5, 6), (6, 5, 70)])
    assert len(ModelTables([store]).states.keys) == 9
    other = keep(make_store([[80, 81]]), [(20, 5, 8), (8, 5, 71)])
    merge_datastores(tmp_path / "merged", [store.path, other.path])
    verify_datastore(tmp_path / "merged")
    merged = open_datastore(tmp_path / "merged")
    for token, follows in ((6, 70), (8, 71)):
        drafter = MixtureDrafter(datastores=[merged])
        told(drafter, [60, 61], state(5), token)
        assert paths(drafter)[0][0] == follows


@pytest.mark.slow
def test_a_model_finds_its_own_states_and_says_the_same(reference_model, reference_tokenizer, tmp_path):
    for first in (0, 60):  # the second run goes on with the transform of the first
        texts = ["".join(f"def f{i}(a, b):\n    return a + {i}\n\n" for i in range(first, first + 60))]
        distil(reference_model, reference_tokenizer, tmp_path / "store", prompts=["class Stack:"], texts=texts)
    store = open_datastore(tmp_path / "store")
    rows = ModelTables([store]).states
    assert rows.keys.shape[1] == 64 and len(rows.keys) > 2000
    ids = reference_tokenizer("def add(x, y):\n    return", return_tensors="pt").input_ids
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "seed": 3}):
        options |= {"max_new_tokens": 48, "nodes": 16}
        rs.accelerate(reference_model, reference_tokenizer)
        plain = reference_model.generate(ids, **options, draft="off")
        rs.accelerate(reference_model, reference_tokenizer, datastores=[store])
        assert torch.equal(reference_model.generate(ids, **options), plain)
        assert reference_model.speculation.last.accepted_by_source.get("states", 0) > 0
