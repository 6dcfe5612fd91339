"""A dense index over vectors held in memory, and hidden states that stand for what the last tokens mean."""

from functools import cache

import numpy as np

WINDOW = 6


class FakeIndex:
    """Cosine search by definition; the door of `retrieve_spec.datastore.dense.DenseIndex`."""

    layer = "last"
    model = "fake"

    def __init__(self, keys, positions, layer="last"):
        self.keys = np.asarray(keys, np.float32)
        self.keys /= np.linalg.norm(self.keys, axis=1, keepdims=True)
        self.positions = np.asarray(positions, np.int64)
        self.layer = layer
        self.count = len(self.positions)
        self.dims = self.hidden_size = self.keys.shape[1]
        self.asked = 0

    def search(self, hidden, k):
        self.asked += 1
        unit = hidden / np.linalg.norm(hidden, axis=1, keepdims=True)
        similarity = np.full((len(hidden), k), -np.inf, np.float32)
        positions = np.full((len(hidden), k), -1, np.int64)
        for row, scores in enumerate(unit @ self.keys.T):
            best = np.lexsort([self.positions, -scores])[:k]
            similarity[row, : len(best)], positions[row, : len(best)] = scores[best], self.positions[best]
        return similarity, positions


class WithDense:
    """A store and dense indexes."""

    def __init__(self, store, dense):
        self._store, self.dense = store, dense

    def __getattr__(self, name):
        return getattr(self._store, name)


def state_of(context, dims=16, like=lambda token: token):
    """(d,) hidden state that depends on the meanings of the last tokens alone."""
    meaning = [int(like(int(token))) for token in context[-WINDOW:]]
    return _vector(tuple(meaning), dims)


def with_dense(store, like=lambda token: token, layer="last"):
    """The store with an index over the hidden states of all its tokens."""
    indexes = []
    for number, segment in enumerate(store.segments):
        keys, positions = [], []
        for document in range(len(segment.document_starts) - 1):
            start, tokens = int(segment.document_starts[document]), segment.text_ids(document)
            keys += [state_of(tokens[: i + 1], like=like) for i in range(len(tokens))]
            positions += range(start, start + len(tokens))
        indexes.append((number, FakeIndex(keys, positions, layer)))
    return WithDense(store, indexes)


@cache
def _vector(meaning, dims):
    return np.random.default_rng(meaning).normal(size=dims).astype(np.float32)
