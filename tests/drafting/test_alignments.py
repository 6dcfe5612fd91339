"""Copies with replaced words: what `auto` makes of them with alignments and without."""

from __future__ import annotations

import numpy as np

from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.sources import SOURCE_NAMES

ALIGNMENT = SOURCE_NAMES.index("alignment")


def renamed(seed, length=400, every=5):
    """A text of few words in which two come again and again, and the same with these two replaced."""
    rng = np.random.default_rng(seed)
    text = rng.integers(100, 110, length)
    where = rng.choice(length, length // every, replace=False)
    text[where] = 50 + where % 2
    other = np.where(text == 50, 60, np.where(text == 51, 61, text))
    return text.astype(np.int32), other.astype(np.int32)


def without_alignments(**kwargs):
    drafter = MixtureDrafter(**kwargs)
    drafter.alignments = None
    return drafter


def test_copies_with_replaced_words_take_fewer_passes(run):
    aligned, exact = MixtureDrafter(), without_alignments()
    passes, sources = {aligned: 0, exact: 0}, {aligned: set(), exact: set()}
    for seed in range(4):
        for drafter in passes:
            trees = run(drafter, lambda left: Budget(8, left)).request(*renamed(seed)).trees
            passes[drafter] += len(trees)
            sources[drafter] |= {int(s) for tree in trees for s in tree.source}
    assert passes[aligned] < passes[exact]
    assert sources[aligned] - sources[exact] == {ALIGNMENT}
