"""Git rules: find the files of a folder that git does not ignore, by git itself or, without git, by its ignore files.

Git runs without environment variables that could point it elsewhere, and without settings of a checkout that would run
a program.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from pathspec import GitIgnoreSpec

from retrieve_spec.datastore.files import open_regular
from retrieve_spec.datastore.manifest import MANIFEST, SEGMENTS

NEVER = frozenset(
    [".git", ".hg", ".svn", ".venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache",
     ".tox", ".nox", "site-packages", ".eggs", ".gradle", ".terraform", ".cache", ".ssh", ".gnupg", ".aws", ".azure",
     ".kube", ".docker", ".password-store", ".idea", ".vscode"]
)  # fmt: skip
"""Folders that are never read, like virtual environments and datastores of any name."""
_MACHINERY = frozenset([".git", ".hg", ".svn", "__pycache__"])
"""Entries that users do not see, and that are left out without being reported; a worktree's `.git` is a file."""
_BUILT = frozenset(["dist", "build", "target"])
"""Folders that are read only if git's listing includes them."""
_ENVIRONMENT = "pyvenv.cfg"
_KEPT = frozenset(["GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"])
_SECONDS = 120


class Reason(StrEnum):
    """Reason why a file may not enter."""

    LINK = "a symbolic link, or behind one"
    IGNORED = "ignored by git or an ignore file"
    TOOLS = "in a folder of tools, caches or build results"
    SECRET_NAME = "a secret by its name"
    SECRET_TEXT = "holds a key or token"
    GENERATED = "generated or minified"
    LARGE = "too large"
    BEYOND = "beyond the bound of text"
    BINARY = "binary"
    ENCODING = "neither UTF-8 nor UTF-16 with a byte order mark"
    UNREADABLE = "unreadable"
    DAMAGED = "damaged"
    SPECIAL = "a pipe, socket or device"
    EMPTY = "empty"
    POINTER = "a pointer of Git LFS or git-annex"
    WORKTREE = "another worktree of a checkout here"
    LICENCE = "under a licence that is not allowed"
    NO_LICENCE = "under no known licence"


PART_OF = {
    Reason.IGNORED: "ignored",
    Reason.TOOLS: "ignored",
    Reason.GENERATED: "generated",
    Reason.SECRET_NAME: "secrets",
    Reason.SECRET_TEXT: "secrets",
}
"""The part of the filter that gives this reason, if one does."""


Entry = tuple[str, Reason | None]


def look_through(root: Path, *, everything: bool = False) -> Iterator[Entry]:
    """Yield (path, None or why it is ignored) for everything below a folder, except for datastores.

    A folder, marked by a slash at its end, stands for all its contents.

    In a checkout, git says what it ignores; elsewhere, ignore files do. Checkouts inside the folder have rules of their
    own. A folder that git ignores is listed if it is `root` itself: whoever names it wants it.

    Parameters
    ----------
    root
        The folder.
    everything
        Whether to disregard ignore files and the names of folders.
    """
    return _walk(str(root), None if everything else _rules_of(root), root, top=True)


