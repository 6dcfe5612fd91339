"""Request: a record with one text's cursors and state in all sources, and Numba kernels that read and update it.

The record holds sizes, positions, counters and the addresses of the request's arrays, which
`drafting/request_state.py` keeps. It replaces twenty arguments: passing an array from Python to a kernel takes a
fraction of a microsecond, and several after a pass of the model, when all caches are cold.

Cursors in the segments of stores are moved as follows. A match that continues is narrowed. Without a match, a new one
must end with the newest tokens: the gram filters of all segments tell, with one read each, which segments may contain
these tokens, and only those are searched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment, automaton, unigram
from retrieve_spec.kernels.automaton import extend
from retrieve_spec.kernels.calibration import CELLS, LENGTH_CLASSES, NUM_SOURCES, SCALE_BINS
from retrieve_spec.kernels.compiled_code import inlined, inner, inner_with_arrays, kernel_with_arrays
from retrieve_spec.kernels.ngram import GRAM, home, may_hold, newest_gram
from retrieve_spec.kernels.source_table import (
    CURSOR,
    KIND_EXACT,
    KIND_NGRAM,
    TAIL,
    edges_of,
    exact_narrow,
    meta_of,
    slots_of,
    sources_at,
    states_of,
    suffixes_of,
    text_u16,
    text_u32,
    to_local_of,
)
from retrieve_spec.kernels.suffix_array import sa_between
from retrieve_spec.kernels.views import (
    Record,
    prefetch,
    record_at,
    view_f32_cube,
    view_f32_rows,
    view_f64,
    view_f64_cube,
    view_i32,
    view_i64_rows,
    view_rows,
    view_u64,
)

REQUEST = np.dtype(
    [
        *((name, np.int64) for name in (
            # Addresses of the text's arrays: (s, CURSOR) int64 cursors, (1, TAIL) int32 newest tokens, (MATCH,) int32
            # the same oldest first, (s,) float64 shares of the tokens that sources explained,
            # (NUM_SOURCES, 1 + LENGTH_CLASSES, 2) float64 trust (`calibration.begin_request`).
            "cursors", "newest", "recent", "use", "trust",
            # Addresses of scratch and results of `expand.expand`, and how many candidates there is room for.
            "node_cursors", "node_tails", "pool_p", "pool_ids", "heap", "scratch", "nodes", "node_p", "pool_size",
            # Addresses of what is shared with other requests: the table of sources (and how many these are), cells,
            # scale and drafts of a calibration (`kernels/calibration.py`).
            "table", "num_sources", "cells", "scale", "drafts",
            # Tokens of the text, how many of them are in `recent`, position of a token less its index.
            "length", "num_recent", "position_offset",
            # Over all requests: steps and tokens learned from, and 1 while any source is disabled.
            "steps", "tokens_learned", "any_disabled",
            # Places in the table: the text (its tokens without a context come next), the first session automaton, the
            # first suffix array, the neighbours and the alignments (-1: none).
            "text_source", "first_session", "num_sessions", "first_exact", "num_exact", "dense_source",
            "alignment_source", "states_source",
            # Address of the keys (n + 1, dims) int8 of a verified tree that is observed next, 0: none.
            "keys",
            # 1 with an expected text (which comes before all other sources), 1 with stores.
            "has_prediction", "has_stores",
            # 1 if tokens are sampled with known noise, and what keys it: seed, row, position of the next token.
            "sampled", "seed", "row", "position",
            # First token of the last draft, made or skipped.
            "first_token",
            # Outcome of the last draft: its nodes, and accepted tokens; 1 to find the origins of nodes in stores.
            "num_verified", "num_accepted", "find_origins",
            # Number of forced tokens at the start of the next draft: the first of `nodes` and `node_p`.
            "num_forced",
            # Of a request whose text an engine keeps (`kernels/batch.py`): address of the generated tokens (int32), how
            # many there is room for and there are, the last of these that the text's automaton had no room for; tokens
            # of the draft that waits to be verified, and the step that it was made for.
            "output", "output_capacity", "output_length", "num_unread", "num_drafted", "step",
        )),
        ("first_p", np.float64),  # probability of `first_token`, 0 for none
        ("min_p", np.float64),  # smallest path probability of a node
        ("least_p", np.float64),  # path probability below which no node pays
        ("expected", np.float64),  # expected accepted tokens of the verified draft
    ],
    align=True,
)  # fmt: skip
"""Record of a request."""
request_at = record_at(REQUEST)
"""The `REQUEST` at an address."""
NODE_TOKEN, NODE_PARENT, NODE_DEPTH, NODE_SOURCE, NODE_COLUMNS = 0, 1, 2, 3, 4
"""Columns of the nodes of a request's draft (n, `NODE_COLUMNS`) int64, best first; the root is parent -1."""
MATCH = 64
"""Longest match kept after the text has left a store."""
LOOKBACK = 32
"""Longest match used to find a place in an expected text again."""
HYPOTHESES = 3
"""Places in an expected text that are followed together: found again, one token replaced, tokens inserted."""
_DISABLED_BELOW, _ENABLED_FROM = 0.002, 0.004
"""Share of the emitted tokens explained by a source below which it is disabled, and from which it is enabled."""
_STORE_DISABLED_BELOW, OF_USE = 0.01, 0.02
"""The same for stores, which miss every cache; the latter is also every source's initial share."""
_LOOK_IN = 8
"""Interval in steps at which learning reads disabled stores."""
FIRST_TOKENS, LATER_EVERY = 2000, 4
"""Number of first tokens at which learning reads stores, and interval after that."""


