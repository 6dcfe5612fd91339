import numpy as np
import pytest
from naive_recycling import NaiveTable

from retrieve_spec.kernels import recycling as kernels
from retrieve_spec.sources.recycling import RecyclingTable


def observations(rng, vocabulary, n, k):
    for _ in range(n):
        length = int(rng.integers(1, 5))
        ids = rng.choice(vocabulary, k, replace=False)
        yield rng.integers(0, 3, length), ids, np.sort(rng.normal(0, 3, k))[::-1]


def learn(table, newest, ids, logits):
    tails = np.zeros((1, 8), np.int32)
    tails[0, : len(newest)] = newest
    lens = np.array([min(len(newest), 3)], np.int32)
    table.learn(tails, lens, np.array([ids], np.int32), np.array([logits], np.float32))


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_running_averages(seed, k):
    rng = np.random.default_rng(seed)
    table, naive = RecyclingTable(1 << 10, k), NaiveTable(k)
    for newest, ids, logits in observations(rng, 20, 150, k + seed):
        learn(table, newest, ids, logits)  # more than are kept are cut
        naive.learn(newest.tolist(), ids[:k].tolist(), logits[:k].tolist())
        for context in [newest[::-1].tolist(), [9, *newest[:2][::-1].tolist()], [int(newest[0])]]:
            expected, order = naive.lookup(context)
            ids_found, p_found, found_order = table.lookup(context)
            assert found_order == order
            assert dict(zip(ids_found.tolist(), p_found, strict=True)) == pytest.approx(expected, abs=1e-5)
            assert (np.diff(p_found) <= 0).all()
            assert p_found.sum() <= 1.0001
    assert table.lookup([15])[2] == 0
    assert table.lookup([])[2] == 0


def test_many_equal_rows_are_averaged_one_after_the_other():
    """Rows are learned in groups; a context may come several times in one, and in the next."""
    n = 150
    rng = np.random.default_rng(3)
    tails = rng.integers(0, 2, (n, 3)).astype(np.int32)
    ids = np.argsort(rng.random((n, 6)))[:, :4].astype(np.int32)
    logits = -np.sort(-rng.normal(size=(n, 4)).astype(np.float32))
    table, naive = RecyclingTable(1 << 10, 4), NaiveTable(4)
    table.learn(tails, np.full(n, 3, np.int32), ids, logits)
    for row in range(n):
        naive.learn(tails[row].tolist(), ids[row].tolist(), logits[row].tolist())
    for context in {tuple(tail[:k][::-1]) for tail in tails.tolist() for k in (1, 2, 3)}:
        tokens, p, _ = table.lookup(list(context))
        assert dict(zip(tokens.tolist(), p, strict=True)) == pytest.approx(naive.lookup(list(context))[0], abs=1e-5)


def test_no_phantom_tokens():
    """What is free in an entry is absent, not token 0, and so is a token without probability."""
    table = RecyclingTable(64, 8)
    learn(table, [5, 6], [9, 4, 0], [3.0, 1.0, -1000.0])
    for context in ([6, 5], [5]):
        ids, p, _ = table.lookup(context)
        assert ids.tolist() == [9, 4] and len(p) == 2
    table.reset()
    assert table.lookup([5])[2] == 0
    learn(table, [5], [7], [0.0])
    assert table.lookup([5])[0].tolist() == [7], "nothing of what was forgotten comes back"


def test_memory_is_bounded_and_what_is_seen_often_stays():
    table = RecyclingTable(64, 2)
    size = table.sets.nbytes + table.entries.nbytes
    rng = np.random.default_rng(0)
    for i in range(3000):
        if i % 20 == 0:
            learn(table, [1], [5, 6], [2.0, 1.0])
        learn(table, [int(rng.integers(10, 10**6))], [3, 4], [1.0, 0.0])
    assert table.sets.nbytes + table.entries.nbytes == size == 64 * (16 + 16)
    assert table.lookup([1])[0].tolist() == [5, 6]
    keys = table.sets.reshape(-1, kernels.SET)[:, : kernels.WAYS]
    known = keys[keys != 0]
    assert len(np.unique(known)) == len(known)


def test_a_full_set_forgets_its_least_observed_then_oldest():
    table = RecyclingTable(kernels.WAYS, 1)  # one set
    for token, times in [(1, 2), (2, 1), (3, 3), (4, 1)]:
        for _ in range(times):
            learn(table, [token], [token], [0.0])
    learn(table, [5], [5], [0.0])
    assert [table.lookup([t])[2] for t in (1, 2, 3, 4, 5)] == [1, 0, 1, 1, 1]
    learn(table, [6], [6], [0.0])  # 4 and 5 were seen once; 4 is older
    assert [table.lookup([t])[2] for t in (1, 2, 3, 4, 5, 6)] == [1, 0, 1, 0, 1, 1]
