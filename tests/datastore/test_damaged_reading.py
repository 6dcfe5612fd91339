"""Stores whose bytes changed behind their checksums: reading them neither crashes nor leaves the vocabulary."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from retrieve_spec.config import SpeculationConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, remove_documents, retokenize_datastore
from retrieve_spec.datastore.search import search_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.datastore.verify import verify_datastore
from retrieve_spec.drafting.drafter import Budget, VerifiedPass
from retrieve_spec.drafting.presets import build_drafter
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.source_table import ORIGIN_BITS

ARRAYS = (
    "tokens",
    "suffix_array",
    "top",
    "vocabulary",
    "documents",
    "ngram_slots",
    "ngram_succ_tokens",
    "ngram_succ_counts",
)
PRESETS = ("auto", "rest", "sam", "hierarchy", "adaptive-trigram")


@pytest.fixture
def store(tokenizer, texts, tmp_path):
    path = tmp_path / "s"
    build_datastore(path, str(texts), tokenizer)
    return path


def damage(store, name, content):
    (path,) = store.glob(f"segments/*/{name}.bin")
    size = path.stat().st_size
    path.write_bytes((content * (size // len(content) + 1))[:size])


def draft(store, preset, ids):
    """Draft along a text that the store knows; every token must be one of the vocabulary, every origin a place."""
    drafter = build_drafter(SpeculationConfig(draft=preset), datastores=[store])
    drafter.start(ids[:20])
    for at in range(20, 40, 2):
        tree = drafter.propose(Budget(16, 16))
        assert (tree.token_ids < store.manifest.vocabulary).all()
        for origin in tree.origin[tree.origin >= 0].tolist():
            store.document_at(origin >> ORIGIN_BITS, origin & ((1 << ORIGIN_BITS) - 1))
        drafter.observe(VerifiedPass(tree, np.empty(0, np.int32), ids[at : at + 2]))


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("seed", [0, 1, None])
def test_reading_a_damaged_array_ends_with_a_draft_or_an_error_that_says_so(store, tokenizer, name, seed):
    text = "the cat sat on the mat. the cat ran to the mat and"
    content = b"\xff" if seed is None else np.random.default_rng(seed).bytes(4099)
    damage(store, name, content)
    with pytest.raises(StoreCorruptError):
        verify_datastore(store)
    try:
        opened = open_datastore(store)
    except StoreCorruptError:
        assert name == "vocabulary"
        return
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    for preset in PRESETS:
        with suppress(StoreCorruptError):
            draft(opened, preset, ids)
    with suppress(StoreCorruptError):
        search_datastore(opened, text)


@pytest.mark.parametrize("name", ["tokens", "documents", "suffix_array", "document_paths", "document_hashes"])
def test_changes_do_not_put_new_checksums_on_damage(store, tokenizer, tmp_path, name):
    (path,) = store.glob(f"segments/*/{name}.bin")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 1] = [whole[len(whole) // 2] ^ 1]
    path.write_bytes(whole)
    before = (store / "manifest.json").read_bytes()
    removal = () if name in ("tokens", "suffix_array") else (lambda: remove_documents(store, ["b.txt"]),)
    for change in (  # a removal writes nothing of these two anew
        *removal,
        lambda: compact_datastore(store),
        lambda: retokenize_datastore(store, tokenizer, workers=1),
    ):
        with pytest.raises(StoreCorruptError):
            change()
    assert (store / "manifest.json").read_bytes() == before
    merge_datastores(tmp_path / "merged", [store])  # takes files over under the checksums that they had
    with pytest.raises(StoreCorruptError):
        verify_datastore(tmp_path / "merged")
