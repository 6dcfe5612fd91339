"""Averages of what a model said after contexts, against a naive twin."""

import numpy as np

from retrieve_spec.datastore.observations import BACKOFF, Observations, averaged
from retrieve_spec.kernels import recycling


def stands(text, context, end):
    """Whether a context, in which None is any token, ends at a place of a text."""
    there = text[end - len(context) : end]
    return len(there) == len(context) and all(one in (None, token) for one, token in zip(context, there, strict=True))


def smoothed(observations, context, k):
    """Average what followed a context, and back off to its last tokens; most probable first."""
    shares, times, shorter = {}, 0, {}
    if len(context) > 1 and None not in context:
        shorter = smoothed(observations, context[1:], k)
        shares = {token: BACKOFF * p for token, p in shorter.items()}
    begin = 0
    for length in observations.lengths:
        text = observations.token_ids[begin : begin + length].tolist()
        for end in range(len(context), length + 1):
            if stands(text, context, end):
                times += 1
                place = begin + end - 1
                for token, p in zip(observations.top_ids[place].tolist(), observations.probs[place], strict=True):
                    shares[token] = shares.get(token, 0.0) + float(p)
        begin += length
    total = times + (BACKOFF if shorter else 0.0)
    best = sorted(shares.items(), key=lambda item: (-item[1], item[0]))[:k]
    return {token: p / total for token, p in best}


def test_averages_are_those_of_every_context():
    rng = np.random.default_rng(5)
    lengths = np.array([40, 1, 25])
    n = int(lengths.sum())
    top_ids = np.argsort(rng.random((n, 12)), axis=1)[:, :3].astype(np.int32)
    probs = np.sort(rng.random((n, 3)) / 3)[:, ::-1].astype(np.float16)
    observations = Observations(rng.integers(0, 4, n).astype(np.int32), lengths, top_ids, probs)
    found = averaged(observations)
    contexts = set()
    begin = 0
    for length in lengths:
        text = observations.token_ids[begin : begin + length].tolist()
        contexts |= {tuple(text[end - order : end]) for order in (1, 2, 3) for end in range(order, length + 1)}
        contexts |= {(token, None) for token in text[:-1]}
        begin += length
    assert len(found.keys) == len(contexts)
    for context in contexts:
        h = np.uint64(1 << 32 if None in context else 0)
        for token in context[::-1]:
            h = h if token is None else np.uint64(recycling.mix(h, token))
        [at] = np.flatnonzero(found.keys == h)
        expected = smoothed(observations, list(context), 3)
        np.testing.assert_allclose(found.probs[at][found.top_ids[at] >= 0], list(expected.values()), rtol=1e-4)
        assert found.counts[at] == sum(
            stands(observations.token_ids[s:e].tolist(), context, i)
            for s, e in zip(np.cumsum(lengths) - lengths, np.cumsum(lengths), strict=True)
            for i in range(len(context), e - s + 1)
        )


def test_a_text_that_was_observed_twice_counts_once():
    texts = [[5, 6], [7], [5, 6], [5], [7]]
    token_ids = np.array([token for text in texts for token in text], np.int32)
    top_ids = np.arange(2 * len(token_ids), dtype=np.int32).reshape(-1, 2)
    all_of_it = Observations(token_ids, np.array([2, 1, 2, 1, 1]), top_ids, np.ones(top_ids.shape, np.float16))
    once = all_of_it.without_repeats()
    assert once.token_ids.tolist() == [5, 6, 7, 5] and once.lengths.tolist() == [2, 1, 1]
    assert once.top_ids.tolist() == top_ids[[0, 1, 2, 5]].tolist() and once.probs.shape == (4, 2)