@inner_with_arrays
def sources_of(request: Record) -> NDArray[Any]:
    """Return all sources, (s,) `SOURCE`."""
    return sources_at(request.table, request.num_sources)


@inner_with_arrays
def cells_of(request: Record) -> NDArray[np.float32]:
    """Return the cells, (CELLS, 4) float32, of `retrieve_spec.drafting.calibration.Calibration`."""
    return view_f32_rows(request.cells, CELLS, 4)


@inner_with_arrays
def nodes_of(request: Record, count: int) -> NDArray[np.int64]:
    """Return the first nodes of the draft, (count, `NODE_COLUMNS`)."""
    return view_i64_rows(request.nodes, count, NODE_COLUMNS)


@inner_with_arrays
def scale_of(request: Record) -> NDArray[np.float32]:
    """Return the corrections, (2 · NUM_SOURCES, SCALE_BINS + 1, 2) float32, for `calibration.scaled`."""
    return view_f32_cube(request.scale, 2 * NUM_SOURCES, SCALE_BINS + 1, 2)


@inner_with_arrays
def trust_of(request: Record) -> NDArray[np.float64]:
    """Return the request's trust, (NUM_SOURCES, 1 + LENGTH_CLASSES, 2) float64 (`calibration.begin_request`)."""
    return view_f64_cube(request.trust, NUM_SOURCES, 1 + LENGTH_CLASSES, 2)


@inner_with_arrays
def drafts_of(request: Record, sampled: int) -> NDArray[np.float64]:
    """Return the counts of drafts, (2,) float64 (`kernels/calibration.py`), greedy (0) or with known noise (1)."""
    return view_f64(request.drafts + 16 * sampled, 2)


@inner_with_arrays
def cursors_of(request: Record) -> NDArray[np.int64]:
    """Return the text's cursors in every source, (s, CURSOR) int64."""
    return view_i64_rows(request.cursors, request.num_sources, CURSOR)


@inner_with_arrays
def newest_of(request: Record) -> NDArray[np.int32]:
    """Return the newest tokens, (1, TAIL) int32, newest first."""
    return view_rows(request.newest, 1, TAIL)


@inner_with_arrays
def use_of(request: Record) -> NDArray[np.float64]:
    """Return the share of tokens that each source explained, (s,) float64."""
    return view_f64(request.use, request.num_sources)


