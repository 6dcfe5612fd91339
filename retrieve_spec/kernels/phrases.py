"""Numba kernels of the phrase memory: counts of tokens that followed one or two tokens in generated texts.

A continuation is *known* after two requesters (requests, or API keys of a server) were given it. Until then, only a
fingerprint of context and continuation and the number of the requester are kept: ``seen`` (slots, 2) uint64, in sets of
`WAYS` slots, newest first; a full set drops its oldest.

Known phrases have the layout of the recycling table (`kernels/recycling.py`), so that drafting reads both in the same
way: ``sets`` (capacity · 2,) uint64 with contexts, numbers of observations and the last request that counted; and
``tokens`` and ``probs`` (capacity, k), the halves of its entries: continuations and their shares of the observations,
most frequent first, -1 after the last. A count is its share times the observations, rounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, inner_with_arrays, kernel_with_arrays
from retrieve_spec.kernels.recycling import SET, WAYS, claim, find, mix
from retrieve_spec.kernels.recycling import seen as observed

PHRASE_ORDERS = 2
"""Longest context in tokens."""
HALVED_AT = 1 << 12
"""Number of a context's observations at which its counts are halved."""
FADE_EVERY = 1024
"""Number of requests after which all counts are halved, so that unused phrases are forgotten."""
BOUNDARY = -1
"""Boundary in place of a token id, which no context spans."""
_HALF = np.uint64(32)
_CONTINUATION = 1 << 30
"""Added to a hashed continuation to distinguish it from another token of context."""


@inner
def given_to_two(seen: NDArray[np.uint64], phrase: np.uint64, requester: np.uint64) -> bool:
    """Whether another requester was given a phrase, too; otherwise remember this requester."""
    sets = len(seen) // WAYS
    base = np.int64((phrase >> np.uint64(20)) & np.uint64(sets - 1)) * WAYS
    for way in range(WAYS):
        if seen[base + way, 0] == phrase:
            return bool(seen[base + way, 1] != requester)
    for way in range(WAYS - 1, 0, -1):
        seen[base + way, 0], seen[base + way, 1] = seen[base + way - 1, 0], seen[base + way - 1, 1]
    seen[base, 0], seen[base, 1] = phrase, requester
    return False


@inner
def _counts(sets: NDArray[np.uint64], probs: NDArray[np.float32], e: int, out: NDArray[np.int64]) -> None:
    for i in range(len(out)):
        out[i] = np.int64(probs[e, i] * observed(sets, e) + 0.5)


@inner
def _write(
    sets: NDArray[np.uint64], tokens: NDArray[np.int32], probs: NDArray[np.float32], e: int, counts: NDArray[np.int64]
) -> None:
    """Write an entry's new counts, highest first; continuations with a count of 0 are dropped."""
    total = np.int64(0)
    for count in counts:
        total += count
    at = (e // WAYS) * SET + WAYS + e % WAYS
    sets[at] = ((sets[at] >> _HALF) << _HALF) | np.uint64(total)
    for i in range(len(counts)):
        if counts[i] == 0:
            tokens[e, i] = -1
        probs[e, i] = counts[i] / max(total, 1)


@inner
def halve(
    sets: NDArray[np.uint64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    e: int,
    counts: NDArray[np.int64],
) -> None:
    """Halve the counts of an entry, rounding down; ``counts`` (k,) is scratch."""
    _counts(sets, probs, e, counts)
    for i in range(len(counts)):
        counts[i] >>= 1
    _write(sets, tokens, probs, e, counts)


@inner_with_arrays
def fade(sets: NDArray[np.uint64], tokens: NDArray[np.int32], probs: NDArray[np.float32]) -> None:
    """Halve all counts, and free contexts without continuations."""
    counts = np.empty(tokens.shape[1], np.int64)
    for e in range(len(tokens)):
        key = (e // WAYS) * SET + e % WAYS
        if sets[key] != 0:
            halve(sets, tokens, probs, e, counts)
            if observed(sets, e) == 0:
                sets[key] = sets[key + WAYS] = 0


@inner
def _place_of(tokens: NDArray[np.int32], e: int, token: int) -> int:
    """Return the index of a continuation in an entry, or -1."""
    for i in range(tokens.shape[1]):
        if tokens[e, i] == token:
            return i
    return -1


@inner
def _count(
    sets: NDArray[np.uint64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    e: int,
    token: int,
    times: int,
    counts: NDArray[np.int64],
) -> None:
    """Count a continuation of an entry; a new one replaces the rarest, unless that is more frequent."""
    _counts(sets, probs, e, counts)
    at = _place_of(tokens, e, token)
    if at < 0:
        at = len(counts) - 1
        if counts[at] > times:
            return
        while at > 0 and counts[at - 1] == 0:
            at -= 1
        counts[at] = 0
    n = counts[at] + times
    while at > 0 and counts[at - 1] < n:
        counts[at], tokens[e, at] = counts[at - 1], tokens[e, at - 1]
        at -= 1
    counts[at], tokens[e, at] = n, token
    _write(sets, tokens, probs, e, counts)
    if observed(sets, e) >= HALVED_AT:
        halve(sets, tokens, probs, e, counts)


@kernel_with_arrays
def learn(
    sets: NDArray[np.uint64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    seen: NDArray[np.uint64],
    text: NDArray[np.int32],
    requester: np.uint64,
    clock: int,
) -> None:
    """Count the phrases of a text generated for a requester.

    Parameters
    ----------
    text
        (n,) int32; a negative id is a boundary.
    clock
        Number of counted requests, including this one; all counts are halved at intervals.
    """
    counts = np.empty(tokens.shape[1], np.int64)
    for i in range(1, len(text)):
        token = text[i]
        context = np.uint64(0)
        for order in range(min(PHRASE_ORDERS, i)):
            if token < 0 or text[i - 1 - order] < 0:
                break
            context = mix(context, text[i - 1 - order])
            e = find(sets, context)
            times = 1
            if e < 0 or _place_of(tokens, e, token) < 0:
                if not given_to_two(seen, mix(context, token + _CONTINUATION), requester):
                    continue
                times = 2
                if e < 0:
                    e = claim(sets, context)
                    for j in range(len(counts)):
                        tokens[e, j], probs[e, j] = -1, 0.0
            _count(sets, tokens, probs, e, token, times, counts)
            at = (e // WAYS) * SET + WAYS + e % WAYS
            sets[at] = np.uint64(observed(sets, e)) | (np.uint64(clock) << _HALF)
    if clock % FADE_EVERY == 0:
        fade(sets, tokens, probs)
