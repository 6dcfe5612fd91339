from __future__ import annotations

import naive_unigrams
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_unigrams import NaiveUnigrams

from retrieve_spec.kernels import unigram as kernels
from retrieve_spec.sources.rows import SourceTable
from retrieve_spec.sources.unigrams import Unigrams


def listed(unigrams):
    n = int(unigrams.meta[kernels.NUM_LISTED])
    return dict(zip(unigrams.tokens[:n].tolist(), unigrams.shares[:n].tolist(), strict=True))


def say(unigrams, tokens, generated):
    kernels.extend(SourceTable([unigrams.row(0)]).words, 0, tokens, int(generated))


def pair():
    rates = np.zeros((kernels.RATES, 2), np.float32)
    return Unigrams(rates), NaiveUnigrams()


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([3, 40, 300]),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=6),
)
def test_the_list_as_defined(alphabet, seed, parts):
    rng = np.random.default_rng(seed)
    unigrams, naive = pair()
    for length, generated in parts:
        tokens = np.minimum(rng.geometric(3 / alphabet, length), alphabet).astype(np.int32)
        say(unigrams, tokens, generated)
        naive.extend(tokens.tolist(), generated)
        assert listed(unigrams) == pytest.approx(naive.shares() if naive.text else {})
        assert sorted(listed(unigrams).values(), reverse=True) == list(listed(unigrams).values())
        assert unigrams.meta[:2].tolist() == [len(naive.text), len(set(naive.text))]


def test_rates_are_learned_as_defined():
    rng = np.random.default_rng(1)
    unigrams, naive = pair()
    words = SourceTable([unigrams.row(0)]).words
    for _ in range(150):
        token = int(min(rng.geometric(0.05), 90))
        say(unigrams, np.array([token], np.int32), bool(token % 2))
        naive.extend([token], bool(token % 2))
        came, reached = int(min(rng.geometric(0.05), 90)), float(rng.random())
        assert kernels.share_of(words, 0, came) == pytest.approx(naive.shares().get(came, 0.0), rel=1e-4)
        kernels.learn(words, 0, came, reached, reached / 2)
        naive.learn(came, reached, reached / 2)
    say(unigrams, np.array([5], np.int32), True)
    naive.extend([5], True)
    assert listed(unigrams) == pytest.approx(naive.shares(), rel=1e-3)
    assert unigrams.rates.sum() == pytest.approx(sum(sum(rate) for rate in naive.rates.values()), rel=1e-4)


def test_rates_are_bounded():
    unigrams, _ = pair()
    say(unigrams, np.array([1], np.int32), True)
    words = SourceTable([unigrams.row(0)]).words
    for _ in range(int(kernels.RATE_MEMORY) + 500):
        kernels.learn(words, 0, 1, 1.0, 1.0)
    assert unigrams.rates.max() <= kernels.RATE_MEMORY + 1


def test_ages_are_learned():
    """In a text where most tokens are the last one but one, that one is ranked first, whatever its count."""
    unigrams, _ = pair()
    words = SourceTable([unigrams.row(0)]).words
    rng = np.random.default_rng(0)
    text = [10, 11]
    for _ in range(600):
        kernels.learn(words, 0, text[-1], 1.0, 1.0)
        say(unigrams, np.array(text[-1:], np.int32), True)
        text.append(text[-2] if rng.random() < 0.7 else int(rng.integers(10, 30)))
    say(unigrams, np.array([8, 9], np.int32), True)
    shares = listed(unigrams)
    assert max(shares, key=shares.get) == 8 and shares[8] > 0.4


def test_another_text_begins_with_nothing():
    unigrams, naive = pair()
    say(unigrams, np.array([1, 2, 3, 70000], np.int32), True)
    unigrams.reset()
    assert listed(unigrams) == {}
    say(unigrams, np.array([5, 70000], np.int32), False)
    naive.extend([5, 70000], False)
    assert listed(unigrams) == pytest.approx(naive.shares())


def test_constants():
    assert (kernels.RECENT, kernels.FREQUENT) == (naive_unigrams.RECENT, naive_unigrams.FREQUENT)
    assert (len(naive_unigrams.AGES), len(naive_unigrams.COUNTS)) == (kernels.AGES, kernels.COUNTS)


def test_ids_beyond_any_vocabulary_are_not_listed():
    unigrams, _ = pair()
    say(unigrams, np.array([7, 2**31 - 1, 7], np.int32), True)
    assert listed(unigrams) == {7: 1.0}
    assert unigrams.meta[kernels.TOKENS] == 3
