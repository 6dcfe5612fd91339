"""Numba kernels of n-gram tables: hashed contexts of one to five tokens with their most frequent next tokens.

A table is an open-addressing hash table. A slot is four adjacent uint32, so that a context takes one cache line: its
fingerprint (`KEY`, 0: empty), total count (`TOTAL`), start of its top continuations (`START`), and numbers of distinct
and of kept continuations (`EXTENT`, low and high half). These are ``succ_tokens[start : start + kept]`` with counts
``succ_counts``, most frequent first.

A context is hashed from its newest to its oldest token, so the hash of order k + 1 is one step from that of order k::

    h = 0
    for token in reversed(text):      # newest first
        h = ngram_hash(h, token)      # h now covers one more token
        slot = ngram_find(slots, h)

A *context filter* tells by one read which of many small tables may hold a context. It is a bit matrix with a row per
bucket of fingerprints and a column per table. The slots of a table mark the buckets of their fingerprints; if a bit is
0, the table need not be searched.

A *gram filter* tells which sequences of `GRAM` tokens may occur in a segment. It is a blocked Bloom filter: the upper
half of a sequence's hash chooses a word of 64 bits, the lower half `BITS` bits in it. If not all of them are set, the
sequence does not occur (about one in thirty other sequences passes). So a cursor finds with one read per segment in
which segments a long match can end, and searches only those.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, kernel, kernel_with_arrays
from retrieve_spec.kernels.views import prefetch, view_u64

MAX_ORDER = 5
"""Longest context of a table in tokens."""

GRAM = MAX_ORDER + 1
"""Length of a sequence: one token more than the longest context."""
PER_WORD = 8
"""Average number of sequences per word."""
BITS = 4

KEY, TOTAL, START, EXTENT = 0, 1, 2, 3
SLOT = 4
"""Integers per slot."""
SLOT_BYTES = 16
_AHEAD = 32
"""Prefetch distance in suffixes, for a line of the text or a word of a filter."""
_HALF = 0xFFFF
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_15 = np.uint64(15)
_ONE = np.uint64(1)
_ROUNDS = (np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D), np.uint64(0x27D4EB2F))


@kernel
def ngram_hash(h, token):  # type: ignore[no-untyped-def]
    """Extend the hash of a context by the token before it.

    A Feistel network over the two halves of the hash: a bijection, so contexts of one order collide only through the
    exclusive-or with the next token, and without products of more than 64 bits.

    Parameters
    ----------
    h
        uint64, hash of the newer tokens; 0 for none.
    token
        Token id (of the tokenizer, not local to a segment), at least 0.

    Returns
    -------
    numpy.uint64
        Hash of the context with one more token.
    """
    x = np.uint64(h) ^ (np.uint64(token) + _ONE)
    high = x >> _32
    low = x & _LOW
    high ^= ((low * _ROUNDS[0]) >> _15) & _LOW
    low ^= ((high * _ROUNDS[1]) >> _15) & _LOW
    high ^= ((low * _ROUNDS[2]) >> _15) & _LOW
    low ^= ((high * _ROUNDS[3]) >> _15) & _LOW
    return (high << _32) | low


@inner
def home(h, capacity):  # type: ignore[no-untyped-def]
    """Return the slot at which the search for a hash begins."""
    return np.int64(((np.uint64(h) >> _32) * np.uint64(capacity)) >> _32)


@kernel
def ngram_find(slots, h):  # type: ignore[no-untyped-def]
    """Find the slot of a context, or -1.

    Parameters
    ----------
    slots
        (capacity, SLOT) uint32, capacity ≥ 1 with at least one slot empty.
    h
        uint64 hash of the context. Its upper half chooses the slot, its lower half is the fingerprint, so an absent
        context is mistaken for another with a probability of about 10^-9 per search.
    """
    capacity = len(slots)
    fingerprint = np.uint32(max(np.uint64(h) & _LOW, _ONE))
    slot = home(h, capacity)
    for _ in range(capacity):  # a damaged table can be full
        if slots[slot, KEY] == 0:
            break
        if slots[slot, KEY] == fingerprint:
            return slot
        slot += 1
        if slot == capacity:
            slot = 0
    return -1


@kernel
def ngram_distinct(slots, slot):  # type: ignore[no-untyped-def]
    """Return the number of a context's distinct continuations, at most 65,535."""
    return np.int64(slots[slot, EXTENT]) & _HALF


@kernel
def ngram_kept(slots, slot):  # type: ignore[no-untyped-def]
    """Return the number of a context's kept continuations."""
    return np.int64(slots[slot, EXTENT]) >> 16


