"""Sources of a build: read recipes (TOML files), and list the files of sources in order."""

from __future__ import annotations

import os
import re
import sysconfig
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.entry_filter import EntryFilter, secret_name
from retrieve_spec.datastore.files import open_listed
from retrieve_spec.datastore.git_rules import Reason
from retrieve_spec.datastore.licences import LicenceRule
from retrieve_spec.datastore.manifest import MANIFEST, SEGMENTS
from retrieve_spec.errors import BuildError

SHARD_BYTES = 1 << 22
"""Size of a shard in bytes of input."""
SHARD_FILES = 1 << 13
_BLOCK = 1 << 22
_ANY = 1 << 62
"""Size limit for listed files in bytes; records are read one by one, and texts that are too large are skipped."""
_RECORDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED = {".gz": "gz", ".zst": "zst"}


@dataclass(frozen=True, slots=True)
class Source:
    """A file or folder to build from.

    Attributes
    ----------
    path
        File or folder.
    licence
        Licence that is recorded with its documents; with `licences`, only with those that state none themselves.
    licences
        SPDX identifiers of the allowed licences, which are also recorded; empty: all documents are allowed.
    include, exclude
        Globs over paths relative to the source (``**`` spans folders; globs without a slash match names). A source that
        is a file and is left out by them is listed as skipped.
    field
        Field or column with the text of JSON Lines and Parquet records, dotted if nested.
    prefix
        Prefix of every document's path, such as ``networkx/``; globs match it, too.
    admit
        Disabled parts of the filter (`retrieve_spec.datastore.entry_filter.PARTS`). A source that is a file is only
        checked for secrets.
    max_bytes
        Larger files of a folder are skipped; 0: the limit is ``StoreConfig.document_bytes``.
    """

    path: str
    licence: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    field: str = "text"
    prefix: str = ""
    licences: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    max_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))
        for name in ("include", "exclude", "licences", "admit"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    def entry_filter(self, root: Path, limit: int, store: Path | None = None, *, named: bool = False) -> EntryFilter:
        """Return the filter for the files of this source below `root`; a `named` file enters whatever git says."""
        admit = {*self.admit, "ignored", "generated"} if named else self.admit
        return EntryFilter(root, max_bytes=self.max_bytes or limit, admit=admit, store=store)

    def licence_rule(self, root: Path) -> LicenceRule | None:
        """Return the licence rule for the files of this source below `root`, None if all are allowed."""
        return LicenceRule(root, self.licences, self.licence) if self.licences else None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read: its source, path to record, path to open, size in bytes, kind and compression.

    `skip` is the reason for not reading it. A part of a JSON Lines file has bytes ``[start, end)``, after `line` lines.
    The times of the last change, of content and of metadata, are in nanoseconds.
    """

    source: Source
    path: str
    location: str
    size: int
    kind: str
    compression: str = ""
    skip: str = ""
    start: int = 0
    end: int = 0
    line: int = 0
    times: tuple[int, int] = (0, 0)


def list_files(sources: tuple[Source, ...], store: Path | None = None) -> Iterator[SourceFile]:
    """List the files of all sources, each source's in the order of their paths.

    `EntryFilter` decides which files of a folder may enter; others are listed with the reason, and ignored folders as a
    whole.

    Parameters
    ----------
    sources
        Sources to list.
    store
        Folder of the store that is being built, which cannot be recognised as a store yet.

    Raises
    ------
    BuildError
        A source does not exist, or is a datastore.
    """
    for source in sources:
        if not Path(source.path).exists():
            remedy = "Check the path; what lies at an address is downloaded first."
            raise BuildError(f"a file or folder at {source.path}", "nothing there", remedy)
        if Path(source.path, MANIFEST).exists() and Path(source.path, SEGMENTS).is_dir():
            remedy = "Join stores with `retrieve-spec merge`."
            raise BuildError(f"files of text at {source.path}", "a datastore", remedy)
    for source in sources:
        yield from _list_source(source, store)


def _list_source(source: Source, store: Path | None) -> Iterator[SourceFile]:
    included, excluded = _matcher(source.include), _matcher(source.exclude)

    def wanted(relative: str) -> bool:
        path = source.prefix + relative
        return (not source.include or included(path)) and not excluded(path)

    root = Path(source.path)
    if not root.is_dir():
        file = _describe(source, root.name, root)
        yield file if wanted(root.name) else replace(file, skip="left out by a glob")
        return
    top = root.resolve()
    for relative, said in sorted(source.entry_filter(top, _ANY, store).entries(), key=_order):
        if wanted(relative):
            yield _file_of(source, relative, os.path.join(top, relative), said)


def _order(entry: tuple[str, object]) -> str:
    """Sort key that keeps folders together: a slash sorts before all characters of names."""
    return entry[0].replace("/", "\0")


def _file_of(source: Source, relative: str, location: str, said: os.stat_result | Reason) -> SourceFile:
    """Return a file of a source, or the entry of a skipped one."""
    path = readable(source.prefix + relative)
    if isinstance(said, Reason):
        return SourceFile(source, path, location, 0, "text", skip=str(said))
    stem, suffix = os.path.splitext(relative.lower())
    compression = _COMPRESSED.get(suffix, "")
    kind = _RECORDS.get(os.path.splitext(stem)[1] if compression else suffix, "text")
    times = (said.st_mtime_ns, said.st_ctime_ns)
    return SourceFile(source, path, location, said.st_size, kind, compression, times=times)


def _describe(source: Source, name: str, location: Path) -> SourceFile:
    """Return a source that is a file; a link is followed, but not to a secret."""
    try:
        real = location.resolve(strict=True)
    except (OSError, RuntimeError):
        return _file_of(source, name, str(location), Reason.UNREADABLE)
    said = source.entry_filter(real.parent, _ANY, named=True).status_of(str(real))
    if "secrets" not in source.admit and (secret_name(name) or (location.is_symlink() and secret_name(real))):
        said = Reason.SECRET_NAME
    return _file_of(source, name, str(real), said)


def readable(path: str) -> str:
    r"""Return a path as valid text: bytes that are not UTF-8 become ``\xff``."""
    return path if path.isascii() else path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    expressions = [glob(pattern) for pattern in patterns]
    return lambda path: any(expression.fullmatch(path) for expression in expressions)


def glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob; ``**/`` spans any number of folders, and a glob without a slash matches names in all folders."""
    if "/" not in pattern:
        pattern = "**/" + pattern
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(translated.get(part) or re.escape(part) for part in parts), re.DOTALL)


