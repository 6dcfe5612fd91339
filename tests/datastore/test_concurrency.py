"""Readers beside a writer: every opening is a consistent snapshot."""

from __future__ import annotations

import os

from test_build import contents

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.edit import compact_datastore, remove_documents
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.verify import verify_datastore

ROUNDS = 8


def test_readers_see_one_state_or_the_next(tokenizer, texts, records, tmp_path):
    store = tmp_path / "s"
    answers = Source(str(records), field="output")
    build_datastore(store, str(texts), tokenizer, config=StoreConfig(segment_tokens=80))
    before = contents(store)
    add_documents(store, answers)
    after = contents(store)
    remove_documents(store, ["answers*"])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for _ in range(ROUNDS):
                add_documents(store, answers)
                compact_datastore(store)
                remove_documents(store, ["answers*"])
            code = 0
        finally:
            os._exit(code)
    seen = []
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        seen.append(contents(store))
        verify_datastore(store)
        assert seen[-1] in (before, after)
    assert ended == (child, 0)
    assert contents(store) == before
    assert after in seen
