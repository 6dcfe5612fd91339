"""Numba kernels of alignments: earlier passages that the newest tokens repeat with edits.

A suffix automaton loses a copied passage at the first token that differs. An alignment continues: it has a place in the
text, the outcomes of its last `OUTCOMES` predictions, and the edits by which the copy differed. It begins where the
newest `ANCHOR` tokens occurred before, and ends when fewer than `FEWEST` of its last `JUDGED` predictions were right.

At a token that differs, it *breaks*. From then on, every unexpected token is searched for among the `REACH` tokens
after the place of the break, since words may have been replaced, inserted or deleted. If it is not found, the passage
continues token by token. The break ends when a prediction is right, or after `LONGEST` tokens. An *edit* records the
break: the old token, the new token, how many more tokens followed (which are not remembered), and how many tokens of
the passage they replace. Where the old token occurs again, the edit is expected again.

A cursor holds the place (index of the next expected token; 32 bits), the outcomes (24; the newest is the lowest bit,
1 if right), the number of tokens since the text differed (4; at most `JUDGED`) and the number of tokens of an edit that
are still to come (3), all 0 without an alignment; and up to three edits ``old << 32 | new << 8 | more << 5 | passed``,
newest first, -1 for none.

``text`` (WINDOW,) int32 is a ring of the newest tokens; ``places`` (SLOTS,) int32 are the last ends of tokens by hash
(0: none); ``kept`` (KEPT, WIDTH) int64 are the followed cursors, with the place of the break (0: not broken) and the
number of tokens since; ``meta`` (COPY_META,) int64 are the number of tokens and whether an alignment, which is then the
first of ``kept``, has survived a differing token (exact contexts cover the others).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.recycling import mix
from retrieve_spec.kernels.source_table import CURSOR
from retrieve_spec.kernels.views import Record, view_i32, view_i64, view_i64_rows

WINDOW = SLOTS = 1 << 16
COPY_META = 2
KEPT = 4
BROKE, SINCE = CURSOR, CURSOR + 1
WIDTH = CURSOR + 2
ANCHOR = 2
OUTCOMES = 24
JUDGED, FEWEST = 8, 2
REACH, LONGEST = 24, 16
FARTHEST = WINDOW - 64
"""Greatest distance of a place from the end: everything searched around it must still be in the ring."""
_OUTCOMES, _JUDGED, LOW = (1 << OUTCOMES) - 1, (1 << JUDGED) - 1, 0xFFFFFFFF
_MORE, _PASSED, _ID = (1 << 3) - 1, (1 << 5) - 1, (1 << 24) - 1
"""Largest number that an edit can store."""
_TO_COME = 1 << 60
"""One pending token of an edit, in the first column of a cursor."""
_HASH_SHIFT = np.uint64(48)


@inner
def ones(n: int) -> int:
    """Return the number of set bits of a number below 2^32."""
    n = n - ((n >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    n = (n + (n >> 4)) & 0x0F0F0F0F
    return ((n * 0x01010101) & LOW) >> 24


@inner
def _packed(place: int, outcomes: int, same: int, coming: int) -> int:
    """Pack a cursor's first column: place, outcomes, tokens since the text differed, pending tokens of an edit."""
    told = np.int64(coming) << 60 | np.int64(min(same, JUDGED)) << 56
    return told | np.int64(outcomes & _OUTCOMES) << 32 | np.int64(place)


@inner
def _outcomes(at: int) -> int:
    return at >> 32 & _OUTCOMES


@inner
def _same(at: int) -> int:
    return at >> 56 & 15


@inner
def _coming(at: int) -> int:
    return at >> 60


@inner
def _expected(text: NDArray[np.int32], cursors: NDArray[np.int64], c: int) -> tuple[int, int]:
    """Return the next expected token, and the column of the edit it comes from (0: none)."""
    token = np.int64(text[cursors[c, 0] & (WINDOW - 1)])
    for j in range(1, CURSOR):
        if cursors[c, j] >= 0 and cursors[c, j] >> 32 == token:
            return cursors[c, j] >> 8 & _ID, np.int64(j)
    return token, np.int64(0)


