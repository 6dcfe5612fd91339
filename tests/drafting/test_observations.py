"""Averages of what a model said after contexts, against a naive twin."""

import numpy as np
import pytest

from retrieve_spec.datastore.observations import BACKOFF, Contexts, Observations, averaged, keys_of_tokens
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


def random_observations(rng, lengths, k):
    n = sum(lengths)
    top_ids = np.argsort(rng.random((n, 12)), axis=1)[:, :k].astype(np.int32)
    probs = np.sort(rng.random((n, k)) / k)[:, ::-1].astype(np.float16)
    return Observations(rng.integers(0, 4, n).astype(np.int32), np.array(lengths), top_ids, probs)


def distributions(contexts):
    """Counts and {token: probability} by key."""
    rows = zip(contexts.keys.tolist(), contexts.counts, contexts.top_ids.tolist(), contexts.probs.tolist(), strict=True)
    return {key: (count, {t: p for t, p in zip(ids, ps, strict=True) if t >= 0}) for key, count, ids, ps in rows}


def test_a_later_run_adds_to_averages_as_if_its_observations_had_been_there_from_the_start():
    rng = np.random.default_rng(6)
    first, later = random_observations(rng, [40, 1, 25], 12), random_observations(rng, [30], 12)
    before = distributions(averaged(first))
    found = distributions(averaged(later, averaged(first)))
    together = distributions(averaged(Observations.joined([first, later])))
    alone = distributions(averaged(later))
    assert found.keys() == together.keys() and {key: count for key, (count, _) in found.items()} == {
        key: count for key, (count, _) in together.items()
    }
    short = set(keys_of_tokens(4).tolist()) | {
        int(recycling.mix(np.uint64(1 << 32), np.int32(token))) for token in range(4)
    }
    for key, (count, probs) in found.items():
        if key in short:
            assert probs == pytest.approx(together[key][1], rel=1e-3), "no smoothing: the same average"
        elif key not in alone:
            assert (count, probs) == before[key], "nothing new"
        elif key in before:  # what it was smoothed towards at first stays its part
            old, fresh = before[key], alone[key][0]
            assert count == old[0] + fresh
            said = {token: (old[0] + BACKOFF) * p for token, p in old[1].items()}
            assert all(probs[token] >= p / (count + BACKOFF) - 1e-6 for token, p in said.items())
            assert sum(probs.values()) == pytest.approx(sum(together[key][1].values()), rel=0.3)


def test_of_a_context_in_several_tables_the_average_of_most_observations_is_kept():
    rng = np.random.default_rng(7)
    small, large = (averaged(random_observations(rng, [length], 3)) for length in (9, 60))
    joined, by_small, by_large = (distributions(each) for each in (Contexts.joined([small, large]), small, large))
    best = {key: max(found, by_large.get(key, (0, {})), key=lambda of: of[0]) for key, found in by_small.items()}
    assert joined == by_large | best
    assert distributions(Contexts.joined([small, large, small])) == joined, (
        "a table that is joined twice changes nothing"
    )
