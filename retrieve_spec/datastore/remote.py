"""Remotes: stores at addresses (``s3://…``) that fsspec reaches.

A remote has the files of a store under the same names, which are content hashes, and manifests ``versions/N.json``,
each of which is written once and never replaced: of two writers of one version, one gets an error. The newest version
counts. With ``manifest.json`` beside it, a plain copy of the remote is a store.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from retrieve_spec.config import cache_dir
from retrieve_spec.datastore.change import Advance, progress_bar
from retrieve_spec.datastore.files import FileEntry, link_file
from retrieve_spec.datastore.manifest import (
    MANIFEST,
    Manifest,
    content_of,
    drop_stale_files,
    existing_manifest,
    explain_write_errors,
    files_of,
    manifest_of,
    read_manifest,
    write_manifest,
)
from retrieve_spec.errors import BuildError, RetrieveSpecError, StoreCorruptError, StoreLockedError, StoreNotFoundError


@contextmanager
def explain_remote_errors(url: str) -> Iterator[None]:
    """Turn errors of a remote's library into a `BuildError` that names the remote."""
    try:
        yield
    except RetrieveSpecError:
        raise
    except Exception as error:  # every library raises its own
        got = next(iter(str(error).splitlines()), "") or type(error).__name__
        remedy = "Check the address; run the command again when it can be reached: what was moved is not moved again."
        raise BuildError(f"to reach {url}", got, remedy) from error


def is_address(path: object) -> bool:
    """Whether a value is the address of a remote (``s3://…``) rather than a local path."""
    return isinstance(path, str) and "://" in path


def public_name(path: str) -> str:
    """Return a path or address without credentials: user name, password and signed query."""
    if not is_address(path):
        return path
    if "http://" in path or "https://" in path:
        path = path.partition("?")[0]
    return re.sub(r"://[^/]*@", "://", path)


def folder_of(path: str | os.PathLike[str], verb: str) -> Path:
    """Return a store's path for operations that need a local folder.

    Raises
    ------
    BuildError
        It is an address.
    """
    if is_address(path):
        remedies = {
            "build": f"Build a folder, then `retrieve-spec push FOLDER {path}`.",
            "pull": f"Give the address first: `retrieve-spec pull {path} FOLDER`.",
        }
        other = f"Run `retrieve-spec pull {path} FOLDER`, {verb} that, and `retrieve-spec push FOLDER {path}`."
        raise BuildError(f"a folder to {verb}", f"the address {path}", remedies.get(verb, other))
    return Path(path)


VERSIONS = "versions"
_BLOCK = 1 << 22
_REMEDY = "Push the store again from a sound copy."


