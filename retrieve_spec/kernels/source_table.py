"""Source table: each source as a row of integers, and Numba kernels that read the arrays behind it.

Source table: one int64 row per source, its `KIND`, its `NUMBER` (index into `retrieve_spec.sources.SOURCE_NAMES`), and
addresses and sizes of the arrays that a source of this kind keeps (`sources/rows.py` holds them together). Cursors:
(rows, `CURSOR`) int64 per node; what their columns mean is up to the kind as well:

==========  ==================================================================================================
kind        cursor
==========  ==================================================================================================
AUTOMATON   state, tokens matched
RECYCLING   none: looked up by the newest tokens
PHRASES     none: looked up by the newest tokens
UNIGRAM     classes of the two newest tokens
BIGRAMS     none: looked up by the newest token
ALIGNMENT   place, outcomes, tokens since the text differed (`kernels/alignment.py`)
PREDICTION  position of the next expected token, tokens matched (-1: not followed)
NGRAM       none: looked up by the newest tokens
EXACT       lo, hi (interval of the suffix array), depth (-1: fallen off)
DENSE       lo, hi (rows of the trie), depth, what stands for the match length
==========  ==================================================================================================
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels import automaton, ngram
from retrieve_spec.kernels.compiled_code import door, inner, making, making_door
from retrieve_spec.kernels.suffix_array import sa_narrow, sa_successors, sa_token
from retrieve_spec.kernels.views import (
    view_f32,
    view_i32,
    view_i64,
    view_rows,
    view_u16,
    view_u32,
    view_u32_rows,
    view_u64,
)

KIND, NUMBER = 0, 1
AUTOMATON, RECYCLING, PREDICTION, NGRAM, EXACT, DENSE, UNIGRAM, PHRASES, ALIGNMENT, BIGRAMS = range(10)
AUTOMATON_STATES, AUTOMATON_NUM_STATES, AUTOMATON_EDGES, AUTOMATON_NUM_EDGES = 2, 3, 4, 5
AUTOMATON_SLOTS, AUTOMATON_NUM_SLOTS, AUTOMATON_META, AUTOMATON_SHORTEST = 6, 7, 8, 9
RECYCLING_SETS, RECYCLING_CAPACITY, RECYCLING_ENTRIES, RECYCLING_K, RECYCLING_MEMORY = 2, 3, 4, 5, 6
PREDICTION_TEXT, PREDICTION_LENGTH, PREDICTION_CURSORS = 2, 3, 4
NGRAM_SLOTS, NGRAM_NUM_SLOTS, NGRAM_TOKENS, NGRAM_COUNTS, NGRAM_SIZE, NGRAM_ITEMSIZE = 2, 3, 4, 5, 6, 7
NGRAM_ORDERS, NGRAM_VOCABULARY, NGRAM_MARKS, NGRAM_BUCKETS, NGRAM_WORDS, NGRAM_COLUMN = 8, 9, 10, 11, 12, 13
EXACT_TOKENS, EXACT_LENGTH, EXACT_ITEMSIZE, EXACT_SUFFIXES, EXACT_NUM_SUFFIXES = 2, 3, 4, 5, 6
EXACT_TO_LOCAL, EXACT_VOCABULARY, EXACT_TO_GLOBAL, EXACT_NUM_LOCAL = 7, 8, 9, 10
EXACT_TOP, EXACT_TOP_SIZE, EXACT_TOP_BITS, EXACT_MIN_DEPTH, EXACT_SEGMENT = 11, 12, 13, 14, 15
EXACT_GRAMS, EXACT_NUM_GRAMS = 16, 17
UNIGRAM_TOKENS, UNIGRAM_SHARES, UNIGRAM_CELLS, UNIGRAM_META, UNIGRAM_RATES = 2, 3, 4, 5, 6
UNIGRAM_STATS, UNIGRAM_NUM_STATS, UNIGRAM_RECENT, UNIGRAM_FREQUENT = 7, 8, 9, 10
UNIGRAM_FACTORS, UNIGRAM_BY_CLASSES, UNIGRAM_VERSIONS = 11, 12, 13
ALIGNMENT_TEXT, ALIGNMENT_PLACES, ALIGNMENT_KEPT, ALIGNMENT_META = 2, 3, 4, 5
DENSE_SPANS, DENSE_NUM_SPANS, DENSE_WIDTH, DENSE_SIMILARITY, DENSE_WEIGHTS, DENSE_ORIGINS = 2, 3, 4, 5, 6, 7
"""Columns by kind (phrases and bigrams: those of recycling); an array's is its address. `EXACT_SEGMENT` numbers
segments over all open stores."""
RESTING = 18
"""Column that is 1 while a source is not asked, because it has explained next to nothing lately."""
ROW = 19
"""Integers per source row."""
CURSOR = 4
"""Integers per cursor."""
TAIL = 8
"""How many of the newest tokens every node knows."""
ORIGIN_BITS = 40
"""An origin is ``segment << ORIGIN_BITS | token position``, segments counted over all open stores in order."""
READ_LIMIT = 32
"""Continuations read per level, most recent or most frequent first."""


@making_door
def states_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """(n, 5) state rows of an automaton."""
    return view_rows(table[s, AUTOMATON_STATES], table[s, AUTOMATON_NUM_STATES], 5)


@making
def edges_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """(n, 6) edge rows of an automaton."""
    return view_rows(table[s, AUTOMATON_EDGES], table[s, AUTOMATON_NUM_EDGES], 6)


@making
def slots_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """(n,) edge hash table of an automaton."""
    return view_i32(table[s, AUTOMATON_SLOTS], table[s, AUTOMATON_NUM_SLOTS])


@making
def meta_of(table: NDArray[np.int64], s: int) -> NDArray[np.int64]:
    """(META,) sizes and newest states of an automaton."""
    return view_i64(table[s, AUTOMATON_META], automaton.META)


@making
def recycling_sets(table: NDArray[np.int64], s: int) -> NDArray[np.uint64]:
    """(capacity · 2,) sets of a recycling table: which contexts it knows, and how well."""
    return view_u64(table[s, RECYCLING_SETS], table[s, RECYCLING_CAPACITY] * 2)


@making
def recycling_tokens(table: NDArray[np.int64], s: int, entry: int) -> NDArray[np.int32]:
    """(k,) top tokens of an entry of a recycling table, -1 behind the last one."""
    k = table[s, RECYCLING_K]
    return view_i32(table[s, RECYCLING_ENTRIES] + 8 * k * entry, k)


@making
def recycling_probs(table: NDArray[np.int64], s: int, entry: int) -> NDArray[np.float32]:
    """(k,) their averaged probabilities."""
    k = table[s, RECYCLING_K]
    return view_f32(table[s, RECYCLING_ENTRIES] + 8 * k * entry + 4 * k, k)


@making
def expected_text(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """(n,) tokens of a prediction."""
    return view_i32(table[s, PREDICTION_TEXT], table[s, PREDICTION_LENGTH])


@making
def ngram_slots(table: NDArray[np.int64], s: int) -> NDArray[np.uint32]:
    """(n, 4) slots of an n-gram table."""
    return view_u32_rows(table[s, NGRAM_SLOTS], table[s, NGRAM_NUM_SLOTS], 4)


@making
def ngram_counts(table: NDArray[np.int64], s: int) -> NDArray[np.uint32]:
    """(m,) counts of an n-gram table's continuations."""
    return view_u32(table[s, NGRAM_COUNTS], table[s, NGRAM_SIZE])


