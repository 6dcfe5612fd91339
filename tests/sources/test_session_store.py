"""Sessions saved into a store and begun from one: what is remembered, in which order, and what is refused."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import retrieve_spec as rs
from retrieve_spec.errors import BuildError, ConfigError, TokenizerMismatchError
from retrieve_spec.sources.session import SessionMemory
from retrieve_spec.sources.session_store import load_session, save_session

TEXTS = ["def first(value):\n    return value + 1\n", "class Second:\n    pass\n", "third = [1, 2, 3]\n"]


@pytest.fixture
def session(reference_tokenizer):
    memory = SessionMemory(1000)
    for text in TEXTS:
        memory.remember(np.array(reference_tokenizer(text, add_special_tokens=False).input_ids, np.int32))
    return memory


def test_a_session_comes_back_from_a_store(session, reference_tokenizer, tmp_path):
    save_session(session, tmp_path / "s", reference_tokenizer)
    other = SessionMemory(1000)
    tokens = load_session(other, rs.open_datastore(tmp_path / "s"))
    assert [text.tolist() for text in other.texts] == [text.tolist() for text in session.texts]
    assert tokens == sum(map(len, session.texts))
    text = session.texts[1][:4]
    assert [a.follow(text) for a in other.automata] == [a.follow(text) for a in session.automata]


def test_saving_again_adds_only_what_is_new(session, reference_tokenizer, tmp_path):
    save_session(session, tmp_path / "s", reference_tokenizer)
    session.remember(np.array(reference_tokenizer("fourth = 4\n", add_special_tokens=False).input_ids, np.int32))
    save_session(session, tmp_path / "s", reference_tokenizer)
    store = rs.open_datastore(tmp_path / "s")
    assert store.manifest.documents == 4
    assert [len(segment.document_starts) - 1 for segment in store.segments] == [3, 1]


def test_a_first_save_that_failed_does_not_stop_the_next(session, reference_tokenizer, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("retrieve_spec.datastore.build.write_segment", full)
        with pytest.raises(BuildError, match="No space left"):
            save_session(session, tmp_path / "s", reference_tokenizer)
    save_session(session, tmp_path / "s", reference_tokenizer)
    assert rs.open_datastore(tmp_path / "s").manifest.documents == 3


def test_a_small_session_takes_the_newest(session, reference_tokenizer, tmp_path):
    save_session(session, tmp_path / "s", reference_tokenizer)
    last, second = session.texts[2], session.texts[1]
    small = SessionMemory(2 * (len(last) + len(second)))
    load_session(small, rs.open_datastore(tmp_path / "s"))
    assert [text.tolist() for text in small.texts] == [second.tolist(), last.tolist()]


def test_forgotten_texts_are_not_saved(reference_tokenizer):
    memory = SessionMemory(20)
    for start in range(0, 60, 10):
        memory.remember(np.arange(start, start + 10, dtype=np.int32))
    assert [text[0] for text in memory.texts] == [40, 50]


def test_nothing_to_save_and_wrong_stores_are_said(session, reference_tokenizer, tmp_path, reference_model):
    with pytest.raises(BuildError, match="session=True"):
        save_session(SessionMemory(), tmp_path / "s", reference_tokenizer)
    save_session(session, tmp_path / "s", reference_tokenizer)
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(TokenizerMismatchError):
        save_session(session, tmp_path / "s", other)
    model = rs.accelerate(reference_model, tokenizer=reference_tokenizer, nodes=4, recorded_pass="off")
    with pytest.raises(ConfigError, match="session=True"):
        model.speculation.save_session(tmp_path / "s")
    rs.restore(model)


def test_a_model_begins_where_another_process_ended(reference_model, reference_tokenizer, tmp_path):
    prompt = reference_tokenizer("def parse_header(line):\n", return_tensors="pt").input_ids
    options = {"tokenizer": reference_tokenizer, "session": True, "nodes": 8, "recorded_pass": "off"}
    model = rs.accelerate(reference_model, **options)
    first = model.generate(prompt, max_new_tokens=40, do_sample=False)
    cold = model.speculation.last.passes
    model.speculation.save_session(tmp_path / "s")
    model = rs.accelerate(reference_model, **options)
    model.speculation.load_session(tmp_path / "s")
    assert model.generate(prompt, max_new_tokens=40, do_sample=False).tolist() == first.tolist()
    assert model.speculation.last.passes < cold
    rs.restore(model)
