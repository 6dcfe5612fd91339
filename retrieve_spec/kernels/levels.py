"""Numba kernels for a single source: its levels at a cursor, their continuations, and the cursor after a token.

Every kernel dispatches on the kind in the source's row (`kernels/source_table.py`). Making slices instead of passing
indices would take longer than the work itself. ``stores`` is None if no datastore is open, else 1: Numba omits branches
that a None rules out, so that code that reads stores is compiled only for users who have some.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment, automaton, hidden_states, ngram, phrases, recycling, trie, unigram
from retrieve_spec.kernels.compiled_code import inner, kernel
from retrieve_spec.kernels.ngram import longest_marked, ngram_find
from retrieve_spec.kernels.source_table import (
    KIND_ALIGNMENT,
    KIND_AUTOMATON,
    KIND_BIGRAMS,
    KIND_DENSE,
    KIND_DISTILLED,
    KIND_EXACT,
    KIND_NGRAM,
    KIND_PHRASES,
    KIND_PREDICTION,
    KIND_RECYCLING,
    KIND_STATES,
    KIND_UNIGRAM,
    READ_LIMIT,
    TAIL,
    edges_of,
    exact_distinct,
    exact_narrow,
    exact_successors,
    expected_text,
    ngram_counts,
    ngram_part,
    ngram_slots,
    ngram_token,
    recycling_probs,
    recycling_sets,
    recycling_tokens,
    slots_of,
    span_weights,
    spans_of,
    states_of,
)
from retrieve_spec.kernels.views import Record, prefetch, view_f32

CLOSED = -2
"""Handle of a level that has not been looked up yet."""


@inner
def _first_useful(states: NDArray[np.int32], state: int, length: int) -> tuple[int, int]:
    """Return the first state along the suffix links that has a successor, and its match length (0: the root)."""
    while state > 0 and states[state, automaton.TOKEN] == -1:
        state = np.int64(states[state, automaton.LINK])
        length = np.int64(states[state, automaton.LENGTH])
    return (state, length) if states[state, automaton.TOKEN] != -1 else (np.int64(0), np.int64(-1))


@inner
def _long_enough(source: Record, state: int, length: int) -> tuple[int, int]:
    """Return a state of an automaton and its match length, -1 if that is too short."""
    return state, length if length >= source.automaton.shortest else np.int64(-1)


@inner
def _open_stored(
    source: Record, cursors: NDArray[np.int64], c: int, hashes: NDArray[np.uint64], tail_len: int
) -> tuple[int, int]:
    """Do `open_row` for a source in a store."""
    if source.kind == KIND_EXACT:
        found = cursors[c, 2] >= source.exact.min_depth and cursors[c, 0] < cursors[c, 1]
        return cursors[c, 0], cursors[c, 2] if found else np.int64(-1)
    if source.kind == KIND_DENSE:
        return cursors[c, 0], cursors[c, 3] if cursors[c, 0] < cursors[c, 1] else np.int64(-1)
    if source.kind == KIND_STATES:
        slot = cursors[c, 0]
        return slot, hidden_states.length_of(source.states, slot) if slot >= 0 else np.int64(-1)
    table, longest = source.ngram, np.int64(min(tail_len, source.ngram.orders))
    if table.buckets > 0:
        longest = np.int64(longest_marked(table.marks, table.buckets, table.words, table.column, hashes, longest))
    return CLOSED, longest if longest > 0 else np.int64(-1)


@kernel
def open_row(
    source: Record,
    cursors: NDArray[np.int64],
    c: int,
    hashes: NDArray[np.uint64],
    tail_len: int,
    stores: int | None,
) -> tuple[int, int]:
    """Return (handle, match length) of a source's longest level; the length is -1 if it has none.

    An n-gram table is not searched yet, since each search misses every cache: the handle is `CLOSED`, and the length is
    the longest possible one, according to the filter of small tables.
    """
    kind = source.kind
    if source.disabled == 1:
        return np.int64(0), np.int64(-1)
    if kind == KIND_AUTOMATON:
        return _long_enough(source, *_first_useful(states_of(source.automaton), cursors[c, 0], cursors[c, 1]))
    if kind == KIND_UNIGRAM:
        return cursors[c, 0], np.int64(0) if unigram.listed(source.unigram) > 0 else np.int64(-1)
    if kind == KIND_ALIGNMENT:
        return alignment.open_level(source.alignment, cursors, c)
    if kind == KIND_BIGRAMS:
        token = np.int64(hashes[1, TAIL - 1])
        known = tail_len > 0 and token < source.recycling.capacity and recycling_tokens(source.recycling, token)[0] >= 0
        return token, np.int64(1) if known else np.int64(-1)
    if kind == KIND_PREDICTION:
        inside = cursors[c, 1] >= 0 and cursors[c, 0] < source.prediction.length
        return cursors[c, 0], cursors[c, 1] if inside else np.int64(-1)
    if stores is not None:  # noqa: SIM102 (Numba leaves out the outer branch alone)
        if kind == KIND_NGRAM or kind == KIND_EXACT or kind == KIND_DENSE or kind == KIND_STATES:
            return _open_stored(source, cursors, c, hashes, tail_len)
    return _recycling_level(
        source, hashes, min(tail_len, phrases.PHRASE_ORDERS if kind == KIND_PHRASES else recycling.ORDERS)
    )


@inner
def _has_contexts(kind: int) -> bool:
    """Whether a source is a table of contexts of several lengths."""
    return bool(kind == KIND_RECYCLING or kind == KIND_PHRASES or kind == KIND_DISTILLED)


@inner
def _recycling_level(source: Record, hashes: NDArray[np.uint64], order: int) -> tuple[int, int]:
    """Return (entry, order) of the longest context of at most ``order`` tokens; order -1 if there is none.

    The skip-gram of what the target said has order 0.
    """
    sets = recycling_sets(source.recycling)
    while order > 0:
        e = recycling.find(sets, hashes[1, order - 1])
        if e >= 0:
            return np.int64(e), np.int64(order)
        order -= 1
    e = -1
    if order == 0 and source.kind != KIND_PHRASES:
        e = recycling.find(sets, hashes[1, recycling.ORDERS])
    return np.int64(e), np.int64(0 if e >= 0 else -1)


@inner
def _ngram_level(source: Record, hashes: NDArray[np.uint64], order: int) -> tuple[int, int]:
    """Return (slot, order) of the longest context of at most ``order`` tokens in an n-gram table."""
    slots = ngram_slots(source.ngram)
    while order > 0:
        slot = ngram_find(slots, hashes[0, order - 1])
        if slot >= 0 and ngram.ngram_kept(slots, slot) > 0:  # none if all documents with it were deleted
            return np.int64(slot), np.int64(order)
        order -= 1
    return np.int64(0), np.int64(-1)


@inner
def look_up(source: Record, hashes: NDArray[np.uint64], order: int) -> tuple[int, int]:
    """Search an n-gram table for its longest level of at most ``order`` tokens."""
    for i in range(order):  # all slots at once, since each would be a cache miss
        prefetch(source.ngram.slots + ngram.SLOT_BYTES * ngram.home(hashes[0, i], source.ngram.num_slots))
    return _ngram_level(source, hashes, order)


@inner
def next_level(
    source: Record, handle: int, length: int, hashes: NDArray[np.uint64], stores: int | None
) -> tuple[int, int]:
    """Return (handle, match length) of the next shorter level."""
    kind = source.kind
    if kind == KIND_AUTOMATON:
        states = states_of(source.automaton)
        link = np.int64(states[handle, automaton.LINK])
        if link < 0:
            return np.int64(0), np.int64(-1)
        return _long_enough(source, *_first_useful(states, link, np.int64(states[link, automaton.LENGTH])))
    if _has_contexts(kind):
        return _recycling_level(source, hashes, length - 1)
    if stores is not None:  # noqa: SIM102 (Numba leaves out the outer branch alone)
        if kind == KIND_NGRAM:
            return _ngram_level(source, hashes, length - 1)
    return np.int64(0), np.int64(-1)


@inner
def _spread(top: np.float32) -> int:
    """Return the substitute for the number of distinct continuations, by the highest probability.

    It is compared in its own precision, so that 3/10 is not greater than 0.3, with and without the compiler.
    """
    if top > np.float32(0.7):
        return np.int64(1 if top > np.float32(0.9) else 2)
    if top > np.float32(0.5):
        return np.int64(3)
    return np.int64(5 if top > np.float32(0.3) else 9)


@inner
def evidence(source: Record, cursors: NDArray[np.int64], c: int, handle: int, stores: int | None) -> tuple[int, int]:
    """Return (total count, distinct continuations) of a level; for probabilities, `_spread` replaces the latter."""
    kind = source.kind
    if kind == KIND_AUTOMATON:
        states = states_of(source.automaton)
        return np.int64(states[handle, automaton.COUNT]), np.int64(automaton.degree(states, handle))
    if _has_contexts(kind):
        top = recycling_probs(source.recycling, handle)[0]
        seen = recycling.seen(recycling_sets(source.recycling), handle)
        return seen, _spread(top)
    if kind == KIND_BIGRAMS:
        return np.int64(1), _spread(recycling_probs(source.recycling, handle)[0])
    if kind == KIND_UNIGRAM:
        return unigram.evidence(source.unigram)
    if stores is not None:
        if kind == KIND_NGRAM:
            slots = ngram_slots(source.ngram)
            first = np.int64(slots[handle, ngram.START])
            prefetch(source.ngram.tokens + source.ngram.token_bytes * first)  # read later, if at all
            prefetch(source.ngram.counts + 4 * first)
            total = max(np.int64(slots[handle, ngram.TOTAL]), np.int64(1))  # 0 in a damaged store only
            return total, ngram.ngram_distinct(slots, handle)
        if kind == KIND_EXACT:
            return cursors[c, 1] - cursors[c, 0], np.int64(
                exact_distinct(source.exact, cursors[c, 0], cursors[c, 1], cursors[c, 2])
            )
        if kind == KIND_DENSE:
            count, distinct = trie.open_rows(spans_of(source.dense), cursors[c, 0], cursors[c, 1], cursors[c, 2])
            return np.int64(count), np.int64(distinct)
        if kind == KIND_STATES:
            return cursors[c, 1] + 1, _spread(hidden_states.probs_of(source.states, handle)[0])
    if kind == KIND_ALIGNMENT:
        return alignment.evidence(cursors, c, handle)
    return np.int64(1), np.int64(1)


@inner
def _read_top(
    ids: NDArray[np.int32],
    p: NDArray[np.float32],
    least: float,
    out_tokens: NDArray[np.int32],
    out_p: NDArray[np.float32],
) -> int:
    """Copy tokens, most probable first (-1: no more), and probabilities of at least ``least``; return how many."""
    n = 0
    while n < len(ids) and ids[n] >= 0 and p[n] >= least:
        out_tokens[n] = ids[n]
        out_p[n] = p[n]
        n += 1
    return n


@inner
def read_level(
    source: Record,
    cursors: NDArray[np.int64],
    c: int,
    handle: int,
    total: int,
    recency: float,
    least: float,
    out_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
    out_p: NDArray[np.float32],
    stores: int | None,
) -> int:
    """Write a level's continuations and their shares; return how many.

    Levels in order of probability leave out shares below ``least``.
    """
    kind = source.kind
    if kind == KIND_AUTOMATON:
        fewest = least * total / (1.0 - recency)
        n = automaton.successors(
            states_of(source.automaton), edges_of(source.automaton), handle, READ_LIMIT, fewest, out_tokens, out_counts
        )
        for i in range(n):
            out_p[i] = (1.0 - recency) * out_counts[i] / total
        if n > 0:
            out_p[0] += recency
        return n
    if _has_contexts(kind) or kind == KIND_BIGRAMS:
        known = source.recycling
        return _read_top(recycling_tokens(known, handle), recycling_probs(known, handle), least, out_tokens, out_p)
    if kind == KIND_UNIGRAM:
        return unigram.read(source.unigram, handle, least, out_tokens, out_p)
    if stores is not None:
        if kind == KIND_NGRAM:
            counts = ngram_counts(source.ngram)
            first, end = ngram_part(source.ngram, handle)
            n = 0
            for i in range(first, min(end, first + READ_LIMIT)):
                token = ngram_token(source.ngram, i)
                if token < source.ngram.vocabulary:  # a damaged store may have ids that the model lacks
                    out_tokens[n] = token
                    out_p[n] = counts[i] / total
                    n += 1
            return n
        if kind == KIND_EXACT:
            n = exact_successors(source.exact, cursors[c, 0], cursors[c, 1], cursors[c, 2], out_tokens, out_counts)
            for i in range(n):
                out_p[i] = out_counts[i] / total
            return n
        if kind == KIND_DENSE:
            weight = span_weights(source.dense)
            return trie.successors(
                spans_of(source.dense),
                weight,
                cursors[c, 0],
                cursors[c, 1],
                cursors[c, 2],
                READ_LIMIT,
                out_tokens,
                out_p,
            )
        if kind == KIND_STATES:
            ids, p = hidden_states.tokens_of(source.states, handle), hidden_states.probs_of(source.states, handle)
            return _read_top(ids, p, least, out_tokens, out_p)
    out_tokens[0] = handle & alignment.LOW if kind == KIND_ALIGNMENT else expected_text(source.prediction)[handle]
    out_p[0] = 1.0
    return 1


@inner
def advance_row(
    source: Record,
    cursors: NDArray[np.int64],
    c: int,
    token: int,
    out: NDArray[np.int64],
    o: int,
    stores: int | None,
) -> None:
    """Advance a source's cursor by one token."""
    kind = source.kind
    if kind == KIND_AUTOMATON:
        out[o, 0], out[o, 1] = automaton.advance(
            states_of(source.automaton),
            edges_of(source.automaton),
            slots_of(source.automaton),
            cursors[c, 0],
            cursors[c, 1],
            token,
        )
    elif kind == KIND_UNIGRAM:
        out[o, 0] = unigram.place_after(source.unigram, cursors[c, 0], token)
    elif kind == KIND_ALIGNMENT:
        alignment.advance(source.alignment, cursors, c, token, out, o)
    elif kind == KIND_PREDICTION:
        out[o, 0], out[o, 1] = cursors[c, 0], np.int64(-1)
        if (
            cursors[c, 1] >= 0
            and cursors[c, 0] < source.prediction.length
            and expected_text(source.prediction)[cursors[c, 0]] == token
        ):
            out[o, 0], out[o, 1] = cursors[c, 0] + 1, cursors[c, 1] + 1
    elif stores is not None:
        if kind == KIND_EXACT:
            out[o, 0], out[o, 1], out[o, 2] = np.int64(0), np.int64(0), np.int64(-1)
            if cursors[c, 2] >= 0 and cursors[c, 0] < cursors[c, 1]:
                out[o, 0], out[o, 1] = exact_narrow(source.exact, cursors[c, 0], cursors[c, 1], cursors[c, 2], token)
                out[o, 2] = cursors[c, 2] + 1
        elif kind == KIND_DENSE:
            spans = spans_of(source.dense)
            a, b = trie.narrow(spans, cursors[c, 0], cursors[c, 1], cursors[c, 2], token)
            out[o, 0], out[o, 1], out[o, 2] = np.int64(a), np.int64(b), cursors[c, 2] + 1
            similarity = view_f32(source.dense.similarity, source.dense.num_spans)
            out[o, 3] = trie.dense_length(similarity, spans, np.int64(a), np.int64(b), out[o, 2])
        elif kind == KIND_STATES:
            out[o, 0], out[o, 1] = np.int64(-1), cursors[c, 1] + 1
            if cursors[c, 0] >= 0 and cursors[c, 1] < hidden_states.DEEPEST:
                slot = cursors[c, 0]
                key, previous = hidden_states.key_of(source.states, slot), hidden_states.token_of(source.states, slot)
                out[o, 0] = hidden_states.predict(source.states, key, previous, np.int64(token))
