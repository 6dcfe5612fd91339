"""Numba kernels that predict from similar hidden states of the target.

A *row* is a token of a text that the target has read or written, with the target's hidden state after it, as a key of
``dims`` int8, and the target's top next tokens. A row's parent is the row of the token before it. There are rows of a
store (`retrieve_spec.datastore.state_rows`), and rows of the running text, rejected branches included.

What follows a state and a token? The neighbours are the rows of that token whose parents have the most similar states.
Of a frequent token, rows that follow the same token are compared, and others evenly spaced: together they find almost
what all would.
Their average next tokens are the prediction (`predict`), as in kNN-LM (Khandelwal et al. 2020), but only among contexts
that end with the same token. The average of their keys stands for the state after the token, which is unknown until the
target has run. So predictions continue to any depth.

Predictions are kept in `SLOTS` slots in turn, more than a pass makes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import MAX_NODES
from retrieve_spec.kernels.compiled_code import inlined, inner, inner_with_arrays, kernel, kernel_with_arrays
from retrieve_spec.kernels.recycling import softmax
from retrieve_spec.kernels.views import (
    Record,
    prefetch,
    view_f32,
    view_i8,
    view_i32,
    view_i64,
    view_rows,
    view_u8,
)

TOP = 8
"""Next tokens of a row."""
STORED, RECENT = 256, 256
"""Most rows of a token that are compared: of a store, and the newest of the text."""
NEIGHBOURS = 32
"""Most rows that are averaged."""
TEMPERATURE = 0.07
"""A neighbour weighs ``exp(cosine / TEMPERATURE)``."""
LEAST_WEIGHT, LEAST_SHARE = 0.003, 2
"""Neighbours of smaller weight are left out, and next tokens of a smaller share of 255."""
WIDTH = 16
"""Most next tokens of a prediction."""
DEEPEST = 8
"""Most tokens that predictions continue after a known state."""
SLOTS = 4 * MAX_NODES
COUNTER, ROWS, LAST, META = 0, 1, 2, 3
"""Places in `meta`: predictions made, rows of the text, number (from 1) of the row of its last token (0: unknown); and
their number."""
LINK, PARENT = 0, 1
"""Columns of `links`, numbers of rows of the text from 1: the one before with the same token, and the parent."""
PREDICTED = 2 * WIDTH + 2
"""Words of a prediction: tokens (-1 after the last), float32 probabilities, match length (`_length`), and the token
that it follows."""

_COMPARED = STORED + RECENT
_FOUND = NEIGHBOURS * TOP
_HASH = 4 * _FOUND
_COSINES, _ROWS = 0, 4 * _COMPARED
_BEST, _CHOSEN = 8 * _COMPARED, 8 * _COMPARED + 4 * NEIGHBOURS
_TOKENS, _SHARES = (8 * _COMPARED + 8 * NEIGHBOURS + 4 * _FOUND * i for i in range(2))
_PLACES = _SHARES + 4 * _FOUND
_SUM = _PLACES + 8 * _HASH


def scratch_bytes(dims: int) -> int:
    """Return the size of the scratch memory for keys of ``dims``."""
    return _SUM + 4 * max(dims, TOP)


@kernel
def project(
    hidden: NDArray[np.float32],
    mean: NDArray[np.float32],
    components: NDArray[np.float32],
    length: int,
    row: NDArray[np.float32],
    keys: NDArray[np.int8],
) -> None:
    """Turn hidden states into keys: products with the components, scaled to one length and rounded.

    Parameters
    ----------
    hidden, mean, components
        (n, d), (d,) and (d, dims) float32.
    length
        Of a key before rounding.
    row
        (dims,) float32 scratch.
    keys
        (n, dims) int8 output.
    """
    for i in range(len(hidden)):
        row[:] = 0
        for k in range(len(mean)):
            moved = hidden[i, k] - mean[k]
            for j in range(len(row)):
                row[j] += moved * components[k, j]
        squares = 1e-24
        for j in range(len(row)):
            squares += np.float64(row[j]) * np.float64(row[j])
        for j in range(len(row)):
            keys[i, j] = np.int8(min(max(np.round(np.float64(row[j]) * length / np.sqrt(squares)), -127.0), 127.0))


@inner
def _product(a: int, b: int, dims: int) -> int:
    """Return the scalar product of two keys at addresses; int32 arithmetic uses vector instructions."""
    x, y = view_i8(a, dims), view_i8(b, dims)
    total = np.int32(0)
    for i in range(dims):
        total = np.int32(total + np.int32(np.int32(x[i]) * np.int32(y[i])))
    return np.int64(total)


@inner
def _first_at_least(previous: NDArray[np.int32], low: int, high: int, token: int) -> int:
    """Return the first place from `low` to `high` of a token or a larger one, `high` if there is none."""
    while low < high:
        middle = (low + high) >> 1
        if previous[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def _list_stored(states: Record, previous: int, token: int) -> int:
    """Write stored rows of a token, as negative numbers from -1, up to `STORED`; return how many."""
    if not 0 <= token < states.vocabulary:
        return np.int64(0)
    rows = view_i32(states.scratch + _ROWS, _COMPARED)
    starts, order = view_i32(states.starts, states.vocabulary + 1), view_i32(states.order, states.num_listed)
    before = view_i32(states.previous, states.num_listed)
    first, last = np.int64(starts[token]), np.int64(starts[token + 1])
    low = _first_at_least(before, first, last, previous)
    high = _first_at_least(before, low, last, previous + 1)
    n = min(high - low, np.int64(STORED))
    for i in range(n):
        rows[i] = -1 - order[low + i]
    others = last - first - (high - low)
    more = min(others, STORED - n)
    for i in range(more):
        at = first + i * others // more
        rows[n + i] = -1 - order[at if at < low else at + high - low]
    return n + more


@inlined
def _compare_stored(states: Record, key: int, previous: int, token: int) -> int:
    """List stored rows of a token with the products of their parents' keys and a key; return how many."""
    n = _list_stored(states, previous, token)
    rows, products = view_i32(states.scratch + _ROWS, _COMPARED), view_i32(states.scratch + _COSINES, _COMPARED)
    for i in range(n):
        prefetch(states.keys - states.dims * (2 + np.int64(rows[i])))
    for i in range(n):
        products[i] = _product(key, states.keys - states.dims * (2 + np.int64(rows[i])), states.dims)
    return n


