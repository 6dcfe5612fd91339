"""Several drafters over one session memory: nothing is read that was freed, and what one remembers the others draft."""

import os
import shutil
import subprocess
import sys
import threading
import weakref

import hammered_session
import numba
import numpy as np
import pytest

from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.kernels import source_table
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.rows import SourceTable
from retrieve_spec.sources.session import SessionMemory


@pytest.fixture(scope="module")
def store(make_store):
    rng = np.random.default_rng(1)
    return make_store([rng.integers(0, hammered_session.TOKENS, 300).tolist() for _ in range(6)])


@pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="its processes are those that run with the compiler on")
@pytest.mark.parametrize(("steps", "threads", "compiled"), [(1500, 1, True), (1500, 3, True), (60, 3, False)])
def test_nothing_is_read_that_was_freed(store, steps, threads, compiled):
    """Freed memory is overwritten: what is read from it ends the process, or is no token."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", hammered_session.__file__, "5", str(steps), str(threads), str(store.path)],
        env={**os.environ, "MALLOC_PERTURB_": "165", "NUMBA_DISABLE_JIT": str(int(not compiled))},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.strip() == "done"


def test_what_one_request_remembers_another_drafts_at_once(run):
    session = SessionMemory(100_000)
    here, there = MixtureDrafter(session=session), MixtureDrafter(session=session)
    here.start(np.array([1, 2, 3], np.int32))
    here.propose(Budget(8, 8))
    answer, states = np.arange(100, 2500, dtype=np.int32), session.automata[1].states
    run(there).request([7], answer)
    assert session.automata[1].states is not states, "its arrays have been replaced since"
    later = run(here).generate(answer[200:400])
    assert np.sum(later.accepted) > 150


def test_a_request_goes_on_reading_what_it_began_with(run):
    session = SessionMemory(400)
    known = np.arange(100, 250, dtype=np.int32)
    session.remember(known)
    drafter = MixtureDrafter(session=session)
    drafter.start(known[:5])
    for i in range(8):
        session.remember(np.arange(1000 + 150 * i, 1150 + 150 * i, dtype=np.int32))
    assert max(automaton.follow(known[:5])[1] for automaton in session.automata) == 0, "forgotten"
    assert np.sum(run(drafter).generate(known[5:100]).accepted) > 60
    drafter.finish()
    newest = np.arange(2060, 2190)
    assert np.sum(run(drafter).request(newest[:5], newest[5:]).accepted) > 90, "the next one reads what is there now"


def test_a_text_waits_while_the_memory_is_read():
    session = SessionMemory(1000)
    session.remember(np.arange(5, dtype=np.int32))
    before = session.automata[1].meta.copy()
    with session:
        session.remember(np.arange(100, 140, dtype=np.int32))  # as when a request ends amid another's step
        assert (session.automata[1].meta == before).all()
        other = threading.Thread(target=session.remember, args=(np.arange(200, 240, dtype=np.int32),))
        other.start()
        other.join(0.05)
        assert (session.automata[1].meta == before).all()
    other.join()
    assert [text[0] for text in session.texts] == [0, 100, 200]
    assert len(session) == 85


def test_stores_that_were_deleted_are_still_drafted_from(run, make_store):
    text = list(range(300, 400))
    folder = make_store([text]).path
    drafter = MixtureDrafter(recycling=False, datastores=[open_datastore(folder)])
    drafter.datastores.clear()  # the table alone keeps the maps open
    shutil.rmtree(folder)
    assert np.sum(run(drafter).request(text[:5], text[5:]).accepted) > 60


def states_at(table, place):
    """The arrays behind a row, as kernels read them."""
    automaton = table.records.view(np.dtype((np.record, table.records.dtype)))[place].automaton
    return source_table.states_of(automaton).copy()


def test_a_table_holds_what_it_points_to():
    automaton = SuffixAutomaton(16)
    automaton.extend(np.arange(10, dtype=np.int32))
    row = automaton.row(0)
    table = SourceTable([row])
    old, before = weakref.ref(automaton.states), automaton.states[:11].copy()
    automaton.extend(np.arange(500, dtype=np.int32) % 7)
    assert automaton.row(0) is not row, "the arrays were replaced"
    del row
    assert old() is not None
    assert (states_at(table, 0)[1:11, 1] == before[1:, 1]).all()
    table.records["disabled"][0] = 1
    table.put(0, automaton.row(0))
    assert old() is None, "nothing points to them any more"
    assert (states_at(table, 0) == automaton.states).all()
    assert table.records["disabled"][0] == 1, "a disabled source stays disabled"
