"""Numba kernels of the empty context: tokens of the text that are likely anywhere, ranked by what is known of them.

Listed are the `RECENT` tokens that came last and the `FREQUENT` most frequent ones. A token's share is the rate at
which tokens of its cell (age, count, said in the answer or only in the prompt) came when no longer context explained
the next token, divided by the sum over the list. Rates are learned online, over all requests.

``stats`` (vocabulary, 3) int32: 1 + position of the last occurrence (0: never), count, whether it was generated.
``recent`` (RECENT,) and ``frequent`` (FREQUENT,) int32 token ids, newest first and most frequent first. ``meta``
(META,) int64: tokens, distinct tokens, recent tokens, frequent tokens, listed tokens, highest id. ``rates`` (2 ·
RATES,) float32: how often tokens of a cell came, of how many chances.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inner
from retrieve_spec.kernels.source_table import (
    UNIGRAM_CELLS,
    UNIGRAM_FREQUENT,
    UNIGRAM_META,
    UNIGRAM_NUM_STATS,
    UNIGRAM_RATES,
    UNIGRAM_RECENT,
    UNIGRAM_SHARES,
    UNIGRAM_STATS,
    UNIGRAM_TOKENS,
)
from retrieve_spec.kernels.views import view_f32, view_i32, view_i64, view_rows

RECENT, FREQUENT = 32, 24
LISTED = RECENT + FREQUENT
"""Tokens of the list at most."""
AGES, COUNTS = 14, 9
RATES = AGES * COUNTS * 2
RATE_PRIOR, RATE_MEMORY = 20.0, 4000.0
"""Chances that the prior of a rate counts for, and after how many a rate forgets as fast as it learns."""
LAST, COUNT, GENERATED = range(3)
TOKENS, DISTINCT, NUM_RECENT, NUM_FREQUENT, NUM_LISTED, HIGHEST = range(6)
META = 6


@inner
def log2(n: int) -> int:
    """Logarithm of a positive number, rounded down."""
    b = 0
    for step in (16, 8, 4, 2, 1):
        if n >> step > 0:
            n >>= step
            b += step
    return b


@njit(cache=True, nogil=True)
def cell_of(age: int, count: int, generated: int) -> int:
    """Row of ``rates``: ages 1, 2, 3, 4, 5-7, then octaves; counts 1, 2, 3, then octaves."""
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
    """Put a token that was counted once more in its place among the most frequent, if it is one of them."""
    n, count = meta[NUM_FREQUENT], stats[token, COUNT]
    if n == FREQUENT and stats[frequent[n - 1], COUNT] > count:
        return
    at = np.int64(0)
    while at < n and frequent[at] != token:
        at += 1
    if at == n:
        if n < FREQUENT:
            meta[NUM_FREQUENT] = n + 1
        elif stats[frequent[n - 1], COUNT] < count:
            at = n - 1
        else:
            return
    while at > 0 and stats[frequent[at - 1], COUNT] < count:
        frequent[at] = frequent[at - 1]
        at -= 1
    frequent[at] = token


@inner
def append(
    stats: NDArray[np.int32],
    recent: NDArray[np.int32],
    frequent: NDArray[np.int32],
    meta: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    generated: int,
) -> None:
    """Take tokens (n,) into the text, ``generated`` (1) or not (0); ids beyond ``stats`` are not counted."""
    for token in token_ids:
        if token < 0 or token >= len(stats):
            meta[TOKENS] += 1
            continue
        n = meta[NUM_RECENT]
        listed = n > 0 and stats[token, LAST] > 0 and stats[token, LAST] >= stats[recent[n - 1], LAST]
        _to_front(recent, meta, token, listed)
        meta[TOKENS] += 1
        meta[HIGHEST] = max(meta[HIGHEST], token)
        meta[DISTINCT] += stats[token, COUNT] == 0
        stats[token, LAST] = meta[TOKENS]
        stats[token, COUNT] += 1
        stats[token, GENERATED] |= generated
        _rise(stats, frequent, meta, token)


@inner
def rank(
    stats: NDArray[np.int32],
    recent: NDArray[np.int32],
    frequent: NDArray[np.int32],
    meta: NDArray[np.int64],
    rates: NDArray[np.float32],
    tokens: NDArray[np.int32],
    cells: NDArray[np.int32],
    shares: NDArray[np.float32],
) -> None:
    """Write the list, most likely first: (LISTED,) token ids, their cells and shares, which add up to one."""
    n = 0
    total = 0.0
    now = meta[TOKENS] + 1
    num_recent = meta[NUM_RECENT]
    for i in range(num_recent + meta[NUM_FREQUENT]):
        token = recent[i] if i < num_recent else frequent[i - num_recent]
        if i >= num_recent and stats[token, LAST] >= stats[recent[num_recent - 1], LAST]:
            continue  # it is a recent one too
        age, count = now - stats[token, LAST], stats[token, COUNT]
        cell = cell_of(age, count, stats[token, GENERATED])
        prior = 0.7 * count / now + 0.3 / (age + 16.0)
        share = (np.float64(rates[2 * cell]) + RATE_PRIOR * prior) / (np.float64(rates[2 * cell + 1]) + RATE_PRIOR)
        total += share
        kept = np.float32(share)
        at = n
        while at > 0 and shares[at - 1] < kept:
            tokens[at], cells[at], shares[at] = tokens[at - 1], cells[at - 1], shares[at - 1]
            at -= 1
        tokens[at], cells[at], shares[at] = token, cell, kept
        n += 1
    for i in range(n):
        shares[i] = np.float64(shares[i]) / total
    meta[NUM_LISTED] = n


@inner
def _meta(table: NDArray[np.int64], s: int) -> NDArray[np.int64]:
    return view_i64(table[s, UNIGRAM_META], META)


@njit(cache=True, nogil=True)
def extend(table: NDArray[np.int64], s: int, token_ids: NDArray[np.int32], generated: int) -> None:
    """Take tokens (n,) into the text of a source, ``generated`` (1) or not (0), and rank anew."""
    stats = view_rows(table[s, UNIGRAM_STATS], table[s, UNIGRAM_NUM_STATS], 3)
    recent, frequent = view_i32(table[s, UNIGRAM_RECENT], RECENT), view_i32(table[s, UNIGRAM_FREQUENT], FREQUENT)
    meta = _meta(table, s)
    append(stats, recent, frequent, meta, token_ids, generated)
    rank(
        stats,
        recent,
        frequent,
        meta,
        view_f32(table[s, UNIGRAM_RATES], 2 * RATES),
        view_i32(table[s, UNIGRAM_TOKENS], LISTED),
        view_i32(table[s, UNIGRAM_CELLS], LISTED),
        view_f32(table[s, UNIGRAM_SHARES], LISTED),
    )


@njit(cache=True, nogil=True)
def listed(table: NDArray[np.int64], s: int) -> int:
    """How many tokens the list of a source holds."""
    return np.int64(_meta(table, s)[NUM_LISTED])


@inner
def evidence(table: NDArray[np.int64], s: int) -> tuple[int, int]:
    """(tokens of the text, distinct ones)"""
    meta = _meta(table, s)
    return np.int64(meta[TOKENS]), np.int64(meta[DISTINCT])


@inner
def read(
    table: NDArray[np.int64], s: int, least: float, out_tokens: NDArray[np.int32], out_p: NDArray[np.float32]
) -> int:
    """Write the tokens of the list with a share of at least ``least``, and their shares; returns how many."""
    tokens, shares = view_i32(table[s, UNIGRAM_TOKENS], LISTED), view_f32(table[s, UNIGRAM_SHARES], LISTED)
    n = 0
    while n < listed(table, s) and shares[n] >= least:
        out_tokens[n] = tokens[n]
        out_p[n] = shares[n]
        n += 1
    return n


@njit(cache=True, nogil=True)
def share_of(table: NDArray[np.int64], s: int, token: int) -> float:
    """Share of a token, 0 when it is not listed."""
    tokens = view_i32(table[s, UNIGRAM_TOKENS], LISTED)
    for i in range(listed(table, s)):
        if tokens[i] == token:
            return np.float64(view_f32(table[s, UNIGRAM_SHARES], LISTED)[i])
    return 0.0


@njit(cache=True, nogil=True)
def learn(table: NDArray[np.int64], s: int, token: int, reached: float, explained: float) -> None:
    """Learn rates from a token that came: the list was reached, and explained it, with these probabilities."""
    tokens, cells = view_i32(table[s, UNIGRAM_TOKENS], LISTED), view_i32(table[s, UNIGRAM_CELLS], LISTED)
    rates = view_f32(table[s, UNIGRAM_RATES], 2 * RATES)
    for i in range(listed(table, s)):
        at = 2 * cells[i]
        keep = 1.0 - 1.0 / RATE_MEMORY if rates[at + 1] > RATE_MEMORY else 1.0
        came = explained if tokens[i] == token else 0.0
        rates[at] = np.float64(rates[at]) * keep + came
        rates[at + 1] = np.float64(rates[at + 1]) * keep + reached