def _walk(folder: str, rules: Rules | None, root: Path, *, top: bool = False) -> Iterator[Entry]:
    """List a folder below `root` as `look_through` does, under rules; without rules, all of it."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        yield os.path.join(folder, ""), Reason.UNREADABLE
        return
    names = {entry.name for entry in entries}
    if not top:
        if MANIFEST in names and os.path.isdir(os.path.join(folder, SEGMENTS)):
            return
        if rules is not None and _ENVIRONMENT in names:
            yield os.path.join(folder, ""), Reason.TOOLS
            return
        if rules is not None and ".git" in names:
            if _is_second_worktree(Path(folder), root):
                yield os.path.join(folder, ""), Reason.WORKTREE
            else:
                yield from look_through(Path(folder))
            return
    rules = rules and rules.inside(folder)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in _MACHINERY:
            continue
        left = None
        if rules is not None and is_folder and entry.name in rules.tools:
            left = Reason.TOOLS
        elif rules is not None and rules.ignores(entry.path, folder=is_folder):
            left = Reason.IGNORED
        if not is_folder:
            yield entry.path, left
        elif left is None:
            yield from _walk(entry.path, rules, root)
        else:
            yield os.path.join(entry.path, ""), left


def _is_second_worktree(folder: Path, root: Path) -> bool:
    """Whether a folder with a `.git` is a linked worktree of a checkout around or inside `root`."""
    try:
        with open(folder / ".git", encoding="utf-8", errors="surrogateescape", opener=open_regular) as file:
            own = folder / file.readline().removeprefix("gitdir:").strip()
    except OSError:  # a checkout of its own
        return False
    if own.parent.name != "worktrees":  # of a submodule
        return False
    main = own.parents[2].resolve()
    return main.is_relative_to(root) or root.is_relative_to(main)


def checkout_of(folder: Path) -> Path | None:
    """Return the checkout that contains a folder, or None."""
    return next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)


def _rules_of(root: Path) -> Rules:
    """Return the rules for a folder: those of its checkout, unless that ignores the folder itself."""
    checkout = checkout_of(root)
    if checkout is None:
        return _rules_by_files(root, root)
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listing is None:
        return _rules_by_files(checkout, root)
    if checkout != root and _git(checkout, "check-ignore", "-q", "--", str(root)) is not None:
        return _rules_by_files(root, root)
    listed = {str(root)}
    for name in os.fsdecode(listing).split("\0")[:-1]:
        place = str(root / name)  # a slash ends the names of checkouts inside this one
        while place not in listed:
            listed.add(place)
            place = os.path.dirname(place)
    return Rules((".ignore",), NEVER, frozenset(listed))


def _rules_by_files(top: Path, root: Path) -> Rules:
    """Return rules from the files that git reads, from the top of a checkout down to the parent of a folder."""
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    general = [os.path.join(config, "git", "ignore"), os.path.join(top, ".git", "info", "exclude")]
    rules = Rules((".gitignore", ".ignore"), NEVER | _BUILT).joined(str(top), general)
    for folder in reversed(root.parents):
        if folder.is_relative_to(top):
            rules = rules.inside(str(folder))
    return rules


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return git's output, None if it fails or is not installed."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("GIT_") or n in _KEPT}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, env=environment, timeout=_SECONDS, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a folder: git's listing, if available, and ignore files in and above the folder.

    Attributes
    ----------
    names
        Names of ignore files.
    tools
        Names of folders to leave out.
    listed
        Paths that git lists, and their parent folders; None without git.
    specs
        (folder, rules) of ignore files, in ascending precedence.
    """

    names: tuple[str, ...]
    tools: frozenset[str]
    listed: frozenset[str] | None = None
    specs: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    def inside(self, folder: str) -> Rules:
        """Return the rules of a subfolder, including its own ignore files."""
        return self.joined(folder, [os.path.join(folder, name) for name in self.names])

    def joined(self, folder: str, files: Sequence[str]) -> Rules:
        """Return these rules, followed by those of ignore files of a folder."""
        spec = _read_rules(files)
        return self if spec is None else replace(self, specs=(*self.specs, (folder, spec)))

    def ignores(self, path: str, *, folder: bool = False) -> bool:
        """Whether git does not list a path, or the last matching rule ignores it; its parents are not checked."""
        verdict = False
        for base, spec in self.specs:
            inside = path[len(base) :].lstrip("/") + ("/" if folder else "")
            if (result := spec.check_file(inside)).include is not None:
                verdict = bool(result.include)
        return verdict or (self.listed is not None and path not in self.listed)


def _read_rules(files: Iterable[str]) -> GitIgnoreSpec | None:
    lines: list[str] = []
    for name in files:
        with suppress(OSError), open(name, encoding="utf-8", errors="replace", opener=open_regular) as file:
            lines += filter(_is_rule, file.read().splitlines())
    return GitIgnoreSpec.from_lines(lines) if lines else None


def _is_rule(line: str) -> bool:
    """Whether a line is a valid rule; git skips invalid lines."""
    try:
        GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):  # such as `!` or `[z-a]`
        return False
    return True
