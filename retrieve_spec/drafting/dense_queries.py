"""Dense queries: when to search the dense index, by the gain and the cost of earlier searches."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.calibration import LENGTH_BUCKETS, length_bucket
from retrieve_spec.sources.dense import DenseSource

FIRST_QUERIES = 24
"""Compared queries before the gain of all buckets together, and then of one bucket, is used."""
MEMORY = 64.0
"""Compared queries over which the gain is averaged."""
COMPARE_EVERY = 8
"""Later, one query in this many is compared."""
PROBE_EVERY = 64
"""A bucket where queries do not pay is queried once in this many passes."""
LEAST_GAIN = 0.1
"""Tokens that a query must gain while the time of a pass is unknown."""


class QueryGate:
    """Decides when to query, by the gain in tokens and the time of a query, per length of the longest exact match.

    The gain is a comparison, not an estimate: now and then the tree is also grown without the neighbours, and both are
    held against the tokens that came, and what a wider tree takes against what it brought.
    """

    def __init__(self) -> None:
        self._gain: NDArray[np.float64] = np.zeros(LENGTH_BUCKETS)
        self._seen: NDArray[np.int64] = np.zeros(LENGTH_BUCKETS, np.int64)
        self._passes: NDArray[np.int64] = np.zeros(LENGTH_BUCKETS, np.int64)
        self._asked: NDArray[np.int64] = np.zeros(LENGTH_BUCKETS, np.int64)
        self.seconds = 0.0
        """Average seconds of a query."""
        self.queries = 0
        """Number of queries."""

    def pays(self, match_len: int, seconds_per_token: float | None) -> bool:
        """Return whether to query at a match of this length; sometimes also if it does not pay, to notice a change.

        Parameters
        ----------
        seconds_per_token
            What a token takes at present; None when it is not measured.
        """
        b = length_bucket(match_len)
        self._passes[b] += 1
        needed = self.seconds / seconds_per_token if seconds_per_token else LEAST_GAIN
        return bool(self._expected(b) >= needed or self._passes[b] % PROBE_EVERY == 0)

    def _expected(self, b: int) -> float:
        """Return the gain of a bucket; of all buckets while little is known of it, large while nothing is known."""
        if self._seen[b] >= FIRST_QUERIES:
            return float(self._gain[b])
        seen = int(self._seen.sum())
        return float(self._gain @ self._seen) / seen if seen >= FIRST_QUERIES else np.inf

    def asked(self, match_len: int, seconds: float) -> bool:
        """Count a query; return whether it should be compared."""
        b = length_bucket(match_len)
        self.queries += 1
        self._asked[b] += 1
        self.seconds += (seconds - self.seconds) / min(self.queries, MEMORY)
        return bool(self._seen[b] < FIRST_QUERIES or self._asked[b] % COMPARE_EVERY == 0)

    def compared(self, match_len: int, gain: float) -> None:
        """Learn the accepted tokens beyond those without the query, less what the time of a wider pass is worth."""
        b = length_bucket(match_len)
        self._seen[b] += 1
        self._gain[b] += (gain - self._gain[b]) / min(self._seen[b], MEMORY)


@dataclass(slots=True)
class Comparison:
    """A query whose gain is measured.

    Attributes
    ----------
    match_len
        Length of the longest exact match when it was made.
    without
        (n, 2) the present pass's tree without it, or None.
    price
        Tokens that take as long as the pass takes longer with it.
    gain
        Tokens it added so far, less their price.
    """

    match_len: int
    without: NDArray[np.int64] | None = None
    price: float = 0.0
    gain: float = 0.0

    def weigh(self, nodes: int, cost: NDArray[np.float32], seconds_per_token: float | None) -> None:
        """Price the tree of the current pass by the seconds (m,) of passes over 0 … m - 1 nodes."""
        if self.without is not None and seconds_per_token is not None:
            self.price = float(cost[nodes] - cost[len(self.without)]) / seconds_per_token

    def score(self, emitted: NDArray[np.int32]) -> None:
        """Add the accepted (a + 1,) tokens, bonus included, beyond those of the tree without the query."""
        if self.without is not None:
            self.gain += len(emitted) - 1 - _accepted(self.without, emitted) - self.price
            self.without, self.price = None, 0.0


def _accepted(nodes: NDArray[np.int64], emitted: NDArray[np.int32]) -> int:
    """Return how many of the tokens a tree (n, 2) of tokens and parents has as a path from its root."""
    children = {(parent, token): i for i, (token, parent) in enumerate(nodes.tolist())}
    at = -1
    for depth, token in enumerate(emitted.tolist()):
        child = children.get((at, token))
        if child is None:
            return depth
        at = child
    return len(emitted)


class DenseQueries:
    """The dense queries of one request.

    Parameters
    ----------
    source
        What is queried, and keeps what was found.
    """

    def __init__(self, source: DenseSource) -> None:
        self.source, self.gate = source, QueryGate()
        self.comparison: Comparison | None = None
        """The last query, while its neighbours are followed and its gain is measured."""
        self._hidden: NDArray[np.float32] | None = None

    def see(self, emitted: NDArray[np.int32], hidden: NDArray[np.float32] | None) -> None:
        """Take the tokens (a + 1,) of a pass and the state (d,) from which the last was predicted."""
        self._hidden = hidden
        if self.comparison is not None:
            self.comparison.score(emitted)

    def leave(self) -> None:
        """End the comparison and drop the state: the text continues with unobserved tokens."""
        self._hidden = None
        self._end_comparison()

    def query(self, cursor: NDArray[np.int64], match_len: int, token: int, seconds_per_token: float | None) -> None:
        """Move a cursor (CURSOR,) to the neighbours of the state, if the state is known and a search pays.

        Parameters
        ----------
        cursor
            Modified in place.
        match_len
            Longest match of the text with anything but neighbours.
        token
            The last one, which the state predicted.
        seconds_per_token
            As for `QueryGate.pays`.
        """
        self._end_comparison()
        if self._hidden is None or not self.gate.pays(match_len, seconds_per_token):
            return
        began = perf_counter()
        self.source.search(self._hidden, token)
        cursor[:] = self.source.root()
        if self.gate.asked(match_len, perf_counter() - began):
            self.comparison = Comparison(match_len)

    def _end_comparison(self) -> None:
        if self.comparison is not None:
            self.gate.compared(self.comparison.match_len, self.comparison.gain)
            self.comparison = None
