"""Predictions from similar hidden states: against a list of all rows."""

from dataclasses import replace

import numpy as np
import pytest
from blend_world import named
from doors import hidden_states as kernels
from doors import levels
from naive_states import NaiveStates

from retrieve_spec.datastore.state_rows import KeyTransform, StateCollector, StateRows
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels import source_table
from retrieve_spec.sources.hidden_states import SimilarStates

WORDS, SIZE = 12, 6


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def top_of(rng, n):
    """(n, TOP) tokens and probabilities that sum up to one, without ties."""
    ids = np.stack([rng.permutation(WORDS)[: kernels.TOP] for _ in range(n)]).astype(np.int32)
    probs = -np.sort(-rng.dirichlet(np.ones(kernels.TOP), n), axis=1)
    return ids, probs.astype(np.float16)


def transform_of(rng):
    components = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0].astype(np.float32)
    return KeyTransform(rng.normal(size=SIZE).astype(np.float32), components)


def collected(rng, transform, lengths):
    """Rows of texts of random tokens and states, and the same as a list."""
    collector, naive = StateCollector(transform), NaiveStates(transform.length, kernels.NEIGHBOURS, kernels.WIDTH)
    for length in lengths:
        tokens = rng.integers(0, WORDS, length).astype(np.int32)
        hidden = rng.normal(size=(length, SIZE)).astype(np.float32)
        ids, probs = top_of(rng, length)
        collector.add(tokens, hidden, ids, probs)
        shares = np.rint(255 * probs.astype(np.float32) / probs.astype(np.float32).sum(1, keepdims=True))
        above = None
        for token, key, row_ids, row_shares in zip(
            tokens.tolist(), transform(hidden).tolist(), ids.tolist(), shares.tolist(), strict=True
        ):
            naive.add(token, key, above, dict(zip(row_ids, row_shares, strict=True)))
            above = key
    return collector.rows(), naive


def predicted(source, known, key, token, previous=0):
    """What the kernel predicts: tokens with probabilities, key, slot."""
    key = np.ascontiguousarray(key, np.int8)
    slot = kernels.predict(known, key.__array_interface__["data"][0], previous, token)
    if slot < 0:
        return None
    tokens, probs = kernels.tokens_of(known, slot), kernels.probs_of(known, slot)
    count = int((tokens >= 0).sum())
    found = dict(zip(tokens[:count].tolist(), probs[:count].tolist(), strict=True))
    return found, source._slots[slot].tolist(), slot


def is_alike(found, expected):
    if expected is None:
        return found is None
    probs, key, cosine = expected
    assert list(found[0]) == list(probs) or np.allclose(sorted(found[0].values()), sorted(probs.values()), atol=1e-5)
    assert found[0] == pytest.approx(probs, abs=1e-5)
    assert np.abs(np.subtract(found[1], key)).max() <= 1, "an average on an edge may be rounded either way"
    return -1.001 < cosine < 1.1


def test_keys_are_whitened_directions(rng):
    hidden = (rng.normal(size=(500, SIZE)) @ rng.normal(size=(SIZE, SIZE)) + 3).astype(np.float32)
    transform = KeyTransform.fitted(hidden, dims=4)
    moved = (hidden - transform.mean) @ transform.components
    assert np.cov(moved.T) == pytest.approx(np.eye(4), abs=0.02)
    expected = moved / np.linalg.norm(moved, axis=1, keepdims=True) * transform.length
    keys = transform(hidden)
    assert keys.dtype == np.int8 and np.abs(keys - np.clip(expected, -127, 127)).max() < 0.51


def test_stored_rows_predict_as_the_list_does(rng):
    transform = transform_of(rng)
    rows, naive = collected(rng, transform, [40, 1, 90, 7, 130])
    source = SimilarStates(rows)
    known = named(source.row(12).record)["states"]
    for key in transform(rng.normal(size=(20, SIZE)).astype(np.float32)):
        for token in range(WORDS + 2):
            assert is_alike(predicted(source, known, key, token), naive.predict(key.tolist(), token))


