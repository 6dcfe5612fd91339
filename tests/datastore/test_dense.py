"""Dense indexes: windows, keys, what a change makes of them, and which model may ask."""

import json
import os

import faiss
import numpy as np
import pytest
import torch
from dense_models import save_model
from hypothesis import given
from hypothesis import strategies as st

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore import dense as indexes
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.dense import build_index, check_model, model_fingerprint, nearest, open_index
from retrieve_spec.datastore.dense_build import HiddenStates, choose_windows, fit_transform, windows_of
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, remove_documents
from retrieve_spec.datastore.inspection import verify_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import (
    BuildError,
    ConfigError,
    ModelMismatchError,
    ModelNotFoundError,
    TokenizerMismatchError,
)
from retrieve_spec.reference_model import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def dense(model, **options):
    options = {"dims": 8, "window": 32, "overlap": 8, **options}
    return StoreConfig(dense=DenseConfig(str(model), **options))


@pytest.fixture
def store(model, tokenizer, texts, tmp_path):
    path = tmp_path / "s"
    build_datastore(path, str(texts), tokenizer, config=dense(model))
    return path


def states_of(model, store, number=0, layer="last"):
    """Hidden states at every token of the documents of a segment, each document read on its own in one pass."""
    segment = open_datastore(store).segments[number]
    encoder = HiddenStates(load_model(model)[0], layer)
    rows = [segment.text_ids(i) for i in range(len(segment.document_starts) - 1)]
    return segment, list(zip(segment.document_starts.tolist(), encoder(rows), strict=False))


def test_every_position_that_something_follows_has_a_key(store):
    (segment,) = open_datastore(store).segments
    tokens = np.asarray(segment.tokens)
    expected = np.flatnonzero((tokens != 0) & (np.append(tokens[1:], 0) != 0))
    assert segment.dense.count == len(expected)
    assert np.array_equal(segment.dense.positions, expected)
    assert verify_datastore(store)["files"] > 0


@pytest.mark.parametrize("layer", ["last", 1])
def test_keys_are_hidden_states_of_the_layer(model, tokenizer, texts, tmp_path, layer):
    build_datastore(tmp_path / "s", str(texts), tokenizer, config=dense(model, layer=layer, window=128))
    segment, documents = states_of(model, tmp_path / "s", layer=layer)
    loaded = load_model(model)[0]
    at = {start + i: state for start, states in documents for i, state in enumerate(states)}
    for start, states in documents:
        ids = torch.tensor(segment.text_ids(segment.document_of(start)).astype(np.int64))[None]
        with torch.inference_mode():
            out = loaded(ids, output_hidden_states=True).hidden_states[-1 if layer == "last" else layer][0].numpy()
        assert np.allclose(out, states, atol=1e-5)
        similarity, positions = segment.dense.search(states[:-1], 1)
        assert np.allclose(similarity, 1, atol=1e-4)
        found = np.stack([at[position] for position in positions[:, 0]])  # the same state may stand elsewhere, too
        products = np.linalg.norm(found, axis=1) * np.linalg.norm(states[:-1], axis=1)
        assert np.allclose((found * states[:-1]).sum(axis=1) / products, 1, atol=1e-4)
        assert segment.dense.layer == layer


def test_removed_documents_are_not_found(model, store):
    segment, documents = states_of(model, store)
    remove_documents(store, ["a.txt"])
    verify_datastore(store)
    (after,) = open_datastore(store).segments
    gone = after.removed[0]
    start, states = documents[gone]
    assert segment.dense.search(states[:-1], 1)[1].min() >= 0
    _, positions = after.dense.search(states[:-1], 200)
    inside = (positions >= start) & (positions < start + len(states))
    assert not inside.any()
    left = segment.dense.count - (len(states) - 1)
    assert ((positions >= 0).sum(1) == min(200, left)).all()
    assert (np.diff((positions >= 0).astype(int), axis=1) <= 0).all()
    compact_datastore(store)
    verify_datastore(store)
    (compacted,) = open_datastore(store).segments
    assert compacted.dense.count == left


def test_added_documents_share_the_transform(store, records):
    add_documents(store, Source(str(records), field="output"))
    verify_datastore(store)
    opened = open_datastore(store)
    assert [number for number, _ in opened.dense] == [0, 1]
    first, second = (index.transform for _, index in opened.dense)
    assert np.array_equal(first.components, second.components)


