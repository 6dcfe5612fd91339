"""N-gram tables: from a suffix array to hashed contexts of 1 … 5 tokens with their most frequent next tokens.

A table is an open-addressing hash table in flat arrays. Slot s holds the context whose fingerprint is ``keys[s]`` (0:
empty), how often it was continued (``total[s]``), by how many different tokens (``distinct[s]``), and its top
continuations ``succ_tokens[start[s]:start[s + 1]]`` with ``succ_counts`` beside them, most frequent first.

A context is hashed from its newest token to its oldest, so the hash of order k + 1 is one step from that of order k::

    h = 0
    for token in reversed(text):      # newest first
        h = ngram_hash(h, token)      # h now stands for one more token
        slot = ngram_find(keys, h)
"""

from __future__ import annotations

import numpy as np
from numba import njit

MAX_ORDER = 5
"""Longest context of a table, in tokens."""

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_15 = np.uint64(15)
_ONE = np.uint64(1)
_ROUNDS = (np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D), np.uint64(0x27D4EB2F))


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def ngram_find(keys, h):  # type: ignore[no-untyped-def]
    """Find the slot of a context, or -1.

    Parameters
    ----------
    keys
        (capacity,) uint32 fingerprints, capacity ≥ 1 with at least one slot empty.
    h
        uint64, hash of the context. Its upper half chooses the slot, its lower half is the fingerprint, so an absent
        context is taken for another with a chance of about 1 in 10^9 per search.
    """
    capacity = len(keys)
    fingerprint = np.uint32(max(np.uint64(h) & _LOW, _ONE))
    slot = np.int64(((np.uint64(h) >> _32) * np.uint64(capacity)) >> _32)
    while keys[slot] != 0:
        if keys[slot] == fingerprint:
            return slot
        slot += 1
        if slot == capacity:
            slot = 0
    return -1
