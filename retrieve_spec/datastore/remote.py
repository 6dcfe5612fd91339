"""Remotes: a store in a folder or an object store that fsspec reaches, as immutable files and numbered versions.

A remote holds the files of segments and tombstones under the names that a store gives them, which say what they hold,
and ``versions/N.json``, a manifest that is put there once and never replaced: of two writers of one version, one
gets an error. The newest version is what the remote holds; ``manifest.json`` beside it makes a plain copy of the
remote a store.
"""

from __future__ import annotations

import os
import posixpath
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from retrieve_spec.datastore.addresses import explain_remote_errors, reach
from retrieve_spec.datastore.change import explain_write_errors
from retrieve_spec.datastore.files import FileEntry, check_content
from retrieve_spec.datastore.manifest import MANIFEST, Manifest, content_of, manifest_of
from retrieve_spec.errors import BuildError, StoreCorruptError, StoreLockedError, StoreNotFoundError

VERSIONS = "versions"
_BLOCK = 1 << 22
_TRIES = 5
Tick = Callable[[int], object]
"""Told of bytes that have travelled."""
_REMEDY = "Push the store again from a sound copy."


def _silent(_: int) -> None:
    pass


class Remote:
    """One remote.

    Parameters
    ----------
    url
        Its folder.

    Raises
    ------
    BuildError
        When no installed library reaches it.
    """

    def __init__(self, url: str) -> None:
        self.fs, self.root = reach(url)
        self.url = url
        protocols = (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
        self._local = "file" in protocols or "local" in protocols
        self._atomic = not self._local and "memory" not in protocols

    def path(self, *parts: str) -> str:
        """Place of a file."""
        return posixpath.join(self.root, *parts)

    def newest(self) -> int:
        """Number of the newest version, 0 for none."""
        self.fs.invalidate_cache()
        try:
            listed = self.fs.ls(self.path(VERSIONS), detail=False)
        except FileNotFoundError:
            return 0
        names = (posixpath.basename(name).removesuffix(".json") for name in listed)
        return max((int(name) for name in names if name.isdigit()), default=0)

    def check_free(self) -> None:
        """Check that a first version would replace no manifest: a store's own folder has one, and other programs do.

        Raises
        ------
        BuildError
            When it would.
        """
        if self.fs.exists(self.path(MANIFEST)):
            raise BuildError(f"an empty folder at {self.url}", f"one that holds {MANIFEST}", "Choose another one.")

    def manifest(self, version: int) -> Manifest:
        """The manifest of a version.

        Raises
        ------
        StoreNotFoundError
            When there is none.
        StoreCorruptError
            When it is damaged.
        """
        place = self.path(VERSIONS, f"{version:012d}.json")
        try:
            content = self.fs.cat_file(place)
        except FileNotFoundError as error:
            raise StoreNotFoundError(
                f"a datastore at {self.url}", "none", "Check the address, or push one there."
            ) from error
        return manifest_of(content, place)

    def add_version(self, version: int, manifest: Manifest) -> None:
        """Put a version there, unless another process has put that version there.

        Raises
        ------
        StoreLockedError
            When one has.
        """
        content = content_of(manifest)
        place = self.path(VERSIONS, f"{version:012d}.json")
        try:
            self.create_file(place, content)
        except FileExistsError as error:
            raise changed(self.url, f"version {version} to be this one", "one that another process pushed") from error
        self.write(self.path(MANIFEST), content)

    def says(self, manifest: Manifest) -> bool:
        """Whether the newest version was put there whole, and is this one."""
        try:
            return bool(self.fs.cat_file(self.path(MANIFEST)) == content_of(manifest))
        except FileNotFoundError:
            return False

    def create_file(self, place: str, content: bytes) -> None:
        """Write a small file, whole; `FileExistsError` where it is there."""
        if self._local:
            part = f"{place}.{secrets.token_hex(4)}.part"
            Path(place).parent.mkdir(parents=True, exist_ok=True)
            Path(part).write_bytes(content)
            try:
                os.link(part, place)
            finally:
                os.unlink(part)
            return
        try:
            with self._in_place():
                self.fs.pipe_file(place, content, mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or "PreconditionFailed" in str(error):
                raise FileExistsError(place) from error
            raise

    def write(self, place: str, content: bytes) -> None:
        """Write a small file, whole."""
        with self._in_place():
            if self._atomic:
                self.fs.pipe_file(place, content)
                return
            part = f"{place}.{secrets.token_hex(4)}.part"
            self.fs.makedirs(posixpath.dirname(place), exist_ok=True)
            self.fs.pipe_file(part, content)
            self._move(part, place)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Turn that there is no such place to write to, as no such bucket, into a `BuildError`."""
        try:
            yield
        except FileNotFoundError as error:
            remedy = "Make the bucket or folder first, or correct the address."
            raise BuildError(f"to write to {self.url}", str(error) or "no such place", remedy) from error

    def _move(self, part: str, place: str) -> None:
        if self._local:
            os.replace(part, place)
        else:
            self.fs.mv(part, place)

    def sizes(self, *below: str) -> dict[str, int]:
        """Bytes of every file that is there, or in a folder there, by its path below the root."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.find(self.path(*below), detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.root) + 1
        return {name[start:]: int(about["size"]) for name, about in found.items()}

    def send(self, source: Path, place: str, expected: FileEntry, tick: Tick = _silent) -> None:
        """Copy a file of a store there, whole or not at all.

        Raises
        ------
        StoreCorruptError
            When it does not hold what the manifest says.
        FileNotFoundError
            When there is no such file of the store.
        """
        target = self.path(place)
        part = target if self._atomic else f"{target}.{secrets.token_hex(4)}.part"
        check_content(source, expected)
        try:
            with self._in_place():
                self.fs.makedirs(posixpath.dirname(target), exist_ok=True)
                self.fs.put_file(os.fspath(source), part)
                if self._size(part) != expected.bytes:
                    raise OSError(f"{place} did not arrive whole")
                if part != target:
                    self._move(part, target)
        except BaseException:
            if part != target:
                with suppress(Exception):
                    self.fs.rm_file(part)
            raise
        tick(expected.bytes)

    def _size(self, place: str) -> int:
        """Bytes of a file that was just put there; a listing that another thread makes may be older than it."""
        for _ in range(_TRIES - 1):
            self.fs.invalidate_cache()
            with suppress(FileNotFoundError):
                return int(self.fs.info(place)["size"])
        self.fs.invalidate_cache()
        return int(self.fs.info(place)["size"])

    def fetch(self, place: str, target: Path, expected: FileEntry, tick: Tick = _silent) -> None:
        """Copy a file from there, whole or not at all.

        Raises
        ------
        StoreCorruptError
            When it is not there, or does not hold what the manifest says.
        BuildError
            When it cannot be read there, or written here.
        """
        part = target.with_name(target.name + ".part")
        try:
            with explain_write_errors(target.parent), part.open("wb") as written:
                for block in self.blocks(place, expected):
                    written.write(block)
                    tick(len(block))
                written.flush()
                os.fsync(written.fileno())
        except StoreCorruptError:
            part.unlink()
            raise
        os.replace(part, target)

    def blocks(self, place: str, expected: FileEntry) -> Iterator[bytes]:
        """Content of a file, piece by piece; errors are those of `fetch`, that of a wrong checksum after the last."""
        digest = sha256()
        try:
            with explain_remote_errors(self.url), self.fs.open(self.path(place), "rb") as read:
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
    """A remote, the number of its newest version, and what that holds.

    Raises
    ------
    StoreNotFoundError
        When the remote holds no store.
    StoreCorruptError
        When the manifest there is damaged.
    BuildError
        When the remote cannot be reached.
    """
    with explain_remote_errors(url):
        remote = Remote(url)
        version = remote.newest()
        return remote, version, remote.manifest(version)


def changed(url: str, expected: str, got: str) -> StoreLockedError:
    """Error about a remote that somebody else changed."""
    return StoreLockedError(
        f"{expected} at {url}", got, "Pull it into the store (`retrieve-spec pull`), then push again."
    )
