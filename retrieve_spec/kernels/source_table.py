"""Source table: a record per source, and Numba kernels that read the source's arrays.

A record (`SOURCE`) has the source's kind, its number (index into `retrieve_spec.sources.SOURCE_NAMES`), and addresses
and sizes of its arrays (`sources/rows.py` keeps both together). Cursors are (rows, `CURSOR`) int64 per node, whose
columns depend on the kind:

==========  ==================================================================================================
kind        cursor
==========  ==================================================================================================
AUTOMATON   state, tokens matched
RECYCLING   none: looked up by the newest tokens
PHRASES     none: looked up by the newest tokens
UNIGRAM     classes of the two newest tokens
BIGRAMS     none: looked up by the newest token
DISTILLED   none: looked up by the newest tokens
ALIGNMENT   place, outcomes, tokens since the text differed (`kernels/alignment.py`)
PREDICTION  position of the next expected token, tokens matched (-1: not followed)
NGRAM       none: looked up by the newest tokens
EXACT       lo, hi (interval of the suffix array), depth (-1: fallen off)
DENSE       lo, hi (rows of the trie), depth, what stands for the match length
STATES      slot of a prediction (-1: none), tokens since the last known state
==========  ==================================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.automaton import META
from retrieve_spec.kernels.compiled_code import inner, inner_with_arrays, kernel, kernel_with_arrays
from retrieve_spec.kernels.ngram import START, ngram_kept
from retrieve_spec.kernels.suffix_array import sa_narrow, sa_successors, sa_token
from retrieve_spec.kernels.views import (
    Record,
    records_at,
    view_f32,
    view_i32,
    view_i64,
    view_rows,
    view_u16,
    view_u32,
    view_u32_rows,
    view_u64,
)

KIND_AUTOMATON, KIND_RECYCLING, KIND_PREDICTION, KIND_NGRAM, KIND_EXACT = 0, 1, 2, 3, 4
KIND_DENSE, KIND_UNIGRAM, KIND_PHRASES, KIND_ALIGNMENT, KIND_BIGRAMS, KIND_DISTILLED, KIND_STATES = (
    5,
    6,
    7,
    8,
    9,
    10,
    11,
)
"""Kinds of sources."""


def _fields(names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names.split()], align=True)


SOURCE = np.dtype(
    [
        ("kind", np.int64),
        ("number", np.int64),
        ("disabled", np.int64),
        ("automaton", _fields("states num_states edges num_edges slots num_slots meta shortest")),
        ("recycling", _fields("sets capacity entries k memory")),
        ("prediction", _fields("text length cursors")),
        (
            "ngram",
            _fields(
                "slots num_slots tokens counts num_successors token_bytes orders vocabulary marks buckets words column"
            ),
        ),
        (
            "exact",
            _fields(
                "tokens length token_bytes suffixes num_suffixes to_local vocabulary to_global num_local"
                " top top_size top_bits min_depth segment grams num_grams"
            ),
        ),
        (
            "unigram",
            _fields("tokens shares cells meta rates stats num_stats recent frequent factors by_classes versions"),
        ),
        ("alignment", _fields("text places kept meta")),
        ("dense", _fields("spans num_spans width similarity weights origins")),
        (
            "states",
            _fields(
                "dims length keys top_ids shares order previous starts num_listed vocabulary"
                " own_keys own_ids own_shares links heads num_heads capacity meta slots predicted scratch"
            ),
        ),
    ],
    align=True,
)
"""Record of a source: kind, number, 1 while it is disabled because it explained almost nothing lately, then addresses
and numbers by kind. Phrases, bigrams and distilled tables use `recycling`; `exact.segment` counts segments over all
open stores. No field has the name of a NumPy scalar's attribute, such as `size`, which would hide it without the
compiler."""
sources_at = records_at(SOURCE)
"""View of (size,) `SOURCE` at an address."""
CURSOR = 4
"""Integers per cursor."""
TAIL = 8
"""Number of newest tokens kept for every node."""
ORIGIN_BITS = 40
"""An origin is ``segment << ORIGIN_BITS | token position``; segments are counted over all open stores."""
READ_LIMIT = 32
"""Most continuations read per level, most recent or most frequent first."""


@kernel_with_arrays
def states_of(automaton: Record) -> NDArray[np.int32]:
    """Return the state rows of an automaton, (n, 5)."""
    return view_rows(automaton.states, automaton.num_states, 5)


@inner_with_arrays
def edges_of(automaton: Record) -> NDArray[np.int32]:
    """Return the edge rows of an automaton, (n, 6)."""
    return view_rows(automaton.edges, automaton.num_edges, 6)


@inner_with_arrays
def slots_of(automaton: Record) -> NDArray[np.int32]:
    """Return the edge hash table of an automaton, (n,)."""
    return view_i32(automaton.slots, automaton.num_slots)


@inner_with_arrays
def meta_of(automaton: Record) -> NDArray[np.int64]:
    """Return sizes and newest states of an automaton, (META,)."""
    return view_i64(automaton.meta, META)


@inner_with_arrays
def recycling_sets(recycling: Record) -> NDArray[np.uint64]:
    """Return the sets of a recycling table, (capacity · 2,)."""
    return view_u64(recycling.sets, recycling.capacity * 2)


@inner_with_arrays
def recycling_tokens(recycling: Record, entry: int) -> NDArray[np.int32]:
    """Return the top tokens of an entry of a recycling table, (k,), -1 after the last one."""
    k = recycling.k
    return view_i32(recycling.entries + 8 * k * entry, k)


@inner_with_arrays
def recycling_probs(recycling: Record, entry: int) -> NDArray[np.float32]:
    """Return the averaged probabilities of an entry of a recycling table, (k,)."""
    k = recycling.k
    return view_f32(recycling.entries + 8 * k * entry + 4 * k, k)


@inner_with_arrays
def expected_text(prediction: Record) -> NDArray[np.int32]:
    """Return the tokens of a prediction, (n,)."""
    return view_i32(prediction.text, prediction.length)


@inner_with_arrays
def ngram_slots(ngram: Record) -> NDArray[np.uint32]:
    """Return the slots of an n-gram table, (n, 4)."""
    return view_u32_rows(ngram.slots, ngram.num_slots, 4)


@inner_with_arrays
def ngram_counts(ngram: Record) -> NDArray[np.uint32]:
    """Return the counts of an n-gram table's continuations, (m,)."""
    return view_u32(ngram.counts, ngram.num_successors)


