"""Request: where one text stands in all sources, as a row of integers, and Numba kernels that read and move it.

The row holds sizes, places, counters and the addresses of the request's arrays; `drafting/mixture.py` keeps it
together with the arrays. One row instead of twenty arrays, because every array that is handed from Python to a kernel
costs a fraction of a microsecond, and between two passes of a model, when no cache holds anything, several.

Where the text stands in the segments of stores is found as follows. A match that goes on is narrowed. Where there was
none, or it fell off, a match must end with the newest tokens: the gram filters of all segments say, for one read each,
which of them can hold that, and only those are searched.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import alignment, automaton, unigram
from retrieve_spec.kernels.automaton import extend
from retrieve_spec.kernels.calibration import CELLS, LENGTH_CLASSES, NUM_SOURCES, SCALE_BINS
from retrieve_spec.kernels.compiled_code import door, inner, making, making_door, part
from retrieve_spec.kernels.ngram import GRAM, home, may_hold, newest_gram
from retrieve_spec.kernels.source_table import (
    CURSOR,
    EXACT,
    EXACT_GRAMS,
    EXACT_ITEMSIZE,
    EXACT_MIN_DEPTH,
    EXACT_NUM_GRAMS,
    EXACT_TOP,
    EXACT_TOP_BITS,
    EXACT_TOP_SIZE,
    KIND,
    NGRAM,
    PREDICTION_CURSORS,
    RESTING,
    ROW,
    TAIL,
    edges_of,
    exact_narrow,
    meta_of,
    slots_of,
    states_of,
    suffixes_of,
    text_u16,
    text_u32,
    to_local_of,
)
from retrieve_spec.kernels.suffix_array import sa_between
from retrieve_spec.kernels.views import (
    prefetch,
    view_f32_cube,
    view_f32_rows,
    view_f64,
    view_f64_cube,
    view_i32,
    view_i64,
    view_i64_rows,
    view_rows,
    view_u64,
)

CURSORS, NEWEST, RECENT, NOISE, USE, TRUST = 0, 1, 2, 3, 4, 5
NODE_CURSORS, NODE_TAILS, POOL_P, POOL_IDS, HEAP, SCRATCH, NODES, NODE_P = 6, 7, 8, 9, 10, 11, 12, 13
"""Columns that hold addresses: (s, CURSOR) int64 cursors, (1, TAIL) int32 newest tokens, (MATCH,) int32 the same oldest
first, (4,) int64 as `expand.expand` takes it, (s,) float64 `calibration.begin_request`'s array; scratch of
`expand`."""
LENGTH, KEPT, OFFSET, STEPS, LEARNED, RESTS = 14, 15, 16, 17, 18, 19
"""Counters: tokens of the text, how many of them are in `RECENT`, what a token's position is ahead of its number; over
all requests steps and tokens learned from, and 1 while a source rests."""
CONTEXT, EARLIER, NUM_EARLIER, STORED, NUM_STORED, DENSE_ROW = 20, 21, 22, 23, 24, 25
"""Places in the table: the text (its tokens without a context come next), the session's first automaton and how many,
the first suffix array and how many, the neighbours (-1: none)."""
PREDICTED, SLOW, POOL, WORDS, ALIGNED = 26, 27, 28, 29, 30
"""1 with an expected text (in front of all other sources), 1 with stores, room for candidates, words of `SCRATCH`, the
place of the alignments in the table (-1: none)."""
TABLE, SOURCES, CELL_COUNTS, SCALE, DRAFTS, FIRST_P, FIRST = 31, 32, 33, 34, 35, 36, 37
"""Addresses of the table and how many sources it has; of a calibration's cells, scale and drafts (as in
`kernels/calibration.py`; greedy, then with known noise); of (1,) float64, how probable the token was that the last
draft began with, or would if it had paid (0: none); that token."""
AHEAD = 38
"""Tokens that the next draft begins with, whatever sources say: the first of `NODES` and `NODE_P`."""
SAID, SAID_ROOM, NUM_SAID, LEFT, DRAFTED, STEP = 39, 40, 41, 42, 43, 44
"""Of a request whose text an engine keeps (`kernels/batch.py`): address of what was generated (int32), tokens that it
has room for and holds, the last ones of these that the text's automaton had no room for; tokens of the draft that waits
to be verified, and the step that it was made for."""
REQUEST = 45
"""Integers per request."""
MATCH = 64
"""Longest match with a store that is kept when the text leaves it."""
LOOKBACK = 32
"""Longest match used to find the place again."""
HYPOTHESES = 3
"""Places in an expected text that are followed at once: found again, one token replaced, tokens inserted."""
_REST_BELOW, _WAKE_AT = 0.002, 0.004
"""Shares of the emitted tokens that a source explained, below which it rests and above which it is asked again."""
_SLOW_REST_BELOW, OF_USE = 0.01, 0.02
"""The same for stores, which are read from memory that no cache holds; the latter is every source's share at first."""
_LOOK_IN = 8
"""Stores that rest are learned about in one of so many steps."""
FIRST_TOKENS, LATER_EVERY = 2000, 4
"""Learning reads stores at all of the first tokens, then at one of so many."""


