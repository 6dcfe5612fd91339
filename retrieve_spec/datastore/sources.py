"""What to build from: from files, folders and checkouts to an ordered list of files, with what is skipped and why."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from retrieve_spec.datastore.manifest import MANIFEST, SEGMENTS
from retrieve_spec.errors import BuildError

STDIN = "-"
FILTERED_BYTES = 1 << 20
"""Largest file that enters from a filtered folder."""
_IGNORED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__"})
_RECORDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED = {".gz": "gz", ".zst": "zst"}


@dataclass(frozen=True, slots=True)
class Source:
    """One thing to build from.

    Attributes
    ----------
    path
        File, folder, git checkout (its tracked files) or ``-`` for standard input.
    licence
        Licence of its documents, recorded with each; with `licences`, of those that state none themselves.
    licences
        SPDX identifiers of the licences under which documents enter, and with which they are recorded; any where there
        are none.
    include, exclude
        Globs over paths relative to the source (``**`` spans folders; without a slash they match names).
        A source that is a file itself is listed as skipped where they leave it out.
    field
        Field or column that holds the text of JSON Lines and Parquet records, dotted for nested ones.
    prefix
        Put before the path of every document, as ``networkx/``; globs see it.
    filtered
        Whether the folder's files enter only as `EntryFilter` lets them.
    """

    path: str
    licence: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    field: str = "text"
    prefix: str = ""
    filtered: bool = False
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file to read: index of its source, path to record, path to open, bytes, kind and compression.

    A file that is not to be read carries the reason in `skip`. A part of a file of JSON Lines carries the bytes
    ``[start, end)`` and the lines before them.
    """

    source: int
    path: str
    location: str
    size: int
    kind: str
    compression: str = ""
    skip: str = ""
    licence: str = ""
    start: int = 0
    end: int = 0
    line: int = 0


def list_files(sources: tuple[Source, ...], store: Path | None = None) -> list[SourceFile]:
    """List the files of all sources, each source's in the order of their paths.

    Symbolic links to folders are not followed; a link that leads out of its source is listed as skipped. Datastores in
    a folder are not part of it.

    Parameters
    ----------
    sources
        What to go through.
    store
        The store that is being built, which does not look like one yet.

    Raises
    ------
    BuildError
        When a source does not exist, or git cannot list a checkout.
    """
    own = None if store is None else store.resolve()
    return [file for index, source in enumerate(sources) for file in _list_source(index, source, own)]


def _list_source(index: int, source: Source, store: Path | None) -> Iterator[SourceFile]:
    if source.path == STDIN:
        kind = "jsonl" if source.field != "text" else "text"
        yield SourceFile(index, "stdin", STDIN, 0, kind, licence=source.licence)
        return
    root = Path(source.path)
    if not root.exists():
        raise BuildError(f"a file or folder at {root}", "nothing there", "Check the path.")
    if source.filtered:
        yield from _admitted(index, source, root.resolve(), store)
        return
    included, excluded = _matcher(source.include), _matcher(source.exclude)

    def wanted(relative: str) -> bool:
        path = source.prefix + relative
        return (not source.include or included(path)) and not excluded(path)

    if root.is_file() or not root.is_dir():
        file = _describe(index, source, root.name, root, root.resolve().parent)
        yield file if wanted(root.name) else replace(file, skip="left out by a glob")
        return
    for relative in _tracked(root) if (root / ".git").exists() else _walk(root, store):
        if wanted(relative):
            yield _describe(index, source, relative, root / relative, root.resolve())


def _admitted(index: int, source: Source, root: Path, store: Path | None) -> Iterator[SourceFile]:
    """Files of a folder that may enter, in the order of their paths, and those that may not with the reason."""
    from retrieve_spec.datastore.entry_filter import Candidate, EntryFilter

    for path, verdict in sorted(EntryFilter([root], max_bytes=FILTERED_BYTES).list()):
        if store is not None and path.is_relative_to(store):
            continue
        name = readable(source.prefix + os.path.relpath(path, root))
        if isinstance(verdict, Candidate):
            yield SourceFile(index, name, str(path), verdict.size, "text", licence=source.licence)
        else:
            yield SourceFile(index, name, str(path), 0, "text", skip=str(verdict), licence=source.licence)


def _describe(index: int, source: Source, relative: str, location: Path, root: Path) -> SourceFile:
    suffix = location.suffix.lower()
    compression = _COMPRESSED.get(suffix, "")
    kind = _RECORDS.get(Path(location.stem).suffix.lower() if compression else suffix, "text")
    size, skip = 0, ""
    try:
        real = location.resolve(strict=True)
        status = real.stat()
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            skip = "not a regular file"
        elif not real.is_relative_to(root) and location.is_symlink():
            skip = "outside the source"
    except (OSError, RuntimeError):
        skip = "unreadable"
    path = readable(source.prefix + relative)
    return SourceFile(index, path, os.path.abspath(location), size, kind, compression, skip, source.licence)


def readable(path: str) -> str:
    r"""A path as text that can be written down: bytes that are not UTF-8 as ``\xff``."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _walk(root: Path, store: Path | None, prefix: str = "") -> Iterator[str]:
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        yield prefix.rstrip("/")
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            folder = Path(entry.path)
            if entry.name not in _IGNORED_FOLDERS and not _is_store(folder, store):
                yield from _walk(folder, store, f"{prefix}{entry.name}/")
        elif not (entry.is_symlink() and entry.is_dir()):
            yield prefix + entry.name


def _is_store(folder: Path, store: Path | None) -> bool:
    """Whether a folder is the store that is being built, or another one."""
    if store is not None and folder.name == store.name and folder.resolve() == store:
        return True
    return all((folder / name).exists() for name in (MANIFEST, SEGMENTS))


def _tracked(root: Path) -> list[str]:
    """Paths of the files git tracks in a checkout, sorted."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached"], capture_output=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        raise BuildError(
            f"git to list the files of {root}",
            detail.decode(errors="replace").strip(),
            "Install git, or copy the files.",
        ) from error
    paths = (os.fsdecode(name) for name in listed.split(b"\0") if name)
    return sorted({path for path in paths if not (root / path).is_dir()})


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    expressions = [glob(pattern) for pattern in patterns]
    return lambda path: any(expression.fullmatch(path) for expression in expressions)


def glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob; ``**/`` spans any number of folders, a pattern without a slash matches in every folder."""
    if "/" not in pattern:
        pattern = "**/" + pattern
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(translated.get(part) or re.escape(part) for part in parts), re.DOTALL)
