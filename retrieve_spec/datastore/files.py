"""Files of a store: arrays in checksummed raw files, written durably, and memory maps of them."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from retrieve_spec.errors import StoreCorruptError, StoreError

_WRITERS = 8


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file's entry in a manifest: size in bytes, SHA-256 of its content, dtype of a raw array or ``""``."""

    bytes: int
    sha256: str
    dtype: str = ""


@contextmanager
def explain_read_errors(path: str | Path) -> Iterator[None]:
    """Raise a `StoreError` for missing permission or a failing disk; other errors are not changed."""
    try:
        yield
    except (StoreError, FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str | Path, error: OSError) -> StoreError:
    """Return the error for a file that may not, or cannot, be read."""
    return StoreError(f"to read {path}", error.strerror or str(error), "Check who may read it, and the disk.")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes | memoryview) -> FileEntry:
    """Write a file and flush it to disk; not atomic, so only for files that nothing refers to yet."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(memoryview(content).nbytes, hashlib.sha256(content).hexdigest())


def write_files(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, FileEntry]:
    """Write 1-D arrays to files of a folder as raw little-endian values, and flush them to disk.

    Returns
    -------
    dict
        Size, checksum and dtype of each file by name.
    """

    def write(name: str) -> FileEntry:
        dtype = arrays[name].dtype.newbyteorder("<")
        written = write_bytes(folder / name, np.ascontiguousarray(arrays[name], dtype).data)
        return replace(written, dtype=dtype.str)

    with ThreadPoolExecutor(_WRITERS) as pool:  # disks handle several writes at once
        files = dict(zip(arrays, pool.map(write, arrays), strict=True))
    sync_folder(folder)
    return files


def replace_file(path: Path, content: bytes, private: bool = False) -> None:
    """Replace a file atomically and durably: readers see the old or the new content, never a part.

    A `private` file can be read by its owner only, unless the owner has changed that. If writing fails, for example on
    a full disk, nothing is left.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        if private:
            temporary.unlink(missing_ok=True)
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            if path.exists():
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))
        write_bytes(temporary, content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomically(path: Path, write: Callable[[BinaryIO], Any], private: bool = False) -> None:
    """Write a file atomically, also from several processes; unlike with `replace_file`, a crash may lose it.

    A `private` file can be read by its owner only, unless the owner has changed that.

    Raises
    ------
    OSError
        It cannot be written; the old content stays.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}")  # containers have equal process ids
    try:
        with open(partial, "wb") as file:
            if private:
                os.chmod(partial, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600)
            write(file)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):  # there may be no folder
            partial.unlink()
        raise


def check_content(path: Path, entry: FileEntry, mapped: NDArray[Any] | None = None) -> None:
    """Check a file's content against its recorded checksum.

    Parameters
    ----------
    path, entry
        The file and its record.
    mapped
        The file as mapped by `map_array` for scattered reads, which is checked instead: the file at the path may have
        been replaced since.

    Raises
    ------
    StoreCorruptError
        It is missing, or its checksum differs.
    """
    if mapped is None:
        try:
            with explain_read_errors(path), path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise StoreCorruptError(f"{entry.bytes:,} bytes in {path}", "no such file") from error
    else:
        with read_in_order(mapped):
            found = hashlib.sha256(mapped.data).hexdigest()
    if found != entry.sha256:
        raise StoreCorruptError(f"checksum {entry.sha256[:12]} of {path}", found[:12])


def link_file(source: Path, target: Path, file: FileEntry) -> None:
    """Link a file of a store to a second path, or copy and check it if the file system has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise StoreCorruptError(f"{file.bytes:,} bytes in {source}", "no such file") from error
    except OSError:  # another file system, or one without links
        check_content(source, file)
        shutil.copyfile(source, target)
        with target.open("r+b") as written:
            os.fsync(written.fileno())


def link_files(source: Path, files: dict[str, FileEntry], folder: Path) -> None:
    """Put files of a store into a new folder by `link_file`."""
    folder.mkdir()
    for name, file in files.items():
        link_file(source / name, folder / name, file)
    sync_folder(folder)


@contextmanager
def read_in_order(array: NDArray[Any]) -> Iterator[None]:
    """Let the system read ahead while a mapped array is read as a whole.

    Page by page it would take minutes on a slow disk, and several times as long as necessary in memory.
    """
    mapped = getattr(array.base, "obj", None)
    if not isinstance(mapped, mmap.mmap):
        yield
        return
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    yield
    mapped.madvise(mmap.MADV_RANDOM)


def map_array(
    path: str | Path, entry: FileEntry, dtypes: Collection[str], *, scattered: bool = False, private: bool = False
) -> NDArray[Any]:
    """Map a raw array into memory, read-only.

    Parameters
    ----------
    path, entry
        The file and its record.
    dtypes
        Dtypes that the array may have.
    scattered
        Whether reads are scattered, so that the system should not read ahead.
    private
        Whether the array can be changed, in this process only; unchanged pages stay shared.

    Raises
    ------
    StoreCorruptError
        The file is missing, its size differs, or it is recorded with another dtype.
    """
    if entry.dtype not in dtypes or entry.bytes % np.dtype(entry.dtype).itemsize:
        raise StoreCorruptError(
            f"an array of {' or '.join(dtypes)} in {path}", f"{entry.bytes:,} bytes of {entry.dtype}"
        )
    try:
        with explain_read_errors(path):
            handle = os.open(path, os.O_RDONLY)  # few system calls: stores have thousands of files
            try:
                size = os.fstat(handle).st_size
                if size != entry.bytes:
                    raise StoreCorruptError(f"{entry.bytes:,} bytes in {path}", f"{size:,} bytes")
                if size == 0:
                    return np.empty(0, entry.dtype)
                mapped = mmap.mmap(handle, size, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
            finally:
                os.close(handle)
    except FileNotFoundError as error:
        raise StoreCorruptError(f"{entry.bytes:,} bytes in {path}", "no such file") from error
    if scattered:
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, entry.dtype)


def open_regular(path: str, flags: int) -> int:
    """Opener for `open` that accepts regular files only and never waits for a pipe."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return handle


def open_listed(path: str | Path) -> BinaryIO:
    """Open a file that was listed in a folder; an error if its path has since come to contain a symbolic link.

    So nothing outside the folder is read, and no pipe is waited for.
    """
    return open(path, "rb", opener=_open_in_place)


def _open_in_place(path: str, flags: int) -> int:
    folder = os.path.dirname(path)
    if os.path.realpath(folder) != folder:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))
