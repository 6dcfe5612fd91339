import numpy as np
import pytest
from tree_paths import paths_of

from retrieve_spec.config import SpeculationConfig, StoreConfig
from retrieve_spec.datastore.edit import remove_documents
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.kernels.source_table import ORIGIN_BITS
from retrieve_spec.kernels.step import MIN_ORIGIN
from retrieve_spec.sources import SOURCE_NAMES

EXACT = StoreConfig(index="exact")
RNG = np.random.default_rng(4)
TEXTS = [RNG.integers(0, 1000, 120).tolist() for _ in range(4)]


@pytest.fixture(scope="module")
def stores(make_store):
    return {
        "exact": [make_store(TEXTS, EXACT)],
        "both": [make_store(TEXTS)],
        "segments": [make_store(TEXTS[:2], EXACT, add=TEXTS[2:])],
        "two": [make_store(TEXTS[:2], EXACT), make_store(TEXTS[2:])],
        "ngram": [make_store(TEXTS, StoreConfig(index="ngram"))],
    }


def drafter_of(stores, **options):
    return MixtureDrafter(SpeculationConfig(**options), recycling=False, datastores=stores)


@pytest.mark.parametrize("kind", ["exact", "both", "segments", "two", "ngram"])
def test_text_of_a_store_is_drafted(run, stores, kind):
    drafter = drafter_of(stores[kind])
    for text in TEXTS:
        r = run(drafter).request([5000, *text[:10]], text[10:])
        assert np.sum(r.accepted) > 90
        used = {SOURCE_NAMES[s] for tree in r.trees for s in tree.source}
        assert used & {"exact", "ngram"}
        assert kind != "ngram" or "exact" not in used


def test_text_that_was_removed_drafts_nothing(run, make_store):
    """Contexts of which nothing is left stay in n-gram tables, where searches for others pass over them."""
    common, gone = TEXTS[0][:60], [7, 8, *TEXTS[1], *TEXTS[1]]
    store = make_store([gone, common]).path
    remove_documents(store, ["000.txt"])
    r = run(drafter_of([open_datastore(store)])).request(gone[:20], [*gone[20:40], *common])
    drafted = {int(token) for tree in r.trees for token in tree.token_ids}
    assert not drafted - set(gone[:40]) - set(common)
    assert sum(r.accepted) > 30


@pytest.mark.parametrize("kind", ["exact", "both", "segments", "two"])
def test_origins_point_at_the_drafted_text(run, stores, kind):
    opened = stores[kind]
    segments = [(store, i) for store in opened for i in range(len(store.segments))]
    known = 0
    for first, second in ((1, 2), (3, 0)):  # of two segments, or stores
        drafter = drafter_of(opened, provenance=True)
        mixed = [*TEXTS[first][:60], 777, *TEXTS[second][20:80]]
        r = run(drafter)
        drafter.start(np.array(mixed[:5], np.int32))
        at = 5
        while at < len(mixed):
            r.generate(mixed[at : at + 1])
            at += 1
            written = mixed[:at]
            tree = drafter.propose(Budget(40, 30))
            paths = paths_of(tree)
            for node in np.flatnonzero(tree.origin >= 0):
                store, segment = segments[int(tree.origin[node]) >> ORIGIN_BITS]
                position = int(tree.origin[node]) & ((1 << ORIGIN_BITS) - 1)
                path = paths[node]
                wanted = (written + path)[-max(MIN_ORIGIN, len(path)) :]
                part = store.segments[segment]
                found = part.to_global[part.tokens[position - len(wanted) + 1 : position + 1]].tolist()
                assert found == wanted
                document = store.document_at(segment, position)
                assert document == store.document_at(segment, position - len(wanted) + 1)
                known += 1
    assert known > 500
    assert all((tree.origin == -1).all() for tree in run(drafter_of(opened)).request(TEXTS[0][:20], TEXTS[0]).trees)


def test_counts_of_segments_and_stores_add_up(make_store):
    """What follows more often over all of them comes first."""
    head = list(range(20, 30))
    one = make_store([[*head, 1, 60], [*head, 2, 61]], EXACT, add=[[*head, 2, 62]])
    two = make_store([[*head, 2, 63], [70, *head, 3]], EXACT)
    drafter = drafter_of([one, two])
    drafter.start(np.array([500, *head], np.int32))
    tree = drafter.propose(Budget(3, 1))
    assert tree.token_ids.tolist()[0] == 2
    assert set(tree.token_ids.tolist()) == {1, 2, 3}


def test_fed_text_breaks_the_match(make_store):
    """What stood before a long piece of fed text does not count as standing before its end."""
    before, shared = list(range(100, 110)), list(range(200, 264))
    store = make_store([[*before, *shared, 1], *[[900 + i, *shared, 2] for i in range(5)]], EXACT)
    drafter = drafter_of([store])
    drafter.start(np.array(before, np.int32))
    drafter.feed(np.array([*range(800, 805), *shared], np.int32))
    assert drafter.propose(Budget(1, 1)).token_ids.tolist() == [2]
    drafter.start(np.array(before, np.int32))
    drafter.feed(np.array(shared, np.int32))
    assert drafter.propose(Budget(1, 1)).token_ids.tolist() == [1], "nothing came between"


def test_tokens_the_store_does_not_know(run, make_store):
    drafter = drafter_of([make_store([list(range(50))], EXACT)])
    r = run(drafter).request([7, 8, 2**31 - 1, 99999], [1000, 2**31 - 1, 20, 21, 22, 23])
    assert r.accepted[-1] >= 1
