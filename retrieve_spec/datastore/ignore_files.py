"""Ignore files: the rules of a folder tree's ``.gitignore`` and ``.ignore`` files, read where git cannot be asked."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from retrieve_spec.datastore.addresses import open_regular

_NO_RULE = (ValueError, re.error)
"""What comes of a pattern that is none, as ``!`` or ``[z-a]``."""


class IgnoreFiles:
    """Ignore files of a folder tree, each read once.

    Parameters
    ----------
    top
        Top of the tree: a checkout, or a folder in none.
    names
        How the files are called.
    general
        The checkout's ``.git/info/exclude`` and the user's global file count too: with ``.gitignore`` all that git
        reads, where git itself cannot be asked.
    """

    def __init__(self, top: Path, names: Sequence[str], *, general: bool = False) -> None:
        self._names = names
        self._top = str(top)
        self._rules: dict[str, list[tuple[str, GitIgnoreSpec]]] = {}
        self._left_out: dict[str, bool] = {}
        self._general = _general_rules(top) if general else None

    def ignores(self, path: Path, *, folder: bool = False) -> bool:
        """Whether a rule leaves out a path, or a folder it lies in."""
        return self.ignores_name(str(path), folder=folder)

    def ignores_name(self, name: str, *, folder: bool = False) -> bool:
        """`ignores` of a path as text."""
        return self._ignores_folder(name.rpartition(os.sep)[0]) or self.ignores_entry(name, folder=folder)

    def ignores_entry(self, name: str, *, folder: bool = False) -> bool:
        """`ignores` for what lies in a folder that is known not to be left out."""
        verdict = False
        for base, spec in self._rules_above(name.rpartition(os.sep)[0]):
            inside = name[len(base) :].lstrip("/") + ("/" if folder else "")
            if (result := spec.check_file(inside)).include is not None:
                verdict = bool(result.include)
        return verdict

    def count_in(self, folder: str, names: Collection[str]) -> bool:
        """Whether any rule counts for what lies in a folder, in which there are ignore files of no other names."""
        return bool(self._rules_above(folder, [name for name in self._names if name in names]))

    def _ignores_folder(self, folder: str) -> bool:
        if folder == self._top:
            return False
        if folder not in self._left_out:
            above = self._ignores_folder(os.path.dirname(folder))
            self._left_out[folder] = above or self.ignores_entry(folder, folder=True)
        return self._left_out[folder]

    def _rules_above(self, folder: str, names: Iterable[str] | None = None) -> list[tuple[str, GitIgnoreSpec]]:
        """(folder of the rules, rules) from the weakest to the strongest, for what lies in a folder.

        Of its ignore files all are looked for, or those of some names.
        """
        if folder not in self._rules:
            if folder == self._top:
                above = [] if self._general is None else [(folder, self._general)]
            else:
                above = self._rules_above(os.path.dirname(folder))
            own = _read_rules([os.path.join(folder, name) for name in (self._names if names is None else names)])
            self._rules[folder] = above if own is None else [*above, (folder, own)]
        return self._rules[folder]


def _general_rules(top: Path) -> GitIgnoreSpec | None:
    """Rules of the user's global file, and of a checkout's own that is not committed."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return _read_rules([os.path.join(config, "git", "ignore"), os.path.join(top, ".git", "info", "exclude")])


def _read_rules(files: Iterable[str]) -> GitIgnoreSpec | None:
    lines: list[str] = []
    for name in files:  # most are not there
        try:
            with open(name, encoding="utf-8", errors="replace", opener=open_regular) as file:
                lines += file.read().splitlines()
        except OSError:
            continue
    try:
        return GitIgnoreSpec.from_lines(lines) if lines else None
    except _NO_RULE:
        return GitIgnoreSpec.from_lines(filter(_is_rule, lines))


def _is_rule(line: str) -> bool:
    """Whether a line is a rule: others match nothing, as git has it, and the rest of the file counts."""
    try:
        GitIgnoreSpec.from_lines([line])
    except _NO_RULE:
        return False
    return True