@inlined
def _compare_recent(states: Record, key: int, token: int, n: int) -> int:
    """Append the text's newest rows of a token to n rows; return how many there are then."""
    if not 0 <= token < states.num_heads:
        return n
    rows, products = view_i32(states.scratch + _ROWS, _COMPARED), view_i32(states.scratch + _COSINES, _COMPARED)
    links, capacity = view_rows(states.links, states.capacity, 2), states.capacity
    oldest = max(view_i64(states.meta, META)[ROWS] - capacity, np.int64(0))  # overwritten up to here
    most = n + RECENT
    at = np.int64(view_i32(states.heads, states.num_heads)[token])
    while at > oldest and n < most:
        place = (at - 1) % capacity
        parent = np.int64(links[place, PARENT])
        if parent > oldest:
            products[n] = _product(key, states.own_keys + states.dims * ((parent - 1) % capacity), states.dims)
            rows[n] = place
            n += 1
        at = np.int64(links[place, LINK])
    return n


@inlined
def _choose(states: Record, n: int) -> int:
    """Choose the most similar of n rows, the most similar first; return how many."""
    rows, products = view_i32(states.scratch + _ROWS, _COMPARED), view_i32(states.scratch + _COSINES, _COMPARED)
    best, chosen = view_i32(states.scratch + _BEST, NEIGHBOURS), view_i32(states.scratch + _CHOSEN, NEIGHBOURS)
    kept = np.int64(0)
    for i in range(n):
        if kept == NEIGHBOURS and products[i] <= best[kept - 1]:
            continue
        at = kept if kept < NEIGHBOURS else kept - 1
        while at > 0 and best[at - 1] < products[i]:
            best[at], chosen[at] = best[at - 1], chosen[at - 1]
            at -= 1
        best[at], chosen[at] = products[i], rows[i]
        kept = min(kept + 1, np.int64(NEIGHBOURS))
    for i in range(kept):  # what is read next, of rows anywhere in a store
        if chosen[i] < 0:
            row = np.int64(-1 - chosen[i])
            prefetch(states.top_ids + 4 * TOP * row)
            prefetch(states.shares + TOP * row)
            prefetch(states.keys + states.dims * row)
    return kept