@making
def table_of(request: NDArray[np.int64]) -> NDArray[np.int64]:
    """(s, ROW) int64, all sources."""
    return view_i64_rows(request[TABLE], request[SOURCES], ROW)


@making
def cells_of(request: NDArray[np.int64]) -> NDArray[np.float32]:
    """(CELLS, 4) float32, how often levels explained tokens (`retrieve_spec.drafting.calibration.Calibration`)."""
    return view_f32_rows(request[CELL_COUNTS], CELLS, 4)


@making
def scale_of(request: NDArray[np.int64]) -> NDArray[np.float32]:
    """(2 · NUM_SOURCES, SCALE_BINS + 1, 2) float32, corrections as for `calibration.scaled`."""
    return view_f32_cube(request[SCALE], 2 * NUM_SOURCES, SCALE_BINS + 1, 2)


@making
def trust_of(request: NDArray[np.int64]) -> NDArray[np.float64]:
    """(NUM_SOURCES, 1 + LENGTH_CLASSES, 2) float64 trust of a request (`calibration.begin_request`)."""
    return view_f64_cube(request[TRUST], NUM_SOURCES, 1 + LENGTH_CLASSES, 2)


@making
def drafts_of(request: NDArray[np.int64], sampled: int) -> NDArray[np.float64]:
    """(2,) float64 counts of drafts (`kernels/calibration.py`), greedy (0) or with known noise (1)."""
    return view_f64(request[DRAFTS] + 16 * sampled, 2)


