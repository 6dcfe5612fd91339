"""Store cards: what a shared store tells of itself, in a manifest without places of this machine and in a README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from retrieve_spec.datastore.addresses import public_name
from retrieve_spec.datastore.manifest import Manifest
from retrieve_spec.datastore.remote import Remote
from retrieve_spec.datastore.store import Datastore

CARD = "README.md"
_TITLE = "# Datastore for speculative decoding"

_KEPT = ("generation", "verb", "at", "version", "recipe", "documents", "tokens", "skipped", "max_tokens")


def public_manifest(manifest: Manifest) -> Manifest:
    """A manifest in which sources, stores and models are called by the last part of their path alone."""
    segments = tuple(
        replace(entry, origins=tuple((licence, name_of(source)) for licence, source in entry.origins))
        for entry in manifest.segments
    )
    dense = manifest.dense and replace(manifest.dense, model=name_of(manifest.dense.model))
    return replace(
        manifest,
        segments=segments,
        config=_public_config(manifest.config),
        history=tuple(map(_public_event, manifest.history)),
        dense=dense,
    )


def _public_config(config: dict[str, Any]) -> dict[str, Any]:
    dense = config.get("dense")
    return {**config, "dense": {**dense, "model": name_of(dense["model"])}} if dense else config


def _public_event(event: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: event[key] for key in _KEPT if key in event}
    if "sources" in event:
        found["sources"] = [{"path": name_of(s["path"]), "licence": s.get("licence", "")} for s in event["sources"]]
    if "stores" in event:
        found["stores"] = [name_of(store) for store in event["stores"]]
    return found


def name_of(path: str) -> str:
    """Last part of a path or address; names of models on a hub stay whole."""
    path = public_name(path)
    absolute = path.startswith(("/", "~", ".", "\\")) or ":" in path[:3] or path.count("/") > 1
    return PurePath(path.replace("\\", "/")).name if absolute else path


def without_lists(manifest: Manifest) -> Manifest:
    """A manifest whose history names no lists of what was left out, which stay where they were made."""
    history = tuple({key: value for key, value in event.items() if key != "listed"} for event in manifest.history)
    return replace(manifest, history=history)


Told = tuple[str, str, int]
"""Licence, source and tokens of a document."""


def told_of(store: Datastore, manifest: Manifest) -> Iterator[Told]:
    """What a card counts of the documents of a store, with the names that a manifest gives to its origins."""
    for segment, entry, said in zip(store.segments, store.manifest.segments, manifest.segments, strict=True):
        names = dict(zip(entry.origins, said.origins, strict=True))
        for document in segment.documents.live():
            yield *names[document.licence, document.source], document.tokens


def put_card(remote: Remote, told: Iterable[Told], manifest: Manifest) -> None:
    """Put a store's card at a remote, unless a README that is no store card stands there: it is somebody's own."""
    place = remote.path(CARD)
    with suppress(FileNotFoundError):
        if _TITLE.encode() not in remote.fs.cat_file(place):
            return
    remote.write(place, store_card(told, manifest))


def store_card(told: Iterable[Told], manifest: Manifest) -> bytes:
    """README of a shared store: sources, licences, tokenizer, tokens, how it was built."""
    text = "\n".join(_card(told, manifest)) + "\n"
    return text.encode("utf-8", "backslashreplace")  # names of sources may be no text


def _card(told: Iterable[Told], manifest: Manifest) -> Iterator[str]:
    licences: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    sources: set[str] = set()
    for licence, source, count in told:
        licences[licence or "not stated"] += count
        documents[licence or "not stated"] += 1
        sources.add(source)
    yield "---\ntags:\n- retrieve-spec\n- speculative-decoding\n---\n"
    yield f"{_TITLE}\n"
    yield "Text that drafts may come from, indexed. Open it with"
    yield "`retrieve_spec.open_datastore(URL)`, or fetch it with `retrieve-spec pull URL FOLDER`.\n"
    yield f"- {manifest.documents:,} documents, {manifest.tokens:,} tokens, {manifest.bytes / 1e6:,.1f} MB in "
    yield f"  {len(manifest.segments):,} segments"
    yield f"- tokenizer `{manifest.fingerprint}`, ids below {manifest.vocabulary:,}"
    yield f"- content `{manifest.content}`"
    if manifest.dense is not None:
        yield f"- dense index for {manifest.dense.model}, layer {manifest.dense.layer}, {manifest.dense.dims} dims"
    yield "\n| licence | documents | tokens |\n|---|---|---|"
    for licence, tokens in sorted(licences.items(), key=lambda item: (-item[1], item[0])):
        yield f"| {licence} | {documents[licence]:,} | {tokens:,} |"
    yield "\nSources: " + (", ".join(sorted(sources)[:50]) + (", …" if len(sources) > 50 else "") or "none") + ".\n"
    yield "How it was built:\n"
    for event in manifest.history:
        counts = f"{event.get('documents', 0):,} documents, {event.get('tokens', 0):,} tokens"
        yield f"- {event.get('at', '')} {event['verb']} (retrieve-spec {event.get('version', '?')}): {counts}"
