"""Numba kernels of the phrase memory: counts of what followed the last one or two tokens of generated texts.

A continuation is *known* once two requesters (requests, or keys of a server) have been given it. Until then nothing is
kept of it but a fingerprint of context and continuation and the number of its requester: ``seen`` (slots, 2) uint64,
sets of `WAYS` slots, newest first, the oldest of a full set forgotten.

What is known lies as in the recycling table (`kernels/recycling.py`), so that drafting reads both alike: ``sets``
(capacity · 2,) uint64 with the contexts, the observations of their continuations and the request that counted last, and
``tokens`` and ``probs`` (capacity, k), the halves of its entries: continuations and their shares of the observations,
most frequent first, -1 after the last. A count is its share times the observations, rounded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, making, making_door
from retrieve_spec.kernels.recycling import SET, WAYS, claim, find, mix
from retrieve_spec.kernels.recycling import seen as observed

PHRASE_ORDERS = 2
"""Longest context."""
HALVED_AT = 1 << 12
"""Observations of a context at which its counts are halved."""
FADE_EVERY = 1024
"""Requests after which all counts are halved, so that what is not said again is forgotten."""
BOUNDARY = -1
"""In place of a token id: no context reaches back over this point."""
_HALF = np.uint64(32)
_CONTINUATION = 1 << 30
"""Added to a continuation when it is hashed, which tells it from one more token of context."""


@inner
def said_by_two(seen: NDArray[np.uint64], phrase: np.uint64, requester: np.uint64) -> bool:
    """Whether somebody else was given a phrase too; otherwise it is remembered that this requester was."""
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
    """Put counts, highest first, in the place of an entry's; continuations without any are dropped."""
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
    """Halve the counts of an entry, rounded down; ``counts`` (k,) is scratch."""
    _counts(sets, probs, e, counts)
    for i in range(len(counts)):
        counts[i] >>= 1
    _write(sets, tokens, probs, e, counts)


@making
def fade(sets: NDArray[np.uint64], tokens: NDArray[np.int32], probs: NDArray[np.float32]) -> None:
    """Halve all counts, and free the contexts that nothing is left of."""
    counts = np.empty(tokens.shape[1], np.int64)
    for e in range(len(tokens)):
        key = (e // WAYS) * SET + e % WAYS
        if sets[key] != 0:
            halve(sets, tokens, probs, e, counts)
            if observed(sets, e) == 0:
                sets[key] = sets[key + WAYS] = 0


@inner
def _place_of(tokens: NDArray[np.int32], e: int, token: int) -> int:
    """Where a continuation stands in an entry, -1 when it does not."""
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
    """Count a continuation of an entry; a new one takes the place of the rarest, if that is not more frequent."""
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


@making_door
def learn(
    sets: NDArray[np.uint64],
    tokens: NDArray[np.int32],
    probs: NDArray[np.float32],
    seen: NDArray[np.uint64],
    text: NDArray[np.int32],
    requester: np.uint64,
    clock: int,
) -> None:
    """Count the phrases of a text that was generated for a requester.

    Parameters
    ----------
    text
        (n,) int32; a negative id is a boundary.
    clock
        Requests counted so far, this one included; all counts fade now and then.
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
                if not said_by_two(seen, mix(context, token + _CONTINUATION), requester):
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
