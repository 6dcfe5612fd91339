"""Readers beside a writer: every opening is a consistent snapshot."""

import shutil

from byte_tokenizers import byte_tokenizer
from children import exit_code, start
from test_build import contents

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents, retokenize_datastore
from retrieve_spec.datastore.inspection import search_datastore, verify_datastore
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import open_datastore

ROUNDS = 4


def test_a_reader_keeps_what_it_opened(store, tokenizer):
    opened = open_datastore(store)
    before = search_datastore(open_datastore(store), "the cat")
    retokenize_datastore(store, byte_tokenizer(offset=300), workers=1)
    assert search_datastore(opened, "the cat") == before
    shutil.rmtree(store)
    assert opened.tokenizer.encode("cat").ids == tokenizer.encode("cat").ids
    assert opened.document_at(0, 0).path == "a.txt"


def change_again_and_again(store, answers):
    for _ in range(ROUNDS):
        add_documents(store, answers)
        compact_datastore(store)
        remove_documents(store, ["answers*"])


def test_readers_see_one_state_or_the_next(tokenizer, texts, records, tmp_path):
    store = tmp_path / "s"
    answers = Source(str(records), field="output")
    build_datastore(store, str(texts), tokenizer, config=StoreConfig(segment_tokens=80))
    before = contents(store)
    add_documents(store, answers)
    after = contents(store)
    remove_documents(store, ["answers*"])
    writer = start(change_again_and_again, store, answers)
    seen = []
    while writer.is_alive():
        seen.append(contents(store))
        verify_datastore(store)
        assert seen[-1] in (before, after)
    assert exit_code(writer) == 0
    assert contents(store) == before
    assert after in seen