@inner
def open_level(copies: Record, cursors: NDArray[np.int64], c: int) -> tuple[int, int]:
    """Return (handle, match length) of a cursor's level; the length is -1 if it has none.

    It has one if it adds to exact contexts: the text differed less than `JUDGED` tokens ago, or the next token is a
    replacement; but never inside an edit. The handle is the expected token, plus 2^32 for a replacement. The length is
    the number of right predictions among the last `JUDGED`.
    """
    none = np.int64(0), np.int64(-1)
    at = cursors[c, 0]
    if at == 0 or _coming(at) > 0 or at & LOW >= view_i64(copies.meta, COPY_META)[0]:
        return none
    token, column = _expected(view_i32(copies.text, WINDOW), cursors, c)
    if token < 0 or (column == 0 and _same(at) >= JUDGED):
        return none
    return token | (np.int64(1) << 32 if column > 0 else np.int64(0)), np.int64(ones(_outcomes(at) & _JUDGED))


@inner
def evidence(cursors: NDArray[np.int64], c: int, handle: int) -> tuple[int, int]:
    """Return what is used as count (right predictions in a row) and as number of distinct continuations (by wrong
    predictions among the last ones, and whether this one is a replacement)."""
    outcomes = _outcomes(cursors[c, 0])
    in_a_row = ones(outcomes & ~(outcomes + 1))
    differed = JUDGED - ones(outcomes & _JUDGED)
    few, some, many = (4, 6, 9) if handle > LOW else (1, 2, 3)
    return in_a_row + 1, np.int64(few if differed <= 1 else some if differed <= 3 else many)


@inner
def _after(cursors: NDArray[np.int64], c: int, column: int) -> int:
    """Return a cursor's first column after the expected token, which came from an edit's column (0: from the text)."""
    at = cursors[c, 0]
    outcomes, place = _outcomes(at) << 1 | 1, at & LOW
    if column == 0:
        return _packed(place + 1, outcomes, _same(at) + 1, np.int64(0))
    return _packed(place + (cursors[c, column] & _PASSED), outcomes, np.int64(0), cursors[c, column] >> 5 & _MORE)


@inner
def advance(copies: Record, cursors: NDArray[np.int64], c: int, token: int, out: NDArray[np.int64], o: int) -> None:
    """Advance a cursor by a draft token; an unexpected token ends the alignment."""
    out[o, 0] = 0
    at = cursors[c, 0]
    if at == 0:
        return
    if _coming(at) > 0:
        out[o, 0] = at - _TO_COME
    else:
        expected, column = _expected(view_i32(copies.text, WINDOW), cursors, c)
        if expected != token:
            return
        out[o, 0] = _after(cursors, c, column)
    for j in range(1, CURSOR):
        out[o, j] = cursors[c, j]


@inner
def _remember(kept: NDArray[np.int64], k: int, column: int, edit: int) -> None:
    """Insert an edit at the front, and drop the one in a column (0: the oldest)."""
    for j in range(column if column > 0 else CURSOR - 1, 1, -1):
        kept[k, j] = kept[k, j - 1]
    kept[k, 1] = edit


@inner
def _look_for(text: NDArray[np.int32], kept: NDArray[np.int64], k: int, token: int, end: int) -> None:
    """Continue after an unexpected token, at its occurrence after the break if there is one, and write the edit so far.

    A found token is not part of the edit, unless it came first or is the one at which the passage broke.
    """
    base, place = kept[k, BROKE], (kept[k, 0] & LOW) + 1
    more, passed = kept[k, SINCE] - 1, place - base
    for j in range(base, min(base + REACH, end)):
        if text[j & (WINDOW - 1)] == token:
            place = j + 1
            inside = np.int64(more > 0 and j > base)
            more, passed = more - inside, place - base - inside
            break
    kept[k, 0] = _packed(place, _outcomes(kept[k, 0]) << 1, np.int64(0), np.int64(0))
    if more > _MORE or passed > _PASSED:
        more, passed = np.int64(0), np.int64(1)
    if kept[k, 1] >= 0:
        kept[k, 1] = kept[k, 1] >> 8 << 8 | more << 5 | passed


