"""Bigrams: the model's own answers behind each token, drafted where a text has shown nothing, learned bit by bit."""

import numpy as np
import pytest
import torch
from batch_rows import small_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import retrieve_spec as rs
from retrieve_spec.drafting.drafter import Budget
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.engine import first_passes
from retrieve_spec.engine.first_passes import learn_bigrams
from retrieve_spec.sources import SOURCE_NAMES
from retrieve_spec.sources.recycling import Bigrams


def entries(vocabulary, rows):
    found = np.full((vocabulary, 4), -1, np.int32)
    for token, top in rows.items():
        found[token, :2] = top
        found[token, 2:] = np.array([2.0, 1.0], np.float32).view(np.int32)
    return found


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a model that is asked as long as it takes."""
    monkeypatch.setenv("RETRIEVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(first_passes, "ASKED_SECONDS", 60.0)
    return tmp_path / "bigrams"


@pytest.fixture
def small():
    """A model with the vocabulary of the bundled one, which is asked in no time."""
    return small_model("llama", vocab_size=8192)


def known(model):
    return model.speculation.drafters.bigrams.known


def test_first_draft_of_a_text_needs_no_text():
    drafter = MixtureDrafter(bigrams=Bigrams(entries(50, {5: (7, 9), 7: (30, 31), 9: (12, 13)})))
    drafter.start(np.array([1, 2, 5], np.int32))
    tree = drafter.propose(Budget(6, 2))
    paths = {(int(tree.parent[i]) < 0, int(tree.token_ids[i])) for i in range(len(tree))}
    assert {(True, 7), (True, 9), (False, 30)} <= paths
    assert {SOURCE_NAMES[number] for number in tree.source} == {"bigrams"}


def test_entries_are_what_the_model_says(reference_model, reference_tokenizer, cache, monkeypatch):
    monkeypatch.setattr(first_passes, "ASKED_SECONDS", 600.0)
    rs.accelerate(reference_model, tokenizer=reference_tokenizer)
    found = reference_model.speculation.drafters.bigrams
    rs.restore(reference_model)
    assert len(found.known) == len(found.entries)
    end = reference_tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    tokens = torch.arange(0, len(found.entries), 101)
    lines = torch.stack([torch.full_like(tokens, end), torch.full_like(tokens, end), tokens], 1)
    with torch.no_grad():
        best = reference_model(lines).logits[:, -1].topk(8)
    logits = found.entries[tokens.numpy(), 8:].view(np.float32)
    np.testing.assert_allclose(logits, best.values.numpy(), atol=1e-3)
    assert (found.entries[tokens.numpy(), 0] == best.indices[:, 0].numpy()).mean() > 0.98  # but near ties


def test_idle_moments_are_used_until_all_tokens_are_known(small, reference_tokenizer, cache, monkeypatch):
    monkeypatch.setattr(first_passes, "ASKED_SECONDS", 0.0)
    monkeypatch.setattr(first_passes, "ASKED_AGAIN_SECONDS", 0.0)
    rs.accelerate(small, tokenizer=reference_tokenizer)
    drafter = MixtureDrafter(bigrams=small.speculation.drafters.bigrams)
    assert not len(known(small))
    passes = iter([True, True, False])
    learn_bigrams(small.speculation, lambda: next(passes))  # once to begin, once for a pass
    few = known(small)
    assert 0 < len(few) < 8192
    drafter.start(few[:1])
    assert len(drafter.propose(Budget(2, 1))) == 2  # from what was learned after it was made
    rs.accelerate(small, tokenizer=reference_tokenizer)
    assert (known(small) == few).all()  # kept
    learn_bigrams(small.speculation, lambda: True)
    assert len(known(small)) == 8192
    once = small.speculation.drafters.bigrams.entries.copy()
    rs.accelerate(small, tokenizer=reference_tokenizer)
    assert (small.speculation.drafters.bigrams.entries == once).all()
    learn_bigrams(small.speculation, lambda: pytest.fail("asked for nothing"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entries: entries * 0 + 10**6,
        lambda entries: entries[:, :3],
        lambda _: b"no array",
        lambda _: b"\x93NUMPY\x01\x00\x1a\x00{'descr': '<i4', 'shape': (\n",
    ],
)
def test_a_file_that_is_another_is_learned_anew(small, reference_tokenizer, cache, monkeypatch, spoil):
    monkeypatch.setattr(first_passes, "_NEVER_KEPT", 0.0)
    rs.accelerate(small, tokenizer=reference_tokenizer)
    wanted = small.speculation.drafters.bigrams.entries
    (file,) = cache.iterdir()
    spoilt = spoil(wanted)
    file.write_bytes(spoilt) if isinstance(spoilt, bytes) else np.save(file, spoilt)
    rs.accelerate(small, tokenizer=reference_tokenizer)
    assert (small.speculation.drafters.bigrams.entries[:, 0] == wanted[:, 0]).all()


def test_a_cache_that_cannot_be_written_is_done_without(small, reference_tokenizer, cache, monkeypatch):
    monkeypatch.setattr(first_passes, "_NEVER_KEPT", 0.0)
    cache.parent.joinpath("bigrams").write_text("a file where the folder would be")
    rs.accelerate(small, tokenizer=reference_tokenizer)
    assert len(known(small))


@pytest.mark.parametrize(("options", "named"), [({}, False), ({"draft": "off"}, True), ({"draft": "sam"}, True)])
def test_models_are_not_asked_in_vain(reference_model, reference_tokenizer, cache, options, named):
    rs.accelerate(reference_model, tokenizer=reference_tokenizer if named else None, **options)
    assert reference_model.speculation.drafters.bigrams is None
    assert not cache.exists()


def test_a_tokenizer_that_fails_on_ends_of_lines_leaves_a_model_without(reference_model, cache):
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("ACGT")}))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rs.accelerate(reference_model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=letters))
    assert not len(known(reference_model))
