"""Search by hand: where a text stands in a store, what followed it, and which places are most like its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.datastore.dense import check_model, continuation
from retrieve_spec.datastore.segment import Document, Segment
from retrieve_spec.datastore.store import Datastore
from retrieve_spec.errors import BuildError, PromptError, StoreCorruptError
from retrieve_spec.kernels.suffix_array import sa_longest, sa_successors

MAX_READS = 1024
SPAN = 16
"""Tokens of a continuation."""


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a store.

    Attributes
    ----------
    segment, position
        Index of the segment, and the token there: the first of a match, or the one whose key is similar.
    document, continuation
        The document, and what follows the match or the token.
    similarity
        Cosine of the keys; 1 for a match.
    """

    segment: int
    position: int
    document: Document
    continuation: str
    similarity: float = 1.0


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a store knows about a text.

    Attributes
    ----------
    tokens
        Tokens of the text.
    matched
        Tokens at its end that occur in the store, as many as possible.
    text
        The matched end of the text.
    count
        How often it occurs (drafting documents only).
    continuations
        ``(token as text, count)``, most frequent first; estimated from a sample where there are many.
    occurrences
        Places, spread evenly over the matches.
    """

    tokens: int
    matched: int
    text: str
    count: int
    continuations: tuple[tuple[str, float], ...]
    occurrences: tuple[Place, ...]


def search_datastore(store: Datastore, text: str, *, limit: int = 10, span: int = SPAN) -> SearchResult:
    """Find the longest end of a text that occurs in a store.

    Parameters
    ----------
    store
        An open store that keeps its text.
    text
        What to look for; encoded with the store's tokenizer.
    limit
        Continuations and occurrences to return at most.
    span
        Tokens of each occurrence's continuation.

    Returns
    -------
    SearchResult
        With ``matched == 0`` when not even the last token occurs.
    """
    ids, decode = np.array(store.tokenizer.encode(text, add_special_tokens=False).ids, np.int64), store.tokenizer.decode
    found = [_longest(segment, ids) for segment in store.segments]
    matched = max((depth for _, _, depth in found), default=0)
    if matched == 0:
        return SearchResult(len(ids), 0, "", 0, (), ())
    parts = [(i, store.segments[i], lo, hi) for i, (lo, hi, depth) in enumerate(found) if depth == matched]
    # Suffixes that stand for themselves, not for a removed one.
    count = sum(hi - lo - int(np.diff(np.searchsorted(part.hidden, [lo, hi]))[0]) for _, part, lo, hi in parts)
    counts: Counter[int] = Counter()
    places = []
    tokens, often = np.empty(MAX_READS, np.int64), np.empty(MAX_READS, np.float64)
    for i, segment, lo, hi in parts:
        sa = segment.suffix_array
        n, _ = sa_successors(segment.tokens, sa, lo, hi, matched, MAX_READS, tokens, often)
        counts.update(dict(zip(segment.ids_of(tokens[:n]).tolist(), often[:n].tolist(), strict=True)))
        share = max(1, round(limit * (hi - lo) / max(count, 1)))
        shown = sa[np.linspace(lo, hi - 1, min(share, hi - lo)).astype(np.int64)]
        for at in shown[np.sort(np.unique(shown, return_index=True)[1])].tolist():
            places.append(_place(store, i, at, at + matched - 1, span))
    best = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]
    return SearchResult(
        len(ids),
        matched,
        decode(ids[len(ids) - matched :].tolist(), skip_special_tokens=False),
        count,
        tuple((decode([token], skip_special_tokens=False), n) for token, n in best),
        tuple(places[:limit]),
    )


def _longest(segment: Segment, ids: NDArray[np.int64]) -> tuple[int, int, int]:
    if not len(segment.suffix_array):
        return 0, 0, 0
    recent = segment.localise(ids)
    lo, hi, depth = sa_longest(
        segment.tokens, segment.suffix_array, segment.top, segment.bits, recent, len(recent), len(recent)
    )
    return int(lo), int(hi), int(depth)


def _place(store: Datastore, index: int, position: int, last: int, span: int, similarity: float = 1.0) -> Place:
    """A position of a segment, and what follows the last token of the match there."""
    segment = store.segments[index]
    try:
        document = store.document_at(index, position)
    except IndexError as error:
        raise StoreCorruptError(
            f"positions in documents in the suffix array of segment {segment.name}", str(error)
        ) from None
    following = store.tokenizer.decode(continuation(segment, last, span).tolist(), skip_special_tokens=False)
    return Place(index, position, document, following, similarity)


def search_dense(store: Datastore, text: str, *, model: Any = None, limit: int = 10) -> tuple[Place, ...]:
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

    Returns
    -------
    tuple of Place
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
    from retrieve_spec.datastore.dense_build import HiddenStates, prefix_of  # imports torch
    from retrieve_spec.reference_model import load_model

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
    return tuple(_place(store, number, at, at, SPAN, -negated) for negated, number, at in sorted(found)[:limit])
