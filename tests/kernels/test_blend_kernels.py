import blend_world
import naive_blend as naive
import numpy as np
import pytest
from doors import calibration
from hypothesis import given
from hypothesis import strategies as st
from number_tokens import number_tokenizer

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.kernels import sampling
from retrieve_spec.sources import SOURCE_NAMES


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """{index: (alphabet, store, documents)}"""
    made = {"none": (3, None, [])}
    rng = np.random.default_rng(7)
    for index, alphabet in (("both", 4), ("exact", 12), ("ngram", 4)):
        folder = tmp_path_factory.mktemp(index)
        (folder / "texts").mkdir()
        documents = [rng.integers(0, alphabet, 60).tolist() for _ in range(4)]
        for i, document in enumerate(documents):
            (folder / "texts" / f"{i}.txt").write_text(" ".join(map(str, document)))
        build_datastore(folder / "store", str(folder / "texts"), number_tokenizer(50), config=StoreConfig(index=index))
        made[index] = alphabet, open_datastore(folder / "store"), documents
    return made


@pytest.fixture(params=["none", "both", "exact", "ngram"])
def world(request, stores):
    alphabet, store, documents = stores[request.param]
    return lambda rng: blend_world.make_world(rng, alphabet, [store] if store else [], documents)


def paths(nodes):
    """{path: (probability, row)} of best-first nodes."""
    found, known = {}, []
    for token, parent, depth, row, p in nodes:
        path = (*(known[parent] if parent >= 0 else ()), token)
        assert len(path) == depth
        known.append(path)
        assert path not in found, "two nodes with one path"
        found[path] = (p, row)
    return found


@pytest.mark.parametrize(("min_p", "depth"), [(0.0, 2), (0.03, 3)])
@pytest.mark.parametrize("seed", range(6))
def test_every_path_has_the_blended_probability(world, seed, min_p, depth):
    rng = np.random.default_rng(seed)
    w = world(rng)
    cells, scale = blend_world.learned(rng) if seed % 2 else blend_world.fresh(rng)
    trust = blend_world.changed_trust(rng) if seed % 3 else naive.Trust()
    nodes, n, _ = w.grow(cells, scale, 256, depth, min_p, trust=trust)
    assert n == len(nodes)
    expected = paths(naive.expand(w.sources, w.text, cells, scale, 10**9, depth, min_p, trust=trust)[0])
    found = paths(nodes)
    if len(expected) < 256:  # nothing was pruned
        assert found.keys() == expected.keys()
    for path, (p, _row) in found.items():
        assert p == pytest.approx(expected[path][0], rel=2e-4), path


@pytest.mark.parametrize("seed", range(6))
def test_best_first_takes_the_most_probable_nodes(world, seed):
    """Levels of little mass are not read for nodes that cannot come among the best: that may cost a little."""
    rng = np.random.default_rng(seed + 100)
    w = world(rng)
    cells, scale = blend_world.fresh(rng)
    taken = possible = 0.0
    for max_nodes, max_depth in ((1, 1), (5, 8), (16, 4), (40, 6)):
        nodes, _, _ = w.grow(cells, scale, max_nodes, max_depth)
        expected, _ = naive.expand(w.sources, w.text, cells, scale, max_nodes, max_depth)
        assert len(nodes) == len(expected)
        p = [node[4] for node in nodes]
        assert p == sorted(p, reverse=True)
        assert all(nodes[node[1]][4] >= node[4] for node in nodes if node[1] >= 0)
        assert all(node[2] <= max_depth for node in nodes)
        best = sum(node[4] for node in expected)
        assert sum(p) <= 1.0001 * best
        taken, possible = taken + sum(p), possible + best
    assert taken >= 0.96 * possible, "of single budgets one in two hundred loses more than 5 %"


def noise_of(seed, row, position):
    """What `blend_world` passes, and the noise it stands for: by depth, then token."""
    key = [np.uint64(sampling.noise_key(seed, row, position + depth)) for depth in range(8)]
    return (1, seed, row, position), lambda depth: lambda token: sampling.uniform(key[depth], token)


@pytest.mark.parametrize("seed", range(4))
def test_known_noise_decides_between_the_candidates(world, seed):
    rng = np.random.default_rng(seed + 600)
    w = world(rng)
    cells, scale = blend_world.learned(rng)
    given, noise = noise_of(seed, 1, 40)
    nodes, _, _ = w.grow(cells, scale, 256, 2, noise=given)
    expected = paths(naive.expand(w.sources, w.text, cells, scale, 10**9, 2, noise=noise)[0])
    found = paths(nodes)
    assert found, "something is drafted"
    for path, (p, _row) in found.items():
        assert p == pytest.approx(expected[path][0], rel=2e-4), path
    plain, _, _ = w.grow(cells, scale, 256, 2)
    assert plain != nodes


