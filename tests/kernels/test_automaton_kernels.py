import random

import numpy as np
import pytest
from doors import automaton as kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_automaton import BOUNDARY, NaiveText

from retrieve_spec.sources.automaton import SuffixAutomaton

TEXTS = st.integers(1, 3).flatmap(lambda k: st.lists(st.sampled_from([*range(k + 1)] * 4 + [BOUNDARY]), max_size=26))


def whole(automaton):
    """(state, length) of the text so far."""
    last = int(automaton.meta[kernels.M_LAST])
    return last, int(automaton.states[last, kernels.LENGTH])


def find(automaton, context):
    """State of a context, or None."""
    state = 0
    for token in context:
        state = int(kernels.step(automaton.states, automaton.edges, automaton.slots, state, token))
        if state < 0:
            return None
    return state


def continuations(automaton, state):
    tokens, counts, total = automaton.successors(state)
    assert total == counts.sum()
    assert len(tokens) == kernels.degree(automaton.states, state)
    recent = kernels.most_recent(automaton.states, automaton.edges, state)
    assert recent == (tokens[0] if len(tokens) else -1)
    for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
        assert kernels.count_of(automaton.states, automaton.edges, automaton.slots, state, token) == count
    assert kernels.count_of(automaton.states, automaton.edges, automaton.slots, state, 999) == 0
    return list(zip(tokens.tolist(), counts.tolist(), strict=True))


def pair(exact, capacity=16):
    return SuffixAutomaton(capacity, exact=exact), NaiveText(exact)


def alike(found, expected):
    """The same continuations with the same counts, the most recent one first, the others most frequent first.

    Of those that came as often, any may be first: exact counts leave them in the order of the text.
    """
    assert dict(found) == dict(expected) and len(found) == len(expected)
    assert [count for _, count in found] == [count for _, count in expected]
    assert found[:1] == expected[:1]


def check(automaton, naive):
    """Every context, its continuations, counts and their order are those of the text."""
    for context in naive.contexts():
        state = find(automaton, context)
        assert state is not None, f"{context} occurs"
        found, expected = continuations(automaton, state), naive.continuations(context)
        if len(context) <= kernels.COUNTED:
            alike(found, expected)
            assert found == expected or not naive.exact, context
        else:
            assert dict(found).keys() == dict(expected).keys()
            assert all(1 <= count <= dict(expected)[token] for token, count in found)
        for token in {t for document in naive.documents for t in document} - {t for t, _ in expected}:
            assert find(automaton, (*context, token)) is None, f"{(*context, token)} does not occur"
    state, matched = whole(automaton)
    assert matched == len(naive.documents[-1])
    assert state == find(automaton, naive.documents[-1])
    tokens = sum(map(len, naive.documents))
    assert len(automaton) == tokens
    num_states, num_edges = int(automaton.meta[kernels.M_STATES]), int(automaton.meta[kernels.M_EDGES])
    assert num_states == naive.states()
    assert num_states <= max(2 * tokens, 1) + 1
    assert num_edges <= 3 * tokens + 1


@settings(max_examples=60)
@given(TEXTS, st.booleans())
def test_every_prefix_knows_every_context(text, exact):
    automaton, naive = pair(exact)
    check(automaton, naive)
    for token in text:
        automaton.extend(np.array([token], np.int32))
        naive.append(token)
        check(automaton, naive)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_long_texts_with_repeats_periods_and_borders(seed, exact):
    rng = random.Random(seed)
    automaton, naive = pair(exact)
    text: list[int] = []
    due = 30
    while len(text) < 110:
        kind = rng.randrange(5)
        if kind == 0:
            piece = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        elif kind == 1 and text:  # a copy from earlier
            start = rng.randrange(len(text))
            piece = text[start : start + rng.randrange(1, 50)]
        elif kind == 2:
            piece = [0, 1, 2][: rng.randrange(1, 4)] * rng.randrange(2, 15)  # longer than counted contexts
        elif kind == 3:
            piece = [BOUNDARY]
        else:
            piece = [rng.randrange(100)]
        text += piece
        automaton.extend(np.array(piece, np.int32))
        naive.extend(piece)
        if len(text) > due:
            check(automaton, naive)
            due = len(text) + 30
    check(automaton, naive)


def test_tokens_at_once_or_one_by_one_make_the_same_arrays():
    rng = np.random.default_rng(5)
    text = np.concatenate([rng.integers(-1, 4, 3000), np.arange(1000), rng.integers(-1, 3, 500)]).astype(np.int32)
    at_once, single, roomy = SuffixAutomaton(16), SuffixAutomaton(16), SuffixAutomaton(1 << 14)
    at_once.extend(text)
    for part in np.split(text, np.sort(rng.integers(0, len(text), 700))):
        single.extend(part)
    roomy.extend(text)
    assert (len(roomy.states), len(roomy.edges)) == (2 << 14, 1 << 14), "nothing grew"
    assert len(at_once.states) > 32 and len(at_once.edges) > 16
    for other in (single, roomy):
        n, e = at_once.meta[kernels.M_STATES], at_once.meta[kernels.M_EDGES]
        assert (at_once.meta == other.meta).all()
        assert (at_once.states[:n] == other.states[:n]).all()
        assert (at_once.edges[:e] == other.edges[:e]).all()


@settings(max_examples=60)
@given(TEXTS, st.lists(st.integers(0, 4), max_size=30), st.booleans())
def test_advance_keeps_the_longest_suffix(text, followed, exact):
    automaton, naive = pair(exact)
    automaton.extend(np.array(text, np.int32))
    naive.extend(text)
    state = matched = 0
    for n, token in enumerate(followed, 1):
        state, matched = automaton.advance(state, matched, token)
        assert matched == naive.longest_suffix(followed[:n])
        alike(continuations(automaton, state), naive.continuations(followed[n - matched : n]))


def test_reset_forgets_and_keeps_the_room_and_how_counts_are_kept():
    automaton = SuffixAutomaton(16)
    automaton.extend(np.arange(500, dtype=np.int32) % 7)
    states = automaton.states
    automaton.reset()
    assert automaton.states is states
    assert len(automaton) == 0 and whole(automaton) == (0, 0)
    naive = NaiveText(exact=False)
    naive.extend([3, 1, 3, 1, BOUNDARY, 3])
    automaton.extend(np.array([3, 1, 3, 1, BOUNDARY, 3], np.int32))
    check(automaton, naive)


@pytest.mark.parametrize("seed", range(3))
def test_of_many_successors_the_frequent_ones_are_listed_first_and_rare_ones_left_out(seed):
    rng = np.random.default_rng(seed)
    followers = 2**31 - 1 - rng.zipf(1.3, 600).clip(max=400)
    automaton = SuffixAutomaton(16)
    for follower in followers.tolist():  # of documents of their own: no longer context
        automaton.extend(np.array([7, follower, BOUNDARY], np.int32))
    state = find(automaton, [7])
    tokens, counts, total = automaton.successors(state, kernels.RANKED)
    assert tokens[0] == followers[-1] and total == 600
    assert counts[1:].tolist() == sorted(counts[1:].tolist(), reverse=True)
    most = np.sort(np.unique(followers, return_counts=True)[1])[::-1]
    assert counts[1:9].sum() >= most[1:9].sum()
    few, of_few = np.empty(8, np.int32), np.empty(8, np.int32)
    n = kernels.successors(automaton.states, automaton.edges, state, 8, float(counts[4]), few, of_few)
    assert 4 < n <= 8 and few[:n].tolist() == tokens[:n].tolist()
    assert n == 8 or counts[n] < counts[4]