@inner
def catch_up(request: Record) -> None:
    """Update the cursors that depend on the text alone: of its automaton, the best alignment and an expected text."""
    table, cursors, newest = sources_of(request), cursors_of(request), newest_of(request)
    c = request.text_source
    text, listing = table[c].automaton, table[c + 1].unigram
    last = meta_of(text)[automaton.M_LAST]
    cursors[c, 0] = last
    cursors[c, 1] = states_of(text)[last, automaton.LENGTH]
    cursors[c + 1, 0] = unigram.place_after(listing, np.int64(0), newest[0, 1])
    cursors[c + 1, 0] = unigram.place_after(listing, cursors[c + 1, 0], newest[0, 0])
    if request.alignment_source >= 0:
        alignment.best(table[request.alignment_source].alignment, cursors, request.alignment_source)
    if request.has_prediction == 1:
        kept = expected_cursors(table[0])
        for i in range(HYPOTHESES):
            for j in range(CURSOR):
                cursors[i, j] = kept[i, j]


@inner_with_arrays
def expected_cursors(source: Record) -> NDArray[np.int64]:
    """Return the cursors in an expected text, (HYPOTHESES, CURSOR) int64."""
    return view_i64_rows(source.prediction.cursors, HYPOTHESES, CURSOR)


@inner
def is_store(source: Record) -> bool:
    """Whether a source is part of a store."""
    return bool(source.kind == KIND_NGRAM or source.kind == KIND_EXACT)


@inlined
def enable_sources(request: Record) -> None:
    """Let learning read every source, but disabled stores only at intervals, since reading them is expensive."""
    request.steps += 1
    if request.any_disabled == 0:
        return
    table = sources_of(request)
    for s in range(len(table)):
        if request.steps % _LOOK_IN == 0 or not is_store(table[s]):
            table[s].disabled = 0


@inlined
def disable_sources(request: Record) -> None:
    """Disable sources that have explained almost nothing lately; learning reads them, and may enable them again.

    While none is disabled, checking at intervals is enough.
    """
    if request.any_disabled == 0 and request.steps % _LOOK_IN != 0:
        return
    table, use = sources_of(request), use_of(request)
    request.any_disabled = 0
    for s in range(len(table)):
        slow = is_store(table[s])
        if use[s] < (_STORE_DISABLED_BELOW if slow else _DISABLED_BELOW):
            table[s].disabled = 1
        elif use[s] >= (OF_USE if slow else _ENABLED_FROM):
            table[s].disabled = 0
        if s <= request.text_source + 1 or s == request.dense_source:  # neighbours are searched when that pays
            table[s].disabled = 0
        if s == request.states_source:  # the text's own come in time
            table[s].disabled = 0
        if table[s].disabled == 1:
            request.any_disabled = 1


@inner_with_arrays
def follow_all(
    table: NDArray[Any], first: int, cursors: NDArray[np.int64], window: NDArray[np.int32], fresh: int
) -> None:
    """Move the stores' longest-match cursors over the newest tokens of the text.

    Parameters
    ----------
    table, first
        Sources, and the index of the first suffix array, which the others follow.
    cursors
        (m, CURSOR) int64, a row for each: (lo, hi, depth) before the fresh tokens, modified in place; depth 0 for no
        match.
    window
        (w,) int32 newest tokens of the text, oldest first, including fresh ones.
    fresh
        Number of fresh tokens.
    """
    known = len(window) >= GRAM
    gram = newest_gram(window) if known else np.uint64(0)
    for i in range(len(cursors)):  # all words at once, since each would be a cache miss
        segment = table[first + i].exact
        if known and segment.num_grams > 0:
            prefetch(segment.grams + 8 * home(gram, segment.num_grams))
    for i in range(len(cursors)):
        _follow(table[first + i].exact, cursors, i, window, fresh, known, gram)


