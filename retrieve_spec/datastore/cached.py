"""Cached stores: built from a recipe on first use, and opened from the cache after that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrieve_spec.datastore.build import build_datastore
from retrieve_spec.datastore.change import ChangeReport
from retrieve_spec.datastore.recipes import Recipe
from retrieve_spec.datastore.store import Datastore, open_datastore
from retrieve_spec.errors import (
    BuildError,
    StoreError,
    StoreIncompleteError,
    StoreNotFoundError,
    TokenizerMismatchError,
)


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

    An interrupted build is continued; a store that is damaged, of another version or for another tokenizer is thrown
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
    except (StoreNotFoundError, StoreIncompleteError) as error:
        interrupted = isinstance(error, StoreIncompleteError)
    except (StoreError, TokenizerMismatchError):
        shutil.rmtree(path, ignore_errors=True)
        interrupted = False
    before()
    after(_build(path, recipe, tokenizer, interrupted, progress))
    return open_datastore(path, tokenizer=tokenizer)


def _build(path: Path, recipe: Recipe, tokenizer: Any, interrupted: bool, progress: bool) -> ChangeReport:
    if interrupted:
        try:
            return build_datastore(path, resume=True, progress=progress)
        except BuildError:  # not enough is left of it, or its sources are no longer what they were
            shutil.rmtree(path, ignore_errors=True)
    return build_datastore(
        path, list(recipe.sources), tokenizer, config=recipe.config, recipe=recipe.name, progress=progress
    )
