"""Dense queries: when the dense index is asked, by what earlier queries added and cost."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.calibration import LENGTH_BUCKETS, length_bucket
from retrieve_spec.sources.dense import DenseSource

FIRST_QUERIES = 24
"""Compared queries before a gain is believed, that of all buckets together and then that of a bucket by itself."""
MEMORY = 64.0
"""Compared queries over which the gain is averaged."""
COMPARE_EVERY = 8
"""One query of so many is compared later on."""
PROBE_EVERY = 64
"""A bucket where queries do not pay is asked once in so many passes."""
LEAST_GAIN = 0.1
"""Tokens a query must add where it is not known what a pass takes."""


class QueryGate:
    """Decides when to query: the tokens gained per query against its time, per length of the longest exact match.

    The gain is a comparison, not an estimate: now and then the tree is also grown without the neighbours, and both are
    held against the tokens that came, and what a wider tree takes against what it brought.
    """

    def __init__(self) -> None:
        self._gain: NDArray[np.float64] = np.zeros(LENGTH_BUCKETS)
        self._seen: NDArray[np.int64] = np.zeros(LENGTH_BUCKETS, np.int64)
        self._passes: NDArray[np.int64] = np.zeros(LENGTH_BUCKETS, np.int64)
        self._asked: NDArray[np.int64] = np.zeros(LENGTH_BUCKETS, np.int64)
        self.seconds = 0.0
        """Running average of what a query takes."""
        self.queries = 0
        """Queries so far."""

    def pays(self, match_len: int, seconds_per_token: float | None) -> bool:
        """Whether to query at a match of this length; rarely also where it does not pay, to notice when it begins to.

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
        """Gain of a bucket; what all have together while it is little known, as if large before anything is known."""
        if self._seen[b] >= FIRST_QUERIES:
            return float(self._gain[b])
        seen = int(self._seen.sum())
        return float(self._gain @ self._seen) / seen if seen >= FIRST_QUERIES else np.inf

    def asked(self, match_len: int, seconds: float) -> bool:
        """Take down a query; true when it should be compared."""
        b = length_bucket(match_len)
        self.queries += 1
        self._asked[b] += 1
        self.seconds += (seconds - self.seconds) / min(self.queries, MEMORY)
        return bool(self._seen[b] < FIRST_QUERIES or self._asked[b] % COMPARE_EVERY == 0)

    def compared(self, match_len: int, gain: float) -> None:
        """Learn how many more tokens were accepted than without the query, less those a wider pass took the time of."""
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
        """Price the present pass's tree of so many nodes, by the seconds (m,) that passes over 0 … m - 1 take."""
        if self.without is not None and seconds_per_token is not None:
            self.price = float(cost[nodes] - cost[len(self.without)]) / seconds_per_token

    def hold_against(self, emitted: NDArray[np.int32]) -> None:
        """Add what a pass accepted, (a + 1,) tokens with the bonus token, beyond the tree without the query."""
        if self.without is not None:
            self.gain += len(emitted) - 1 - _accepted(self.without, emitted) - self.price
            self.without, self.price = None, 0.0


def _accepted(nodes: NDArray[np.int64], emitted: NDArray[np.int32]) -> int:
    """How many of the tokens that came a tree (n, 2) of tokens and parents holds as a path from the root."""
    children = {(parent, token): i for i, (token, parent) in enumerate(nodes.tolist())}
    at = -1
    for depth, token in enumerate(emitted.tolist()):
        child = children.get((at, token))
        if child is None:
            return depth
        at = child
    return len(emitted)


class DenseQueries:
    """When the dense index is queried in a request, and with what.

    Parameters
    ----------
    source
        What is queried, and keeps what was found.
    """

    def __init__(self, source: DenseSource) -> None:
        self.source, self.gate = source, QueryGate()
        self.comparison: Comparison | None = None
        """The last query, while its neighbours are followed, if its gain is measured."""
        self._hidden: NDArray[np.float32] | None = None

    def see(self, emitted: NDArray[np.int32], hidden: NDArray[np.float32] | None) -> None:
        """Take over what a pass showed: its tokens (a + 1,) and the state (d,) that the last was predicted from."""
        self._hidden = hidden
        if self.comparison is not None:
            self.comparison.hold_against(emitted)

    def leave(self) -> None:
        """The text goes on with something else than what the state is known for: end the comparison, drop the state."""
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