@kernel
def suffix_beginnings(tokens, sa, shared, ahead):  # type: ignore[no-untyped-def]
    """Compare the first `MAX_ORDER` + 1 tokens of consecutive suffixes.

    Fills two (m,) uint8 arrays: the number of tokens that each suffix shares with the previous one, and the number of
    tokens before its document ends. Later kernels read these in order instead of the text at random.
    """
    limit = MAX_ORDER + 1
    before = np.int64(0)
    first = np.int64(tokens.ctypes.data)
    for i in range(len(sa)):
        if i + _AHEAD < len(sa):
            prefetch(first + tokens.itemsize * np.int64(sa[i + _AHEAD]))
        at = np.int64(sa[i])
        length = 0
        same = 0
        while length < limit and tokens[at + length] != 0:
            if i > 0 and same == length and tokens[at + length] == tokens[before + length]:
                same += 1
            length += 1
        shared[i] = same
        ahead[i] = length
        before = at


@inner
def _context(shared, ahead, i, order):  # type: ignore[no-untyped-def]
    """Return the end of the run of suffixes from i that share `order` tokens, and its total and distinct continuations.

    A suffix with fewer than `order` tokens is a run by itself, without continuations.
    """
    if ahead[i] < order:
        return i + 1, 0, 0
    end = i + 1
    run = 1
    total = 0
    distinct = 0
    while True:
        if end == len(shared) or shared[end] <= order:
            if ahead[end - 1] > order:
                total += run
                distinct += 1
            run = 0
            if end == len(shared) or shared[end] < order:
                return end, total, distinct
        run += 1
        end += 1


@kernel
def count_contexts(shared, ahead, order, top, contexts, continuations):  # type: ignore[no-untyped-def]
    """Count the contexts of one order and the continuations a table would keep, by the contexts' total counts.

    Adds to ``contexts[t]`` and ``continuations[t]``, (limit + 1,) int64, for contexts with total count t; the last
    entry also counts all larger ones.
    """
    limit = len(contexts) - 1
    i = 0
    while i < len(shared):
        end, total, distinct = _context(shared, ahead, i, order)
        if total > 0:
            contexts[min(total, limit)] += 1
            continuations[min(total, limit)] += min(distinct, top)
        i = end


@kernel
def insert_contexts(  # type: ignore[no-untyped-def]
    tokens, sa, shared, ahead, to_global, order, min_count, top, slots, owner
):
    """Insert every context of one order with a total count of at least `min_count`.

    Fills all fields of a slot except ``START``, and ``owner`` with ``first suffix * (MAX_ORDER + 1) + order``. If two
    contexts have the same fingerprint, the first keeps the slot.
    """
    i = 0
    while i < len(sa):
        end, n, d = _context(shared, ahead, i, order)
        if n >= min_count:
            at = np.int64(sa[i])
            h = np.uint64(0)
            for j in range(order - 1, -1, -1):
                h = ngram_hash(h, to_global[tokens[at + j]])
            if ngram_find(slots, h) < 0:
                slot = home(h, len(slots))
                while slots[slot, KEY] != 0:
                    slot = slot + 1 if slot + 1 < len(slots) else 0
                slots[slot, KEY] = np.uint32(max(h & _LOW, _ONE))
                slots[slot, TOTAL] = n
                slots[slot, EXTENT] = min(d, _HALF) | min(d, top) << 16
                owner[slot] = i * (MAX_ORDER + 1) + order
        i = end


@inner
def _top_continuations(tokens, sa, shared, ahead, to_global, i, order, kept, out_tokens, out_counts):  # type: ignore[no-untyped-def]
    """Write the `kept` most frequent continuations of the context at suffix i, by count, then token."""
    n = 0
    first = i
    end = i
    while end == i or (end < len(sa) and shared[end] >= order):
        end += 1
        if end < len(sa) and shared[end] > order:
            continue
        count = end - first
        source = first
        first = end
        if ahead[source] <= order or (n == kept and out_counts[n - 1] >= count):
            continue
        # Insert from the right; local ids ascend along the run, so equal counts come after.
        n = min(n + 1, kept)
        at = n - 1
        while at > 0 and out_counts[at - 1] < count:
            out_tokens[at] = out_tokens[at - 1]
            out_counts[at] = out_counts[at - 1]
            at -= 1
        out_tokens[at] = to_global[tokens[np.int64(sa[source]) + order]]
        out_counts[at] = count


@kernel
def fill_continuations(  # type: ignore[no-untyped-def]
    tokens, sa, shared, ahead, to_global, owner, slots, succ_tokens, succ_counts
):
    """Write the continuations and ``START`` of every used slot; ``owner`` is -1 for empty slots."""
    b = 0
    for slot in range(len(owner)):
        if owner[slot] >= 0:
            a = b
            b += ngram_kept(slots, slot)
            slots[slot, START] = a
            i, order = owner[slot] // (MAX_ORDER + 1), owner[slot] % (MAX_ORDER + 1)
            top_tokens, top_counts = succ_tokens[a:b], succ_counts[a:b]
            _top_continuations(tokens, sa, shared, ahead, to_global, i, order, b - a, top_tokens, top_counts)


