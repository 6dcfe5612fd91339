"""New stores: a folder that is free, a copy of the tokenizer, a manifest without segments."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from retrieve_spec.config import DenseConfig, StoreConfig
from retrieve_spec.datastore.change import LOCK, existing_manifest
from retrieve_spec.datastore.files import FileEntry, replace_file, sha256_of
from retrieve_spec.datastore.fingerprint import load_tokenizer, tokenizer_fingerprint
from retrieve_spec.datastore.manifest import (
    CATALOG,
    MANIFEST,
    SEGMENTS,
    SKIPPED,
    TOMBSTONES,
    WORK,
    Manifest,
    incomplete,
    tokenizer_name,
)
from retrieve_spec.datastore.work import GONE, INPUTS, LOGS, STDIN_COPY, WorkFolder
from retrieve_spec.errors import BuildError

_OURS = {
    "": re.compile(
        rf"{LOCK}|{WORK}|{SEGMENTS}|{SKIPPED}|{TOMBSTONES}|(?:{MANIFEST}|tokenizer-\w+\.json)(?:\.tmp)?|{CATALOG}"
    ),
    WORK: re.compile(
        rf"(?:plan|cut|(?:shard|segment|dense|keys|error)-[\w-]+)\.(?:json|bin)(?:\.tmp)?|{STDIN_COPY}|{INPUTS}"
        rf"|segment-\d+|(?:shard|segment)-\d+\.[0-9a-f]{{8}}|{TOMBSTONES}|{LOGS}|pull"
    ),
    SEGMENTS: re.compile(rf"[0-9a-f]{{32}}(?:{re.escape(GONE)})?"),
    TOMBSTONES: re.compile(r"[0-9a-f]{32}-[0-9a-f]{12}-\w+\.bin"),
    SKIPPED: re.compile(r"[0-9a-f]{16}\.json|list\.tmp"),
}
"""Names that an interrupted first build leaves, by folder."""


def check_folder(store: Path) -> None:
    """Check that a folder holds neither a store nor anything that no build made, before even a lock is put there.

    Raises
    ------
    BuildError
        When there is a store, or files that a build might overwrite.
    """
    if existing_manifest(store) is not None:
        raise BuildError(f"to build a datastore at {store}", "there is one", "Use `add`, or choose another folder.")
    foreign = next(_foreign(store), None)
    if foreign is not None:
        raise BuildError(f"an empty folder at {store}", f"one that holds {foreign.name}", "Choose another folder.")


def check_not_begun(store: Path, work: WorkFolder) -> None:
    """Check, as the only writer, that no build was finished meanwhile and none was interrupted.

    Raises
    ------
    BuildError
        When there is a store.
    StoreIncompleteError
        When an interrupted build lies there.
    """
    check_folder(store)
    if work.plan() is not None:
        raise incomplete(store, f"an empty folder at {store}")


def _foreign(store: Path) -> Iterator[Path]:
    """Files in a folder without a manifest that no build made."""
    for folder, ours in _OURS.items():
        inside = store / folder
        for path in sorted(inside.iterdir()) if inside.is_dir() else ():
            if not ours.fullmatch(path.name):
                yield path


def write_tokenizer(store: Path, tokenizer: Any) -> str:
    """Put a copy of a tokenizer into a store, without truncation and padding; returns its file name.

    Raises
    ------
    BuildError
        When none is given, or it is none of the `tokenizers` library.
    """
    if tokenizer is None:
        raise BuildError(
            "a tokenizer", "none", "Give --tokenizer: the model folder, or tokenizer.json, that drafts are for."
        )
    backend = Tokenizer.from_str(load_tokenizer(tokenizer).to_str())
    backend.no_truncation()
    backend.no_padding()
    content = backend.to_str().encode()
    name = tokenizer_name(FileEntry(len(content), hashlib.sha256(content).hexdigest()))
    replace_file(store / name, content)
    return name


def first_manifest(store: Path, name: str) -> Manifest:
    """Manifest of a store without segments, for the copy of the tokenizer that lies in it under a name."""
    tokenizer = store / name
    backend = load_tokenizer(tokenizer)
    vocabulary = max(backend.get_vocab().values(), default=0) + 1
    return Manifest(
        tokenizer_fingerprint(backend), FileEntry(tokenizer.stat().st_size, sha256_of(tokenizer)), vocabulary
    )


def config_of(manifest: Manifest) -> StoreConfig:
    """Settings of the store's first build; without dense indexes where the store has none any more."""
    known = {field.name for field in fields(StoreConfig)}  # earlier versions had others, too
    config = StoreConfig(**{name: value for name, value in manifest.config.items() if name in known})
    return config if manifest.dense is not None else replace(config, dense=None)


def common_dense(stores: list[Path], manifests: list[Manifest]) -> DenseConfig | None:
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