@inlined
def _follow(
    segment: Record,
    cursors: NDArray[np.int64],
    c: int,
    window: NDArray[np.int32],
    fresh: int,
    known: bool,
    gram: np.uint64,
) -> None:
    """Do `follow_all` for one cursor; ``gram`` is the hash of the newest tokens, if ``known``."""
    lo, hi, depth = cursors[c, 0], cursors[c, 1], cursors[c, 2]
    least = segment.min_depth
    n = len(window)
    i = n - fresh
    while depth > 0 and i < n:
        a, b = exact_narrow(segment, lo, hi, depth, window[i])
        if a >= b:
            break
        lo, hi, depth = a, b, depth + 1
        i += 1
    if depth == 0 or i < n:
        # The match before token i had length `depth` and did not continue with it, or was shorter than `least`.
        longest = min((depth if depth > 0 else least) - 1 + n - i, n, MATCH)
        if known and longest >= GRAM and not may_hold(view_u64(segment.grams, segment.num_grams), gram):
            longest = np.int64(GRAM - 1)
        lo, hi, depth = np.int64(0), np.int64(0), np.int64(0)
        if longest >= least:
            lo, hi, depth = _search(segment, window[n - longest :], least)
    cursors[c, 0], cursors[c, 1], cursors[c, 2] = lo, hi, depth


@inlined
def _search(segment: Record, recent: NDArray[np.int32], least: int) -> tuple[int, int, int]:
    """Return (lo, hi, depth) of the longest suffix of a text, of at least ``least`` tokens, in a segment."""
    local = np.empty(len(recent), np.int64)
    to_local = to_local_of(segment)
    for i in range(len(recent)):
        local[i] = to_local[recent[i]] if 0 <= recent[i] < len(to_local) else 0
    sa = suffixes_of(segment)
    top = view_u64(segment.top, segment.top_size)
    bits = segment.top_bits
    if segment.token_bytes == 2:
        lo, hi, depth = sa_between(text_u16(segment), sa, top, bits, local, least, len(local))
    else:
        lo, hi, depth = sa_between(text_u32(segment), sa, top, bits, local, least, len(local))
    return np.int64(lo), np.int64(hi), np.int64(depth)


@inner_with_arrays
def follow_stores(
    request: Record, tokens: NDArray[np.int32], roots: NDArray[np.int64], stores: int | None
) -> NDArray[np.int32]:
    """Move the stores' longest-match cursors over tokens (e,), from ``roots``.

    Returns
    -------
    (≤ MATCH + e,) int32
        The newest tokens of the text, oldest first, including these.
    """
    kept, fresh = request.num_recent, len(tokens)
    recent = view_i32(request.recent, MATCH)
    window = np.empty(kept + fresh, np.int32)
    for i in range(kept):  # a loop, since Numba takes seconds to compile a slice assignment's shape check
        window[i] = recent[i]
    for i in range(fresh):
        window[kept + i] = tokens[i]
    cursors = cursors_of(request)
    if stores is not None:
        follow_all(sources_of(request), request.first_exact, roots, window, fresh)
    for i in range(len(roots)):
        for j in range(CURSOR):
            cursors[request.first_exact + i, j] = roots[i, j]
    left = min(len(window), MATCH)
    for i in range(left):
        recent[i] = window[len(window) - left + i]
    request.num_recent = left
    return window


@inner_with_arrays
def stored_cursors(request: Record) -> NDArray[np.int64]:
    """Return a copy of the stores' cursors, (stores, CURSOR) int64."""
    first = request.first_exact
    return cursors_of(request)[first : first + request.num_exact].copy()


@inner
def grow_context(request: Record, tokens: NDArray[np.int32], said: int) -> int:
    """Append tokens, generated (1) or not (0), to the text's automaton, frequent tokens and alignments.

    Returns how many tokens the automaton had room for.
    """
    table, c = sources_of(request), request.text_source
    unigram.extend(table[c + 1].unigram, tokens, said)
    if request.alignment_source >= 0:
        alignment.extend(table[request.alignment_source].alignment, tokens, said)
    text = table[c].automaton
    return extend(states_of(text), edges_of(text), slots_of(text), meta_of(text), tokens)


