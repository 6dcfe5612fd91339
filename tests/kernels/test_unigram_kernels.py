import numpy as np
import pytest
from blend_world import source_of
from doors import unigram as kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_unigrams import NaiveUnigrams

from retrieve_spec.sources.unigrams import Unigrams, token_classes


def place_behind(listing, text):
    place = 0
    for token in [0, 0, *text][-2:]:
        place = kernels.place_after(listing, place, token)
    return place


def listed(unigrams, text=()):
    """{token: share} behind the tokens of a text."""
    listing = source_of(unigrams).unigram
    n = kernels.listed(listing)
    shares = kernels.shares_at(listing, place_behind(listing, text))
    return dict(zip(unigrams.tokens[:n].tolist(), shares[:n].tolist(), strict=True))


def say(unigrams, tokens, generated):
    kernels.extend(source_of(unigrams).unigram, tokens, int(generated))


def pair(classes=()):
    rates = np.zeros((kernels.RATES, 2), np.float32)
    factors = np.zeros((kernels.CLASSES + kernels.PLACES, 2 * kernels.CLASSES), np.float32)
    classes = np.array(classes, np.uint8)
    return Unigrams(rates, factors, classes), NaiveUnigrams(dict(enumerate(classes.tolist())))


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
        assert unigrams.meta[:2].tolist() == [len(naive.text), len(set(naive.text))]


@pytest.mark.parametrize("classes", [1, 3, 16])
def test_rates_and_factors_are_learned_as_defined(classes):
    rng = np.random.default_rng(1)
    unigrams, naive = pair(rng.integers(0, classes, 80))
    listing = source_of(unigrams).unigram
    for _ in range(150):
        token = int(min(rng.geometric(0.05), 90))
        say(unigrams, np.array([token], np.int32), bool(token % 2))
        naive.extend([token], bool(token % 2))
        came, reached = int(min(rng.geometric(0.05), 90)), float(rng.random())
        place = place_behind(listing, naive.text)
        assert kernels.share_of(listing, place, came) == pytest.approx(naive.shares().get(came, 0.0), rel=1e-4)
        kernels.learn(listing, place, came, reached, reached / 2)
        naive.learn(came, reached, reached / 2)
    say(unigrams, np.array([5], np.int32), True)
    naive.extend([5], True)
    for text in (naive.text, [3], [7, 40]):
        assert listed(unigrams, text) == pytest.approx(naive.shares(text), rel=1e-3)
    assert unigrams.rates.sum() == pytest.approx(sum(sum(rate) for rate in naive.rates.values()), rel=1e-4)


def test_shares_are_those_of_the_list_as_it_is():
    unigrams, naive = pair([0, 1])
    for text in ([1, 1, 0], [0], [2, 1]):
        say(unigrams, np.array(text, np.int32), True)
        naive.extend(text, True)
        assert listed(unigrams, [1, 0]) == pytest.approx(naive.shares([1, 0]))
    unigrams.reset()
    say(unigrams, np.array([1], np.int32), True)
    assert listed(unigrams, [1, 0]) == {1: 1.0}


class Vocabulary:
    def __init__(self, *strings):
        self.strings = strings

    def get_vocab(self):
        return {string: i for i, string in enumerate(self.strings)}


def test_the_same_strings_are_of_one_class_in_every_spelling_of_white_space():
    bytes_as_letters = token_classes(
        Vocabulary("Ġthe", "the", "The", "ĠThe", "Ċ", "ĊĊ", "ĠĠ", "12", "Ġ(", ")", ",", ".Ċ")
    )
    pieces = token_classes(
        Vocabulary("▁the", "the", "The", "▁The", "<0x0A>", "\n\n", "▁▁", "12", "▁(", ")", ",", ".\n")
    )
    assert bytes_as_letters.tolist() == pieces.tolist()
    assert len(set(pieces.tolist())) == 11  # only the two line breaks are alike
    assert pieces.max() < kernels.CLASSES


def test_a_tokenizer_that_tells_nothing_leaves_all_tokens_alike():
    for tokenizer in (None, object(), Vocabulary()):
        assert len(token_classes(tokenizer)) == 0
    assert token_classes(Vocabulary("", "<s>", "<0xzz>")).tolist() == [0, 0, 0]


def test_ids_beyond_any_vocabulary_are_not_listed():
    unigrams, _ = pair()
    say(unigrams, np.array([7, 2**31 - 1, 7], np.int32), True)
    assert listed(unigrams) == {7: 1.0}
    assert unigrams.meta[kernels.NUM_TOKENS] == 3