@making
def cursors_of(request: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """(s, CURSOR) int64, where the text stands in every source."""
    return view_i64_rows(request[CURSORS], rows, CURSOR)


@making
def newest_of(request: NDArray[np.int64]) -> NDArray[np.int32]:
    """(1, TAIL) int32 newest tokens, newest first."""
    return view_rows(request[NEWEST], 1, TAIL)


@making
def noise_of(request: NDArray[np.int64]) -> NDArray[np.int64]:
    """(4,) int64: 1 if tokens are sampled with known noise (else 0), seed, row, position of the next token."""
    return view_i64(request[NOISE], 4)


@making
def use_of(request: NDArray[np.int64], rows: int) -> NDArray[np.float64]:
    """(s,) float64, share of the tokens that each source explained."""
    return view_f64(request[USE], rows)


@door
def catch_up(table: NDArray[np.int64], request: NDArray[np.int64]) -> None:
    """Take over cursors that the text alone decides: those of the text, the best alignment and an expected text."""
    cursors = cursors_of(request, len(table))
    c = request[CONTEXT]
    last = meta_of(table, c)[automaton.M_LAST]
    cursors[c, 0] = last
    cursors[c, 1] = states_of(table, c)[last, automaton.LENGTH]
    newest = newest_of(request)
    cursors[c + 1, 0] = unigram.place_after(table, c + 1, np.int64(0), newest[0, 1])
    cursors[c + 1, 0] = unigram.place_after(table, c + 1, cursors[c + 1, 0], newest[0, 0])
    if request[ALIGNED] >= 0:
        alignment.best(table, request[ALIGNED], cursors, request[ALIGNED])
    if request[PREDICTED] == 1:
        kept = view_i64_rows(table[0, PREDICTION_CURSORS], HYPOTHESES, CURSOR)
        for i in range(HYPOTHESES):
            for j in range(CURSOR):
                cursors[i, j] = kept[i, j]


@inner
def _is_slow(table: NDArray[np.int64], s: int) -> bool:
    return table[s, KIND] == NGRAM or table[s, KIND] == EXACT


@part
def wake(table: NDArray[np.int64], request: NDArray[np.int64]) -> None:
    """Let learning see every source, but stores that rest only now and then: looking into them is what costs."""
    request[STEPS] += 1
    if request[RESTS] == 0:
        return
    for s in range(len(table)):
        if request[STEPS] % _LOOK_IN == 0 or not _is_slow(table, s):
            table[s, RESTING] = 0


@part
def choose_sources(table: NDArray[np.int64], request: NDArray[np.int64]) -> None:
    """Let sources rest that have explained next to nothing lately; learning still sees them, and wakes them.

    While none rests, looking now and then is enough.
    """
    if request[RESTS] == 0 and request[STEPS] % _LOOK_IN != 0:
        return
    use = use_of(request, len(table))
    request[RESTS] = 0
    for s in range(len(table)):
        slow = _is_slow(table, s)
        if use[s] < (_SLOW_REST_BELOW if slow else _REST_BELOW):
            table[s, RESTING] = 1
        elif use[s] >= (OF_USE if slow else _WAKE_AT):
            table[s, RESTING] = 0
        if s <= request[CONTEXT] + 1 or s == request[DENSE_ROW]:  # neighbours are asked when that pays
            table[s, RESTING] = 0
        if table[s, RESTING] == 1:
            request[RESTS] = 1


@making
def follow_all(
    table: NDArray[np.int64], first: int, cursors: NDArray[np.int64], window: NDArray[np.int32], fresh: int
) -> None:
    """Follow the newest tokens of the text with the longest-match cursors of stores.

    Parameters
    ----------
    table, first
        Sources, and the number of the first `EXACT` one; the others follow it.
    cursors
        (m, CURSOR) int64, one row for each: (lo, hi, depth) before the fresh tokens, modified in place; depth 0 for
        none.
    window
        (w,) int32 newest tokens of the text, oldest first, the fresh ones included.
    fresh
        How many of them are new.
    """
    known = len(window) >= GRAM
    gram = newest_gram(window) if known else np.uint64(0)
    for i in range(len(cursors)):  # all words at once: they lie far apart, and each would be waited for
        if known and table[first + i, EXACT_NUM_GRAMS] > 0:
            prefetch(table[first + i, EXACT_GRAMS] + 8 * home(gram, table[first + i, EXACT_NUM_GRAMS]))
    for i in range(len(cursors)):
        _follow(table, first + i, cursors, i, window, fresh, known, gram)


@part
def _follow(
    table: NDArray[np.int64],
    s: int,
    cursors: NDArray[np.int64],
    c: int,
    window: NDArray[np.int32],
    fresh: int,
    known: bool,
    gram: np.uint64,
) -> None:
    """`follow_all` for one cursor; ``gram`` is the hash of the newest tokens, if ``known``."""
    lo, hi, depth = cursors[c, 0], cursors[c, 1], cursors[c, 2]
    least = table[s, EXACT_MIN_DEPTH]
    n = len(window)
    i = n - fresh
    while depth > 0 and i < n:
        a, b = exact_narrow(table, s, lo, hi, depth, window[i])
        if a >= b:
            break
        lo, hi, depth = a, b, depth + 1
        i += 1
    if depth == 0 or i < n:
        # The match before token i was `depth` long and did not go on with it, or was shorter than `least`.
        longest = min((depth if depth > 0 else least) - 1 + n - i, n, MATCH)
        if known and longest >= GRAM and not may_hold(view_u64(table[s, EXACT_GRAMS], table[s, EXACT_NUM_GRAMS]), gram):
            longest = np.int64(GRAM - 1)
        lo, hi, depth = np.int64(0), np.int64(0), np.int64(0)
        if longest >= least:
            lo, hi, depth = _search(table, s, window[n - longest :], least)
    cursors[c, 0], cursors[c, 1], cursors[c, 2] = lo, hi, depth


@part
def _search(table: NDArray[np.int64], s: int, recent: NDArray[np.int32], least: int) -> tuple[int, int, int]:
    """(lo, hi, depth) of the longest suffix of at least ``least`` tokens of a text that a segment holds."""
    local = np.empty(len(recent), np.int64)
    to_local = to_local_of(table, s)
    for i in range(len(recent)):
        local[i] = to_local[recent[i]] if 0 <= recent[i] < len(to_local) else 0
    sa = suffixes_of(table, s)
    top = view_u64(table[s, EXACT_TOP], table[s, EXACT_TOP_SIZE])
    bits = table[s, EXACT_TOP_BITS]
    if table[s, EXACT_ITEMSIZE] == 2:
        lo, hi, depth = sa_between(text_u16(table, s), sa, top, bits, local, least, len(local))
    else:
        lo, hi, depth = sa_between(text_u32(table, s), sa, top, bits, local, least, len(local))
    return np.int64(lo), np.int64(hi), np.int64(depth)


@making
def follow_stores(
    table: NDArray[np.int64],
    request: NDArray[np.int64],
    tokens: NDArray[np.int32],
    roots: NDArray[np.int64],
    stores: int | None,
) -> NDArray[np.int32]:
    """Move the stores' longest-match cursors over tokens (e,) from where they were before them, ``roots``.

    Returns
    -------
    (≤ MATCH + e,) int32
        The newest tokens of the text, oldest first, these included.
    """
    kept, fresh = request[KEPT], len(tokens)
    recent = view_i32(request[RECENT], MATCH)
    window = np.empty(kept + fresh, np.int32)
    for i in range(kept):  # Numba compiles what a slice that is assigned says of shapes that differ, for seconds
        window[i] = recent[i]
    for i in range(fresh):
        window[kept + i] = tokens[i]
    cursors = cursors_of(request, len(table))
    if stores is not None:
        follow_all(table, request[STORED], roots, window, fresh)
    for i in range(len(roots)):
        for j in range(CURSOR):
            cursors[request[STORED] + i, j] = roots[i, j]
    left = min(len(window), MATCH)
    for i in range(left):
        recent[i] = window[len(window) - left + i]
    request[KEPT] = left
    return window


@making
def stored_cursors(table: NDArray[np.int64], request: NDArray[np.int64]) -> NDArray[np.int64]:
    """(stores, CURSOR) int64 copy of the stores' cursors."""
    first = request[STORED]
    return cursors_of(request, len(table))[first : first + request[NUM_STORED]].copy()


@inner
def grow_context(table: NDArray[np.int64], request: NDArray[np.int64], tokens: NDArray[np.int32], said: int) -> int:
    """Append tokens, generated (1) or not (0), to what is known of the text: automaton, frequent tokens, alignments.

    Returns for how many there was room in the automaton.
    """
    c = request[CONTEXT]
    unigram.extend(table, c + 1, tokens, said)
    if request[ALIGNED] >= 0:
        alignment.extend(table, request[ALIGNED], tokens, said)
    return extend(states_of(table, c), edges_of(table, c), slots_of(table, c), meta_of(table, c), tokens)


@making_door
def read(
    table: NDArray[np.int64], request: NDArray[np.int64], tokens: NDArray[np.int32], looked_at: int, stores: int | None
) -> int:
    """Take text (n,) that was not generated into the text so far.

    Parameters
    ----------
    looked_at
        How much of its end is followed in the session.
    stores
        As in `kernels/levels.py`.

    Returns
    -------
    int
        How many tokens there was room for in the text's automaton.
    """
    n = len(tokens)
    cursors = cursors_of(request, len(table))
    for s in range(request[EARLIER], request[EARLIER] + request[NUM_EARLIER]):
        states, edges, slots = states_of(table, s), edges_of(table, s), slots_of(table, s)
        state = matched = np.int64(0)
        for i in range(max(n - looked_at, 0), n):
            state, matched = automaton.advance(states, edges, slots, state, matched, tokens[i])
        cursors[s, 0], cursors[s, 1] = state, matched
    roots = stored_cursors(table, request)
    if n > MATCH:  # only the end is followed: what was matched before does not reach it
        roots[:] = 0
    follow_stores(table, request, tokens[max(n - MATCH, 0) :], roots, stores)
    newest = newest_of(request)
    for i in range(max(n - TAIL, 0), n):
        push(newest, tokens[i])
    request[LENGTH] += n
    return grow_context(table, request, tokens, np.int64(0))


@inner
def push(newest: NDArray[np.int32], token: int) -> None:
    """Put a token in front of the newest ones."""
    for j in range(TAIL - 1, 0, -1):
        newest[0, j] = newest[0, j - 1]
    newest[0, 0] = token


@inner
def anchor(text: NDArray[np.int32], recent: NDArray[np.int32], near: int) -> tuple[int, int]:
    """Where in ``text`` the output stands now.

    Parameters
    ----------
    text
        (n,) int32 expected text.
    recent
        (m,) int32 newest emitted tokens, oldest first.
    near
        Position expected if the output went on in parallel; ties in match length go to the nearest place.

    Returns
    -------
    position, matched
        Next expected token's index and how many of the newest tokens precede it there; (0, 0) when none does.
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
        (m,) int32 newest tokens of the text so far, the emitted ones included, oldest first.
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
        if matched > 0:  # otherwise the place last known stays the one to look near
            cursors[0, 0], cursors[0, 1] = position, matched
            for c in range(1, 3):
                if cursors[c, 0] == position:
                    cursors[c, 1] = -1
