"""Numba kernels of alignments: earlier places of the text that the newest tokens run beside, with edits between them.

A suffix automaton forgets a copied passage at the first token that differs. An alignment goes on: it is a place in the
text, and the outcomes of its last `OUTCOMES` predictions. It begins where the newest `ANCHOR` tokens were said before,
and ends when fewer than `FEWEST` of its last `RECENT` predictions came true.

At a token that differs it *breaks*. Every token from there on that is not the expected one is looked for among the
`REACH` tokens behind the place of the break: words may have been replaced, put in or left out. Where none is found, the
passage goes on token by token. The break ends when a prediction comes true, or after `LONGEST` tokens.

A cursor holds the place (the number of the next expected token, 0 for no alignment), the outcomes (bits, the newest is
the lowest, 1 for true) and how many tokens have come since the text differed (`RECENT` at most).

``text`` (WINDOW,) int32 is a ring of the newest tokens, ``places`` (SLOTS,) int32 where the tokens with a hash ended
last (0: nowhere), ``kept`` (KEPT, WIDTH) int64 the cursors that are followed, with the place where each broke (0: it is
not broken) and how many tokens have come since, and ``meta`` (META,) int64 the tokens of the text and whether one of
``kept`` (then the first) has outlived a token that differed: exact contexts know the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.recycling import mix
from retrieve_spec.kernels.source_table import (
    ALIGNMENT_KEPT,
    ALIGNMENT_META,
    ALIGNMENT_PLACES,
    ALIGNMENT_TEXT,
)
from retrieve_spec.kernels.views import view_i32, view_i64, view_i64_rows

WINDOW = SLOTS = 1 << 16
META = 2
KEPT = 4
PLACE, OUTCOMES, SAME, BROKE, SINCE = range(5)
WIDTH = 5
ANCHOR = 2
REMEMBERED = 24
"""Outcomes that are kept."""
RECENT, FEWEST = 8, 2
REACH, LONGEST = 24, 16
FARTHEST = WINDOW - 64
"""How far back a place may be: what is looked for around it must still be in the ring."""
_ALL, _NEWEST, _RING = (1 << REMEMBERED) - 1, (1 << RECENT) - 1, WINDOW - 1
_HASH_SHIFT = np.uint64(48)


@inner
def ones(n: int) -> int:
    """How many bits of a number below 2^32 are set."""
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return ((n * 0x01010101) & 0xFFFFFFFF) >> 24


@inner
def open_level(table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int) -> tuple[int, int]:
    """(expected token, how many of the last `RECENT` predictions came true) of a cursor; (0, -1) for no level.

    There is one where it says more than exact contexts do: the text differed less than `RECENT` tokens ago.
    """
    place = cursors[c, PLACE]
    if place == 0 or cursors[c, SAME] >= RECENT or place >= view_i64(table[s, ALIGNMENT_META], META)[0]:
        return np.int64(0), np.int64(-1)
    token = np.int64(view_i32(table[s, ALIGNMENT_TEXT], WINDOW)[place & _RING])
    return token, np.int64(ones(cursors[c, OUTCOMES] & _NEWEST)) if token >= 0 else np.int64(-1)


@inner
def evidence(cursors: NDArray[np.int64], c: int) -> tuple[int, int]:
    """What stands for the count, predictions in a row that came true; and for the distinct continuations, how many of
    the last ones did not."""
    outcomes = cursors[c, OUTCOMES]
    differed = RECENT - ones(outcomes & _NEWEST)
    return ones(outcomes & ~(outcomes + 1)) + 1, np.int64(1 if differed <= 1 else 2 if differed <= 3 else 3)


@inner
def _came_true(cursors: NDArray[np.int64], c: int, out: NDArray[np.int64], o: int) -> None:
    """Write the cursor after the expected token."""
    out[o, PLACE] = cursors[c, PLACE] + 1
    out[o, OUTCOMES] = (cursors[c, OUTCOMES] << 1 | 1) & _ALL
    out[o, SAME] = min(cursors[c, SAME] + 1, RECENT)


@inner
def advance(
    table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int, token: int, out: NDArray[np.int64], o: int
) -> None:
    """Cursor after one more token of a draft: no alignment any more where the token is another one."""
    place = cursors[c, PLACE]
    if place > 0 and view_i32(table[s, ALIGNMENT_TEXT], WINDOW)[place & _RING] == token:
        _came_true(cursors, c, out, o)
    else:
        out[o, PLACE] = 0


@inner
def _look_for(text: NDArray[np.int32], kept: NDArray[np.int64], k: int, token: int, end: int) -> None:
    """Go on behind a token that was not expected: where it stands behind the break, if it does."""
    if kept[k, BROKE] == 0 or kept[k, SINCE] > LONGEST:
        kept[k, BROKE], kept[k, SINCE] = kept[k, PLACE], 1
    base = kept[k, BROKE]
    kept[k, PLACE] += 1
    for j in range(base, min(base + REACH, end)):
        if text[j & _RING] == token:
            kept[k, PLACE] = j + 1
            break
    kept[k, OUTCOMES] = (kept[k, OUTCOMES] << 1) & _ALL
    kept[k, SAME] = 0
    if ones(kept[k, OUTCOMES] & _NEWEST) < FEWEST:
        kept[k, PLACE] = 0


@inner
def _follow(text: NDArray[np.int32], kept: NDArray[np.int64], k: int, token: int, end: int) -> None:
    """Move an alignment over a token of the text."""
    place = kept[k, PLACE]
    kept[k, SINCE] += 1
    if place >= end or end - place > FARTHEST:
        kept[k, PLACE] = 0
    elif text[place & _RING] == token:
        _came_true(kept, k, kept, k)
        kept[k, BROKE] = 0
    else:
        _look_for(text, kept, k, token, end)


@inner
def _slot(text: NDArray[np.int32], end: int) -> int:
    """Where ``places`` knows the `ANCHOR` tokens in front of ``end``."""
    h = np.uint64(0)
    for back in range(1, ANCHOR + 1):
        h = mix(h, text[(end - back) & _RING])
    return np.int64(h >> _HASH_SHIFT)


@inner
def _matched(text: NDArray[np.int32], place: int, end: int) -> int:
    """How many tokens in front of a place are those in front of the end, `REMEMBERED` at most."""
    n = np.int64(0)
    if 0 < place < end and end - place <= FARTHEST:
        while n < min(REMEMBERED, place) and text[(place - 1 - n) & _RING] == text[(end - 1 - n) & _RING]:
            n += 1
    return n


@inner
def _worth(outcomes: int) -> int:
    """Order of alignments: recent predictions that came true, then all."""
    return ones(outcomes & _NEWEST) * (REMEMBERED + 1) + ones(outcomes)


@inner
def _begin(kept: NDArray[np.int64], place: int, matched: int) -> None:
    """Follow an alignment that has matched so many tokens, instead of the worst one, if it is not followed yet."""
    worst, least = np.int64(0), np.int64(1 << 40)
    for k in range(KEPT):
        if kept[k, PLACE] == place:
            return
        worth = _worth(kept[k, OUTCOMES]) if kept[k, PLACE] > 0 else np.int64(0)
        if worth < least:
            worst, least = np.int64(k), worth
    kept[worst, PLACE], kept[worst, OUTCOMES] = place, (np.int64(1) << matched) - 1
    kept[worst, SAME], kept[worst, BROKE] = min(matched, RECENT), 0


@inner
def _best_first(kept: NDArray[np.int64]) -> int:
    """Put the best alignment in front of those that have outlived a token that differed; returns 1 if there is one."""
    best, most = 0, np.int64(0)
    for k in range(KEPT):
        outcomes = kept[k, OUTCOMES] if kept[k, PLACE] > 0 else np.int64(0)
        if outcomes & (outcomes + 1) != 0 and _worth(outcomes) > most:
            best, most = k, _worth(outcomes)
    if best > 0:
        for j in range(WIDTH):
            kept[0, j], kept[best, j] = kept[best, j], kept[0, j]
    return np.int64(most > 0)


@inner
def extend(table: NDArray[np.int64], s: int, tokens: NDArray[np.int32], said: int) -> None:
    """Take tokens (n,) into the text of a source: generated ones (1) are followed, others (0) end all alignments."""
    text, places = view_i32(table[s, ALIGNMENT_TEXT], WINDOW), view_i32(table[s, ALIGNMENT_PLACES], SLOTS)
    kept = view_i64_rows(table[s, ALIGNMENT_KEPT], KEPT, WIDTH)
    meta = view_i64(table[s, ALIGNMENT_META], META)
    if said == 0:
        kept[:] = 0
    for i in range(len(tokens)):
        if said == 1:
            for k in range(KEPT):
                if kept[k, PLACE] > 0:
                    _follow(text, kept, k, np.int64(tokens[i]), meta[0])
        text[meta[0] & _RING] = tokens[i]
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


@inner
def best(table: NDArray[np.int64], s: int, cursors: NDArray[np.int64], c: int) -> None:
    """Write the cursor of a source's best alignment."""
    kept = view_i64_rows(table[s, ALIGNMENT_KEPT], 1, WIDTH)
    found = view_i64(table[s, ALIGNMENT_META], META)[1]
    cursors[c, PLACE] = kept[0, PLACE] * found
    cursors[c, OUTCOMES], cursors[c, SAME] = kept[0, OUTCOMES], kept[0, SAME]
