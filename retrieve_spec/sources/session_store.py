"""Earlier generations of a session to documents of a datastore, and back."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.build import add_documents, build_datastore
from retrieve_spec.datastore.change import ChangeReport
from retrieve_spec.datastore.manifest import MANIFEST, read_manifest
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import Datastore, check_tokenizer
from retrieve_spec.errors import BuildError
from retrieve_spec.sources.session import SessionMemory

_NAME = "session.jsonl"


def save_session(session: SessionMemory, path: str | os.PathLike[str], tokenizer: Any) -> ChangeReport:
    """Add the texts that a session remembers to a datastore, which is made when there is none.

    Parameters
    ----------
    session
        What to save. Texts that the store already has are skipped, so a session can be saved again and again.
    path
        Folder of the store.
    tokenizer
        Tokenizer of the model that wrote the texts (a `transformers` tokenizer).

    Raises
    ------
    BuildError
        The session remembers nothing.
    TokenizerMismatchError
        The store was built with another tokenizer.
    StoreError
        The folder holds a damaged store, or another process writes it.
    """
    exists = (Path(path) / MANIFEST).exists()
    if exists:
        check_tokenizer(Path(path), read_manifest(Path(path)), tokenizer)
    texts = [tokenizer.decode(text, clean_up_tokenization_spaces=False) for text in session.texts]
    if not any(texts):
        raise BuildError("a session that remembers texts", "an empty one", "Generate with session=True first.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / _NAME
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text), encoding="utf-8")
        if exists:
            return add_documents(path, Source(str(source)))
        return build_datastore(path, Source(str(source)), tokenizer)


def load_session(session: SessionMemory, store: Datastore) -> int:
    """Remember the documents of a store as earlier generations, up to the session's bound, the last ones first.

    Returns
    -------
    int
        Tokens remembered.
    """
    newest = list(_newest_documents(store, session.max_tokens // 2))  # more would push the first ones out again
    for ids in reversed(newest):
        session.read(ids)
    return sum(map(len, newest))


def _newest_documents(store: Datastore, most_tokens: int) -> Iterator[NDArray[np.int32]]:
    """Documents from the last one back, until the next would exceed the tokens."""
    for segment in reversed(store.segments):
        if not len(segment.tokens):
            continue  # n-grams only: no texts
        removed = set(segment.removed)
        for document in range(len(segment.document_starts) - 2, -1, -1):
            if document in removed:
                continue
            ids = segment.text_ids(document).astype(np.int32)
            most_tokens -= len(ids)
            if most_tokens < 0:
                return
            yield ids
