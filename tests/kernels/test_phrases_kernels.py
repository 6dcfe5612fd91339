import itertools

import numpy as np
import pytest
from blend_world import source_of
from doors import levels
from hypothesis import given, settings
from hypothesis import strategies as st
from known_phrases import known
from naive_phrases import NaivePhrases

from retrieve_spec.kernels import phrases as kernels
from retrieve_spec.kernels.recycling import WAYS
from retrieve_spec.sources import phrases as source
from retrieve_spec.sources.phrases import PhraseMemory

KEYS = st.sampled_from([None, "a", "b"])
TEXTS = st.lists(st.integers(-1, 4), max_size=30)


def remember(memory, *texts, key=None):
    for text in texts:
        memory.learn(np.array(text, np.int32), key)
    return memory


def keys(memory):
    kept = memory.sets.reshape(-1, 2, WAYS)[:, 0]
    return kept[kept != 0]


def observations(memory):
    """Of the context that was observed most."""
    return (memory.sets.reshape(-1, 2, WAYS)[:, 1] & np.uint64(0xFFFFFFFF)).max()


def contexts(alphabet):
    return [[a] for a in range(alphabet)] + [list(pair) for pair in itertools.product(range(alphabet), repeat=2)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, KEYS), max_size=8))
def test_phrases_as_defined(requests):
    memory, naive = PhraseMemory(), NaivePhrases()
    for text, key in requests:
        text = text[: source.loop_start(np.array(text, np.int32))]
        remember(memory, text, key=key)
        naive.learn(text, key)
    for context in contexts(5):
        assert known(memory, context) == pytest.approx(naive.known(context))


def test_much_text_as_defined():
    """Counts are halved in time, and the order of continuations is that of their counts."""
    rng = np.random.default_rng(0)
    memory, naive = PhraseMemory(), NaivePhrases()
    for _ in range(1100):
        text = rng.choice(6, 40, p=[0.4, 0.3, 0.15, 0.1, 0.04, 0.01]).tolist()
        text = text[: source.loop_start(np.array(text, np.int32))]
        remember(memory, text)
        naive.learn(text)
    for context in contexts(6):
        found = known(memory, context)
        assert found == pytest.approx(naive.known(context), abs=1e-6)
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert observations(memory) < kernels.HALVED_AT


@pytest.mark.parametrize(("share", "distinct"), [(3, 9), (5, 5), (7, 3), (9, 2)])
def test_a_round_share_is_not_more_than_itself(share, distinct):
    """3 of 10 is not more than 0.3, in whichever precision it is kept: compiled or not, a level is the same."""
    memory = PhraseMemory()
    for token in [1] * share + [2 + i % 5 for i in range(10 - share)]:
        remember(memory, [0, token], key=str(token))
        remember(memory, [0, token], key="other")
    e = kernels.find(memory.sets, kernels.mix(np.uint64(0), 0))
    assert memory.probs[e, 0] == np.float32(share / 10)
    assert levels.evidence(source_of(memory, 8), np.zeros((1, 4), np.int64), 0, e, None)[1] == distinct


def test_memory_is_bounded_and_what_is_said_often_stays(monkeypatch):
    monkeypatch.setattr(source, "CAPACITY", 64)
    monkeypatch.setattr(source, "SEEN", 256)
    memory = PhraseMemory()
    size = memory.packed().nbytes
    rng = np.random.default_rng(0)
    for _ in range(300):
        rare = rng.integers(10, 10**6, 8).tolist()
        remember(memory, [1, 2, 3, *rare], [1, 2, 3, *rare])
    assert memory.packed().nbytes == size
    assert known(memory, [1]) == {2: 1.0} and known(memory, [1, 2]) == {3: 1.0}
    kept = keys(memory)
    assert len(np.unique(kept)) == len(kept)


def test_packed_and_back():
    memory = remember(PhraseMemory(), [1, 2, 3, 4], [2, 3, 4, 5], [9, 9, 1])
    packed, other = memory.packed(), PhraseMemory()
    other.unpack(packed)
    assert np.array_equal(other.packed(), packed) and known(other, [2]) == {3: 1.0}
    assert other.requests == 2, "requests that come later have other numbers"
    remember(memory, [1, 2])
    remember(other, [1, 2])
    assert known(other, [1]) == {} and known(memory, [1]) == {2: 1.0}, "what one alone was given is not kept"
