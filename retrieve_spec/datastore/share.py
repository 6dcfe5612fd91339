"""Share stores with a remote: transfer the files that the other side lacks, with a store card.

Shared files do not contain paths of the local machine.
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
    """Report of a push.

    Attributes
    ----------
    url, version
        The remote, and its version after the push.
    files, bytes
        Number and size of the transferred files.
    kept
        Number of files that the remote had already.
    """

    url: str
    version: int
    files: int
    bytes: int
    kept: int


def push_datastore(path: str | os.PathLike[str], url: str, *, progress: bool = False) -> PushReport:
    """Upload a store to a remote.

    An interrupted push leaves the remote's newest version unchanged; another push sends the missing files. A store card
    (``README.md``) is written, too, unless the remote has a README that this library did not write. Earlier versions
    stay readable, and without changes since the last push no version is added. Local paths and the store's history
    are not uploaded.

    Parameters
    ----------
    path
        Folder of the store.
    url
        A folder that fsspec can reach: ``s3://…``, ``gs://…``, ``hf://…``, ``file://…``.
    progress
        Show bars on standard error.

    Raises
    ------
    StoreLockedError
        The remote has a version that this store has not seen, or another process changes the store meanwhile.
    StoreCorruptError
        A file of the store is damaged.
    BuildError
        The remote cannot be reached or written.
    """
    folder = folder_of(path, "push")
    store = open_datastore(folder)
    manifest = public_manifest(store.manifest)
    with explain_remote_errors(url):
        remote = Remote(url)
        holds = remote.fs.exists(remote.path(MANIFEST))  # checked first: a concurrent push writes a version before it
        newest = version = remote.newest()
        if holds and not newest:  # a local store, or a file of another program
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
                    check_content(source, file)
                    remote.send(source, place)
                except (FileNotFoundError, StoreCorruptError) as error:
                    if source.exists() or read_manifest(folder).generation == manifest.generation:
                        raise  # the remote failed, or the store is damaged
                    got = "a store that another process has changed meanwhile"
                    remedy = "Push it again when it is done."
                    raise StoreLockedError(f"{source}, which the store listed", got, remedy) from error
                advance(file.bytes)
        if remote.read(MANIFEST) != content_of(manifest):  # another version is newest, or the last push was interrupted
            version += 1
            there = remote.read(CARD)
            if there is None or _TITLE.encode() in there:  # do not replace a README of somebody else
                card = _card(store, manifest).encode("utf-8", "backslashreplace")  # sources may be invalid text
                remote.write(CARD, card)
            remote.add_version(version, manifest)
    _remember(folder, url, version, manifest.content)
    return PushReport(url, version, len(missing), total, len(files) - len(missing))


def _seen(folder: Path) -> dict[str, Any]:
    """Return version and content of the remotes that a store was pushed to or pulled from, by address."""
    try:
        found: dict[str, Any] = json.loads((folder / REMOTES).read_bytes())
    except FileNotFoundError:
        return {}
    return found


def _remember(folder: Path, url: str, version: int, content: str) -> None:
    with explain_write_errors(folder), FileLock(folder / f"{REMOTES}.lock"):  # others may push the store elsewhere
        seen = _seen(folder) | {url: {"version": version, "content": content}}
        replace_file(folder / REMOTES, json.dumps(seen, indent=1).encode())


def pull_datastore(url: str, path: str | os.PathLike[str], *, progress: bool = False) -> ChangeReport:
    """Download a remote into a store, which is created if it does not exist.

    A store without changes since its last pull or push then equals the remote; any other store keeps its own segments,
    too. An interrupted pull leaves the store unchanged; another pull fetches the missing files.

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
        The remote holds no store.
    TokenizerMismatchError
        The store has another tokenizer.
    StoreCorruptError
        A file of the remote is damaged or missing.
    BuildError
        The remote cannot be reached.
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
            _check_dense(store, mine, there)  # its segments are not on the remote
            report = unite(work, mine, event, [store, work.pulled], progress)
        else:
            replace_file(store / there.tokenizer_name, (work.pulled / there.tokenizer_name).read_bytes())
            generation, history = (mine.generation, mine.history) if mine else (0, ())
            base = replace(there, segments=(), generation=generation, history=history)
            report = unite(work, base, event, [work.pulled], progress)
    _remember(store, url, version, there.content)
    return report


def _check_dense(store: Path, mine: Manifest, there: Manifest) -> None:
    """Check that the dense keys of two stores are comparable, if both have any."""
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
    """Return a manifest without history, in which paths of sources and models are reduced to their last part."""
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
    """Return the last part of a path or address; hub ids of models stay whole."""
    path = public_name(path)
    absolute = path.startswith(("/", "~", ".", "\\")) or ":" in path[:3] or path.count("/") > 1
    return PurePath(path.replace("\\", "/")).name if absolute else path


def _card(store: Datastore, manifest: Manifest) -> str:
    """Write the README of a shared store, with sources named as in its shared manifest."""
    tokens: Counter[str] = Counter()
    documents: Counter[str] = Counter()
    named = set()  # removed documents are not mentioned
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