def test_of_a_frequent_token_rows_after_the_same_token_are_compared_and_others_evenly_spaced(rng):
    transform = transform_of(rng)
    rows, _ = collected(rng, transform, [20_000])
    source = SimilarStates(rows)
    known, listed = named(source.row(12).record)["states"], source._scratch[kernels._ROWS :].view(np.int32)
    tokens = {int(row): token for token in range(WORDS) for row in rows.order[slice(*rows.starts[token : token + 2])]}
    for previous, token in ((3, 4), (0, 0), (11, 11), (99, 5)):
        assert kernels._list_stored(known, previous, token) == kernels.STORED
        found = (-1 - listed[: kernels.STORED]).tolist()
        assert len(set(found)) == kernels.STORED and {tokens[row] for row in found} == {token}
        after_same = [row for row in found if tokens.get(row - 1) == previous]
        assert (
            after_same
            == sorted(row for row in tokens if tokens[row] == token and tokens.get(row - 1) == previous)[::-1]
        )
        others = [row for row in found if row not in after_same]
        assert len({tokens.get(row - 1) for row in others}) >= WORDS - 1, "after every other token"


def test_rows_of_the_text_are_found_too_and_the_path_is_followed(rng):
    transform = transform_of(rng)
    rows, naive = collected(rng, transform, [30])
    source = SimilarStates(rows)
    known = named(source.row(12).record)["states"]
    root, last_key = 3, None
    for size in (0, 3, 5, 1, 8):
        tokens = rng.integers(0, WORDS, size).astype(np.int32)
        parents = np.array([rng.integers(-1, i) if i else -1 for i in range(size)], np.int32)
        emitted, at = [], -1
        while (below := [i for i in range(at + 1, size) if parents[i] == at]) and rng.random() < 0.8:
            at = next(i for i in below if tokens[i] == tokens[below[0]])
            emitted.append(int(tokens[at]))
        emitted.append(int(rng.integers(0, WORDS)))
        keys = transform(rng.normal(size=(size + 1, SIZE)).astype(np.float32))
        ids, probs = top_of(rng, size + 1)
        address = kernels.remember(
            known, root, tokens, parents, np.array(emitted, np.int32), keys, ids, np.log(probs.astype(np.float32))
        )
        shares = np.rint(255 * probs.astype(np.float64) / probs.astype(np.float64).sum(1, keepdims=True))
        for i in range(size + 1):
            above = last_key if i == 0 else keys[parents[i - 1] + 1].tolist()
            token = root if i == 0 else int(tokens[i - 1])
            naive.add(token, keys[i].tolist(), above, dict(zip(ids[i].tolist(), shares[i].tolist(), strict=True)))
        last_key, root = keys[at + 1].tolist(), emitted[-1]
        assert (
            source._own_keys.reshape(-1)[address - source._own_keys.__array_interface__["data"][0] :][:SIZE].tolist()
            == last_key
        )
        for token in range(WORDS):
            found, expected = predicted(source, known, np.array(last_key), token), naive.predict(last_key, token)
            if expected is not None:
                assert found[0] == pytest.approx(expected[0], abs=0.01)


def test_a_negative_token_has_no_rows_and_gets_none(rng):
    """An expected text may hold any numbers; what lies before the arrays is neither read nor written."""
    transform = transform_of(rng)
    rows, _ = collected(rng, transform, [30])
    starts, order = (
        np.concatenate([[before], each]).astype(np.int32) for before, each in ((-1, rows.starts), (1, rows.order))
    )
    source = SimilarStates(replace(rows, starts=starts[1:], order=order[1:]))
    heads = np.zeros(WORDS + 1, np.int32)
    source._heads = heads[1:]
    known = named(source.row(12).record)["states"]
    keys = transform(rng.normal(size=(2, SIZE)).astype(np.float32))
    ids, probs = top_of(rng, 2)
    tree = np.array([-1], np.int32), np.array([-1], np.int32)
    kernels.remember(known, 3, *tree, np.array([-1, 4], np.int32), keys, ids, np.log(probs.astype(np.float32)))
    assert predicted(source, known, keys[0], -1) is None and heads.nonzero()[0].tolist() == [1 + 3]


