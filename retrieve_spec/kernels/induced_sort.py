"""Induced sorting: the suffix array of an integer array, in time linear in its length.

SA-IS (Nong, Zhang, Chan 2009) in the variant that keeps all but a few small arrays in the suffix array itself. A suffix
is of type S if it is smaller than the suffix after it, else of type L; a suffix of type S after one of type L is a
*border* (LMS in the papers). Borders are sorted by the text up to the next one, and named by their rank; if names
repeat, the text of names is sorted recursively. Given sorted borders, two passes over the array induce the order of all
other suffixes. The end of the text is smaller than any token.

Entries that a pass must still handle are marked by their sign: ``~j`` stands for j. The passes read the text in random
order, so they prefetch some entries ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, kernel, kernel_with_arrays
from retrieve_spec.kernels.views import prefetch

_AHEAD, _NEAR = 32, 16
"""Prefetch distance in entries, for a line of the text and for the bucket of a token read from it."""


def sort_suffixes(text: NDArray[Any], size: int) -> NDArray[np.int32]:
    """Sort the suffixes of a text.

    Parameters
    ----------
    text
        (n,) unsigned or int32, n < 2^31.
    size
        Tokens are in ``[0, size)``.

    Returns
    -------
    numpy.ndarray
        (n,) int32 positions of the suffixes in order. Temporary memory is about four bytes per token, and eight per
        number below `size`.
    """
    out = np.zeros(len(text), np.int32)
    _sort_into(text, size, out)
    return out


def _sort_into(text: NDArray[Any], size: int, sa: NDArray[np.int32]) -> None:
    """Sort the suffixes of a text into an array of zeros."""
    n = len(text)
    if n < 2:
        return  # the only position is 0
    counts = count_tokens(text, size)
    borders = find_borders(text, np.empty(n // 2 + 1, np.int32))
    m = len(borders)
    if m > 1:
        order_borders(text, sa, counts, borders)
        names = name_borders(text, sa, borders)
        if names < m:
            reduced = sa[n - m :]
            sa[:m] = 0
            _sort_into(reduced, names, sa[:m])
        borders_of_ranks(sa, borders, names)
    else:
        sa[:m] = borders
    induce(text, sa, counts, m)


@kernel_with_arrays
def count_tokens(text, size):  # type: ignore[no-untyped-def]
    """Count each token of a text."""
    counts = np.zeros(size, np.int32)
    for i in range(len(text)):
        counts[text[i]] += 1
    return counts


@kernel_with_arrays
def find_borders(text, buffer):  # type: ignore[no-untyped-def]
    """Write the borders of a text, in ascending order, to the end of a buffer; return that part."""
    at = len(buffer)
    is_s, following = False, text[len(text) - 1]
    for i in range(len(text) - 2, -1, -1):
        token = text[i]
        was_s = is_s
        is_s = (token < following) | ((token == following) & is_s)
        following = token
        buffer[at - 1] = i + 1  # branchless, as types change unpredictably
        at -= was_s & (not is_s)
    return buffer[at:]


@inner
def _starts(counts, out):  # type: ignore[no-untyped-def]
    """Write the starts of the buckets of suffixes by first token."""
    total = 0
    for token in range(len(counts)):
        out[token] = total
        total += counts[token]


@inner
def _ends(counts, out):  # type: ignore[no-untyped-def]
    """Write the ends of the buckets of suffixes by first token."""
    total = 0
    for token in range(len(counts)):
        total += counts[token]
        out[token] = total


@inner
def _prefetch_text(text, position):  # type: ignore[no-untyped-def]
    """Prefetch the text at a position that is still to be handled."""
    if position > 0:
        prefetch(np.int64(text.ctypes.data) + text.itemsize * np.int64(position - 1))


@inner
def _prefetch_place(text, places, position):  # type: ignore[no-untyped-def]
    """Prefetch the bucket of the suffix at a position, whose token has been prefetched."""
    if position >= 0:
        prefetch(np.int64(places.ctypes.data) + places.itemsize * np.int64(text[position]))


@kernel_with_arrays
def order_borders(text, sa, counts, borders):  # type: ignore[no-untyped-def]
    """Write the borders, sorted by the text up to the next border, to the beginning of an array of zeros."""
    n, m = len(text), len(borders)
    places = np.empty(len(counts), np.int32)
    _ends(counts, places)
    for i in range(m - 1, 0, -1):  # nothing precedes the first suffix
        token = text[borders[i]]
        places[token] -= 1
        sa[places[token]] = borders[i] - 1
    # An entry is the position before its suffix. First, in ascending order, all suffixes of type L after a border …
    _starts(counts, places)
    token = text[n - 1]
    sa[places[token]] = ~(n - 2) if text[n - 2] < token else n - 2
    places[token] += 1
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch_text(text, sa[i + _AHEAD])
            _prefetch_place(text, places, sa[i + _NEAR])
        j = sa[i]
        if j > 0:
            token = text[j]
            j -= 1
            at = places[token]
            places[token] = at + 1
            sa[at] = ~j if text[j] < token else j
            sa[i] = 0
        elif j < 0:
            sa[i] = ~j
    # … then, in descending order, all of type S, of which borders are kept, marked.
    _ends(counts, places)
    for i in range(n - 1, -1, -1):
        if i >= _AHEAD:
            _prefetch_text(text, sa[i - _AHEAD])
            _prefetch_place(text, places, sa[i - _NEAR])
        j = sa[i]
        if j > 0:
            token = text[j]
            j -= 1
            at = places[token] - 1
            places[token] = at
            sa[at] = ~(j + 1) if text[j] > token else j
            sa[i] = 0
    found = 0
    for i in range(n):
        j = sa[i]
        if j < 0:
            sa[i] = 0
            sa[found] = ~j
            found += 1


@kernel_with_arrays
def name_borders(text, sa, borders):  # type: ignore[no-untyped-def]
    """Given sorted borders, write the text of their names to the end; return the number of names."""
    n, m = len(text), len(borders)
    for i in range(m - 1):
        sa[m + (borders[i] >> 1)] = borders[i + 1] - borders[i] + 1
    sa[m + (borders[m - 1] >> 1)] = n - borders[m - 1]
    names = 0
    before = length_before = 0
    for i in range(m):
        if i + _AHEAD < m:
            ahead = sa[i + _AHEAD]
            _prefetch_text(text, ahead)
            _prefetch_text(sa, m + (ahead >> 1))
        at = sa[i]
        length = sa[m + (at >> 1)]
        same = length == length_before and before + length < n
        if same:
            k = 0
            while k < length and text[at + k] == text[before + k]:
                k += 1
            same = k == length
        if not same:
            names += 1
        before, length_before = at, length
        sa[m + (at >> 1)] = names
    for i in range(m - 1, -1, -1):
        name = sa[m + (borders[i] >> 1)]
        sa[n - m + i] = name - 1
    return names


@kernel
def borders_of_ranks(sa, borders, names):  # type: ignore[no-untyped-def]
    """Replace the sorted suffixes of the text of names, at the beginning, by their borders."""
    n, m = len(sa), len(borders)
    if names == m:  # names are ranks
        for i in range(m):
            sa[sa[n - m + i]] = borders[i]
    else:
        for i in range(m):
            if i + _AHEAD < m:
                _prefetch_text(borders, sa[i + _AHEAD] + 1)
            sa[i] = borders[sa[i]]


@kernel_with_arrays
def induce(text, sa, counts, m):  # type: ignore[no-untyped-def]
    """Induce the suffix array of a text from its sorted borders at the beginning."""
    n = len(text)
    places = np.empty(len(counts), np.int32)
    _ends(counts, places)
    sa[m:] = 0
    for i in range(m - 1, -1, -1):  # borders only move up
        if i >= _AHEAD:
            _prefetch_text(text, sa[i - _AHEAD] + 1)
            _prefetch_place(text, places, sa[i - _NEAR])
        j = sa[i]
        sa[i] = 0
        token = text[j]
        places[token] -= 1
        sa[places[token]] = j
    _starts(counts, places)
    token = text[n - 1]
    sa[places[token]] = ~(n - 1) if text[n - 2] < token else n - 1
    places[token] += 1
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch_text(text, sa[i + _AHEAD])
            _prefetch_place(text, places, sa[i + _NEAR] - 1)
        j = sa[i]
        sa[i] = ~j
        if j > 0:
            j -= 1
            token = text[j]
            at = places[token]
            places[token] = at + 1
            sa[at] = ~j if j > 0 and text[j - 1] < token else j
    _ends(counts, places)
    for i in range(n - 1, -1, -1):
        if i >= _AHEAD:
            _prefetch_text(text, sa[i - _AHEAD])
            _prefetch_place(text, places, sa[i - _NEAR] - 1)
        j = sa[i]
        if j > 0:
            j -= 1
            token = text[j]
            at = places[token] - 1
            places[token] = at
            sa[at] = ~j if j == 0 or text[j - 1] > token else j
        else:
            sa[i] = ~j
