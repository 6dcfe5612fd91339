import numpy as np
import pytest
from blend_world import source_of
from doors import alignment as kernels
from doors import levels
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_alignments import NaiveAlignments

from retrieve_spec.kernels.source_table import CURSOR, TAIL
from retrieve_spec.sources.rows import Alignments

HASHES = np.zeros((2, TAIL), np.uint64)


class Pair:
    """The same text twice: in the kernels' arrays, and by definition."""

    def __init__(self):
        self.alignments, self.naive = Alignments(), NaiveAlignments()
        self.source = source_of(self.alignments, 9)

    def say(self, tokens, generated=True):
        kernels.extend(self.source.alignment, np.array(tokens, np.int32), int(generated))
        self.naive.extend(tokens, generated)

    def level(self, draft=()):
        """[(length, total, distinct, [(token, share)], None)] behind a draft, as the kernels say it."""
        cursor, source = np.zeros((1, CURSOR), np.int64), self.source
        kernels.best(source.alignment, cursor, 0)
        for token in draft:
            moved = cursor.copy()
            levels.advance_row(source, cursor, 0, token, moved, 0, None)
            cursor = moved
        handle, length = levels.open_row(source, cursor, 0, HASHES, 0, None)
        if length < 0:
            return []
        total, distinct = levels.evidence(source, cursor, 0, handle, None)
        tokens, counts, p = np.empty(32, np.int32), np.empty(32, np.int32), np.empty(32, np.float32)
        n = levels.read_level(source, cursor, 0, handle, total, 0.0, 0.0, tokens, counts, p, None)
        shares = list(zip(tokens[:n].tolist(), p[:n].tolist(), strict=True))
        assert levels.next_level(source, handle, length, HASHES, None)[1] == -1
        return [(int(length), int(total), int(distinct), shares, None)]

    def same(self, draft=()):
        assert self.level(draft) == list(self.naive.levels([*self.naive.text, *draft]))


PART = st.tuples(st.integers(0, 60), st.booleans(), st.sampled_from([0.0, 0.05, 0.3]))


def edited(rng, token, alphabet, noise):
    """What comes instead of a token: mostly itself, or up to three others, it among them or not."""
    if rng.random() >= noise:
        return [token]
    return [*rng.integers(0, alphabet, rng.integers(0, 4)).tolist(), *[token] * int(rng.integers(0, 2))]


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([2, 3, 5]), st.integers(0, 2**32), st.lists(PART, min_size=1, max_size=7))
def test_alignments_as_defined(alphabet, seed, parts):
    """Texts that copy earlier passages with tokens replaced, put in and left out, in pieces of any length."""
    rng = np.random.default_rng(seed)
    pair = Pair()
    for length, generated, noise in parts:
        text = pair.naive.text
        start = int(rng.integers(0, len(text) - length)) if len(text) > length else None
        copied = text[start : start + length] if start is not None else rng.integers(0, alphabet, length).tolist()
        said = [new for token in copied for new in edited(rng, token, alphabet, noise)]
        pair.say(said, generated)
        pair.same()
        followed = list(pair.naive.kept[0].outcomes) if pair.naive.kept[0] else []
        for draft in ([0], [1, 0], rng.integers(0, alphabet, 6).tolist()):
            pair.same(draft)
        assert followed == (list(pair.naive.kept[0].outcomes) if pair.naive.kept[0] else []), "drafts change nothing"


def test_places_beyond_the_window_are_not_followed():
    passage = list(range(100, 140))
    for filler, found in ((kernels.WINDOW - 200, True), (kernels.WINDOW, False)):
        alignments = Alignments()
        copies = source_of(alignments).alignment
        text = np.array([*passage, *np.random.default_rng(0).integers(1000, 1 << 30, filler)], np.int32)
        kernels.extend(copies, text, 0)
        kernels.extend(copies, np.array([*passage[:10], 7], np.int32), 1)
        cursor = np.zeros((1, CURSOR), np.int64)
        kernels.best(copies, cursor, 0)
        _, length = kernels.open_level(copies, cursor, 0)
        assert (length > 0) == found


@pytest.mark.parametrize("token", [-1, -(2**31), 2**24 - 1, 2**24, 2**31 - 1])
def test_ids_of_any_size(token):
    pair = Pair()
    pair.say([1, 2, 3, token, 4, 5, token, 6], generated=False)
    for said in (1, 2, 3, 9, 4, 5):
        pair.say([said])
        pair.same()
        pair.same([token, 6])
    pair.say([1, 2, 3, token, 4, token, 5])
    pair.same()
    assert not any(given[0] < 0 for level in pair.level() for given in level[3]), "no id below 0 is drafted"
