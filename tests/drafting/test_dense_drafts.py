"""Neighbours of hidden states in the one tree: what is drafted, when it is asked for, and what it may not change."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_dense import FakeIndex, state_of, with_dense
from tree_paths import leaf_paths, paths_of

from retrieve_spec.config import SpeculationConfig, StoreConfig
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.drafting.published.stores import Dresd
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.errors import ConfigError, MissingSourceError
from retrieve_spec.sources import SOURCE_NAMES

WORDS = 9
TEXTS = [np.random.default_rng(seed).integers(0, WORDS, 150).tolist() for seed in range(4)]
DENSE = SOURCE_NAMES.index("dense")


def paraphrase(text):
    """The same meanings in other words."""
    return [token + WORDS for token in text]


def meaning(token):
    return token % WORDS


@pytest.fixture(scope="module")
def store(make_store):
    return with_dense(make_store(TEXTS, StoreConfig(index="exact")), meaning)


def told(drafter, prompt, token):
    """Start a request, and show its first token and the state that it was made from."""
    drafter.start(np.array(prompt, np.int32))
    hidden = state_of(prompt, like=meaning)[None]
    drafter.observe(VerifiedPass(DraftTree(), np.empty(0, np.int32), np.array([token], np.int32), hidden=hidden))


def generate(run, drafter, prompt, output):
    """A greedy verification that hands out hidden states as the loop does."""
    told(drafter, prompt, output[0])
    behind = [*prompt, output[0]]
    made = run(drafter, hidden=lambda written: state_of([*behind, *written.tolist()], like=meaning))
    made.generate(output[1:])
    drafter.finish()
    return made


def auto(store, **options):
    return MixtureDrafter(SpeculationConfig(**options), recycling=False, datastores=[store])


@pytest.mark.parametrize("make", [lambda store: Dresd([store]), auto], ids=["dresd", "auto"])
def test_text_that_an_exact_match_does_not_find_is_drafted(run, store, make):
    """The prompt says the same in other words: only the hidden state leads to the place."""
    dense, exact = make(store), auto(store, dense="off")
    found = without = 0
    for text in TEXTS:
        for at in range(20, 120, 20):
            prompt, output = paraphrase(text[:at]), text[at : at + 21]
            got = generate(run, dense, prompt, output)
            assert DENSE in got.trees[0].source
            found += got.accepted[0]
            without += generate(run, exact, prompt, output).accepted[0]
    assert found > 20 * 6
    assert without < 20 * 2


@pytest.mark.parametrize("followed", [False, True])
def test_fed_text_leaves_the_neighbours_behind(store, followed):
    """The state that is known, and what was found with it, stand before other text than what comes next."""
    drafter, index, text = auto(store), store.dense[0][1], TEXTS[0]
    told(drafter, paraphrase(text[:30]), text[30])
    if followed:
        assert DENSE in drafter.propose(Budget(8, 8)).source
    drafter.feed(np.array(paraphrase(text[60:70]), np.int32))
    index.asked = 0
    assert DENSE not in drafter.propose(Budget(8, 8)).source
    assert index.asked == 0


def test_origins_of_neighbours_point_at_the_drafted_text(run, store):
    """A drafted run is known to stand in the store from the eighth token on, the root among them."""
    drafter = auto(store, provenance=True)
    known = 0
    for at in range(20, 120, 20):
        generate(run, drafter, paraphrase(TEXTS[0][:at]), TEXTS[0][at : at + 30])  # learn to trust neighbours
    for text in TEXTS:
        told(drafter, paraphrase(text[:50]), text[50])
        tree, segment = drafter.propose(Budget(40, 40)), store.segments[0]
        paths = paths_of(tree)
        for node in np.flatnonzero(tree.origin >= 0):
            path, position = paths[node], int(tree.origin[node])
            found = segment.to_global[segment.tokens[position - len(path) : position + 1]].tolist()
            assert found == [text[50], *path]
            known += tree.source[node] == DENSE
    assert known > 20


def test_what_is_asked_for_must_be_there(store, make_store):
    plain = make_store(TEXTS[:1])
    assert auto(plain).wants_hidden is None
    assert auto(store, dense="off").wants_hidden is None
    assert auto(store).wants_hidden == "last"
    with pytest.raises(MissingSourceError, match="dense index"):
        Dresd([plain])
    with pytest.raises(MissingSourceError, match="got none"):
        Dresd([])
    with pytest.raises(ConfigError, match="layers 2, last"):
        MixtureDrafter(datastores=[store, with_dense(plain, layer=2)])


def test_presets_draft_as_published():
    """Neighbours by similarity; those that go on with another token are dropped; ten drafts of ten tokens."""
    #           0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19
    tokens = [5, 1, 2, 3, 4, 0, 6, 1, 2, 9, 0, 7, 8, 8, 0, 5, 1, 7, 7, 0]  # 0 ends a document
    segment = SimpleNamespace(
        tokens=np.array(tokens, np.uint16),
        to_global=np.arange(10, dtype=np.uint32),
    )
    keys = [[1, 0], [0.9, 0.3], [0.8, 0.6], [0, 1]]
    index = FakeIndex(keys, [11, 0, 6, 15])  # tokens 7, 5, 6, 5; what follows: 8 8 | 1 2 3 4 | 1 2 9 | 1 7 7
    drafter = Dresd([SimpleNamespace(segments=[segment], dense=[(0, index)])])
    drafter.start(np.array([3, 3], np.int32))
    assert len(drafter.propose(Budget(100, 100))) == 0, "no state yet"
    emitted = np.array([1], np.int32)
    drafter.observe(VerifiedPass(DraftTree(), emitted[:0], emitted, hidden=np.array([[1, 0]], np.float32)))
    tree = drafter.propose(Budget(100, 100))
    assert leaf_paths(tree) == [[2, 3, 4], [2, 9], [7, 7]]
    drafter.drafts = 2
    assert leaf_paths(drafter.propose(Budget(100, 100))) == [[2, 3, 4], [2, 9]]
    drafter.drafts, drafter.length = 10, 1
    assert leaf_paths(drafter.propose(Budget(100, 100))) == [[2], [7]]
    drafter.neighbours = 1
    assert len(drafter.propose(Budget(100, 100))) == 0, "the nearest neighbour goes on with 8: a plain step"
