"""Numba kernels of the empty context: the text's tokens that are likely anywhere, ranked by learned rates.

The list has the last `RECENT` tokens and the `FREQUENT` most frequent ones. A token's share is proportional to the
rate of its cell (age, count, in the answer or only in the prompt), which is how often tokens of that cell came when no
longer context explained the next token, times the factor of its class (a word beginning, a comma, a digit) after the
classes of the last two tokens. Both are learned online over all requests. Without a tokenizer, there is one class.

``stats`` (vocabulary, 4) int32: 1 + position of the last occurrence (0: never), count, whether it was generated, class.
``recent`` (RECENT,) and ``frequent`` (FREQUENT,) int32 token ids, newest first and most frequent first. ``meta``
(LIST_META,) int64: numbers of tokens, distinct, recent, frequent and listed tokens, highest id, version of the list.
``rates`` (2 · RATES,) float32: how often tokens of a cell came, and number of chances. ``factors`` (CLASSES + PLACES,
2 · CLASSES) float32: how often tokens of a class came, and how often rates alone predicted that, after one class, then
after two. A place is a pair of classes, ``16 · older + newer``. ``by_classes`` (PLACES, LISTED) float32: shares at a
place, for the version of the list in ``versions`` (PLACES,) int64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner, inner_with_arrays
from retrieve_spec.kernels.views import Record, prefetch, view_f32, view_i32, view_i64, view_rows

RECENT, FREQUENT = 32, 32
LISTED = RECENT + FREQUENT
"""Most tokens in the list."""
AGES, COUNTS = 14, 9
RATES = AGES * COUNTS * 2
RATE_PRIOR, RATE_MEMORY = 20.0, 4000.0
"""Weight of a rate's prior in chances, and number of chances after which a rate forgets as fast as it learns."""
CLASSES = 16
PLACES = CLASSES * CLASSES
FACTOR_PRIOR = 2.0
"""Weight of a factor's prior in expected tokens; it is 1 after one class, and the newer class's factor after two."""
LAST, OCCURRENCES, GENERATED, CLASS = range(4)
STATS = 4
NUM_TOKENS, DISTINCT, NUM_RECENT, NUM_FREQUENT, NUM_LISTED, HIGHEST, VERSION = range(7)
LIST_META = 7


@inner
def log2(n: int) -> int:
    """Return the binary logarithm of a positive number, rounded down."""
    b = 0
    for step in (16, 8, 4, 2, 1):
        if n >> step > 0:
            n >>= step
            b += step
    return b


@inner
def cell_of(age: int, count: int, generated: int) -> int:
    """Return a row of ``rates``: ages 1, 2, 3, 4, 5-7, then octaves; counts 1, 2, 3, then octaves."""
    a = age - 1 if age <= 4 else min(log2(age) + 2, AGES - 1)
    c = count - 1 if count <= 3 else min(log2(count) + 1, COUNTS - 1)
    return (a * COUNTS + c) * 2 + generated


@inner
def _to_front(recent: NDArray[np.int32], meta: NDArray[np.int64], token: int, listed: bool) -> None:
    at = np.int64(0)
    if listed:
        while recent[at] != token:
            at += 1
    else:
        meta[NUM_RECENT] = min(meta[NUM_RECENT] + 1, RECENT)
        at = meta[NUM_RECENT] - 1
    while at > 0:
        recent[at] = recent[at - 1]
        at -= 1
    recent[0] = token


@inner
def _rise(stats: NDArray[np.int32], frequent: NDArray[np.int32], meta: NDArray[np.int64], token: int) -> None:
    """Move a token whose count has increased to its rank among the most frequent ones, if it is one of them."""
    n, count = meta[NUM_FREQUENT], stats[token, OCCURRENCES]
    if n == FREQUENT and stats[frequent[n - 1], OCCURRENCES] > count:
        return
    at = np.int64(0)
    while at < n and frequent[at] != token:
        at += 1
    if at == n:
        if n < FREQUENT:
            meta[NUM_FREQUENT] = n + 1
        elif stats[frequent[n - 1], OCCURRENCES] < count:
            at = n - 1
        else:
            return
    while at > 0 and stats[frequent[at - 1], OCCURRENCES] < count:
        frequent[at] = frequent[at - 1]
        at -= 1
    frequent[at] = token


