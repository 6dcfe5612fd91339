import pytest
from byte_tokenizers import byte_tokenizer
from test_build import contents
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import (
    compact_datastore,
    merge_datastores,
    remove_documents,
    retokenize_datastore,
)
from retrieve_spec.datastore.inspection import search_datastore, verify_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import BuildError, TokenizerMismatchError


@pytest.fixture
def store(tokenizer, texts, records, tmp_path):
    path = tmp_path / "s"
    build_datastore(path, Source(str(texts), "MIT"), tokenizer)
    add_documents(path, Source(str(records), "GPL-3.0", field="output"))
    return path


def test_remove_everything(store, records):
    remove_documents(store, ["**"])
    assert contents(store) == {}
    assert search_datastore(open_datastore(store), "cat").matched == 0
    verify_datastore(store)
    add_documents(store, Source(str(records), field="output"))  # no duplicates: they were removed
    assert len(contents(store)) == 5
    verify_datastore(store)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"documents": ["nothing.txt"]}, "documents that match, got none"),
        ({}, "neither paths nor a condition"),
        ({"where": "no such column = 1"}, "SQL condition"),
        *(
            ({"where": where}, "SQL condition")
            for where in ("path = '\udc80'", "\0", "tokens >", "1 = 1; drop table documents")
        ),
    ],
)
def test_remove_errors(store, arguments, message):
    with pytest.raises(BuildError, match=message):
        remove_documents(store, **arguments)
    verify_datastore(store)


def test_compact(store):
    remove_documents(store, ["a.txt"])
    kept = contents(store)
    before = open_datastore(store)
    report = compact_datastore(store)
    assert (report.segments, report.documents) == (1, 8)
    assert contents(store) == kept
    after = open_datastore(store)
    assert sum(len(s.tokens) for s in after.segments) == after.manifest.tokens + 8
    verify_datastore(store)
    # A reader that opened the store before still has its arrays and its documents.
    assert before.document_at(0, 100).path == "b.txt"
    assert search_datastore(before, "number 4").matched == 8
    assert [p.name for p in (store / "segments").iterdir()] == [after.segments[0].name]


def test_merge_keeps_a_text_once(store, texts, tokenizer, tmp_path):
    (texts / "new.txt").write_text("something new")
    build_datastore(tmp_path / "t", str(texts), tokenizer)
    report = merge_datastores(tmp_path / "out", [store, tmp_path / "t"])
    assert report.skipped_by_reason == {"duplicate": 4}
    assert contents(tmp_path / "out") == contents(store) | contents(tmp_path / "t")
    verify_datastore(tmp_path / "out")
    with pytest.raises(BuildError, match="there is one"):
        merge_datastores(tmp_path / "out", [store])


def test_merge_refuses_another_tokenizer(store, texts, tmp_path):
    build_datastore(tmp_path / "t", str(texts), byte_tokenizer(offset=5))
    with pytest.raises(TokenizerMismatchError):
        merge_datastores(tmp_path / "out", [store, tmp_path / "t"])
    with pytest.raises(BuildError, match="at least one store"):
        merge_datastores(tmp_path / "out", [])


def test_retokenize(store):
    kept = contents(store)
    other = byte_tokenizer(offset=70_000)
    before = open_datastore(store)
    retokenize_datastore(store, other)
    opened = open_datastore(store, tokenizer=other)
    assert contents(store) == kept
    assert opened.segments[0].to_global[1:].min() >= 70_000
    assert before.segments[0].to_global.max() < 70_000
    assert len(list(store.glob("tokenizer-*.json"))) == 1
    verify_datastore(store)


def test_what_another_tokenizer_says_nothing_of_is_left_out(tmp_path):
    for name, text in (("a.txt", "hello world"), ("b.txt", "\u200b"), ("c.txt", "world")):
        (tmp_path / name).write_text(text)
    build_datastore(tmp_path / "s", [str(tmp_path / f"{name}.txt") for name in "abc"], byte_tokenizer())
    other = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    other.normalizer, other.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.Whitespace()
    report = retokenize_datastore(tmp_path / "s", other)
    assert (report.documents, report.skipped) == (2, (("b.txt", str(tmp_path / "b.txt"), "empty"),))
    verify_datastore(tmp_path / "s")
    remove_documents(tmp_path / "s", ["a.txt", "c.txt"])


def test_ngram_only_stores_say_what_they_cannot_do(tokenizer, texts, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer, config=StoreConfig(index="ngram"))
    for verb in (
        lambda: remove_documents(tmp_path / "s", ["a.txt"]),
        lambda: compact_datastore(tmp_path / "s"),
        lambda: retokenize_datastore(tmp_path / "s", tokenizer),
    ):
        with pytest.raises(BuildError, match="n-grams only"):
            verb()
    verify_datastore(tmp_path / "s")


def test_ngram_only_stores_grow_by_segments(tokenizer, texts, tmp_path):
    build_datastore(tmp_path / "s", str(texts), tokenizer, config=StoreConfig(index="ngram"))
    (tmp_path / "more.txt").write_text("the cat met the dog")
    report = add_documents(tmp_path / "s", [str(tmp_path / "more.txt"), str(texts)])
    assert (report.documents, report.segments, report.skipped_by_reason) == (1, 2, {"duplicate": 4})
    assert [len(segment.tokens) for segment in open_datastore(tmp_path / "s").segments] == [0, 0]
    assert len(open_datastore(tmp_path / "s").ngrams) == 2
    verify_datastore(tmp_path / "s")
    assert remove_documents(tmp_path / "s", ["more.txt"]).segments == 1  # a whole segment
    verify_datastore(tmp_path / "s")