@making
def text_u16(table: NDArray[np.int64], s: int) -> NDArray[np.uint16]:
    """(n,) text of a segment with at most 2^16 ids (`EXACT_ITEMSIZE` 2)."""
    return view_u16(table[s, EXACT_TOKENS], table[s, EXACT_LENGTH])


@making
def text_u32(table: NDArray[np.int64], s: int) -> NDArray[np.uint32]:
    """(n,) text of a segment with more."""
    return view_u32(table[s, EXACT_TOKENS], table[s, EXACT_LENGTH])


@making
def suffixes_of(table: NDArray[np.int64], s: int) -> NDArray[np.uint32]:
    """(n,) suffix array of a segment."""
    return view_u32(table[s, EXACT_SUFFIXES], table[s, EXACT_NUM_SUFFIXES])


@making
def to_local_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """(vocabulary,) ids in a segment of the model's token ids, 0 for those it does not hold."""
    return view_i32(table[s, EXACT_TO_LOCAL], table[s, EXACT_VOCABULARY])


@making
def spans_of(table: NDArray[np.int64], s: int) -> NDArray[np.int32]:
    """(k, w) rows of a trie of retrieved spans."""
    return view_rows(table[s, DENSE_SPANS], table[s, DENSE_NUM_SPANS], table[s, DENSE_WIDTH])


