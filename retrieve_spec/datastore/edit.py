"""Editing stores: remove documents, compact, merge, and rewrite for another tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import checked, grow
from retrieve_spec.datastore.catalog import Document
from retrieve_spec.datastore.change import (
    ChangeReport,
    begin_change,
    begin_or_resume,
    existing_manifest,
    finished,
    writer,
)
from retrieve_spec.datastore.files import replace_file
from retrieve_spec.datastore.fingerprint import load_tokenizer
from retrieve_spec.datastore.fresh import (
    check_folder,
    check_not_begun,
    common_dense,
    config_of,
    first_manifest,
    write_tokenizer,
)
from retrieve_spec.datastore.ingest import Tokenised, encode, ordered_map
from retrieve_spec.datastore.manifest import CATALOG, Manifest, read_manifest
from retrieve_spec.datastore.removal import choose_documents, remove_chosen
from retrieve_spec.datastore.store import Datastore, check_tokenizer, open_datastore
from retrieve_spec.datastore.work import WorkFolder
from retrieve_spec.errors import BuildError


def remove_documents(
    path: str | os.PathLike[str],
    documents: Sequence[str] = (),
    *,
    where: str = "",
    progress: bool = False,
) -> ChangeReport:
    """Take documents out of a datastore: from then on nothing is drafted from them.

    Their text stays in the token arrays until `compact_datastore`, but no index leads to it.

    Parameters
    ----------
    path
        Folder of the store.
    documents
        Paths as the catalogue lists them, or globs over them.
    where
        SQL condition over the catalogue's `documents` table, as ``licence like 'GPL%'``.
    progress
        Show bars on standard error.

    Raises
    ------
    BuildError
        When nothing matches, the condition is no SQL, or the store keeps n-grams only.
    """
    store = Path(path)
    read_manifest(store)
    with writer(store) as work:
        manifest = read_manifest(store)
        chosen = choose_documents(store, manifest, documents, where)
        if not chosen:
            remedy = f"`select path from documents` lists them in {store / CATALOG}."
            raise BuildError("documents that match", "none", remedy)
        arguments = {"verb": "remove", "documents": list(documents), "where": where}
        plan = begin_change(work, manifest, {k: v for k, v in arguments.items() if v})
        return remove_chosen(work, manifest, plan, chosen, progress)


def _documents_of(store: Datastore) -> Iterator[tuple[Document, NDArray[np.uint32]]]:
    """Documents of a store that can be drafted from, with their token ids, in order."""
    for segment, entry in zip(store.segments, store.manifest.segments, strict=True):
        if not len(segment.tokens):
            raise BuildError(
                "a store that keeps its text", f"{store.path}, which keeps n-grams only", "Build it again from sources."
            )
        store.check_text(entry)
        for document in store.documents(entry):
            if document.number not in segment.removed:
                yield document, segment.text_ids(document.number)


def _as_result(document: Document, ids: NDArray[np.uint32]) -> Tokenised:
    return Tokenised(document.path, document.licence, document.source, document.sha256, ids, 4 * len(ids))


def compact_datastore(path: str | os.PathLike[str], *, resume: bool = False, progress: bool = False) -> ChangeReport:
    """Rewrite a datastore into as few segments as possible, without the text of removed documents.

    Readers keep what they have opened. Dense indexes are computed anew, by the model they were built with.

    Parameters
    ----------
    path
        Folder of the store.
    resume
        Continue an interrupted compaction.
    progress
        Show bars on standard error.

    Raises
    ------
    BuildError
        When the store keeps n-grams only, or the disk cannot be written.
    StoreLockedError
        When another process is writing to it.
    """
    store = Path(path)
    read_manifest(store)

    def make_plan() -> dict[str, Any]:
        return {"config": asdict(checked(config_of(manifest), manifest.fingerprint))}

    with writer(store) as work:
        manifest = read_manifest(store)
        plan = begin_or_resume(work, manifest, "compact", resume, make_plan)
        return _rewrite(work, manifest, plan, [store], progress) if plan else finished(work, "compact")


def merge_datastores(
    out: str | os.PathLike[str],
    stores: Sequence[str | os.PathLike[str]] = (),
    *,
    resume: bool = False,
    progress: bool = False,
) -> ChangeReport:
    """Join datastores built with one tokenizer into a new one; a text that several hold is kept once.

    Parameters
    ----------
    out
        Folder to create.
    stores
        Folders of the stores, in order; not needed to resume.
    resume, progress
        As for `compact_datastore`.

    Raises
    ------
    TokenizerMismatchError
        When their tokenizers differ.
    BuildError
        When there is a store at `out` already, no store is given, or one keeps n-grams only.
    """
    target = Path(out)

    def make_plan() -> dict[str, Any]:
        check_not_begun(target, work)
        return _plan_merge(work, [Path(store) for store in stores])

    if not resume:
        check_folder(target)
    with writer(target) as work:
        plan = begin_or_resume(work, existing_manifest(target), "merge", resume, make_plan)
        if plan is None:
            return finished(work, "merge")
        manifest = first_manifest(target, plan["tokenizer"])
        return _rewrite(work, manifest, plan, [Path(store) for store in plan["places"]], progress)


def _plan_merge(work: WorkFolder, stores: list[Path]) -> dict[str, Any]:
    if not stores:
        raise BuildError("at least one store to merge", "none", "Give the folders of the stores.")
    manifests = [read_manifest(store) for store in stores]
    for store, manifest in zip(stores, manifests, strict=True):
        check_tokenizer(store, manifest, manifests[0].fingerprint)
    tokenizer = (stores[0] / manifests[0].tokenizer_name).read_bytes()
    replace_file(work.store / manifests[0].tokenizer_name, tokenizer)
    config = replace(config_of(manifests[0]), dense=common_dense(stores, manifests))
    return {
        "stores": [str(store) for store in stores],
        "places": [os.path.abspath(store) for store in stores],  # to resume from any folder
        "tokenizer": manifests[0].tokenizer_name,
        "config": asdict(checked(config, manifests[0].fingerprint)),
    }


def _rewrite(
    work: WorkFolder, manifest: Manifest, plan: dict[str, Any], stores: list[Path], progress: bool
) -> ChangeReport:
    """Write the documents of stores into new segments that replace the old ones."""
    opened = [open_datastore(store, tokenizer=manifest.fingerprint) for store in stores]

    def stream(consumed: int) -> Iterator[Tokenised]:
        documents = (pair for store in opened for pair in _documents_of(store))
        return (_as_result(document, ids) for document, ids in islice(documents, consumed, None))

    size = 4 * sum(store.manifest.tokens for store in opened)
    config = StoreConfig(**plan["config"])
    return grow(work, manifest, plan, stream, config, known=set(), size=size, progress=progress, replaces=True)


def retokenize_datastore(
    path: str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    workers: int | None = None,
    resume: bool = False,
    progress: bool = False,
) -> ChangeReport:
    """Rewrite a datastore for another tokenizer, from its own text: the sources are not needed.

    Dense indexes belong to the model of the old tokenizer; the new store has none.

    Parameters
    ----------
    path
        Folder of the store.
    tokenizer
        The tokenizer to convert to (anything `load_tokenizer` takes); not needed to resume.
    workers
        Threads that decode and encode; all CPUs by default.
    resume, progress
        As for `compact_datastore`.

    Raises
    ------
    BuildError
        When the store keeps n-grams only, no tokenizer is given, or the disk cannot be written.
    StoreLockedError
        When another process is writing to it.
    """
    store = Path(path)
    read_manifest(store)

    def make_plan() -> dict[str, Any]:
        config = replace(config_of(manifest), dense=None)  # keys of another model's tokens
        return {"tokenizer": write_tokenizer(store, tokenizer), "config": asdict(config)}

    with writer(store) as work:
        manifest = read_manifest(store)
        plan = begin_or_resume(work, manifest, "retokenize", resume, make_plan)
        if plan is None:
            return finished(work, "retokenize")
        return _retokenize(work, manifest, plan, workers or os.cpu_count() or 1, progress)


def _retokenize(
    work: WorkFolder, manifest: Manifest, plan: dict[str, Any], workers: int, progress: bool
) -> ChangeReport:
    opened = open_datastore(work.store)
    backend = load_tokenizer(work.store / plan["tokenizer"])

    def convert(pair: tuple[Document, NDArray[np.uint32]]) -> Tokenised:
        document, ids = pair
        text = opened.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return replace(_as_result(document, encode(backend, text)), bytes=4 * len(ids))

    def stream(consumed: int) -> Iterator[Tokenised]:
        return ordered_map(convert, islice(_documents_of(opened), consumed, None), workers)

    target = first_manifest(work.store, plan["tokenizer"])
    base = replace(manifest, fingerprint=target.fingerprint, tokenizer=target.tokenizer, vocabulary=target.vocabulary)
    size, config = 4 * manifest.tokens, StoreConfig(**plan["config"])
    return grow(work, base, plan, stream, config, known=set(), size=size, progress=progress, replaces=True)
