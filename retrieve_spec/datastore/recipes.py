"""Recipes: TOML files that say what a store is made of, read as sources and settings, and stores built from them."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from retrieve_spec.config import StoreConfig
from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.change import ChangeReport
from retrieve_spec.datastore.git_rules import checkout_of
from retrieve_spec.datastore.sources import Source
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import (
    BuildError,
    StoreError,
    StoreIncompleteError,
    StoreNotFoundError,
    TokenizerMismatchError,
)

_KEYS = {"name", "description", "expected", "source", "index"}
_SOURCE_KEYS = {"path", "distributions", "licence", "include", "exclude", "field", "admit"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a store is made of.

    Attributes
    ----------
    name, description
        For people.
    sources
        What to build from, in order.
    config
        Settings that differ from the defaults.
    """

    name: str
    description: str
    sources: tuple[Source, ...]
    config: StoreConfig


def recipe_file(name: str | os.PathLike[str]) -> Path:
    """The file that a recipe's path or name stands for: one that is there, else one that came with the library."""
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
    given: Sequence[str] = (),
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Recipe:
    """Read a recipe and find its sources on this machine.

    A source names a ``path``, in which ``{stdlib}`` stands for the standard library of the running interpreter,
    ``{repository}`` for the git checkout of the working directory and ``{given}`` for each source given on the command
    line; or ``distributions = true``, which stands for every installed distribution with the licence it states. Paths
    of its documents begin as below ``site-packages``: ``networkx/utils/misc.py``.

    Parameters
    ----------
    path
        The TOML file, or the name of a recipe that comes with the library, such as ``python-stdlib``.
    given
        Sources given by the user.
    include, exclude
        Globs that replace (include) or join (exclude) those of every source.

    Raises
    ------
    BuildError
        When the file is no recipe, or a place it names is not there.
    """
    file = recipe_file(path)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BuildError(f"to read recipe {file}", error.strerror or str(error), "Check the path.") from error
    except ValueError as error:
        raise BuildError(
            f"to read recipe {file}", str(error), "Correct the TOML; docs/datastores.md has the keys."
        ) from error
    _check_keys(file, content, _KEYS)
    listed = content.get("source")
    if not isinstance(listed, list) or not all(isinstance(s, dict) for s in listed) or not listed:
        raise BuildError(f"a name and at least one [[source]] in {file}", "none", "See docs/datastores.md.")
    if "name" not in content:
        raise BuildError(f"a name in {file}", "none", "See docs/datastores.md.")
    sources: list[Source] = []
    for source in listed:
        _check_keys(file, source, _SOURCE_KEYS)
        found = _sources_of(file, source, given)
        sources += [replace(s, include=tuple(include) or s.include, exclude=(*s.exclude, *exclude)) for s in found]
    config = StoreConfig(index=content.get("index", "both"))
    return Recipe(content["name"], content.get("description", ""), tuple(sources), config)


def _check_keys(file: Path, table: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise BuildError(f"keys {', '.join(sorted(known))} in {file}", ", ".join(unknown), "Correct the recipe.")


def _sources_of(file: Path, source: dict[str, Any], given: Sequence[str]) -> list[Source]:
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
    if template.path == "{given}":
        if not given:
            raise BuildError(f"the sources that {file} is about", "none", "Give files or folders after the store.")
        return [replace(template, path=path) for path in given]
    return [replace(template, path=_place(template.path))]


def _place(path: str) -> str:
    if "{stdlib}" in path:
        path = path.replace("{stdlib}", sysconfig.get_path("stdlib"))
    if "{repository}" in path:
        checkout = checkout_of(Path.cwd())
        if checkout is None:
            raise BuildError("a git checkout around the working directory", "none", "Change into the checkout.")
        path = path.replace("{repository}", str(checkout))
    return path


def _distributions(template: Source) -> list[Source]:
    """One source per package or module of every installed distribution, in the order of their names."""
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
    """Packages and modules that are a distribution's own: it may share a namespace folder with others."""
    packages = {PurePosixPath(file).parent for file in files if file.name == "__init__.py"}
    roots = set()
    for file in map(PurePosixPath, files):
        if file.parts[0] != ".." and not file.is_absolute():
            outermost_first = list(file.parents)[-2::-1]
            roots.add(next((folder for folder in outermost_first if folder in packages), file))
    return roots


def licence_of(distribution: metadata.Distribution) -> str:
    """Licence a distribution states: its expression, its trove classifiers, or the first line of its licence field."""
    about = distribution.metadata
    if "License-Expression" in about:
        return str(about["License-Expression"])
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or () if c.startswith("License ::")]
    if classifiers:
        return "; ".join(sorted(set(classifiers)))
    stated = str(about["License"]) if "License" in about else ""
    return re.split(r"[\r\n]", stated.strip())[0][:80]


def open_or_build(
    path: Path,
    recipe: Recipe,
    tokenizer: Any,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[ChangeReport], object] = lambda report: None,
    progress: bool = False,
) -> Datastore:
    """Open a store, or build it where there is none that can be used.

    What an interrupted build left, and a store that is damaged, of another version or for another tokenizer, is thrown
    away: give a path that nothing else is kept at.

    Parameters
    ----------
    path
        Folder of the store.
    recipe, tokenizer
        What to build it from.
    before, after
        Told that a build begins, and what it did.
    progress
        Show bars on standard error.

    Raises
    ------
    BuildError
        When it cannot be built.
    StoreLockedError
        When another process is building it.
    """
    try:
        return open_datastore(path, tokenizer=tokenizer)
    except (StoreNotFoundError, StoreIncompleteError):
        pass
    except (StoreError, TokenizerMismatchError):
        shutil.rmtree(path, ignore_errors=True)
    before()
    after(build_datastore(path, recipe.sources, tokenizer, config=recipe.config, recipe=recipe.name, progress=progress))
    return open_datastore(path, tokenizer=tokenizer)