@making
def span_weights(table: NDArray[np.int64], s: int) -> NDArray[np.float32]:
    """(k,) weights of the spans."""
    return view_f32(table[s, DENSE_WEIGHTS], table[s, DENSE_NUM_SPANS])


@inner
def ngram_part(table: NDArray[np.int64], s: int, slot: int) -> tuple[int, int]:
    """Where the continuations of an n-gram begin and end; inside the arrays also where a damaged store says else."""
    slots = ngram_slots(table, s)
    first = np.int64(slots[slot, ngram.START])
    return first, min(first + ngram.ngram_kept(slots, slot), table[s, NGRAM_SIZE])


@inner
def ngram_token(table: NDArray[np.int64], s: int, i: int) -> int:
    """Token of one stored continuation of an n-gram table."""
    if table[s, NGRAM_ITEMSIZE] == 2:
        return np.int64(view_u16(table[s, NGRAM_TOKENS], table[s, NGRAM_SIZE])[i])
    return np.int64(view_u32(table[s, NGRAM_TOKENS], table[s, NGRAM_SIZE])[i])


@inner
def exact_narrow(table: NDArray[np.int64], s: int, lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """Suffix array interval of a store's segment after one more token of the model's vocabulary."""
    local = to_local_of(table, s)[token] if 0 <= token < table[s, EXACT_VOCABULARY] else np.int32(0)
    sa = suffixes_of(table, s)
    if table[s, EXACT_ITEMSIZE] == 2:
        a, b = sa_narrow(text_u16(table, s), sa, lo, hi, depth, np.int64(local))
    else:
        a, b = sa_narrow(text_u32(table, s), sa, lo, hi, depth, np.int64(local))
    return np.int64(a), np.int64(b)


@door
def exact_successors(
    table: NDArray[np.int64],
    s: int,
    lo: int,
    hi: int,
    depth: int,
    out_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
) -> int:
    """Next tokens of an interval, as ids of the model's vocabulary, with counts; returns how many."""
    sa = suffixes_of(table, s)
    if table[s, EXACT_ITEMSIZE] == 2:
        n, _ = sa_successors(text_u16(table, s), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    else:
        n, _ = sa_successors(text_u32(table, s), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    to_global = view_u32(table[s, EXACT_TO_GLOBAL], table[s, EXACT_NUM_LOCAL])
    known = 0
    for i in range(n):
        if out_tokens[i] < len(to_global):  # a damaged store can hold other ids
            out_tokens[known] = to_global[out_tokens[i]]
            out_counts[known] = out_counts[i]
            known += 1
    return np.int64(known)


@inner
def exact_distinct(table: NDArray[np.int64], s: int, lo: int, hi: int, depth: int) -> int:
    """1 when all suffixes of a sorted interval go on alike, else a guess from its size (a read would cost more)."""
    sa = suffixes_of(table, s)
    if table[s, EXACT_ITEMSIZE] == 2:
        tokens = text_u16(table, s)
        same = sa_token(tokens, sa, lo, depth) == sa_token(tokens, sa, hi - 1, depth)
    else:
        wide = text_u32(table, s)
        same = sa_token(wide, sa, lo, depth) == sa_token(wide, sa, hi - 1, depth)
    return 1 if same else min(hi - lo, 2 + (hi - lo) // 8)