@inner
def _follow(text: NDArray[np.int32], kept: NDArray[np.int64], k: int, token: int, end: int) -> None:
    """Advance an alignment by a token of the text."""
    at = kept[k, 0]
    place = at & LOW
    kept[k, SINCE] += 1
    if _coming(at) > 0:
        kept[k, 0] = at - _TO_COME
        return
    if place >= end or end - place > FARTHEST:
        kept[k, 0] = 0
        return
    expected, column = _expected(text, kept, k)
    if expected == token:
        kept[k, 0] = _after(kept, k, column)
        kept[k, BROKE] = 0
        if column > 0:
            _remember(kept, k, column, kept[k, column])
            kept[k, BROKE], kept[k, SINCE] = place, 1
        return
    if kept[k, BROKE] == 0 or kept[k, SINCE] > LONGEST:
        old = np.int64(text[place & (WINDOW - 1)])
        known = old >= 0 and 0 <= token <= _ID
        _remember(kept, k, column, (old << 24 | token) << 8 if known else np.int64(-1))
        kept[k, BROKE], kept[k, SINCE] = place, 1
    _look_for(text, kept, k, token, end)
    if ones(_outcomes(kept[k, 0]) & _JUDGED) < FEWEST:
        kept[k, 0] = 0


@inner
def _slot(text: NDArray[np.int32], end: int) -> int:
    """Return the slot of ``places`` for the `ANCHOR` tokens before ``end``."""
    h = np.uint64(0)
    for back in range(1, ANCHOR + 1):
        h = mix(h, text[(end - back) & (WINDOW - 1)])
    return np.int64(h >> _HASH_SHIFT)


@inner
def _matched(text: NDArray[np.int32], place: int, end: int) -> int:
    """Return how many tokens before a place equal those before the end, at most `OUTCOMES`."""
    if place <= 0 or place >= end or end - place > FARTHEST:
        return np.int64(0)
    n = np.int64(0)
    while n < min(OUTCOMES, place) and text[(place - 1 - n) & (WINDOW - 1)] == text[(end - 1 - n) & (WINDOW - 1)]:
        n += 1
    return n


@inner
def _worth(outcomes: int) -> int:
    """Return the rank of an alignment: by recent right predictions, then by all."""
    return ones(outcomes & _JUDGED) * (OUTCOMES + 1) + ones(outcomes)


@inner
def _begin(kept: NDArray[np.int64], place: int, matched: int) -> None:
    """Follow a new alignment with `matched` tokens in place of the worst one, unless it is already followed."""
    worst, least = np.int64(0), np.int64(1 << 40)
    for k in range(KEPT):
        if kept[k, 0] != 0 and _coming(kept[k, 0]) == 0 and kept[k, 0] & LOW == place:
            return
        worth = _worth(_outcomes(kept[k, 0]))
        if worth < least:
            worst, least = np.int64(k), worth
    kept[worst, 0] = _packed(place, (np.int64(1) << matched) - 1, matched, np.int64(0))
    for j in range(1, CURSOR):
        kept[worst, j] = -1
    kept[worst, BROKE] = 0


@inner
def _best_first(kept: NDArray[np.int64]) -> int:
    """Move the best alignment that has survived a differing token to the front; return 1 if there is one."""
    best, most = 0, np.int64(0)
    for k in range(KEPT):
        outcomes = _outcomes(kept[k, 0])
        if outcomes & (outcomes + 1) != 0 and _worth(outcomes) > most:
            best, most = k, _worth(outcomes)
    if best > 0:
        for j in range(WIDTH):
            kept[0, j], kept[best, j] = kept[best, j], kept[0, j]
    return np.int64(most > 0)


@inner
def extend(copies: Record, tokens: NDArray[np.int32], said: int) -> None:
    """Append tokens (n,) to a source's text: generated ones (1) are followed, others (0) end all alignments."""
    text, places = view_i32(copies.text, WINDOW), view_i32(copies.places, SLOTS)
    kept = view_i64_rows(copies.kept, KEPT, WIDTH)
    meta = view_i64(copies.meta, COPY_META)
    if said == 0:
        kept[:] = 0
    for i in range(len(tokens)):
        if said == 1:
            for k in range(KEPT):
                if kept[k, 0] != 0:
                    _follow(text, kept, k, np.int64(tokens[i]), meta[0])
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


@inner
def best(copies: Record, cursors: NDArray[np.int64], c: int) -> None:
    """Write the cursor of a source's best alignment to row ``c`` of the cursors; all 0 if there is none."""
    kept = view_i64_rows(copies.kept, 1, WIDTH)
    found = view_i64(copies.meta, COPY_META)[1]
    for j in range(CURSOR):
        cursors[c, j] = kept[0, j] * found
