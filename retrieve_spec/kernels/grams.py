"""Gram filter: which sequences of `GRAM` tokens occur in a segment, as a few bits of one word each.

A word of 64 bits is chosen by the upper half of a sequence's hash, `BITS` bits in it by the lower half. A sequence
whose bits are not all set does not occur; one whose bits are may (about one in thirty that do not). So a cursor learns
from one read per segment which segments a long match can end in, and searches only those.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import door, inner, making_door
from retrieve_spec.kernels.ngram import MAX_ORDER, home, ngram_hash
from retrieve_spec.kernels.views import prefetch

GRAM = MAX_ORDER + 1
"""Tokens of a sequence: one more than n-gram tables know."""
PER_WORD = 8
"""Sequences per word, on average."""
BITS = 4
_AHEAD = 32


@inner
def gram_bits(h):  # type: ignore[no-untyped-def]
    """Bits of a sequence in its word."""
    bits = np.uint64(0)
    for i in range(BITS):
        bits |= np.uint64(1) << ((np.uint64(h) >> np.uint64(6 * i)) & np.uint64(63))
    return bits


@inner
def may_hold(words: NDArray[np.uint64], h: np.uint64) -> bool:
    """Whether a sequence may occur in the text of a filter; True where the filter is not known (empty)."""
    if len(words) == 0:
        return True
    bits = gram_bits(h)
    return bool(words[home(h, len(words))] & bits == bits)


@inner
def newest_gram(window: NDArray[np.int32]) -> np.uint64:
    """Hash of the last `GRAM` tokens of a text that has at least so many."""
    h = np.uint64(0)
    for i in range(len(window) - 1, len(window) - 1 - GRAM, -1):
        h = ngram_hash(h, window[i])
    return h


@door
def count_grams(shared: NDArray[np.uint8], ahead: NDArray[np.uint8]) -> int:
    """Different sequences of a text, from what `ngram.suffix_beginnings` says of its suffixes."""
    n = 0
    for i in range(len(shared)):
        if ahead[i] == GRAM and shared[i] < GRAM:
            n += 1
    return n


@making_door
def fill_grams(tokens, to_global, words):  # type: ignore[no-untyped-def]
    """Set the bits of every sequence of a text in (w,) uint64 words, all zero before.

    It goes through the text in its own order; words, which lie anywhere, are asked for some sequences ahead.
    """
    first = np.int64(words.ctypes.data)
    places, bits = np.zeros(_AHEAD, np.int64), np.zeros(_AHEAD, np.uint64)
    behind = 0  # tokens from here to the end of the document
    n = 0
    for at in range(len(tokens) - 1, -1, -1):
        behind = behind + 1 if tokens[at] != 0 else 0
        if behind < GRAM:
            continue
        h = np.uint64(0)
        for j in range(GRAM - 1, -1, -1):
            h = ngram_hash(h, to_global[tokens[at + j]])
        place = home(h, len(words))
        prefetch(first + 8 * place)
        words[places[n]] |= bits[n]
        places[n], bits[n] = place, gram_bits(h)
        n = (n + 1) % _AHEAD
    for i in range(_AHEAD):
        words[places[i]] |= bits[i]
