"""Draft trees as arrays: block layout, ids, positions, and attention masks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.kernels.compiled_code import inlined, kernel

ORIGINS, TOKENS, PARENTS, DEPTHS, LOG_P, SOURCES, BLOCK_ROWS = 0, 2, 3, 4, 5, 6, 7
"""Rows of a tree's block (`BLOCK_ROWS`, n) int32: n int64 in the first two, n float32, n uint8 in the last, all others
int32."""


def unpacked(words: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Unpack words (m, ⌈m / 32⌉) to (m, m) bool, the lowest bit first."""
    rows = len(words)
    if not rows:
        return np.empty((0, 0), np.bool_)
    return np.unpackbits(words.view(np.uint8), axis=1, count=rows, bitorder="little").view(np.bool_)


def visible_rows(parent: NDArray[np.int32], num_roots: int) -> NDArray[np.int32]:
    """Return which rows see which in a pass over m root tokens, then n nodes, as words (m + n, ⌈(m + n) / 32⌉)."""
    rows = num_roots + len(parent)
    words = np.zeros((rows, -(-rows // 32)), np.int32)
    see_ancestors(parent, num_roots, words)
    return words


def fill_tree_mask(
    mask: NDArray[np.bool_],
    parent: NDArray[np.int32],
    depth: NDArray[np.int32],
    num_roots: int,
    past: int,
    kv_offset: int,
    window: int,
    chunk: int,
    left_padding: int,
    padded: NDArray[np.bool_],
) -> None:
    """Fill `mask` (m + n, kv) for m root tokens and n nodes that follow `past` cached tokens.

    Rows and the last m + n columns are the root tokens, then the nodes; the columns before them are the cached
    tokens from slot `kv_offset` on. A row sees the cached tokens, the root tokens up to itself, its ancestors and
    itself; of those only the last `window` slots (0: no limit) and only slots of its own chunk (0: no chunks;
    chunks of `chunk` slots count from `left_padding`). `padded` (p,) marks cached slots that nobody sees, p may be 0.
    """
    cached = mask.shape[1] - num_roots - len(parent)
    slots = np.concatenate([past + np.arange(num_roots), past + num_roots - 1 + depth])
    first = np.zeros_like(slots)  # first visible slot of each row: both limits hide only the oldest slots
    if window > 0:
        first = np.maximum(first, slots - window + 1)
    if chunk > 0:
        first = np.maximum(first, (slots - left_padding) // chunk * chunk + left_padding)
    np.greater_equal(kv_offset + np.arange(cached), first[:, None], out=mask[:, :cached])
    hidden = padded[kv_offset : kv_offset + cached]
    mask[:, : len(hidden)] &= ~hidden
    np.logical_and(unpacked(visible_rows(parent, num_roots)), slots >= first[:, None], out=mask[:, cached:])


@kernel
def see_ancestors(parent: NDArray[np.int32], num_roots: int, words: NDArray[np.int32]) -> None:
    """Write the attention mask of a pass over m root tokens, then n nodes, as bits.

    Parameters
    ----------
    parent
        (n,) int32, parents before children, -1 below the last root token.
    num_roots
        m; a root token sees itself and those before it, a node sees all of them.
    words
        (m + n, w ≥ (m + n) / 32) int32 zeros, filled: bit j of row i is set where row i sees row j.
    """
    for i in range(len(words)):
        above = i - 1 if i < num_roots else num_roots + parent[i - num_roots]
        if above >= 0:
            for w in range(words.shape[1]):
                words[i, w] = words[above, w]
        words[i, i >> 5] |= np.int32(-(1 << 31)) if i & 31 == 31 else np.int32(1 << (i & 31))


@kernel
def find_child(parent: NDArray[np.int32], token_ids: NDArray[np.int32], node: int, token_id: int) -> int:
    """Return the child of `node` (-1: the root) that carries `token_id`, -1 if none does."""
    for i in range(node + 1, parent.shape[0]):
        if parent[i] == node and token_ids[i] == token_id:
            return i
    return -1


@inlined
def node_tails(
    token_ids: NDArray[np.int32],
    parent: NDArray[np.int32],
    tail: NDArray[np.int32],
    tail_len: int,
    tails: NDArray[np.int32],
    lens: NDArray[np.int32],
) -> None:
    """Write the newest tokens of the contexts ending at the root (row 0) and every node (row i + 1), newest first."""
    width = tails.shape[1]
    for j in range(width):
        tails[0, j] = tail[0, j]
    lens[0] = min(tail_len, width)
    for i in range(len(token_ids)):
        above = parent[i] + 1
        tails[i + 1, 0] = token_ids[i]
        for j in range(1, width):
            tails[i + 1, j] = tails[above, j - 1]
        lens[i + 1] = min(lens[above] + 1, width)
