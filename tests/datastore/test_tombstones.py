"""Removed documents: nothing that only they said is found or drafted, at once, whatever the index."""

from collections import Counter

import naive_index as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_build import contents

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore import edit
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, merge_datastores, remove_documents
from retrieve_spec.datastore.inspection import search_datastore, verify_datastore
from retrieve_spec.datastore.store import open_datastore
from retrieve_spec.errors import StoreCorruptError
from retrieve_spec.kernels.ngram import ngram_hash

TEXTS = st.lists(st.text("abc", min_size=1, max_size=25), min_size=2, max_size=7, unique=True)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A new folder for every example."""
    return lambda: tmp_path_factory.mktemp("example")


def build(folder, tokenizer, texts):
    (folder / "texts").mkdir()
    for i, text in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_text(text)
    build_datastore(folder / "s", str(folder / "texts"), tokenizer, workers=1)
    return folder / "s"


@settings(max_examples=40)
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
    encode = {character: tokenizer.encode(character).ids[0] for character in "abc"}
    followed = naive.contexts([[encode[c] for c in text] for text in left], 5)
    check_ngrams(opened, followed, encode.values())
    check_search(opened, left, data.draw(st.text("abc", min_size=1, max_size=12)))


def check_ngrams(opened, followed, alphabet):
    """Every context of the text that is left has its counts, and no other continuation."""
    (table,) = opened.ngrams
    for context in [(), *followed]:
        for first in alphabet:
            h = np.uint64(0)
            for token in reversed((first, *context[-4:])):
                h = np.uint64(ngram_hash(h, token))
            found = table.look_up(h)
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
    content = bytearray(ranks.read_bytes())
    content[-4] ^= 1
    ranks.write_bytes(content)
    with pytest.raises(StoreCorruptError, match="ranks"):
        remove_documents(store, ["c.py"])


def test_a_text_that_two_stores_have_goes_from_both(tokenizer, texts, tmp_path):
    for name in ("one", "two"):
        (texts / f"{name}.txt").write_text(f"only {name} says this")
        build_datastore(tmp_path / name, [str(texts / "a.txt"), str(texts / f"{name}.txt")], tokenizer)
    merged = tmp_path / "m"
    report = merge_datastores(merged, [tmp_path / "one", tmp_path / "two"])
    assert (report.documents, report.skipped_by_reason) == (3, {"duplicate": 1})
    verify_datastore(merged)
    for change in (lambda: None, lambda: compact_datastore(merged)):
        change()
        assert sorted(contents(merged)) == ["a.txt", "one.txt", "two.txt"]
    merge_datastores(tmp_path / "n", [tmp_path / "one", tmp_path / "two"])
    remove_documents(tmp_path / "n", ["a.txt"])
    verify_datastore(tmp_path / "n")
    assert search_datastore(open_datastore(tmp_path / "n"), "the cat sat").matched < 5
    assert sorted(contents(tmp_path / "n")) == ["one.txt", "two.txt"]


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
