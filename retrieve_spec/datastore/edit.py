"""Editing stores: remove documents, compact, merge, and rewrite for another tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from retrieve_spec.config import DenseConfig
from retrieve_spec.datastore.addresses import folder_of
from retrieve_spec.datastore.build import checked, first_manifest, grow, write_tokenizer
from retrieve_spec.datastore.change import (
    ChangeReport,
    Inputs,
    WorkFolder,
    begin_change,
    begin_or_resume,
    check_folder,
    check_not_begun,
    finished,
    nothing_to_index,
    writer,
)
from retrieve_spec.datastore.files import replace_file
from retrieve_spec.datastore.manifest import Manifest, config_of, existing_manifest, read_manifest
from retrieve_spec.datastore.remote import local_folder
from retrieve_spec.datastore.removal import choose_documents, remove_chosen
from retrieve_spec.datastore.shards import check_text, conversion_shards, segment_shards
from retrieve_spec.datastore.store import check_tokenizer, open_as_written
from retrieve_spec.datastore.union import unite
from retrieve_spec.errors import BuildError


def remove_documents(
    path: str | os.PathLike[str],
    documents: Sequence[str] = (),
    *,
    where: str = "",
    progress: bool = False,
) -> ChangeReport:
    """Take documents out of a datastore: from then on nothing is drafted from them.

    Their text stays in the token arrays until `compact_datastore`, but no index shows it.

    Parameters
    ----------
    path
        Folder of the store.
    documents
        Paths as the document tables list them, or globs over them.
    where
        SQL condition over the catalogue's `documents` table, as ``licence like 'GPL%'``.
    progress
        Show bars on standard error.

    Raises
    ------
    BuildError
        When nothing matches, the condition is no SQL, or the store keeps n-grams only.
    """
    store = folder_of(path, "remove")
    read_manifest(store)
    with writer(store) as work:
        opened = open_as_written(store)
        chosen = choose_documents(opened, documents, where)
        if not chosen:
            remedy = f"`retrieve-spec catalog {store}` makes a database that lists them."
            raise BuildError("documents that match", f"none for {', '.join(documents) or where}", remedy)
        arguments = {"verb": "remove", "documents": list(documents), "where": where}
        plan = begin_change(work, opened.manifest, {k: v for k, v in arguments.items() if v})
        return remove_chosen(work, opened, plan, chosen, progress)


def compact_datastore(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    resume: bool = False,
    progress: bool = False,
) -> ChangeReport:
    """Rewrite a datastore into the segments that a build would make, without the text of removed documents.

    Readers keep what they have opened. Dense indexes are computed anew, by the model they were built with.

    Parameters
    ----------
    path
        Folder of the store.
    workers
        Processes at most; all CPUs by default.
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
    store = folder_of(path, "compact")
    read_manifest(store)

    def make_plan() -> tuple[dict[str, Any], Inputs]:
        _check_texts([store])
        plan = {
            "config": asdict(checked(config_of(manifest), store / manifest.tokenizer_name)),
            "tokenizer": manifest.tokenizer_name,
            "vocabulary": manifest.vocabulary,
        }
        return plan, segment_shards(store, manifest)

    with writer(store) as work:
        manifest = read_manifest(store)
        plan = begin_or_resume(work, manifest, "compact", resume, make_plan)
        if plan is None:
            return finished(work, "compact")
        return grow(work, manifest, plan, workers=workers, progress=progress, kept=())


def _check_texts(stores: Iterable[Path]) -> None:
    """Check that stores keep their text, before anything is begun."""
    for store in stores:
        for segment in open_as_written(store).segments:
            check_text(segment, store)


def merge_datastores(
    out: str | os.PathLike[str],
    stores: Sequence[str | os.PathLike[str]] = (),
    *,
    resume: bool = False,
    progress: bool = False,
) -> ChangeReport:
    """Join datastores built with one tokenizer into a new one; a text that several hold is listed once.

    Segments are taken over as they are, as links to the same files where the file system has them; with dense indexes
    all is indexed anew, since keys of stores that were built apart do not compare.

    Parameters
    ----------
    out
        Folder to create.
    stores
        Folders of the stores, or addresses of remotes, in order; not needed to resume.
    resume, progress
        As for `compact_datastore`.

    Raises
    ------
    TokenizerMismatchError
        When their tokenizers differ.
    BuildError
        When there is a store at `out` already or no store is given.
    """
    target = folder_of(out, "merge into")
    if not resume:
        check_folder(target)
    with writer(target) as work:

        def make_plan() -> tuple[dict[str, Any], Inputs]:
            check_not_begun(target, work)
            return _plan_merge(work, [local_folder(store) for store in stores], [str(store) for store in stores])

        plan = begin_or_resume(work, existing_manifest(target), "merge", resume, make_plan)
        if plan is None:
            return finished(work, "merge")
        manifest = replace(first_manifest(target, plan["tokenizer"]), config=plan["config"])
        if plan["indexed_anew"]:
            return grow(work, manifest, plan, workers=None, progress=progress)
        return unite(work, manifest, plan, [Path(place) for place in plan["places"]], progress)