def test_merged_stores_are_embedded_and_must_agree(model, store, tokenizer, records, tmp_path):
    source = Source(str(records), field="output")
    build_datastore(tmp_path / "plain", source, tokenizer)
    build_datastore(tmp_path / "other", source, tokenizer, config=dense(model, layer=1))
    merge_datastores(tmp_path / "m", [tmp_path / "plain", store])
    verify_datastore(tmp_path / "m")
    merged = open_datastore(tmp_path / "m")
    assert sum(index.count for _, index in merged.dense) > open_datastore(store).dense[0][1].count
    with pytest.raises(BuildError, match="layer 1"):
        merge_datastores(tmp_path / "n", [store, tmp_path / "other"])


def test_fingerprints_tell_models_apart_and_not_dtypes(model, tmp_path):
    fingerprint = model_fingerprint(load_model(model)[0])
    assert fingerprint.startswith("sha256:")
    assert model_fingerprint(load_model(model, dtype="bfloat16")[0]) == fingerprint
    assert model_fingerprint(load_model(save_model(tmp_path / "other", seed=1))[0]) != fingerprint


def test_weights_made_of_other_tensors_have_a_fingerprint(model):
    """As those that torchao quantises: what they are made of is not looked at."""
    base, _ = load_model(model)
    before, weight = model_fingerprint(base), base.model.layers[0].mlp.up_proj
    weight.weight = torch.nn.Parameter(weight.weight.detach().to_sparse(), requires_grad=False)
    assert model_fingerprint(base) != before


def test_another_model_is_an_error_naming_both(model, store, tmp_path):
    record = open_datastore(store).manifest.dense
    other = save_model(tmp_path / "other", seed=1)
    wide = save_model(tmp_path / "wide", hidden=32)
    check_model(record, load_model(model)[0])
    for path, size in ((other, 16), (wide, 32)):
        with pytest.raises(ModelMismatchError, match=f"hidden size {size}") as caught:
            check_model(record, load_model(path)[0])
        assert model in caught.value.expected and path in caught.value.got
    with pytest.raises(ModelMismatchError, match="16 numbers"):
        open_datastore(store).dense[0][1].search(np.zeros((1, 32), np.float32), 1)


def test_hidden_states_that_are_not_finite(store, tmp_path, model, tokenizer, texts):
    states = np.full((1, 16), np.nan, np.float32)
    with pytest.raises(ConfigError, match="finite"):
        open_datastore(store).dense[0][1].search(states, 1)
    broken = load_model(model)[0]
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    broken.save_pretrained(tmp_path / "nan")
    load_model(model)[1].save_pretrained(tmp_path / "nan")
    with pytest.raises(BuildError, match="NaN"):
        build_datastore(tmp_path / "s2", str(texts), tokenizer, config=dense(str(tmp_path / "nan")))


def test_from_the_command_line(model, texts, command, tmp_path):
    options = ("--tokenizer", model, "--dense", model, "--dims", 8, "--index", "exact")
    code, out, err = command("build", tmp_path / "s", texts, *options, "--json")
    assert code == 0, err
    report = json.loads(out)["dense"]
    assert report["vectors"] == report["positions"] > 0
    assert "layer last, 8 dims" in command("info", tmp_path / "s")[1]
    assert command("verify", tmp_path / "s")[0] == 0


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        ("nothing", {}, ModelNotFoundError),
        ("reference", {}, TokenizerMismatchError),
        ("model", {"dims": 17}, ConfigError),
        ("model", {"layer": 3}, ConfigError),
    ],
)
def test_a_wrong_model_is_found_before_any_text_is_read(texts, tokenizer, tmp_path, model, options, error):
    save_model(tmp_path / "model")
    name = model if model == "reference" else tmp_path / model
    with pytest.raises(error):
        build_datastore(tmp_path / "s", str(texts), tokenizer, config=dense(name, **options))
    assert not (tmp_path / "s").exists()  # nothing to resume, nothing in the way of the next attempt


def test_a_model_that_is_gone_stops_a_change_before_it_begins(texts, records, tokenizer, tmp_path):
    save_model(tmp_path / "model")
    store = tmp_path / "s"
    build_datastore(store, str(texts), tokenizer, config=dense(tmp_path / "model"))
    os.rename(tmp_path / "model", tmp_path / "moved")
    for change in (lambda: add_documents(store, str(records)), lambda: compact_datastore(store)):
        with pytest.raises(ModelNotFoundError):
            change()
        assert not (store / "work").exists()
    add_documents(store, str(texts / "a.txt"), config=dense(tmp_path / "moved"))


