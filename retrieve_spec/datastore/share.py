"""Sharing of stores with a remote: only files that the other side lacks are transferred, with a store card beside them.

What is shared names no paths of this machine.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from filelock import FileLock

from retrieve_spec.datastore.change import ChangeReport, begin_change, check_folder, progress_bar, writer
from retrieve_spec.datastore.dense import TRANSFORM
from retrieve_spec.datastore.edit import unite
from retrieve_spec.datastore.files import check_content, replace_file
from retrieve_spec.datastore.manifest import (
    MANIFEST,
    Manifest,
    content_of,
    existing_manifest,
    explain_write_errors,
    files_of,
    read_manifest,
)
from retrieve_spec.datastore.remote import (
    Remote,
    bring,
    changed,
    explain_remote_errors,
    folder_of,
    public_name,
    read_remote,
)
from retrieve_spec.datastore.store import Datastore, check_tokenizer, open_datastore
from retrieve_spec.errors import BuildError, StoreCorruptError, StoreLockedError

CARD = "README.md"
_TITLE = "# Datastore for speculative decoding"
_CARD = """\
---
tags:
- retrieve-spec
- speculative-decoding
---

{title}

Text that drafts may come from, indexed. Open it with
`retrieve_spec.open_datastore(URL)`, or fetch it with `retrieve-spec pull URL FOLDER`.

- {m.documents:,} documents, {m.tokens:,} tokens, {megabytes:,.1f} MB in {segments:,} segments
- tokenizer `{m.fingerprint}`, ids below {m.vocabulary:,}
- content `{m.content}`
{dense}{distilled}
| licence | documents | tokens |
|---|---|---|
{licences}

Sources: {sources}.
"""

REMOTES = "remotes.json"


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did.

    Attributes
    ----------
    url, version
        The remote, and the version that it has now.
    files, bytes
        What was transferred.
    kept
        Files that were there already.
    """

    url: str
    version: int
    files: int
    bytes: int
    kept: int


def push_datastore(path: str | os.PathLike[str], url: str, *, progress: bool = False) -> PushReport:
    """Make a remote hold what a store holds.

    If it is interrupted, the remote's newest version stays as it was; another run sends what is missing. A store card
    (``README.md``) is written beside it, unless a README of somebody's own stands there. What stood there before stays
    readable under its version; where nothing has changed since the last push there is no new one. Places of this
    machine and the history of the store stay here.

    Parameters
    ----------
    path
        Folder of the store.
    url
        Folder that fsspec reaches: ``s3://…``, ``gs://…``, ``hf://…``, ``file://…``.
    progress
        Show bars on standard error.

    Raises
    ------
    StoreLockedError
        When the remote holds something that this store has not seen, or another process changes the store meanwhile.
    StoreCorruptError
        When a file of the store is damaged.
    BuildError
        When the remote cannot be reached or written.
    """
    folder = folder_of(path, "push")
    store = open_datastore(folder)
    manifest = public_manifest(store.manifest)
    with explain_remote_errors(url):
        remote = Remote(url)
        holds = remote.fs.exists(remote.path(MANIFEST))  # asked first: who pushes just now puts a version before it
        newest = version = remote.newest()
        if holds and not newest:  # of a store's own folder, or another program's
            raise BuildError(f"an empty folder at {url}", f"one that holds {MANIFEST}", "Choose another one.")
        seen = _seen(folder).get(url, {}).get("version", 0)
        if newest and seen != newest and remote.manifest(newest).content != manifest.content:
            raise changed(url, f"version {seen or 'none'}", f"version {newest}, which this store has not seen")
        there_sizes = remote.sizes()
        files = list(files_of(manifest))
        missing = [(place, file) for place, file in files if there_sizes.get(place) != file.bytes]
        total = sum(file.bytes for _, file in missing)
        with progress_bar("pushing", total, "B", progress) as advance:
            for place, file in missing:
                source = folder / place
                try:
                    check_content(source, file)  # which holds what the manifest says
                    remote.send(source, place)
                except (FileNotFoundError, StoreCorruptError) as error:
                    if source.exists() or read_manifest(folder).generation == manifest.generation:
                        raise  # of the remote, or of a damaged store
                    got = "a store that another process has changed meanwhile"
                    remedy = "Push it again when it is done."
                    raise StoreLockedError(f"{source}, which the store listed", got, remedy) from error
                advance(file.bytes)
        if remote.read(MANIFEST) != content_of(manifest):  # the newest version is another one, or was not finished
            version += 1
            there = remote.read(CARD)
            if there is None or _TITLE.encode() in there:  # another README is somebody's own
                card = _card(store, manifest).encode("utf-8", "backslashreplace")  # sources may be no text
                remote.write(CARD, card)
            remote.add_version(version, manifest)
    _remember(folder, url, version, manifest.content)
    return PushReport(url, version, len(missing), total, len(files) - len(missing))


def _seen(folder: Path) -> dict[str, Any]:
    """Version and content of the remotes that a store was pushed to or pulled from, by address."""
    try:
        found: dict[str, Any] = json.loads((folder / REMOTES).read_bytes())
    except FileNotFoundError:
        return {}
    return found


