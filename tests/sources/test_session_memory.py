from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.sources.session import LONGEST_LOOP, SessionMemory, loop_start


def known(session, text):
    """Tokens at the end of a text that the session knows."""
    return max(automaton.follow(np.array(text, np.int32))[1] for automaton in session.automata)


def test_what_was_generated_is_known():
    session = SessionMemory(1000)
    session.remember(np.arange(50, dtype=np.int32))
    assert known(session, [900, 10, 11, 12, 13]) == 4
    assert known(session, [900]) == 0
    state = session.automata[1].follow(np.array([10, 11], np.int32))[0]
    assert session.automata[1].successors(state)[0].tolist() == [12]


def test_texts_do_not_run_into_each_other():
    session = SessionMemory(1000)
    session.remember(np.array([1, 2, 3], np.int32))
    session.remember(np.array([4, 5, 6], np.int32))
    assert known(session, [2, 3, 4, 5]) == 2
    state = session.automata[1].follow(np.array([2, 3], np.int32))[0]
    assert len(session.automata[1].successors(state)[0]) == 0


@pytest.mark.parametrize("bound", [1, 2, 10, 64, 1000])
def test_memory_is_bounded_and_the_oldest_goes_first(bound):
    session = SessionMemory(bound)
    rng = np.random.default_rng(0)
    for i in range(200):
        text = np.arange(i * 50, i * 50 + int(rng.integers(1, 50)), dtype=np.int32)
        session.remember(text)
        assert len(session) <= bound
        if bound >= 2 and len(text) <= bound // 2:
            assert known(session, text.tolist()) == len(text), "the newest text is there"
    if bound == 1000:
        assert known(session, [0, 1]) == 0, "the first one is forgotten"
        assert known(session, [198 * 50]) == 1, "the one before the last is not"


def test_of_a_text_longer_than_the_memory_the_end_is_kept():
    session = SessionMemory(40)
    session.remember(np.arange(100, dtype=np.int32))
    assert known(session, list(range(60, 100))) == 20
    assert known(session, [50]) == 0


@given(
    st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 30)
)
def test_where_a_loop_begins(before, period, length):
    text = before + [period[i % len(period)] for i in range(length)]
    n = len(text)
    expected = n
    for p in range(1, n // 3 + 1):
        begins = [b for b in range(n - 3 * p + 1) if all(text[i] == text[i + p] for i in range(b, n - p))]
        if begins:
            expected = begins[0] + 2 * p
            break
    assert loop_start(np.array(text, np.int32)) == expected


def test_a_loop_is_remembered_once():
    beginning, loop = np.arange(100, 120, dtype=np.int32), np.arange(5, dtype=np.int32)
    session = SessionMemory(1000)
    session.remember(np.concatenate([beginning, np.tile(loop, 40), loop[:3]]))
    assert len(session) == 20 + 2 * 5
    session.remember(np.concatenate([beginning, np.tile(loop, 2)]))
    assert len(session) == 60, "twice is no loop"
    assert loop_start(np.arange(LONGEST_LOOP * 3 + 3, dtype=np.int32) % (LONGEST_LOOP + 1)) == LONGEST_LOOP * 3 + 3