@inner
def prefetch_tokens(listing: Record, token_ids: NDArray[np.int32]) -> None:
    """Prefetch what `extend` will read."""
    stats, known = listing.stats, listing.num_stats
    recent, frequent = view_i32(listing.recent, RECENT), view_i32(listing.frequent, FREQUENT)
    meta = _meta(listing)
    for token in token_ids:
        if 0 <= token < known:
            prefetch(stats + 4 * STATS * token)
    for i in range(meta[NUM_RECENT]):
        prefetch(stats + 4 * STATS * recent[i])
    for i in range(meta[NUM_FREQUENT]):
        prefetch(stats + 4 * STATS * frequent[i])


@inner_with_arrays
def _meta(listing: Record) -> NDArray[np.int64]:
    return view_i64(listing.meta, LIST_META)


@inner_with_arrays
def _stats(listing: Record) -> NDArray[np.int32]:
    return view_rows(listing.stats, listing.num_stats, STATS)


@inner
def place_after(listing: Record, place: int, token: int) -> int:
    """Return the place after one more token."""
    known = 0 <= token < listing.num_stats
    return place % CLASSES * CLASSES + (np.int64(_stats(listing)[token, CLASS]) if known else np.int64(0))


@inner
def extend(listing: Record, token_ids: NDArray[np.int32], generated: int) -> None:
    """Append tokens (n,) to a source's text, ``generated`` (1) or not (0), and update the list.

    Ids beyond ``stats`` are not counted. The list has token ids, ``CLASSES`` times their cells plus classes, and
    shares, which add up to one.
    """
    stats, meta = _stats(listing), _meta(listing)
    recent, frequent = view_i32(listing.recent, RECENT), view_i32(listing.frequent, FREQUENT)
    for token in token_ids:
        meta[NUM_TOKENS] += 1
        if token < 0 or token >= len(stats):
            continue
        n = meta[NUM_RECENT]
        is_recent = n > 0 and stats[token, LAST] > 0 and stats[token, LAST] >= stats[recent[n - 1], LAST]
        _to_front(recent, meta, token, is_recent)
        meta[HIGHEST] = max(meta[HIGHEST], token)
        meta[DISTINCT] += stats[token, OCCURRENCES] == 0
        stats[token, LAST] = meta[NUM_TOKENS]
        stats[token, OCCURRENCES] += 1
        stats[token, GENERATED] |= generated
        _rise(stats, frequent, meta, token)
    rates, tokens = view_f32(listing.rates, 2 * RATES), view_i32(listing.tokens, LISTED)
    cells, shares = view_i32(listing.cells, LISTED), view_f32(listing.shares, LISTED)
    n = 0
    total = 0.0
    now, num_recent = meta[NUM_TOKENS] + 1, meta[NUM_RECENT]
    for i in range(num_recent + meta[NUM_FREQUENT]):
        token = recent[i] if i < num_recent else frequent[i - num_recent]
        if i >= num_recent and stats[token, LAST] >= stats[recent[num_recent - 1], LAST]:
            continue  # it is a recent token, too
        age, count = now - stats[token, LAST], stats[token, OCCURRENCES]
        cell = cell_of(age, count, stats[token, GENERATED])
        prior = 0.7 * count / now + 0.3 / (age + 16.0)
        share = (np.float64(rates[2 * cell]) + RATE_PRIOR * prior) / (np.float64(rates[2 * cell + 1]) + RATE_PRIOR)
        total += share
        tokens[n], cells[n], shares[n] = token, cell * CLASSES + stats[token, CLASS], share
        n += 1
    for i in range(n):
        shares[i] = np.float64(shares[i]) / total
    meta[NUM_LISTED] = n
    meta[VERSION] += 1


@inner
def listed(listing: Record) -> int:
    """Return the number of tokens in a source's list."""
    return np.int64(_meta(listing)[NUM_LISTED])


