"""Remote reading: stores at addresses, opened from a copy in the cache folder, or looked at where they are."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.addresses import explain_remote_errors, is_address
from retrieve_spec.datastore.change import existing_manifest
from retrieve_spec.datastore.manifest import Manifest, files_of, read_manifest
from retrieve_spec.datastore.progress import progress_bar
from retrieve_spec.datastore.remote import read_remote
from retrieve_spec.datastore.share import pull_datastore
from retrieve_spec.errors import BuildError
from retrieve_spec.paths import cache_dir


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Folder of a store: of an address, that of a copy in the cache folder, which is brought up to date first.

    Where the remote cannot be reached, the copy stays as it is. Errors are those of `pull_datastore`.
    """
    if not is_address(path):
        return Path(path)
    url = str(path)
    folder = cache_dir() / "remotes" / hashlib.sha256(url.encode()).hexdigest()[:24]
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        pull_datastore(url, folder)
    except BuildError:
        if existing_manifest(folder) is None:
            raise
    return folder


def manifest_at(path: str | os.PathLike[str]) -> Manifest:
    """Manifest of a store in a folder or at an address; errors are those of `read_manifest` and `pull_datastore`."""
    return read_remote(str(path))[2] if is_address(path) else read_manifest(Path(path))


def verify_remote(url: str, *, progress: bool = False) -> dict[str, Any]:
    """Check that a remote holds every byte of its newest version; nothing is kept here.

    Parameters
    ----------
    url
        Folder of the remote.
    progress
        Show a bar on standard error.

    Returns
    -------
    dict
        As `verify_datastore`; no queries are run.

    Raises
    ------
    StoreCorruptError
        Naming the first file that is missing or damaged.
    StoreNotFoundError, BuildError
        As `pull_datastore`.
    """
    remote, _, manifest = read_remote(url)
    files = list(files_of(manifest))
    size = sum(file.bytes for _, file in files)
    with progress_bar("verifying", size, "B", progress) as advance, explain_remote_errors(url):
        for place, file in files:
            for block in remote.blocks(place, file):
                advance(len(block))
    return {
        "segments": len(manifest.segments),
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "files": len(files),
        "bytes": size,
        "queries": 0,
    }