@inner_with_arrays
def text_u16(exact: Record) -> NDArray[np.uint16]:
    """Return the text of a segment with at most 2^16 ids, (n,)."""
    return view_u16(exact.tokens, exact.length)


@inner_with_arrays
def text_u32(exact: Record) -> NDArray[np.uint32]:
    """Return the text of a segment with more ids, (n,)."""
    return view_u32(exact.tokens, exact.length)


@inner_with_arrays
def suffixes_of(exact: Record) -> NDArray[np.uint32]:
    """Return the suffix array of a segment, (n,)."""
    return view_u32(exact.suffixes, exact.num_suffixes)


@inner_with_arrays
def to_local_of(exact: Record) -> NDArray[np.int32]:
    """Return a segment's local ids of the model's token ids, (vocabulary,), 0 for those it does not contain."""
    return view_i32(exact.to_local, exact.vocabulary)


@inner_with_arrays
def spans_of(dense: Record) -> NDArray[np.int32]:
    """Return the rows of a trie of retrieved spans, (k, w)."""
    return view_rows(dense.spans, dense.num_spans, dense.width)


@inner_with_arrays
def span_weights(dense: Record) -> NDArray[np.float32]:
    """Return the weights of the spans, (k,)."""
    return view_f32(dense.weights, dense.num_spans)


@inner
def ngram_part(ngram: Record, slot: int) -> tuple[int, int]:
    """Return start and end of an n-gram's continuations, limited to the arrays even if a store is damaged."""
    slots = ngram_slots(ngram)
    first = np.int64(slots[slot, START])
    return first, min(first + ngram_kept(slots, slot), ngram.num_successors)


@inner
def ngram_token(ngram: Record, i: int) -> int:
    """Return the token of a stored continuation of an n-gram table."""
    if ngram.token_bytes == 2:
        return np.int64(view_u16(ngram.tokens, ngram.num_successors)[i])
    return np.int64(view_u32(ngram.tokens, ngram.num_successors)[i])


@inner
def exact_narrow(exact: Record, lo: int, hi: int, depth: int, token: int) -> tuple[int, int]:
    """Narrow a segment's suffix array interval by a token of the model's vocabulary."""
    local = to_local_of(exact)[token] if 0 <= token < exact.vocabulary else np.int32(0)
    sa = suffixes_of(exact)
    if exact.token_bytes == 2:
        a, b = sa_narrow(text_u16(exact), sa, lo, hi, depth, np.int64(local))
    else:
        a, b = sa_narrow(text_u32(exact), sa, lo, hi, depth, np.int64(local))
    return np.int64(a), np.int64(b)


@kernel
def exact_successors(
    exact: Record,
    lo: int,
    hi: int,
    depth: int,
    out_tokens: NDArray[np.int32],
    out_counts: NDArray[np.int32],
) -> int:
    """Write the next tokens of an interval, as ids of the model's vocabulary, with counts; return how many."""
    sa = suffixes_of(exact)
    if exact.token_bytes == 2:
        n, _ = sa_successors(text_u16(exact), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    else:
        n, _ = sa_successors(text_u32(exact), sa, lo, hi, depth, READ_LIMIT, out_tokens, out_counts)
    to_global = view_u32(exact.to_global, exact.num_local)
    known = 0
    for i in range(n):
        if out_tokens[i] < len(to_global):  # a damaged store may have other ids
            out_tokens[known] = to_global[out_tokens[i]]
            out_counts[known] = out_counts[i]
            known += 1
    return np.int64(known)


@inner
def exact_distinct(exact: Record, lo: int, hi: int, depth: int) -> int:
    """Return 1 if all suffixes of an interval continue alike, else a guess by its size (reading would cost more)."""
    sa = suffixes_of(exact)
    if exact.token_bytes == 2:
        tokens = text_u16(exact)
        same = sa_token(tokens, sa, lo, depth) == sa_token(tokens, sa, hi - 1, depth)
    else:
        wide = text_u32(exact)
        same = sa_token(wide, sa, lo, depth) == sa_token(wide, sa, hi - 1, depth)
    return 1 if same else min(hi - lo, 2 + (hi - lo) // 8)