def _plan_merge(work: WorkFolder, stores: list[Path], names: list[str]) -> tuple[dict[str, Any], Inputs]:
    if not stores:
        raise BuildError("at least one store to merge", "none", "Give the folders of the stores.")
    manifests = [read_manifest(store) for store in stores]
    for store, manifest in zip(stores, manifests, strict=True):
        check_tokenizer(store, manifest, stores[0] / manifests[0].tokenizer_name)
    if not any(manifest.segments for manifest in manifests):
        raise nothing_to_index((), {}, 0)
    dense = _common_dense(stores, manifests)
    if dense is not None:
        _check_texts(stores)
    widest = max(range(len(stores)), key=lambda i: manifests[i].vocabulary)  # added tokens stay out of fingerprints
    tokenizer = manifests[widest].tokenizer_name
    replace_file(work.store / tokenizer, (stores[widest] / tokenizer).read_bytes())
    config = replace(config_of(manifests[0]), dense=dense)
    plan = {
        "stores": names,
        "places": [os.path.abspath(store) for store in stores],  # to resume from any folder
        "tokenizer": tokenizer,
        "vocabulary": max(manifest.vocabulary for manifest in manifests),
        "config": asdict(checked(config, work.store / tokenizer)),
        "indexed_anew": dense is not None,
    }
    shards = (segment_shards(store, manifest) for store, manifest in zip(stores, manifests, strict=True))
    return plan, chain.from_iterable(shards)


def _common_dense(stores: list[Path], manifests: list[Manifest]) -> DenseConfig | None:
    """Settings of the dense indexes of stores to merge, None where none has any.

    Raises
    ------
    BuildError
        When they differ in model, layer or dims.
    """
    dense = [(s, m, m.dense) for s, m in zip(stores, manifests, strict=True) if m.dense is not None]
    for store, _, record in dense:
        if replace(record, model="") != replace(dense[0][2], model=""):
            raise BuildError(
                f"stores with dense indexes of one model, layer and number of dims, as {dense[0][0]} "
                f"({dense[0][2].model}, layer {dense[0][2].layer}, {dense[0][2].dims} dims)",
                f"{store} ({record.model}, layer {record.layer}, {record.dims} dims)",
                "Build one of them again with the other's `--dense`, `--layer` and `--dims`.",
            )
    return config_of(dense[0][1]).dense if dense else None


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
        Processes that decode, encode and index; all CPUs by default.
    resume, progress
        As for `compact_datastore`.

    Raises
    ------
    BuildError
        When the store keeps n-grams only, no tokenizer is given, or the disk cannot be written.
    StoreLockedError
        When another process is writing to it.
    """
    store = folder_of(path, "retokenize")
    read_manifest(store)

    def make_plan() -> tuple[dict[str, Any], Inputs]:
        _check_texts([store])
        config = replace(config_of(manifest), dense=None)  # keys of another model's tokens
        plan = {
            "tokenizer": write_tokenizer(store, tokenizer),
            "tokenizer_before": manifest.tokenizer_name,
            "vocabulary": manifest.vocabulary,
            "config": asdict(config),
            "bytes": 4 * manifest.tokens,
        }
        return plan, conversion_shards(store, manifest)

    with writer(store) as work:
        manifest = read_manifest(store)
        plan = begin_or_resume(work, manifest, "retokenize", resume, make_plan)
        if plan is None:
            return finished(work, "retokenize")
        new = first_manifest(store, plan["tokenizer"])
        base = replace(manifest, fingerprint=new.fingerprint, tokenizer=new.tokenizer, vocabulary=new.vocabulary)
        return grow(work, base, plan, workers=workers, progress=progress, kept=())