@pytest.mark.parametrize("seed", range(5))
def test_cost_stops_where_tokens_per_second_are_most(world, seed):
    rng = np.random.default_rng(seed + 300)
    w = world(rng)
    cells, scale = blend_world.fresh(rng)
    cost = 1 + np.cumsum(rng.gamma(1.0, rng.choice([0.01, 0.1, 0.5]), 41))
    cost[rng.integers(1, 40) :] += 0.2  # a step, as when one more tile is needed
    whole, _, _ = w.grow(cells, scale, 40, 8)
    gains = 1 + np.concatenate([[0], np.cumsum([node[4] for node in whole])])
    rates = gains / cost[: len(gains)]
    nodes, n, _ = w.grow(cells, scale, 40, 8, cost=cost)
    assert nodes == whole[: len(nodes)]
    assert rates[n] == pytest.approx(rates.max(), rel=1e-5)
    if len(nodes) < len(whole):  # stopped early, because nothing more could pay
        assert rates[len(nodes) :].max() <= rates.max()
    assert w.grow(cells, scale, 40, 8, cost=np.linspace(1, 500, 41))[1] == 0, "what never pays is not drafted"


@pytest.mark.parametrize(("every", "noisy"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("seed", range(4))
def test_learning_is_expectation_maximisation(world, seed, every, noisy):
    rng = np.random.default_rng(seed + 400)
    w = world(rng)
    cells, scale = blend_world.learned(rng, 300.0) if seed % 2 else blend_world.fresh(rng)
    if seed % 4 == 3:
        scale *= 5  # beyond the memory of the scale
    expected_cells, expected_scale = cells.astype(np.float64), scale.astype(np.float64)
    use = rng.random(len(w.table))
    expected_use = use.copy()
    emitted, expected_trust = rng.integers(0, 4, 5).tolist(), naive.Trust()
    known, noise = noise_of(seed, 1, 40)
    for i, token in enumerate(emitted):
        read = (len(w.text) + i) % every == 0
        sources = [s if read or s.number not in (4, 5) else naive.Silent(s.number) for s in w.sources]
        merged = naive.merged(sources, w.text + emitted[:i], expected_cells, naive.Trust(), 0.01)
        blended = naive.distribution(merged, 0.0 if noisy else naive.NEGLIGIBLE * 0.002)
        blended = naive.couple(blended, noise(i)) if noisy else blended
        first = calibration.NUM_SOURCES if noisy else 0
        naive.learn_scale(expected_scale, sources, blended, 0.002, token, first)
        before = expected_use.copy()
        naive.learn_weights(expected_cells, expected_trust, expected_use, merged, token, sources, w.text + emitted[:i])
        silent = [isinstance(s, naive.Silent) for s in sources]
        expected_use[silent] = before[silent]
    table = w.table.copy()
    tail, trust = w.learn(cells, scale, use, emitted, 0.002, known if noisy else blend_world.NO_NOISE, every)
    assert (w.table == table).all(), "what is disabled while a token is learned is enabled again"
    np.testing.assert_allclose(cells, expected_cells, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scale, expected_scale, rtol=1e-3 if noisy else 1e-4, atol=1e-3 if noisy else 1e-4)
    np.testing.assert_allclose(use, expected_use, rtol=1e-5)
    np.testing.assert_allclose(trust, expected_trust.table(), rtol=1e-4)
    assert (tail == blend_world.newest_first(w.text + emitted)).all()


def test_a_disabled_source_is_neither_asked_nor_judged(world):
    rng = np.random.default_rng(9)
    w = world(rng)
    cells, scale = blend_world.fresh(rng)
    use = np.full(len(w.table), 0.5)
    w.table["disabled"][3] = 1
    w.learn(cells, scale, use, rng.integers(0, 4, 5).tolist())
    assert use[3] == 0.5
    assert (np.delete(use, 3) != 0.5).all()


@given(st.integers(0, 11), st.integers(0, 100), st.integers(0, 200), st.integers(0, 20))
def test_cells(number, length, total, distinct):
    assert calibration.cell_of(number, length, total, distinct) == naive.cell_of(number, length, total, distinct)
    assert 0 <= calibration.cell_of(number, length, total, distinct) < calibration.CELLS
    if total and distinct:
        assert calibration.prior_weight(number, length, total, distinct) == pytest.approx(
            naive.prior(number, length, total, distinct)
        )


def test_priors_know_the_sources_by_their_numbers():
    assert len(SOURCE_NAMES) == calibration.NUM_SOURCES + 1 and SOURCE_NAMES[calibration.FORCED] == "forced"
    known = "context", "prediction", "recycling", "dense", "phrases", "alignment", "bigrams", "distilled", "states"
    assert [SOURCE_NAMES[getattr(calibration, f"_{name.upper()}")] for name in known] == list(known)


@given(st.floats(0, 1), st.integers(0, 15), st.integers(0, 3))
def test_scale(p, number, seed):
    _, scale = blend_world.learned(np.random.default_rng(seed))
    assert calibration.scaled(scale, number, p) == pytest.approx(naive.scaled(scale, number, p), rel=1e-5, abs=1e-9)
    scale = np.zeros_like(scale)
    assert calibration.scaled(scale, number, p) == pytest.approx(min(p, 0.9999)), "nothing learned changes nothing"