@inlined
def _average(states: Record, n: int) -> int:
    """Add up n neighbours by weight: next tokens with their shares, and keys; return the number of tokens."""
    best, chosen = view_i32(states.scratch + _BEST, NEIGHBOURS), view_i32(states.scratch + _CHOSEN, NEIGHBOURS)
    tokens, shares = view_i32(states.scratch + _TOKENS, _FOUND), view_f32(states.scratch + _SHARES, _FOUND)
    places, dims = view_i64(states.scratch + _PLACES, _HASH), states.dims
    key = view_f32(states.scratch + _SUM, dims)
    for j in range(dims):
        key[j] = 0.0
    scale = 1.0 / (TEMPERATURE * states.length * states.length)
    mass = 0.0
    for i in range(n):
        mass += np.exp(scale * np.float64(best[i] - best[0]))
    stamp, found = view_i64(states.meta, META)[COUNTER], np.int64(0)
    for i in range(n):
        weight = np.float32(np.exp(scale * np.float64(best[i] - best[0])) / mass)
        if weight < LEAST_WEIGHT:
            break
        stored = chosen[i] < 0
        row = np.int64(-1 - chosen[i]) if stored else np.int64(chosen[i])
        its_key = view_i8((states.keys if stored else states.own_keys) + dims * row, dims)
        for j in range(dims):
            key[j] += weight * np.float32(its_key[j])
        ids = view_i32((states.top_ids if stored else states.own_ids) + 4 * TOP * row, TOP)
        parts = view_u8((states.shares if stored else states.own_shares) + TOP * row, TOP)
        for j in range(TOP):
            if ids[j] < 0 or parts[j] < LEAST_SHARE:
                break
            h = (np.int64(ids[j]) * 0x9E3779B1 >> 7) & (_HASH - 1)
            while places[h] >> 16 == stamp and tokens[places[h] & 0xFFFF] != ids[j]:
                h = (h + 1) & (_HASH - 1)
            if places[h] >> 16 != stamp:
                places[h] = stamp << 16 | found
                tokens[found], shares[found] = ids[j], 0.0
                found += 1
            shares[places[h] & 0xFFFF] += weight * np.float32(parts[j]) / np.float32(255.0)
    return found


@inlined
def _write_tokens(states: Record, slot: int, found: int) -> None:
    """Write the most probable next tokens to a slot, the most probable first, of equal ones the lower id."""
    ids, p = view_i32(states.scratch + _TOKENS, _FOUND), view_f32(states.scratch + _SHARES, _FOUND)
    tokens, probs = tokens_of(states, slot), probs_of(states, slot)
    kept = np.int64(0)
    for i in range(found):
        at = kept
        while at > 0 and (probs[at - 1] < p[i] or (probs[at - 1] == p[i] and tokens[at - 1] > ids[i])):
            if at < WIDTH:
                probs[at], tokens[at] = probs[at - 1], tokens[at - 1]
            at -= 1
        if at < WIDTH:
            probs[at], tokens[at] = p[i], ids[i]
            kept = min(kept + 1, np.int64(WIDTH))
    for i in range(kept, WIDTH):
        tokens[i], probs[i] = -1, 0.0


@inlined
def _length(cosine: float) -> int:
    """Return the match length that a similarity counts as: more for every halving of 1 - cosine, from 1 to 21."""
    near = np.int64(-np.log2(min(max(1.0 - cosine, 0.0078125), 1.0)))
    return 1 + near if near < 3 else 4 * near - 7


@inner_with_arrays
def tokens_of(states: Record, slot: int) -> NDArray[np.int32]:
    """Return the next tokens of a prediction, (WIDTH,), -1 after the last."""
    return view_i32(states.predicted + 4 * PREDICTED * slot, WIDTH)


@inner_with_arrays
def probs_of(states: Record, slot: int) -> NDArray[np.float32]:
    """Return the probabilities of a prediction, (WIDTH,)."""
    return view_f32(states.predicted + 4 * PREDICTED * slot + 4 * WIDTH, WIDTH)


@inner
def length_of(states: Record, slot: int) -> int:
    """Return the match length of a prediction."""
    return np.int64(view_i32(states.predicted + 4 * PREDICTED * slot + 8 * WIDTH, 1)[0])


@inner
def token_of(states: Record, slot: int) -> int:
    """Return the token that a prediction follows."""
    return np.int64(view_i32(states.predicted + 4 * PREDICTED * slot + 8 * WIDTH + 4, 1)[0])


