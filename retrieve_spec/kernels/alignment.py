"""Numba kernels of alignments: earlier places of the text that the newest tokens run beside, single words replaced.

A suffix automaton forgets a copied passage at the first token that differs. An alignment goes on: it is a place in the
text, the outcomes of its last `OUTCOMES` predictions, and what the words that differed were replaced by. It begins
where the newest `ANCHOR` tokens were said before, and ends when fewer than `FEWEST` of its last `RECENT` predictions
came true.

A cursor holds ``outcomes << 32 | place`` (0: no alignment; the newest outcome is the lowest bit, 1 for true; the place
is the number of the next expected token) and up to three replacements ``old << 32 | new``, newest first, -1 for none.
``text`` (WINDOW,) int32 is a ring of the newest tokens, ``places`` (SLOTS,) int32 where the tokens with a hash ended
last (0: nowhere), ``kept`` (KEPT, CURSOR) int64 the alignments that are followed, and ``meta``
(META,) int64 the tokens of the text and whether one of ``kept`` (then the first) has outlived a token that differed:
exact contexts know the others.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.recycling import mix
from retrieve_spec.kernels.source_table import (
    ALIGNMENT_KEPT,
    ALIGNMENT_META,
    ALIGNMENT_PLACES,
    ALIGNMENT_TEXT,
    CURSOR,
)
from retrieve_spec.kernels.views import view_i32, view_i64, view_i64_rows

WINDOW = SLOTS = 1 << 16
META = 2
KEPT = 4
ANCHOR = 2
OUTCOMES = 31
RECENT, FEWEST = 8, 2
_OUTCOMES, _RECENT, _LOW = (1 << OUTCOMES) - 1, (1 << RECENT) - 1, 0xFFFFFFFF
_HASH_SHIFT = np.uint64(48)


@inner
def ones(n: int) -> int:
    """How many bits of a number below 2^32 are set."""
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return ((n * 0x01010101) & _LOW) >> 24


@inner
def run_of(outcomes: int) -> int:
    """How many of the newest predictions came true without a break."""
    return ones(outcomes & ~(outcomes + 1))


@inner
def _expected(text: NDArray[np.int32], cursors: NDArray[np.int64], c: int) -> tuple[int, int]:
    """The next expected token, and the column of the replacement it comes from (0: none)."""
    token = np.int64(text[cursors[c, 0] & (WINDOW - 1)])
    for j in range(1, CURSOR):
        if cursors[c, j] >= 0 and cursors[c, j] >> 32 == token:
            return cursors[c, j] & _LOW, np.int64(j)
    return token, np.int64(0)


@njit(cache=True, nogil=True)
def open_level(table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int) -> tuple[int, int]:
    """(handle, match length) of a cursor's level; length -1 where it has none.

    It has one where it says more than exact contexts do: among the last `RECENT` predictions one did not come true, or
    the next token is a replaced one. The handle is the expected token, and 2^32 more when it is a replacement; the
    length how many of the last `RECENT` predictions came true.
    """
    none = np.int64(0), np.int64(-1)
    outcomes = cursors[c, 0] >> 32
    if outcomes == 0 or cursors[c, 0] & _LOW >= view_i64(table[s, ALIGNMENT_META], META)[0]:
        return none
    token, column = _expected(view_i32(table[s, ALIGNMENT_TEXT], WINDOW), cursors, c)
    if token < 0 or (column == 0 and outcomes & _RECENT == _RECENT):
        return none
    return token | (np.int64(1) << 32 if column > 0 else np.int64(0)), np.int64(ones(outcomes & _RECENT))


@inner
def token_of(handle: int) -> int:
    """The token that a level expects."""
    return handle & _LOW


@inner
def evidence(cursors: NDArray[np.int64], c: int, handle: int) -> tuple[int, int]:
    """What stands for the count, tokens in a row that came true; and for the distinct continuations, how many of the
    last ones differed and whether this one is a replacement."""
    outcomes = cursors[c, 0] >> 32
    differed = RECENT - ones(outcomes & _RECENT)
    few, some, many = (4, 6, 9) if handle > _LOW else (1, 2, 3)
    return run_of(outcomes) + 1, np.int64(few if differed <= 1 else some if differed <= 3 else many)


@inner
def advance(
    table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int, token: int, out: NDArray[np.int64], o: int
) -> None:
    """Cursor after one more token of a draft: no alignment any more where the token is another one."""
    out[o, 0] = 0
    if cursors[c, 0] != 0:
        expected, _ = _expected(view_i32(table[s, ALIGNMENT_TEXT], WINDOW), cursors, c)
        if expected == token:
            out[o, 0] = _after(cursors[c, 0], np.int64(1))
            for j in range(1, CURSOR):
                out[o, j] = cursors[c, j]


@inner
def _after(at: int, true: int) -> int:
    """First column of a cursor after one more outcome."""
    return (((at >> 32) << 1 | true) & _OUTCOMES) << 32 | ((at & _LOW) + 1)


@inner
def _follow(text: NDArray[np.int32], kept: NDArray[np.int64], k: int, token: int) -> None:
    """Move an alignment over a token of the text: one that differs is a replacement from now on."""
    expected, column = _expected(text, kept, k)
    old = np.int64(text[kept[k, 0] & (WINDOW - 1)])
    kept[k, 0] = _after(kept[k, 0], np.int64(expected == token))
    if ones(kept[k, 0] >> 32 & _RECENT) < FEWEST:
        kept[k, 0] = 0
    elif expected != token and old >= 0 and token >= 0:
        for j in range(column if column > 0 else CURSOR - 1, 1, -1):
            kept[k, j] = kept[k, j - 1]
        kept[k, 1] = old << 32 | token


@njit(cache=True, nogil=True)
def _slot(text: NDArray[np.int32], end: int) -> int:
    """Where ``places`` knows the `ANCHOR` tokens in front of ``end``."""
    h = np.uint64(0)
    for back in range(1, ANCHOR + 1):
        h = mix(h, text[(end - back) & (WINDOW - 1)])
    return np.int64(h >> _HASH_SHIFT)


@inner
def _matched(text: NDArray[np.int32], place: int, end: int) -> int:
    """How many tokens in front of a place are those in front of the end, `OUTCOMES` at most."""
    if place <= 0 or place >= end or end - place > WINDOW - OUTCOMES:
        return np.int64(0)
    n = np.int64(0)
    while n < min(OUTCOMES, place) and text[(place - 1 - n) & (WINDOW - 1)] == text[(end - 1 - n) & (WINDOW - 1)]:
        n += 1
    return n


@inner
def _worth(outcomes: int) -> int:
    """Order of alignments: recent predictions that came true, then all."""
    return ones(outcomes & _RECENT) * (OUTCOMES + 1) + ones(outcomes)


@inner
def _begin(kept: NDArray[np.int64], place: int, matched: int) -> None:
    """Follow an alignment that has matched so many tokens, instead of the worst one, if it is not followed yet."""
    worst, least = np.int64(0), np.int64(1 << 40)
    for k in range(KEPT):
        if kept[k, 0] != 0 and kept[k, 0] & _LOW == place:
            return
        worth = _worth(kept[k, 0] >> 32)
        if worth < least:
            worst, least = np.int64(k), worth
    kept[worst, 0] = ((np.int64(1) << matched) - 1) << 32 | place
    for j in range(1, CURSOR):
        kept[worst, j] = -1


@inner
def _best_first(kept: NDArray[np.int64]) -> int:
    """Put the best alignment in front of those that have outlived a token that differed; returns 1 if there is one."""
    best, most = 0, np.int64(0)
    for k in range(KEPT):
        outcomes = kept[k, 0] >> 32
        if outcomes & (outcomes + 1) != 0 and _worth(outcomes) > most:
            best, most = k, _worth(outcomes)
    if best > 0:
        for j in range(CURSOR):
            kept[0, j], kept[best, j] = kept[best, j], kept[0, j]
    return np.int64(most > 0)


@njit(cache=True, nogil=True)
def extend(table: NDArray[np.int64], s: int, tokens: NDArray[np.int32], said: int) -> None:
    """Take tokens (n,) into the text of a source: generated ones (1) are followed, others (0) end all alignments."""
    text, places = view_i32(table[s, ALIGNMENT_TEXT], WINDOW), view_i32(table[s, ALIGNMENT_PLACES], SLOTS)
    kept = view_i64_rows(table[s, ALIGNMENT_KEPT], KEPT, CURSOR)
    meta = view_i64(table[s, ALIGNMENT_META], META)
    if said == 0:
        kept[:] = 0
    for i in range(len(tokens)):
        if said == 1:
            for k in range(KEPT):
                if kept[k, 0] != 0:
                    _follow(text, kept, k, np.int64(tokens[i]))
        text[meta[0] & (WINDOW - 1)] = tokens[i]
        meta[0] += 1
        if meta[0] < ANCHOR:
            continue
        slot = _slot(text, meta[0])
        if said == 1 or i == len(tokens) - 1:
            matched = _matched(text, np.int64(places[slot]), meta[0])
            if matched >= ANCHOR:
                _begin(kept, np.int64(places[slot]), matched)
        places[slot] = meta[0]
    meta[1] = _best_first(kept)


@njit(cache=True, nogil=True)
def best(table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int) -> None:
    """Write the cursor of a source's best alignment."""
    kept = view_i64_rows(table[s, ALIGNMENT_KEPT], 1, CURSOR)
    found = view_i64(table[s, ALIGNMENT_META], META)[1]
    for j in range(CURSOR):
        cursors[c, j] = kept[0, j] * found