def test_predictions_continue_from_the_average_state(rng):
    transform = transform_of(rng)
    rows, _ = collected(rng, transform, [200])
    source = SimilarStates(rows)
    record = named(source.row(12).record)
    key = np.ascontiguousarray(transform(rng.normal(size=(1, SIZE)).astype(np.float32))[0])
    cursors = np.zeros((2, source_table.CURSOR), np.int64)
    cursors[0, 0] = kernels.predict(record["states"], key.__array_interface__["data"][0], 2, 4)
    for depth in range(1, kernels.DEEPEST + 2):
        levels.advance_row(record, cursors, 0, 5, cursors, 1, 1)
        if depth > kernels.DEEPEST:
            assert cursors[1, 0] == -1, "too far from a known state"
            break
        expected, state, _ = predicted(source, record["states"], source._slots[cursors[0, 0]], 5)
        assert source._slots[cursors[1, 0]].tolist() == state
        handle, length = levels.open_row(record, cursors, 1, np.zeros((2, source_table.TAIL), np.uint64), 0, 1)
        assert 1 <= length <= 21 and levels.evidence(record, cursors, 1, handle, 1)[0] == depth + 1
        tokens, probs = np.zeros(32, np.int32), np.zeros(32, np.float32)
        n = levels.read_level(record, cursors, 1, handle, 1, 0.0, 0.0, tokens, tokens.copy(), probs, 1)
        assert dict(zip(tokens[:n].tolist(), probs[:n].tolist(), strict=True)) == pytest.approx(expected)
        cursors[0] = cursors[1]


def test_joined_rows_are_those_of_all_and_the_newest_are_kept(rng, monkeypatch):
    transform = transform_of(rng)
    (first, _), (second, _) = collected(rng, transform, [30, 20]), collected(rng, transform, [25])
    joined = StateRows.joined([first, second])
    assert joined.keys.tolist() == [*first.keys.tolist(), *second.keys.tolist()]
    assert len(joined.order) == 48 + 24 and sorted(joined.order.tolist())[-1] == 74
    for token in range(WORDS):
        mine = [part.order[slice(*part.starts[token : token + 2])] if token + 1 < len(part.starts) else part.order[:0]
                for part in (first, second)]  # fmt: skip
        both = slice(*joined.starts[token : token + 2])
        assert sorted(joined.order[both].tolist()) == [*sorted(mine[0].tolist()), *sorted((mine[1] + 50).tolist())]
        pairs = [(before, -row) for before, row in zip(joined.previous[both], joined.order[both], strict=True)]
        assert pairs == sorted(pairs), "by the token before, the newest first"
    assert StateRows.joined([first, second, first]).keys.tolist() == [*second.keys.tolist(), *first.keys.tolist()], (
        "each text once"
    )
    other, _ = collected(rng, transform_of(rng), [10])
    assert len(StateRows.joined([other, first]).keys) == 50, "keys of another transform cannot be compared"
    monkeypatch.setattr("retrieve_spec.datastore.state_rows.MOST_ROWS", 50)
    kept = StateRows.joined([first, second])
    assert kept.keys.tolist() == joined.keys[30:].tolist() and len(kept.order) == 19 + 24
    back = StateRows.of_arrays({name: array.reshape(-1) for name, array in kept.arrays().items()})
    assert back.keys.tolist() == kept.keys.tolist() and back.order.tolist() == kept.order.tolist()


def test_too_few_states_make_no_rows(rng):
    ids, probs = top_of(rng, 5)
    collector = StateCollector(None)
    collector.add(np.arange(5, dtype=np.int32), rng.normal(size=(5, SIZE)).astype(np.float32), ids, probs)
    assert collector.rows() is None


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("keys", lambda array: array[:-1]),
        ("shares", lambda array: array[:-8]),
        ("mean", lambda array: array[:-1]),
        ("previous", lambda array: array[1:]),
        ("order", lambda array: array * 0),
        ("order", lambda array: array + 25),
        ("starts", lambda array: array + 1),
        ("starts", lambda array: array[::-1]),
        ("starts", lambda array: np.array([0, 2**31 - 1, -(2**31), array[-1]], np.int32)),
    ],
)
def test_arrays_that_contradict_one_another_are_refused(rng, name, damaged):
    rows, _ = collected(rng, transform_of(rng), [25])
    arrays = {other: array.reshape(-1) for other, array in rows.arrays().items()}
    with pytest.raises(StoreCorruptError, match="state rows"):
        StateRows.of_arrays(arrays | {name: damaged(arrays[name])})