@inner
def key_of(states: Record, slot: int) -> int:
    """Return the address of the key that stands for the state after a prediction's token."""
    return states.slots + states.dims * slot


@inner_with_arrays
def predict(states: Record, key: int, previous: int, token: int) -> int:
    """Predict what follows a state and a token.

    Parameters
    ----------
    key
        Address of the key of the state, from which the token was predicted or drafted.
    previous, token
        The token before the state, and the token after it.

    Returns
    -------
    int
        Slot of the prediction, -1 if no row has the token.
    """
    n = _compare_stored(states, key, previous, token)
    n = _compare_recent(states, key, token, n)
    n = _choose(states, n)
    if n == 0:
        return np.int64(-1)
    meta, dims, length = view_i64(states.meta, META), states.dims, np.float64(states.length)
    meta[COUNTER] += 1
    slot = meta[COUNTER] % SLOTS
    _write_tokens(states, slot, _average(states, n))
    average, after = view_f32(states.scratch + _SUM, dims), view_i8(key_of(states, slot), dims)
    squares = 1e-9
    for j in range(dims):
        squares += np.float64(average[j]) * np.float64(average[j])
    for j in range(dims):
        after[j] = np.int8(min(max(np.round(np.float64(average[j]) * length / np.sqrt(squares)), -127.0), 127.0))
    cosine = np.float64(view_i32(states.scratch + _BEST, 1)[0]) / (length * length)
    last_words = view_i32(states.predicted + 4 * PREDICTED * slot + 8 * WIDTH, 2)
    last_words[0], last_words[1] = _length(cosine), token
    return slot


@kernel_with_arrays
def remember(
    states: Record,
    root: int,
    tokens: NDArray[np.int32],
    parents: NDArray[np.int32],
    emitted: NDArray[np.int32],
    keys: NDArray[np.int8],
    top_ids: NDArray[np.int32],
    top_logits: NDArray[np.float32],
) -> int:
    """Add the rows of a verified tree to those of the text.

    Parameters
    ----------
    root
        The token before the tree.
    tokens, parents
        (n,) int32 tokens and parents (-1: the root) of its nodes.
    emitted
        (e,) int32 emitted tokens: the accepted path, and one more.
    keys, top_ids, top_logits
        (n + 1, dims) int8, (n + 1, k) int32 and float32: keys and top tokens of the target after the root and every
        node.

    Returns
    -------
    int
        Address of the key after the last accepted token.
    """
    meta, links, heads = view_i64(states.meta, META), view_rows(states.links, states.capacity, 2), states.heads
    dims, first, k = states.dims, meta[ROWS] + 1, min(top_ids.shape[1], TOP)
    p = view_f32(states.scratch + _SUM, k)
    for i in range(len(keys)):
        token, parent = np.int64(root), meta[LAST]
        if i > 0:
            token, parent = np.int64(tokens[i - 1]), first + 1 + np.int64(parents[i - 1])
        place = (first + i - 1) % states.capacity
        links[place, PARENT], links[place, LINK] = parent, 0
        if 0 <= token < states.num_heads:
            links[place, LINK] = view_i32(heads, states.num_heads)[token]
            view_i32(heads, states.num_heads)[token] = first + i
        own_key = view_i8(states.own_keys + dims * place, dims)
        for j in range(dims):
            own_key[j] = keys[i, j]
        softmax(top_logits, i, p)
        ids, shares = view_i32(states.own_ids + 4 * TOP * place, TOP), view_u8(states.own_shares + TOP * place, TOP)
        for j in range(TOP):
            ids[j] = top_ids[i, j] if j < k else -1
            shares[j] = np.uint8(np.round(255.0 * np.float64(p[j]))) if j < k else np.uint8(0)
    meta[ROWS] += len(keys)
    last = _last_accepted(tokens, parents, emitted)
    meta[LAST] = first + 1 + last
    return np.int64(states.own_keys + dims * ((first + last) % states.capacity))


@inlined
def _last_accepted(tokens: NDArray[np.int32], parents: NDArray[np.int32], emitted: NDArray[np.int32]) -> int:
    """Return the node of the last accepted token, -1 for the root."""
    at = np.int64(-1)
    for i in range(len(emitted) - 1):
        for node in range(at + 1, len(tokens)):
            if parents[node] == at and tokens[node] == emitted[i]:
                at = np.int64(node)
                break
    return at