class Remote:
    """One remote.

    Parameters
    ----------
    url
        Address of its folder.

    Raises
    ------
    BuildError
        No installed library reaches it.
    """

    def __init__(self, url: str) -> None:
        if not is_address(url):
            folder = Path(url).absolute().as_uri()
            raise BuildError("an address of a remote", repr(url), f"Write {folder} for that folder, or s3://…, hf://….")
        from fsspec.core import url_to_fs  # slow to import, and not needed for folders

        try:
            self.fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            remedy = "Give an address such as s3://, gs://, hf:// or file://, and install with pip what it needs."
            raise BuildError(f"to reach {url}", str(error), remedy) from error
        self.url, self.root = url, root.rstrip("/")

    def path(self, place: str) -> str:
        """Return a file's path in the remote's file system."""
        return posixpath.join(self.root, place)

    def newest(self) -> int:
        """Return the number of the newest version, 0 without any."""
        self.fs.invalidate_cache()
        try:
            listed = self.fs.ls(self.path(VERSIONS), detail=False)
        except FileNotFoundError:
            return 0
        names = (posixpath.basename(name).removesuffix(".json") for name in listed)
        return max((int(name) for name in names if name.isdigit()), default=0)

    def manifest(self, version: int) -> Manifest:
        """Read the manifest of a version.

        Raises
        ------
        StoreNotFoundError
            There is none.
        StoreCorruptError
            It is damaged.
        """
        place = f"{VERSIONS}/{version:012d}.json"
        content = self.read(place)
        if content is None:
            raise StoreNotFoundError(f"a datastore at {self.url}", "none", "Check the address, or push one there.")
        return manifest_of(content, self.path(place))

    def add_version(self, version: int, manifest: Manifest) -> None:
        """Add a version, unless another process has added it.

        Raises
        ------
        StoreLockedError
            Another process has added it.
        """
        content, place = content_of(manifest), f"{VERSIONS}/{version:012d}.json"
        try:
            if "file" in self.fs.protocol:  # fsspec's check and write are not atomic there
                part = f"{place}.{secrets.token_hex(4)}.part"
                self.write(part, content)
                try:
                    os.link(self.path(part), self.path(place))
                finally:
                    os.unlink(self.path(part))
            else:
                self.fs.pipe_file(self.path(place), content, mode="create")
        except OSError as error:
            # A file at the folder's path raises this error, too.
            exists = isinstance(error, FileExistsError) and self.fs.exists(self.path(place))
            if exists or "PreconditionFailed" in str(error):
                got = "one that another process pushed"
                raise changed(self.url, f"version {version} to be this one", got) from error
            raise
        self.write(MANIFEST, content)

    def read(self, place: str) -> bytes | None:
        """Read a small file; None if it does not exist."""
        try:
            return bytes(self.fs.cat_file(self.path(place)))
        except FileNotFoundError:
            return None

    def write(self, place: str, content: bytes) -> None:
        """Write a small file."""
        self.fs.makedirs(posixpath.dirname(self.path(place)), exist_ok=True)
        self.fs.pipe_file(self.path(place), content)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file, by its path below the root."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.root) + 1
        return {name[start:]: int(about["size"]) for name, about in found.items()}

    def send(self, source: Path, place: str) -> None:
        """Upload a file of a store."""
        target = self.path(place)
        self.fs.makedirs(posixpath.dirname(target), exist_ok=True)
        self.fs.put_file(os.fspath(source), target)

    def fetch(self, place: str, target: Path, expected: FileEntry, advance: Advance) -> None:
        """Download a file, whole or not at all.

        Raises
        ------
        StoreCorruptError
            It does not exist, or differs from its checksum in the manifest.
        BuildError
            It cannot be read from the remote, or written locally.
        """
        part = target.with_name(target.name + ".part")
        try:
            with explain_write_errors(target.parent), part.open("wb") as written:
                for block in self.blocks(place, expected):
                    written.write(block)
                    advance(len(block))
                written.flush()
                os.fsync(written.fileno())
        except StoreCorruptError:
            part.unlink()
            raise
        os.replace(part, target)

    def blocks(self, place: str, expected: FileEntry) -> Iterator[bytes]:
        """Yield the content of a file in blocks; errors are those of `fetch`, a wrong checksum after the last block."""
        digest = hashlib.sha256()
        with explain_remote_errors(self.url):
            try:
                with self.fs.open(self.path(place), "rb") as read:
                    while block := read.read(_BLOCK):
                        digest.update(block)
                        yield block
            except FileNotFoundError as error:
                raise StoreCorruptError(f"{place} at {self.url}", "no such file", _REMEDY) from error
        if digest.hexdigest() != expected.sha256:
            raise StoreCorruptError(
                f"checksum {expected.sha256[:12]} of {place} at {self.url}", digest.hexdigest()[:12], _REMEDY
            )


def read_remote(url: str) -> tuple[Remote, int, Manifest]:
    """Return a remote, the number of its newest version, and that version's manifest.

    Raises
    ------
    StoreNotFoundError
        The remote holds no store.
    StoreCorruptError
        Its manifest is damaged.
    BuildError
        The remote cannot be reached.
    """
    with explain_remote_errors(url):
        remote = Remote(url)
        version = remote.newest()
        return remote, version, remote.manifest(version)


def changed(url: str, expected: str, got: str) -> StoreLockedError:
    """Return the error for a remote that was changed by somebody else."""
    return StoreLockedError(
        f"{expected} at {url}", got, "Pull it into the store (`retrieve-spec pull`), then push again."
    )


def bring(
    remote: Remote, manifest: Manifest, folder: Path, beside: Path | None = None, *, progress: bool = False
) -> None:
    """Make a folder a store with a version's contents: files that the local store has are linked, others fetched.

    Errors are those of `Remote.fetch`.
    """
    places = ((place, file, folder / place) for place, file in files_of(manifest))
    missing = [one for one in places if not (one[2].exists() and one[2].stat().st_size == one[1].bytes)]
    with progress_bar("pulling", sum(file.bytes for _, file, _ in missing), "B", progress) as advance:
        for place, file, here in missing:
            here.parent.mkdir(parents=True, exist_ok=True)
            if beside is not None and (beside / place).is_file():
                link_file(beside / place, here, file)
                advance(file.bytes)
            else:
                remote.fetch(place, here, file, advance)
    write_manifest(folder, manifest)


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a store; for an address, that of a local copy in the cache, after updating it.

    If the remote cannot be reached, the copy is not updated. Errors are those of `read_remote` and `Remote.fetch`.
    """
    if not is_address(path):
        return Path(path)
    url = str(path)
    folder = cache_dir() / "remotes" / hashlib.sha256(url.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock"):
            remote, _, there = read_remote(url)
            bring(remote, there, folder)
            drop_stale_files(folder, there)
    except BuildError:
        if existing_manifest(folder) is None:
            raise
    return folder


def manifest_at(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a store in a folder or at an address; errors are those of `read_manifest`, `read_remote`."""
    return read_remote(str(path))[2] if is_address(path) else read_manifest(Path(path))
