"""Edits: nothing that only removed documents said is found or drafted, whatever the index; what is joined or rewritten
says what it said."""

from collections import Counter

import naive_index as naive
import pytest
from byte_tokenizers import byte_tokenizer
from folders import flip, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_build import contents
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import edit
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
from retrieve_spec.errors import BuildError, StoreCorruptError, TokenizerMismatchError


@pytest.fixture
def store(tokenizer, texts, records, tmp_path):
    path = tmp_path / "s"
    build_datastore(path, Source(str(texts), "MIT"), tokenizer)
    add_documents(path, Source(str(records), "GPL-3.0", field="output"))
    return path


def test_documents_go_by_the_path_that_they_were_built_from(texts, records, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = write(tmp_path / "texts2", {"a.txt": "of another folder"})
    store = tmp_path / "s"
    build_datastore(store, [texts.name, str(other), Source(str(records), field="output")], tokenizer)
    before = set(contents(store))
    remove_documents(store, ["texts/sub"])
    assert set(contents(store)) == before - {"sub/d.txt"}
    remove_documents(store, [str(texts / "c.py"), records.name])
    assert set(contents(store)) == {"a.txt", "b.txt"}
    remove_documents(store, [texts.name])
    assert contents(store) == {"a.txt": "of another folder"}
    with pytest.raises(BuildError, match="documents that match"):
        remove_documents(store, ["texts"])
    remove_documents(store, [f"{other}/"])
    assert contents(store) == {}


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
    write(tmp_path, {"a.txt": "hello world", "b.txt": "\u200b", "c.txt": "world"})
    build_datastore(tmp_path / "s", [str(tmp_path / f"{name}.txt") for name in "abc"], byte_tokenizer())
    other = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    other.normalizer, other.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.Whitespace()
    report = retokenize_datastore(tmp_path / "s", other)
    assert (report.documents, report.skipped) == (2, (("b.txt", str(tmp_path / "b.txt"), "empty"),))
    verify_datastore(tmp_path / "s")
    remove_documents(tmp_path / "s", ["a.txt", "c.txt"])


def test_ngram_only_stores_grow_by_segments_and_say_what_they_cannot_do(tokenizer, texts, tmp_path):
    store = tmp_path / "s"
    build_datastore(store, str(texts), tokenizer, config=StoreConfig(index="ngram"))
    for verb in (
        lambda: remove_documents(store, ["a.txt"]),
        lambda: compact_datastore(store),
        lambda: retokenize_datastore(store, tokenizer),
    ):
        with pytest.raises(BuildError, match="n-grams only"):
            verb()
    write(tmp_path, {"more.txt": "the cat met the dog"})
    report = add_documents(store, [str(tmp_path / "more.txt"), str(texts)])
    assert (report.documents, report.segments, report.skipped_by_reason) == (1, 2, {"duplicate": 4})
    assert [len(segment.tokens) for segment in open_datastore(store).segments] == [0, 0]
    assert len(open_datastore(store).ngrams) == 2
    verify_datastore(store)
    assert remove_documents(store, ["more.txt"]).segments == 1  # a whole segment
    verify_datastore(store)


TEXTS = st.lists(st.text("abc", min_size=1, max_size=25), min_size=2, max_size=7, unique=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A new folder for every example."""
    return lambda: tmp_path_factory.mktemp("example")


def build(folder, tokenizer, texts):
    write(folder / "texts", {f"{i}.txt": text for i, text in enumerate(texts)})
    build_datastore(folder / "s", str(folder / "texts"), tokenizer, workers=1)
    return folder / "s"


@settings(max_examples=20)
@given(TEXTS, st.data())
@pytest.mark.parametrize("most", [1 << 17, 0])
def test_only_what_is_left_is_found_and_drafted(places, tokenizer, most, texts, data):
    store = build(places(), tokenizer, texts)
    gone = data.draw(st.sets(st.integers(0, len(texts) - 1), min_size=1, max_size=len(texts) - 1))
    left = [text for i, text in enumerate(texts) if i not in gone]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edit, "MOST_TOKENS", most)
        for i in sorted(gone, reverse=data.draw(st.booleans())):
            remove_documents(store, [f"{i}.txt"])
    verify_datastore(store)
    opened = open_datastore(store)
    assert sorted(contents(store).values()) == sorted(left)
    assert most or not any(entry.tombstones for entry in opened.manifest.segments)  # written anew
    assert opened.manifest.tokens == sum(map(len, left))
    (table,) = opened.ngrams
    check_ngrams(table, tokenizer, left)
    check_search(opened, left, data.draw(st.text("abc", min_size=1, max_size=12)))


def check_ngrams(table, tokenizer, texts):
    """Every context of some texts of a, b and c has its counts, and no other continuation."""
    encode = {character: tokenizer.encode(character).ids[0] for character in "abc"}
    followed = naive.contexts([[encode[c] for c in text] for text in texts], 5)
    for context in [(), *followed]:
        for first in encode.values():
            found = table.look_up(naive.context_hash((first, *context[-4:])))
            expected = followed.get((first, *context[-4:]), Counter())
            if found is not None:
                assert dict(zip(found[2].tolist(), found[3].tolist(), strict=True)) == dict(expected)
                assert found[0] == sum(expected.values())
                assert found[3].tolist() == sorted(found[3].tolist(), reverse=True)
            assert found is not None or sum(expected.values()) < 2 or len(context) == 0


def check_search(opened, left, query):
    """The longest end of a query that occurs is that of the text that is left, and only what follows there follows."""
    longest = next(n for n in range(len(query), -1, -1) if any(query[len(query) - n :] in text for text in left))
    result, end = search_datastore(opened, query), query[len(query) - longest :]
    assert result.matched == longest
    if longest:
        starts = [text[i + longest :] for text in left for i in range(len(text)) if text.startswith(end, i)]
        assert result.count == len(starts)
        assert {token for token, _ in result.continuations} == {rest[0] for rest in starts if rest}
        assert {place.document.path for place in result.occurrences} <= set(contents(opened.path))


def test_ranks_that_are_damaged_are_not_carried_into_new_tombstones(store):
    remove_documents(store, ["a.txt"])
    (ranks,) = (store / "tombstones").glob("*-ranks.bin")
    flip(ranks)
    with pytest.raises(StoreCorruptError, match="ranks"):
        remove_documents(store, ["c.py"])


def test_a_text_that_two_stores_have_is_listed_once_and_goes_from_both(tokenizer, texts, tmp_path):
    stores = [tmp_path / "one", tmp_path / "two"]
    for store in stores:
        write(texts, {f"{store.name}.txt": f"only {store.name} says this"})
        build_datastore(store, [str(texts / "a.txt"), str(texts / f"{store.name}.txt")], tokenizer)
    merged = tmp_path / "m"
    report = merge_datastores(merged, stores)
    assert (report.documents, report.skipped_by_reason) == (3, {"duplicate": 1})
    with pytest.raises(BuildError, match="there is one"):
        merge_datastores(merged, stores)
    for change in (lambda: None, lambda: compact_datastore(merged)):
        change()
        verify_datastore(merged)
        assert contents(merged) == contents(stores[0]) | contents(stores[1])
    merge_datastores(tmp_path / "n", stores)
    remove_documents(tmp_path / "n", ["a.txt"])
    verify_datastore(tmp_path / "n")
    assert search_datastore(open_datastore(tmp_path / "n"), "the cat sat").matched < 5
    assert sorted(contents(tmp_path / "n")) == ["one.txt", "two.txt"]


def test_a_text_that_merged_stores_share_is_found_and_counted_once(tokenizer, tmp_path):
    shared = "abcabcabbabc"
    for name, own in (("one", "cabcabca"), ("two", "bacbacab")):
        build(tmp_path / name, tokenizer, [shared, own])
    merged = tmp_path / "m"
    merge_datastores(merged, [tmp_path / "one" / "s", tmp_path / "two" / "s"])
    verify_datastore(merged)
    opened, left = open_datastore(merged), [shared, "cabcabca", "bacbacab"]
    for query in ("abc", "cab", "ab", "a", "babc"):
        check_search(opened, left, query)
        following = dict(search_datastore(opened, query).continuations)
        assert following == Counter(
            text[i + len(query)] for text in left for i in range(len(text) - len(query)) if text.startswith(query, i)
        )
    for table, texts in zip(opened.ngrams, ([shared, "cabcabca"], ["bacbacab"]), strict=True):
        check_ngrams(table, tokenizer, texts)


def test_a_text_whose_ngrams_alone_are_kept_is_listed_once_and_said_to_count_twice(tokenizer, tmp_path):
    shared, config = "abcabcabbabc", StoreConfig(index="ngram")
    stores = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    for store, own in zip(stores, (["cabcabca"], ["bacbacab"], []), strict=True):
        folder = write(tmp_path / f"{store.name}-texts", {f"{i}.txt": text for i, text in enumerate([shared, *own])})
        build_datastore(store, str(folder), tokenizer, config=config)
    report = merge_datastores(tmp_path / "m", stores)
    (twice,) = (reason for reason in report.skipped_by_reason if "counted twice" in reason)
    assert report.skipped_by_reason == {twice: 1, "duplicate": 1}
    verify_datastore(tmp_path / "m")
    opened = open_datastore(tmp_path / "m")
    assert sorted(Counter(document.tokens for document in opened.documents()).items()) == [(8, 2), (12, 1)]
    for table, texts in zip(opened.ngrams, ([shared, "cabcabca"], [shared, "bacbacab"]), strict=True):
        check_ngrams(table, tokenizer, texts)


def test_merging_links_files_and_takes_a_segment_once(tokenizer, texts, records, tmp_path):
    build_datastore(tmp_path / "a", str(texts), tokenizer)
    merge_datastores(tmp_path / "b", [tmp_path / "a"])
    add_documents(tmp_path / "b", str(records), config=StoreConfig(document_bytes=1 << 20))
    remove_documents(tmp_path / "a", ["c.py"])
    merge_datastores(tmp_path / "m", [tmp_path / "b", tmp_path / "a"])
    verify_datastore(tmp_path / "m")
    assert "c.py" not in contents(tmp_path / "m")  # one of the stores removed it from the segment that both have
    first = open_datastore(tmp_path / "a").segments[0].name
    here, there = (tmp_path / name / "segments" / first / "tokens.bin" for name in "am")
    assert here.stat().st_ino == there.stat().st_ino