@kernel_with_arrays
def read(address: int, tokens: NDArray[np.int32], looked_at: int, stores: int | None) -> int:
    """Append text (n,) that was not generated.

    Parameters
    ----------
    address
        Of the request.
    looked_at
        Number of last tokens that are followed in the session.
    stores
        As in `kernels/levels.py`.

    Returns
    -------
    int
        How many tokens the text's automaton had room for.
    """
    n = len(tokens)
    request = request_at(address)
    table, cursors = sources_of(request), cursors_of(request)
    for s in range(request.first_session, request.first_session + request.num_sessions):
        session = table[s].automaton
        states, edges, slots = states_of(session), edges_of(session), slots_of(session)
        state = matched = np.int64(0)
        for i in range(max(n - looked_at, 0), n):
            state, matched = automaton.advance(states, edges, slots, state, matched, tokens[i])
        cursors[s, 0], cursors[s, 1] = state, matched
    roots = stored_cursors(request)
    if n > MATCH:  # only the end is followed; earlier matches do not reach it
        roots[:] = 0
    follow_stores(request, tokens[max(n - MATCH, 0) :], roots, stores)
    newest = newest_of(request)
    for i in range(max(n - TAIL, 0), n):
        push(newest, tokens[i])
    request.length += n
    return grow_context(request, tokens, np.int64(0))


@inner
def push(newest: NDArray[np.int32], token: int) -> None:
    """Prepend a token to the newest ones."""
    for j in range(TAIL - 1, 0, -1):
        newest[0, j] = newest[0, j - 1]
    newest[0, 0] = token


@inner
def anchor(text: NDArray[np.int32], recent: NDArray[np.int32], near: int) -> tuple[int, int]:
    """Find the output's place in an expected text.

    Parameters
    ----------
    text
        (n,) int32 expected text.
    recent
        (m,) int32 newest emitted tokens, oldest first.
    near
        Position if the output had continued in parallel; of equally long matches, the nearest place is chosen.

    Returns
    -------
    position, matched
        Index of the next expected token, and number of newest tokens that precede it there; (0, 0) if none does.
    """
    best, best_len = 0, 0
    m = len(recent)
    if m == 0:
        return best, best_len
    newest = recent[m - 1]
    for i in range(len(text)):
        if text[i] != newest:
            continue
        length = 1
        while length < min(m, LOOKBACK) and length <= i and text[i - length] == recent[m - 1 - length]:
            length += 1
        closer = length == best_len and abs(i + 1 - near) < abs(best - near)
        if length > best_len or closer:
            best, best_len = i + 1, length
    return best, best_len


@inner
def follow_expected(
    text: NDArray[np.int32], cursors: NDArray[np.int64], emitted: NDArray[np.int32], recent: NDArray[np.int32]
) -> None:
    """Move the cursors (3, 4) of an expected text over emitted tokens; see `sources.rows.Prediction`.

    Parameters
    ----------
    recent
        (m,) int32 newest tokens of the text, including emitted ones, oldest first.
    """
    for token in emitted:
        hit = -1
        for c in range(2, -1, -1):
            if cursors[c, 1] >= 0 and cursors[c, 0] < len(text) and text[cursors[c, 0]] == token:
                hit = c
        if hit >= 0:
            cursors[0, 0], cursors[0, 1] = cursors[hit, 0] + 1, cursors[hit, 1] + 1
            cursors[1, 1] = -1
            cursors[2, 1] = -1
        else:
            if cursors[0, 1] > 0:
                cursors[1, 0], cursors[1, 1] = cursors[0, 0] + 1, 0
                cursors[2, 0], cursors[2, 1] = cursors[0, 0], 0
            cursors[0, 1] = -1
    if cursors[0, 1] <= 0 and len(emitted) > 0:
        position, matched = anchor(text, recent, cursors[0, 0])
        if matched > 0:  # otherwise keep searching near the last known place
            cursors[0, 0], cursors[0, 1] = position, matched
            for c in range(1, 3):
                if cursors[c, 0] == position:
                    cursors[c, 1] = -1
