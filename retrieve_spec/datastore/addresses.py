"""Addresses: what stands at one (``s3://…``), reached through fsspec as a file or folder of this machine is."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from retrieve_spec.errors import BuildError, RetrieveSpecError


@contextmanager
def explain_remote_errors(url: str) -> Iterator[None]:
    """Turn what a remote's library raises into a `BuildError` that names it; a missing file stays what it is."""
    try:
        yield
    except (RetrieveSpecError, FileNotFoundError, FileExistsError):
        raise
    except Exception as error:  # every library raises its own
        got = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BuildError(
            f"to reach {url}", got, "Run the command again when it can be reached: what was moved is not moved again."
        ) from error


def is_address(path: object) -> bool:
    """Whether something is the address of a remote (``s3://…``) rather than a path of this machine."""
    return isinstance(path, str) and "://" in path


def public_name(path: str) -> str:
    """A path or address without what lets in whom it is given to: a user's name and password, and a signed query."""
    if not is_address(path):
        return path
    if "http://" in path or "https://" in path:
        path = path.partition("?")[0]
    return re.sub(r"://[^/]*@", "://", path)


def folder_of(path: str | os.PathLike[str], verb: str) -> Path:
    """Path of a store's folder, for what is not done at an address.

    Raises
    ------
    BuildError
        When it is an address.
    """
    if is_address(path):
        remedies = {
            "build": f"Build a folder, then `retrieve-spec push FOLDER {path}`.",
            "pull": f"Give the address first: `retrieve-spec pull {path} FOLDER`.",
        }
        other = f"Run `retrieve-spec pull {path} FOLDER`, {verb} that, and `retrieve-spec push FOLDER {path}`."
        raise BuildError(f"a folder to {verb}", f"the address {path}", remedies.get(verb, other))
    return Path(path)


def reach(url: str) -> tuple[Any, str]:
    """The file system of an address, and the place there.

    Raises
    ------
    BuildError
        When no installed library reaches it.
    """
    try:
        import fsspec
    except ImportError as error:
        raise BuildError(
            f"to reach {url}", "fsspec is not installed", "Run: pip install 'retrieve-spec[share]'"
        ) from error
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        remedy = "Give an address such as s3://, gs://, hf:// or file://, and install with pip what it needs."
        raise BuildError(f"to reach {url}", str(error), remedy) from error
    return fs, root.rstrip("/")


@contextmanager
def open_file(location: str, *, listed: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for reading, by its path or its address; errors are those of `open`, of remotes `BuildError`.

    Of one that was `listed` it is an error as well if its place has become a link since, or lies behind one, or is no
    regular file any more: nothing outside of a folder is read, and a pipe is not waited for.
    """
    if not is_address(location):
        with open(location, "rb", opener=_open_listed if listed else None) as file:
            yield file
        return
    with explain_remote_errors(location):
        fs, place = reach(location)
        with fs.open(place, "rb") as file, io.BufferedReader(file) as buffered:  # not all of them read lines in full
            yield buffered


class IrregularFileError(OSError):
    """A pipe, folder or device where a regular file is read."""


def _open_listed(path: str, flags: int) -> int:
    folder = os.path.dirname(path)
    if os.path.realpath(folder) != folder:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


def open_regular(path: str, flags: int) -> int:
    """An opener for `open` that waits for no pipe: what is no regular file is an error."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise IrregularFileError(errno.EINVAL, "not a regular file", path)
    return handle