@inner
def evidence(listing: Record) -> tuple[int, int]:
    """Return the numbers of tokens and of distinct tokens of the text."""
    meta = _meta(listing)
    return np.int64(meta[NUM_TOKENS]), np.int64(meta[DISTINCT])


@inner_with_arrays
def _factors(listing: Record, row: int) -> NDArray[np.float32]:
    return view_f32(listing.factors + 8 * CLASSES * row, 2 * CLASSES)


@inner_with_arrays
def shares_at(listing: Record, place: int) -> NDArray[np.float32]:
    """Return the shares of the listed tokens at a place, (LISTED,), computed on first use."""
    meta, versions = _meta(listing), view_i64(listing.versions, PLACES)
    here = view_f32(listing.by_classes + 4 * LISTED * place, LISTED)
    if versions[place] == meta[VERSION]:
        return here
    versions[place] = meta[VERSION]
    one, two = _factors(listing, place % CLASSES), _factors(listing, CLASSES + place)
    factors = np.empty(CLASSES, np.float64)
    for k in range(CLASSES):
        factor = (np.float64(one[2 * k]) + FACTOR_PRIOR) / (np.float64(one[2 * k + 1]) + FACTOR_PRIOR)
        factors[k] = (np.float64(two[2 * k]) + FACTOR_PRIOR * factor) / (np.float64(two[2 * k + 1]) + FACTOR_PRIOR)
    cells, shares = view_i32(listing.cells, LISTED), view_f32(listing.shares, LISTED)
    total = 0.0
    for i in range(meta[NUM_LISTED]):
        share = np.float64(shares[i]) * factors[cells[i] % CLASSES]
        here[i] = share
        total += share
    for i in range(meta[NUM_LISTED]):
        here[i] = np.float64(here[i]) / total
    return here


@inner
def read(
    listing: Record,
    place: int,
    least: float,
    out_tokens: NDArray[np.int32],
    out_p: NDArray[np.float32],
) -> int:
    """Write the listed tokens with a share of at least ``least``, and their shares; return how many."""
    tokens, shares = view_i32(listing.tokens, LISTED), shares_at(listing, place)
    n = 0
    for i in range(listed(listing)):
        if shares[i] >= least:
            out_tokens[n] = tokens[i]
            out_p[n] = shares[i]
            n += 1
    return n


@inner
def share_of(listing: Record, place: int, token: int) -> float:
    """Return the share of a token at a place, 0 if it is not listed."""
    tokens = view_i32(listing.tokens, LISTED)
    for i in range(listed(listing)):
        if tokens[i] == token:
            return np.float64(shares_at(listing, place)[i])
    return 0.0


@inner
def _fade(of: NDArray[np.float32], at: int) -> float:
    """Return the factor by which a pair of counts fades when an observation is added."""
    return 1.0 - 1.0 / RATE_MEMORY if of[at + 1] > RATE_MEMORY else 1.0


@inner_with_arrays
def learn(listing: Record, place: int, token: int, reached: float, explained: float) -> None:
    """Learn from a token at a place, where the list was reached, and explained it, with these probabilities."""
    tokens, cells = view_i32(listing.tokens, LISTED), view_i32(listing.cells, LISTED)
    shares, rates = view_f32(listing.shares, LISTED), view_f32(listing.rates, 2 * RATES)
    expected = np.zeros(2 * CLASSES, np.float64)
    for i in range(listed(listing)):
        at, k = 2 * (cells[i] // CLASSES), 2 * (cells[i] % CLASSES)
        keep = _fade(rates, at)
        came = explained if tokens[i] == token else 0.0
        rates[at] = np.float64(rates[at]) * keep + came
        rates[at + 1] = np.float64(rates[at + 1]) * keep + reached
        expected[k] += came
        expected[k + 1] += reached * np.float64(shares[i])
    for factors in (_factors(listing, place % CLASSES), _factors(listing, CLASSES + place)):
        for k in range(0, 2 * CLASSES, 2):
            keep = _fade(factors, k)
            factors[k] = np.float64(factors[k]) * keep + expected[k]
            factors[k + 1] = np.float64(factors[k + 1]) * keep + expected[k + 1]