def file_shards(files: Iterable[SourceFile]) -> Iterator[list[SourceFile]]:
    """Group files into shards, in order."""
    group: list[SourceFile] = []
    size = 0
    for file in chain.from_iterable(map(_divided, files)):
        if group and (size + file.size > SHARD_BYTES or len(group) == SHARD_FILES):
            yield group
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield group


def _divided(file: SourceFile) -> Iterator[SourceFile]:
    """Yield a file, or the parts of a large JSON Lines file."""
    if file.kind != "jsonl" or file.compression or file.skip or file.size <= 2 * SHARD_BYTES:
        yield file
        return
    try:
        cuts = list(_line_cuts(file.location))
    except OSError:  # reported when it is read
        yield file
        return
    for (start, line), (end, _) in pairwise(cuts):
        yield replace(file, start=start, end=end, line=line, size=end - start)


def _line_cuts(path: str) -> Iterator[tuple[int, int]]:
    """Yield (offset, lines before it) of the parts' starts and of the file's end."""
    at = lines = 0
    wanted = SHARD_BYTES
    yield 0, 0
    with open_listed(path) as file:
        while block := file.read(_BLOCK):
            while wanted < at + len(block) and (end := block.find(b"\n", wanted - at)) >= 0:
                yield at + end + 1, lines + block.count(b"\n", 0, end + 1)
                wanted = at + end + 1 + SHARD_BYTES
            lines += block.count(b"\n")
            at += len(block)
    yield max(at, 1), lines


