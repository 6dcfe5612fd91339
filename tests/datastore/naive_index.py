"""What the index kernels compute, by definition: lists, loops, no cleverness."""

from collections import Counter, defaultdict

import numpy as np

from retrieve_spec.kernels.ngram import ngram_hash


def suffix_array(tokens):
    return sorted((i for i in range(len(tokens)) if tokens[i]), key=lambda i: tokens[i:])


def interval(tokens, sa, pattern):
    """Matches of a pattern as (lo, hi); None when it does not occur."""
    hits = [k for k, i in enumerate(sa) if tokens[i : i + len(pattern)] == pattern]
    return (hits[0], hits[-1] + 1) if hits and 0 not in pattern else None


def longest(tokens, sa, recent, limit=10**9):
    """Longest end of `recent` that occurs, as (lo, hi, depth)."""
    for depth in range(min(len(recent), limit), 0, -1):
        found = interval(tokens, sa, recent[len(recent) - depth :])
        if found:
            return (*found, depth)
    return 0, len(sa), 0


def successors(tokens, sa, lo, hi, depth, max_reads):
    """(tokens, counts): the suffix in the middle of each block speaks for the block."""
    unit = 1
    while hi - lo > unit * max_reads:
        unit *= 2
    counts = Counter()
    for start in range(lo, hi, unit):
        end = min(start + unit, hi)
        counts[tokens[sa[min(start + unit // 2, hi - 1)] + depth]] += end - start
    del counts[0]
    return sorted(counts.items())


def contexts(documents, orders):
    """Next-token counts of every context of 1 … `orders` tokens."""
    counts = defaultdict(Counter)
    for document in documents:
        for i in range(1, len(document)):
            for order in range(1, min(i, orders) + 1):
                counts[tuple(document[i - order : i])][document[i]] += 1
    return counts


def context_hash(context):
    """Hash under which an n-gram table keeps a context."""
    h = np.uint64(0)
    for token in reversed(context):
        h = np.uint64(ngram_hash(h, token))
    return h