def test_a_model_named_by_a_relative_path_serves_from_every_folder(texts, tokenizer, tmp_path, monkeypatch):
    save_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    build_datastore("s", "texts/a.txt", tokenizer, config=dense("model"))
    monkeypatch.chdir(texts)
    add_documents(tmp_path / "s", "b.txt")
    assert len(open_datastore(tmp_path / "s").dense) == 2


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(lengths=LENGTHS, size=st.integers(2, 20), data=st.data())
def test_windows_cover_every_position_once_with_context(lengths, size, data):
    overlap = data.draw(st.integers(0, size // 2))
    removed = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    starts = np.cumsum([0, *(n + 1 for n in lengths)]).astype(np.uint32)
    windows = windows_of(starts, sorted(removed), size, overlap)
    covered = np.zeros(int(starts[-1]), np.int64)
    for start, stop, first, end in windows.tolist():
        document = int(np.searchsorted(starts, start, side="right")) - 1
        assert starts[document] <= start <= first < end <= stop <= starts[document + 1] - 1
        assert stop - start <= size
        assert first - start >= overlap or start == starts[document]
        covered[first:end] += 1
    expected = np.zeros_like(covered)
    for number, length in enumerate(lengths):
        if number not in removed:
            expected[starts[number] : starts[number] + length - 1] = 1
    assert np.array_equal(covered, expected)


@given(lengths=LENGTHS, most=st.integers(0, 60))
def test_chosen_positions_are_those_of_windows_up_to_a_limit(lengths, most):
    starts = np.cumsum([0, *(n + 1 for n in lengths)]).astype(np.uint32)
    windows = windows_of(starts, (), 7, 2)
    chosen, taken = choose_windows(windows, int(starts[-1]), most)
    possible = np.zeros(len(taken), np.bool_)
    for _, _, first, end in windows.tolist():
        possible[first:end] = True
    assert not (taken & ~possible).any()
    assert taken.sum() == min(most or possible.sum(), possible.sum())
    assert {tuple(w) for w in chosen.tolist()} <= {tuple(w) for w in windows.tolist()}


def test_transform_is_standardised_principal_components():
    random = np.random.default_rng(0)
    states = (random.normal(size=(500, 6)) @ random.normal(size=(6, 6)) * [1, 5, 1, 1, 9, 1] + 100).astype(np.float32)
    states[:, 3] = 7  # never varies
    transform = fit_transform(iter(np.split(states, 5)), 6, 3)
    assert np.allclose(transform.mean, states.mean(0), atol=1e-3)
    assert np.allclose(transform.components.T @ transform.components, np.eye(3), atol=1e-5)
    scores = (states - states.mean(0)) / np.where(states.std(0) > 1e-6, states.std(0), 1)
    _, _, axes = np.linalg.svd(scores, full_matrices=False)
    assert np.allclose(np.abs(np.sum(axes[:3].T * transform.components, 0)), 1, atol=1e-3)
    keys = transform(states)
    expected = scores @ transform.components
    assert np.allclose(keys, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-3)


@pytest.fixture(scope="module")
def keys():
    """Keys in clusters, as those of hidden states are."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(80, 32))
    found = (centres[random.integers(0, 80, 4000)] + 0.4 * random.normal(size=(4000, 32))).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@pytest.mark.parametrize(("flat_below", "least"), [(1 << 20, 1.0), (4000, 0.85)])
def test_indexes_find_what_exact_search_finds(keys, flat_below, least, monkeypatch, capfd):
    monkeypatch.setattr(indexes, "FLAT_BELOW", flat_below)
    index = build_index(keys)
    assert capfd.readouterr() == ("", "")  # FAISS prints of few keys to train with
    assert isinstance(index, faiss.IndexFlat) or index.code_size + index.refine_pq.code_size <= 40
    opened = open_index(faiss.serialize_index(index))
    similarity, found = nearest(opened, keys[:50], 10)
    assert similarity.shape == found.shape == (50, 10)
    assert (found[:, 0] == np.arange(50)).mean() > 0.9
    best = np.argsort(-keys[:50] @ keys.T, axis=1)[:, :10]
    assert np.mean([len(np.intersect1d(*rows)) / 10 for rows in zip(best, found, strict=True)]) >= least
    exact = np.einsum("qkd,qd->qk", keys[found], keys[:50])
    assert np.abs(exact - similarity).max() < 0.1
    assert (np.diff(similarity, axis=1) <= 1e-6).all()