@kernel
def forget_document(ids, slots, succ_tokens, succ_counts):  # type: ignore[no-untyped-def]
    """Subtract the contexts of one removed document from an n-gram table's counts.

    A continuation with a count of 0 is dropped from its slot. The slot itself stays, since searches for other contexts
    probe past it.

    Parameters
    ----------
    ids
        (n,) token ids of the document.
    slots, succ_tokens, succ_counts
        Arrays of the table, modified in place.
    """
    for i in range(len(ids) - 1):
        h = np.uint64(0)
        for order in range(1, min(i + 1, MAX_ORDER) + 1):
            h = ngram_hash(h, ids[i + 1 - order])
            slot = ngram_find(slots, h)
            if slot >= 0:
                _forget(slots, slot, succ_tokens, succ_counts, ids[i + 1])


@inner
def _forget(slots, slot, succ_tokens, succ_counts, token):  # type: ignore[no-untyped-def]
    """Decrement the count of one continuation of a context."""
    if slots[slot, TOTAL] > 0:
        slots[slot, TOTAL] -= np.uint32(1)
    extent = np.int64(slots[slot, EXTENT])
    kept = extent >> 16
    start = np.int64(slots[slot, START])
    end = min(start + kept, np.int64(min(len(succ_tokens), len(succ_counts))))
    at = start
    while at < end and succ_tokens[at] != token:
        at += 1
    if at >= end:
        return
    count = np.int64(succ_counts[at]) - 1
    # Move it back to its rank: most frequent first, ties by token.
    while at + 1 < end and (
        succ_counts[at + 1] > count or (succ_counts[at + 1] == count and succ_tokens[at + 1] < token)
    ):
        succ_counts[at] = succ_counts[at + 1]
        succ_tokens[at] = succ_tokens[at + 1]
        at += 1
    succ_counts[at] = max(count, 0)
    succ_tokens[at] = token
    if count <= 0:  # now the last one
        slots[slot, EXTENT] = np.uint32(((kept - 1) << 16) | max((extent & 0xFFFF) - 1, np.int64(0)))


@kernel
def longest_marked(address: int, buckets: int, words: int, column: int, hashes: NDArray[np.uint64], order: int) -> int:
    """Return the length of the longest context of at most ``order`` tokens that a table may hold, 0 for none.

    Parameters
    ----------
    address, buckets, words
        Address and shape of the filter's bits.
    column
        Column of the table.
    hashes
        (rows, k) uint64; row 0 has the hashes of the contexts of 1, 2, … tokens.
    order
        At most k.
    """
    mask = np.int64(buckets - 1)
    shift = np.uint64(column & 63)
    while order > 0:
        fingerprint = np.int64(max(hashes[0, order - 1] & _LOW, _ONE))
        word = view_u64(address + 8 * ((fingerprint & mask) * words + (column >> 6)), 1)[0]
        if (word >> shift) & _ONE:
            break
        order -= 1
    return order


@inner
def gram_bits(h):  # type: ignore[no-untyped-def]
    """Return the bits of a sequence in its word."""
    bits = np.uint64(0)
    for i in range(BITS):
        bits |= np.uint64(1) << ((np.uint64(h) >> np.uint64(6 * i)) & np.uint64(63))
    return bits


@inner
def may_hold(words: NDArray[np.uint64], h: np.uint64) -> bool:
    """Whether a sequence may occur in a filter's text; True for an empty (unknown) filter."""
    if len(words) == 0:
        return True
    bits = gram_bits(h)
    return bool(words[home(h, len(words))] & bits == bits)


@inner
def newest_gram(window: NDArray[np.int32]) -> np.uint64:
    """Return the hash of the last `GRAM` tokens of a text of at least that length."""
    h = np.uint64(0)
    for i in range(len(window) - 1, len(window) - 1 - GRAM, -1):
        h = ngram_hash(h, window[i])
    return h


@kernel
def count_grams(shared: NDArray[np.uint8], ahead: NDArray[np.uint8]) -> int:
    """Count the distinct sequences of a text, from the arrays of `suffix_beginnings`."""
    n = 0
    for i in range(len(shared)):
        if ahead[i] == GRAM and shared[i] < GRAM:
            n += 1
    return n


@kernel_with_arrays
def fill_grams(tokens, to_global, words):  # type: ignore[no-untyped-def]
    """Set the bits of every sequence of a text in (w,) uint64 words, initially zero.

    The text is read in order, and the words, which are at random places, are prefetched.
    """
    first = np.int64(words.ctypes.data)
    places, bits = np.zeros(_AHEAD, np.int64), np.zeros(_AHEAD, np.uint64)
    following = 0  # tokens from here to the end of the document
    n = 0
    for at in range(len(tokens) - 1, -1, -1):
        following = following + 1 if tokens[at] != 0 else 0
        if following < GRAM:
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
