"""Search by meaning: the places whose hidden states are most similar to a text's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from retrieve_spec.datastore.dense import check_model, continuation
from retrieve_spec.datastore.dense_keys import HiddenStates, prefix_of
from retrieve_spec.datastore.documents import Document
from retrieve_spec.datastore.store import Datastore
from retrieve_spec.errors import BuildError, PromptError
from retrieve_spec.reference_model import load_model


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A place like the end of the text: cosine of the keys, segment index, token position, document, what follows."""

    similarity: float
    segment: int
    position: int
    document: Document
    continuation: str


def search_dense(
    store: Datastore, text: str, *, model: Any = None, limit: int = 10, span: int = 16
) -> tuple[Neighbour, ...]:
    """Find the places of a store that are most like the end of a text to the model of its dense indexes.

    Parameters
    ----------
    store
        An open store with dense indexes.
    text
        What to look for.
    model
        Name of the model, or a model at hand; by default the one the manifest names.
    limit
        Neighbours to return at most.
    span
        Tokens of each continuation.

    Returns
    -------
    tuple of Neighbour
        Most similar first.

    Raises
    ------
    BuildError
        When the store has no dense index.
    ModelMismatchError
        When its dense indexes were built with another model.
    PromptError
        When the text has no tokens.
    """
    record = store.manifest.dense
    if record is None or not store.dense:
        raise BuildError(
            "a store with dense indexes", f"{store.path}, which has none", "Build it with `--dense MODEL`."
        )
    ids = np.array(store.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    if not len(ids):
        raise PromptError("a text to search for", "an empty one", "Give some text.")
    name = record.model if model is None else model
    loaded = load_model(name)[0] if isinstance(name, str) else name
    check_model(record, loaded, name if isinstance(name, str) else "")
    encoder = HiddenStates(loaded, record.layer, prefix_of(store.tokenizer, loaded))
    hidden = encoder([ids[-encoder.window(len(ids) + len(encoder.prefix)) :]])[0][-1:]
    found = []
    for number, index in store.dense:
        similarity, positions = index.search(hidden, limit)
        found += [(-float(s), number, int(p)) for s, p in zip(similarity[0], positions[0], strict=True) if p >= 0]
    return tuple(_neighbour(store, -s, number, p, span) for s, number, p in sorted(found)[:limit])


def _neighbour(store: Datastore, similarity: float, number: int, position: int, span: int) -> Neighbour:
    ids = continuation(store.segments[number], position, span)
    text = store.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return Neighbour(similarity, number, position, store.document_at(number, position), text)