_KEYS = {"name", "description", "expected", "source", "index"}
_SOURCE_KEYS = {"path", "distributions", "licence", "include", "exclude", "field", "admit"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sources and settings of a store.

    Attributes
    ----------
    name
        Name shown to people.
    sources
        Sources, in order.
    config
        Settings other than the defaults.
    """

    name: str
    sources: tuple[Source, ...]
    config: StoreConfig


def recipe_file(name: str | os.PathLike[str]) -> Path:
    """Return the file of a recipe: an existing path, else the bundled recipe of that name."""
    given = Path(name)
    if given.is_file() or given.suffix or len(given.parts) > 1:
        return given
    beside = Path(__file__).resolve().parents[2] / "datastores" / f"{given}.toml"
    if beside.exists():  # in a checkout
        return beside
    try:
        installed = metadata.files("retrieve-spec") or []
    except metadata.PackageNotFoundError:
        installed = []
    found = (Path(str(file.locate())) for file in installed if file.parts[-2:] == ("recipes", beside.name))
    return next(found, given)


def load_recipe(
    path: str | os.PathLike[str],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Recipe:
    """Read a recipe, and find its sources on this machine.

    A source has a ``path``, in which ``{stdlib}`` is the standard library of the running interpreter, or
    ``distributions = true``: all installed distributions with the licences they state. Paths of their documents are
    those below ``site-packages``: ``networkx/utils/misc.py``.

    Parameters
    ----------
    path
        A TOML file, or the name of a bundled recipe such as ``python-stdlib``.
    include, exclude
        Globs that replace (include) or are added to (exclude) those of every source.

    Raises
    ------
    BuildError
        The file is not a recipe, or a path in it does not exist.
    """
    file = recipe_file(path)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise BuildError(f"to read recipe {file}", got, "Check the path; docs/datastores.md has the keys.") from error
    _check_keys(file, content, _KEYS)
    listed = content.get("source")
    if "name" not in content or not isinstance(listed, list) or not all(isinstance(s, dict) for s in listed):
        raise BuildError(f"a name and [[source]] tables in {file}", "none", "See docs/datastores.md.")
    sources: list[Source] = []
    for source in listed:
        _check_keys(file, source, _SOURCE_KEYS)
        found = _sources_of(file, source)
        sources += [replace(s, include=tuple(include) or s.include, exclude=(*s.exclude, *exclude)) for s in found]
    config = StoreConfig(index=content.get("index", "both"))
    return Recipe(content["name"], tuple(sources), config)


def _check_keys(file: Path, table: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise BuildError(f"keys {', '.join(sorted(known))} in {file}", ", ".join(unknown), "Correct the recipe.")


def _sources_of(file: Path, source: dict[str, Any]) -> list[Source]:
    template = Source(
        source.get("path", ""),
        source.get("licence", ""),
        source.get("include", ()),
        source.get("exclude", ()),
        source.get("field", "text"),
        admit=source.get("admit", ()),
    )
    if source.get("distributions"):
        return _distributions(template)
    if not template.path:
        raise BuildError(f"a path, or distributions = true, of every [[source]] in {file}", "none", "Name a path.")
    return [replace(template, path=template.path.replace("{stdlib}", sysconfig.get_path("stdlib")))]


def _distributions(template: Source) -> list[Source]:
    """Return a source per package or module of every installed distribution, in the order of their names."""
    sources = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        for root in _roots({file for file in distribution.files or () if file.suffix == ".py"}):
            location = Path(str(distribution.locate_file(root)))
            if name and location.exists():
                prefix = "".join(f"{part}/" for part in (root.parts if location.is_dir() else root.parts[:-1]))
                sources[name.lower(), root] = replace(
                    template, path=str(location), licence=licence_of(distribution), prefix=prefix
                )
    return [sources[key] for key in sorted(sources)]


def _roots(files: set[metadata.PackagePath]) -> set[PurePosixPath]:
    """Return the packages and modules of a distribution; distributions may share a namespace folder."""
    packages = {PurePosixPath(file).parent for file in files if file.name == "__init__.py"}
    roots = set()
    for file in map(PurePosixPath, files):
        if file.parts[0] != ".." and not file.is_absolute():
            outermost_first = list(file.parents)[-2::-1]
            roots.add(next((folder for folder in outermost_first if folder in packages), file))
    return roots


def licence_of(distribution: metadata.Distribution) -> str:
    """Return a distribution's licence: expression, trove classifiers, or first line of its licence field."""
    about = distribution.metadata
    if "License-Expression" in about:
        return str(about["License-Expression"])
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if c.startswith("License ::")]
    if classifiers:
        return "; ".join(sorted(set(classifiers)))
    stated = str(about["License"]) if "License" in about else ""
    return re.split(r"[\r\n]", stated.strip())[0][:80]
