"""Copies with replaced words: what `auto` makes of them with alignments and without."""

from __future__ import annotations

import numpy as np

from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.session import SessionMemory

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


def test_what_one_request_was_aligned_with_is_nothing_to_the_next(run):
    """Trees of a request are those of a drafter that has the calibration and the session, and never saw the text."""
    first, second = renamed(1), renamed(2)
    used, fresh = MixtureDrafter(session=SessionMemory()), MixtureDrafter(session=SessionMemory())
    for drafter in (used, fresh):
        run(drafter).request(*first)
    other = MixtureDrafter(session=fresh.session, calibration=fresh.calibration)
    other._learned, other._use, other._scratch = fresh._learned, fresh._use, fresh._scratch
    other.recycling = fresh.recycling
    a, b = (run(drafter).request(*second) for drafter in (used, other))
    assert len(a.trees) == len(b.trees)
    for one, two in zip(a.trees, b.trees, strict=True):
        for name in ("token_ids", "parent", "log_p", "source"):
            assert (getattr(one, name) == getattr(two, name)).all()