def _remember(folder: Path, url: str, version: int, content: str) -> None:
    with explain_write_errors(folder), FileLock(folder / f"{REMOTES}.lock"):  # others push the store elsewhere
        seen = _seen(folder) | {url: {"version": version, "content": content}}
        replace_file(folder / REMOTES, json.dumps(seen, indent=1).encode())


def pull_datastore(url: str, path: str | os.PathLike[str], *, progress: bool = False) -> ChangeReport:
    """Bring what a remote holds into a store, which is made when there is none.

    A store that was not changed since it last pulled or pushed holds what the remote holds afterwards; any other one
    keeps its own segments too. Interrupted, it leaves the store as it was; run again, it fetches what is missing.

    Parameters
    ----------
    url
        Folder of the remote.
    path
        Folder of the store.
    progress
        Show bars on standard error.

    Raises
    ------
    StoreNotFoundError
        When the remote holds no store.
    TokenizerMismatchError
        When the store has another tokenizer.
    StoreCorruptError
        When a file there is damaged or missing.
    BuildError
        When the remote cannot be reached.
    """
    store = folder_of(path, "pull")
    remote, version, there = read_remote(url)
    mine = existing_manifest(store)
    if mine is None:
        check_folder(store)
    else:
        check_tokenizer(store, mine, there.fingerprint)
        if mine.content == there.content:
            _remember(store, url, version, there.content)
            return ChangeReport("pull", 0, 0, len(mine.segments))
    with writer(store) as work:
        mine = existing_manifest(store)
        event = begin_change(work, "pull", url=url)
        bring(remote, there, work.pulled, store, progress=progress)
        if mine is not None and _seen(store).get(url, {}).get("content") != mine.content:
            _check_dense(store, mine, there)  # it has segments that the remote has not seen
            report = unite(work, mine, event, [store, work.pulled], progress)
        else:
            replace_file(store / there.tokenizer_name, (work.pulled / there.tokenizer_name).read_bytes())
            generation, history = (mine.generation, mine.history) if mine else (0, ())
            base = replace(there, segments=(), generation=generation, history=history)
            report = unite(work, base, event, [work.pulled], progress)
    _remember(store, url, version, there.content)
    return report


def _check_dense(store: Path, mine: Manifest, there: Manifest) -> None:
    """Check that the keys of two stores compare, where both have some."""
    spaces = {
        tuple(entry.files[name].sha256 for name in TRANSFORM)
        for entry in (*mine.segments, *there.segments)
        if TRANSFORM[0] in entry.files
    }
    if len(spaces) > 1:
        raise BuildError(
            f"dense keys that compare with those of {store}",
            "others",
            "Pull into another folder and join the two with `retrieve-spec merge`, which computes them anew.",
        )


def public_manifest(manifest: Manifest) -> Manifest:
    """A manifest without history, in which sources and models are called by the last part of their path alone."""
    segments = tuple(
        replace(entry, origins=tuple((licence, name_of(source)) for licence, source in entry.origins))
        for entry in manifest.segments
    )
    dense = manifest.dense and replace(manifest.dense, model=name_of(manifest.dense.model))
    config, wished = manifest.config, manifest.config.get("dense")
    if wished:
        config = {**config, "dense": {**wished, "model": name_of(wished["model"])}}
    return replace(manifest, segments=segments, config=config, history=(), dense=dense)


def name_of(path: str) -> str:
    """Last part of a path or address; names of models on a hub stay whole."""
    path = public_name(path)
    absolute = path.startswith(("/", "~", ".", "\\")) or ":" in path[:3] or path.count("/") > 1
    return PurePath(path.replace("\\", "/")).name if absolute else path


def _card(store: Datastore, manifest: Manifest) -> str:
    """A shared store's README, with the sources as its shared manifest names them."""
    tokens: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    named = set()  # of what was removed nothing is told
    for segment, own, shared in zip(store.segments, store.manifest.segments, manifest.segments, strict=True):
        names = dict(zip(own.origins, shared.origins, strict=True))
        for document in segment.documents.live():
            tokens[document.licence or "not stated"] += document.tokens
            documents[document.licence or "not stated"] += 1
            named.add(names[document.licence, document.source][1])
    sources, dense = sorted(named), manifest.dense
    licences = sorted(tokens.items(), key=lambda item: (-item[1], item[0]))
    return _CARD.format(
        title=_TITLE,
        m=manifest,
        megabytes=manifest.bytes / 1e6,
        segments=len(manifest.segments),
        dense=f"- dense index for {dense.model}, layer {dense.layer}, {dense.dims} dims\n" if dense else "",
        distilled="".join(
            f"- what model `{table.model}` says, distilled from {table.tokens:,} tokens, whose ids are in it\n"
            for table in manifest.distilled
        ),
        licences="\n".join(f"| {name} | {documents[name]:,} | {count:,} |" for name, count in licences),
        sources=", ".join(sources[:50]) + (", …" if len(sources) > 50 else "") or "none",
    )
