"""Token healing: which tokens agree with what was begun, and what of a line may be the beginning of a token."""

from __future__ import annotations

import gc
import string
import weakref

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper

from retrieve_spec.config import ServeConfig
from retrieve_spec.sampling.acceptance import ProcessorSampler
from retrieve_spec.sampling.pass_logits import read_logits
from retrieve_spec.sampling.samplers import make_sampler
from retrieve_spec.sampling.text import RowText
from retrieve_spec.server.run import assemble
from retrieve_spec.server.sampling import Beginnings
from retrieve_spec.server.text import TextCodec


@pytest.fixture(scope="module")
def beginnings(codec):
    return Beginnings(codec)


@pytest.mark.parametrize("begun", [" r", " retur", "(", "    ", "größ", "_", "zqxj", "\N{PILE OF POO}x"])
def test_tokens_agree_that_begin_a_text_or_begin_with_it(beginnings, codec, begun):
    control = {i for text, i in codec.vocab.items() if text.startswith("<|")}
    naive = set()
    for token_id in set(codec.vocab.values()) - control:
        piece = codec.tokenizer.convert_ids_to_tokens(token_id)
        said = codec.tokenizer.convert_tokens_to_string([piece])
        if "\N{REPLACEMENT CHARACTER}" not in said and said and (said.startswith(begun) or begun.startswith(said)):
            naive.add(token_id)
    agreeing = set(beginnings.agreeing(begun.encode()))
    assert len(agreeing) == len(beginnings.agreeing(begun.encode()))
    halves = {i for i in agreeing if "\N{REPLACEMENT CHARACTER}" in codec.decode([i])}
    assert agreeing - halves == naive
    assert bool(halves) == (not begun[0].isascii())
    assert not agreeing & control


def test_what_is_remembered_of_words_does_not_keep_a_model_that_was_given_up(codec):
    beginnings = Beginnings(codec)
    beginnings.agreeing(b" r")
    gone = weakref.ref(beginnings)
    del beginnings
    gc.collect()
    assert gone() is None


def test_a_processor_leaves_what_agrees_until_all_is_said(beginnings, codec):
    process = beginnings.processor(" return", 2)
    scores = torch.arange(len(codec.vocab), dtype=torch.float32)[None]
    ids = torch.tensor([[7, 7]])
    first = process(ids, scores)
    assert set(first.isfinite()[0].nonzero()[:, 0].tolist()) == set(beginnings.agreeing(b" return"))
    piece = codec.encode(" re")
    assert len(piece) == 1
    then = process(torch.tensor([[7, 7, *piece]]), scores)
    assert set(then.isfinite()[0].nonzero()[:, 0].tolist()) == set(beginnings.agreeing(b"turn"))
    said = codec.encode(" return x")
    assert torch.equal(process(torch.tensor([[7, 7, *said]]), scores), scores)


@pytest.mark.parametrize(
    ("line", "begun"),
    [("    retur", " retur"), ("self.fo", ".fo"), ("f(", "("), ("    ", "    "), ("", ""), ("x" * 100, "")],
)
def test_the_last_word_of_a_line_is_begun(beginnings, line, begun):
    assert beginnings.of(line) == begun


def test_vocabularies_that_spell_no_bytes_are_left_alone():
    backend = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    beginnings = Beginnings(TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert not beginnings.possible
    assert beginnings.of("    ab") == ""


def test_a_model_whose_vocabulary_spells_no_bytes_tries_requests_of_every_kind(tiny, caplog):
    letters = {letter: number for number, letter in enumerate(f"▁{string.printable}")}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    assemble(tiny, PreTrainedTokenizerFast(tokenizer_object=backend), "tiny", ServeConfig())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("seed", [None, 7])
def test_behind_what_was_begun_tokens_are_chosen_as_without_it(beginnings, codec, seed):
    """The guide is asked while it acts, no longer behind that; every choice is what asking it always would give."""
    prompt = codec.encode("def f(x):\n   ")
    guide, calls = beginnings.processor(" return", len(prompt)), []
    hot = LogitsProcessorList([guide] if seed is None else [guide, TemperatureLogitsWarper(1.5)])
    asked = make_sampler(hot, seed)
    always = ProcessorSampler(hot, seed)
    text = RowText(torch.tensor([prompt]))
    torch.manual_seed(1)
    for _ in range(12):
        logits = read_logits(torch.randn(1, len(codec.vocab)), 4)
        token = always.choose(logits, 0, text)
        assert asked.choose(logits, 0, text) == token
        assert asked.noise_at(text) == always.noise_at(text)

        calls.append(guide.acts_on(text.ids))
        assert torch.equal(asked.log_prob(logits, 0, text, token), always.log_prob(logits, 0, text, token)) or seed
        text.append(token)
    assert calls[0] and not calls[-1]
    assert codec.decode(text.ids[len(prompt) :].tolist()).startswith(" return")
