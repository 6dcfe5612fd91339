import weakref

import numpy as np

from retrieve_spec.kernels import source_table
from retrieve_spec.sources.automaton import SuffixAutomaton
from retrieve_spec.sources.rows import SourceTable


def states_at(table, place):
    """The arrays behind a row, as kernels read them."""
    return source_table.states_of(table.words, place).copy()


def test_a_table_holds_what_it_points_to():
    automaton = SuffixAutomaton(16)
    automaton.extend(np.arange(10, dtype=np.int32))
    row = automaton.row(0)
    table = SourceTable([row])
    old, before = weakref.ref(automaton.states), automaton.states[:11].copy()
    automaton.extend(np.arange(500, dtype=np.int32) % 7)
    assert automaton.moved and automaton.row(0) is not row, "the arrays were replaced"
    del row
    assert old() is not None
    assert (states_at(table, 0)[1:11, 1] == before[1:, 1]).all()
    table.words[0, source_table.RESTING] = 1
    table.put(0, automaton.row(0))
    assert old() is None, "nothing points to them any more"
    assert (states_at(table, 0) == automaton.states).all()
    assert table.words[0, source_table.RESTING] == 1, "a source that rests goes on resting"
