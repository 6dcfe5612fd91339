"""Static automata of small segments: arrays of a compact suffix automaton over local ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.static_automaton import automaton_states, count_states


@dataclass(frozen=True, slots=True)
class StaticAutomaton:
    """A suffix automaton over a segment's tokens (`retrieve_spec.kernels.static_automaton` explains the states).

    Attributes
    ----------
    link, counts
        (states,) uint32, suffix link (0 for the first state) and occurrences.
    clone_lengths
        (states - n - 1,) uint32, longest string of the states above n.
    first
        (states + 1,) uint32, where the edges of each state start.
    edge_tokens, edge_targets
        (edges,) local ids in the dtype of the tokens, rising within a state, and (edges,) uint32 states.
    """

    link: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    clone_lengths: NDArray[np.uint32]
    first: NDArray[np.uint32]
    edge_tokens: NDArray[Any]
    edge_targets: NDArray[np.uint32]


def check_automaton(automaton: StaticAutomaton, tokens: int, place: str) -> None:
    """Check that following an automaton stays inside its arrays and comes to an end, in one pass over them.

    Parameters
    ----------
    automaton, tokens
        The automaton, and the length of its text.
    place
        Where it lies, for the message.

    Raises
    ------
    StoreCorruptError
        When it does not.
    """
    a, states = automaton, len(automaton.link)
    first, link = a.first.astype(np.int64), a.link.astype(np.int64)
    sound = len(a.counts) == states == tokens + 1 + len(a.clone_lengths) and len(first) == states + 1
    sound = sound and first[0] == 0 and bool((np.diff(first) >= 0).all())
    sound = sound and len(a.edge_tokens) == len(a.edge_targets) == first[-1]
    sound = sound and max(int(a.link.max()), int(a.edge_targets.max(initial=0))) < states
    if sound:
        lengths = np.concatenate([np.arange(tokens + 1), a.clone_lengths])
        sound = bool((lengths[link[1:]] < lengths[1:]).all())
    if not sound:
        raise StoreCorruptError(f"an automaton in {place}", "a damaged one")


def build_automaton(tokens: NDArray[Any], sa: NDArray[Any]) -> StaticAutomaton:
    """Build the automaton of a segment; takes about 500 bytes per token while it does.

    Parameters
    ----------
    tokens
        (n,) local ids, separators included.
    sa
        Positions that may be drafted from; others count nothing.

    Returns
    -------
    StaticAutomaton
        Deterministic in its inputs.
    """
    n = len(tokens)
    size = 1 << max(6, int(6 * n + 8).bit_length())
    link, length, heads = (np.zeros(2 * n + 2, np.int64) for _ in range(3))
    keys, targets, next_edge = (np.empty(size, np.int64) for _ in range(3))
    states = automaton_states(tokens, link, length, keys, targets, heads, next_edge)
    counts = np.zeros(states, np.int64)
    counts[np.asarray(sa, np.int64) + 1] = 1
    count_states(link[:states], length[:states], counts)
    counts[0] = len(sa)

    used = keys[keys >= 0]
    source, token, target = used >> 32, used & 0xFFFFFFFF, targets[keys >= 0]
    stored = target != source + 1
    stored |= source >= n
    stored[~stored] = tokens[source[~stored]] != token[~stored]
    order = np.argsort(used[stored], kind="stable")
    first = np.zeros(states + 1, np.int64)
    np.cumsum(np.bincount(source[stored], minlength=states), out=first[1:])
    return StaticAutomaton(
        np.maximum(link[:states], 0).astype(np.uint32),
        counts.astype(np.uint32),
        length[n + 1 : states].astype(np.uint32),
        first.astype(np.uint32),
        token[stored][order].astype(tokens.dtype),
        target[stored][order].astype(np.uint32),
    )
