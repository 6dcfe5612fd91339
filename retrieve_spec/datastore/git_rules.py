"""Git rules: which files of a folder git would let in, asked of git itself, and read from its files where it cannot be.

Git is started with nothing of the environment that could point it elsewhere, and with nothing of a checkout's own
configuration that would run a program.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from operator import attrgetter
from pathlib import Path

from pathspec import GitIgnoreSpec

from retrieve_spec.datastore.files import open_regular
from retrieve_spec.datastore.manifest import MANIFEST, SEGMENTS

NEVER = frozenset(
    [".git", ".hg", ".svn", ".venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache",
     ".tox", ".nox", "site-packages", ".eggs", ".gradle", ".terraform", ".cache", ".ssh", ".gnupg", ".aws", ".azure",
     ".kube", ".docker", ".password-store"]
)  # fmt: skip
"""Folders that are never looked into; so are virtual environments and datastores, whatever they are called."""
_MACHINERY = frozenset([".git", ".hg", ".svn", "__pycache__"])
"""Folders that are no part of what a user sees, and not counted where they are left out."""
_BUILT = frozenset(["dist", "build", "target", ".idea", ".vscode"])
"""Folders that are looked into only as far as git tracks what they hold."""
_ENVIRONMENT = "pyvenv.cfg"
_MARKS = (_ENVIRONMENT, MANIFEST, ".ignore")
_KEPT = frozenset(["GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"])
_NAME = attrgetter("name")
_AT_ONCE = 400
_SECONDS = 120


class Left(Enum):
    """Why something in a folder is passed over."""

    IGNORED = 1
    TOOLS = 2
    STORE = 3
    UNREADABLE = 4


def list_folder(root: Path) -> Iterator[Path]:
    """Files below a folder that no rule leaves out, symbolic links among them."""
    return (Path(place) for place, left, _ in look_through(root) if left is None)


Entry = tuple[str, Left | None, os.stat_result | None]


def look_through(root: Path, *, everything: bool = False, only: Collection[str] | None = None) -> Iterator[Entry]:
    """(path, None or why it is passed over, its status where it was looked up) of what lies below a folder; a folder,
    told by a slash at its end, stands for all that is in it.

    A folder that lies in a checkout is listed by git, every other one file by file; checkouts inside of it are listed
    by git on their own. A folder that git ignores itself is looked into: whoever names it wants it.

    Parameters
    ----------
    root
        The folder.
    everything
        Whether ignore files and the names of folders count for nothing.
    only
        Paths below the folder, and all folders above them, that are looked for; all by default.
    """
    checkout = None if everything else _governing(root)
    found = None if checkout is None else _git_lists(root, only)
    if found is None:
        rules = None if everything else IgnoreFiles(checkout or root, (".gitignore", ".ignore"), general=True)
        yield from _walk(str(root), rules, only, top=True)
        return
    special = [name for name in found if name.endswith(_MARKS)]
    own = IgnoreFiles(root, (".ignore",)) if any(name.endswith(".ignore") for name in special) else None
    base = os.path.join(root, "")
    closed = _closed(base, special)
    shut = tuple(closed)
    told: set[str] = set()
    for place, left in closed.items():
        yield place, left, None
    for name, tracked in found.items():
        place = base + name
        if shut and place.startswith(shut):
            continue
        if tracked is None:
            if _MACHINERY.isdisjoint(name.split("/")):
                yield place, Left.IGNORED, None
            continue
        try:
            status = os.lstat(place)
            nested = name[-1] == "/" or stat.S_ISDIR(status.st_mode)
        except OSError:
            status, nested = None, name[-1] == "/"
        if nested:  # a checkout inside of this one
            name = name.rstrip("/")
            place = f"{base}{name}/"
            if os.path.islink(base + name) or not os.path.exists(place + ".git"):
                continue
        passed = passed_over(name if nested else name.rpartition("/")[0], tracked=tracked and not nested)
        if passed:
            if passed not in told:
                told.add(passed)
                yield f"{base}{passed}/", Left.TOOLS, None
        elif own is not None and own.ignores(base + name, folder=nested):
            yield place, Left.IGNORED, status
        elif nested:
            yield from _look_into(place, only)
        else:
            yield place, None, status


def _look_into(folder: str, only: Collection[str] | None) -> Iterator[Entry]:
    """`look_through` of a checkout that was found inside of a folder, unless what lies in it closes it."""
    try:
        left = _closes(folder, os.listdir(folder))
    except OSError:
        left = Left.UNREADABLE
    if left is None:
        yield from look_through(Path(folder), only=only)
    else:
        yield os.path.join(folder, ""), left, None


def listed(roots: Sequence[Path], paths: Collection[Path], *, everything: bool = False) -> set[Path]:
    """Those of some paths below the roots that `look_through` of the nearest root lets pass."""
    below: dict[Path, set[str]] = {}
    for path in paths:
        above = [root for root in roots if path.is_relative_to(root)]
        if above:
            root = max(above, key=lambda one: len(one.parts))
            below.setdefault(root, {str(root)}).update(
                map(str, (path, *path.parents[: len(path.relative_to(root).parts)]))
            )
    passed = {
        Path(place)
        for root, only in below.items()
        for place, left, _ in look_through(root, everything=everything, only=only)
        if left is None
    }
    return passed.intersection(paths)


def _governing(root: Path) -> Path | None:
    """The checkout whose rules a folder is under; None where it lies in none, or is left out of it itself."""
    checkout = checkout_of(root)
    if checkout is None or checkout == root:
        return checkout
    if _git(checkout, "rev-parse", "--git-dir") is None:
        ignored = IgnoreFiles(checkout, (".gitignore", ".ignore"), general=True).ignores(str(root), folder=True)
    else:
        ignored = _git(checkout, "check-ignore", "-q", "--", str(root)) is not None
    return None if ignored else checkout


def _closes(folder: str, names: Collection[str]) -> Left | None:
    """Whether what lies in a folder, by name, makes it one that is not looked into."""
    if _ENVIRONMENT in names:
        return Left.TOOLS
    if MANIFEST in names and os.path.isdir(os.path.join(folder, SEGMENTS)):
        return Left.STORE
    return None


def _closed(base: str, names: Iterable[str]) -> dict[str, Left]:
    """Folders, with a slash at their ends, that are not looked into for what lies in them, by names of a listing."""
    closed = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        if folder and last in (_ENVIRONMENT, MANIFEST) and (left := _closes(base + folder, (last,))):
            closed[f"{base}{folder}/"] = left
    return closed


def passed_over(folder: str, *, tracked: bool) -> str:
    """The outermost folder of a path that is never looked into by its name, "" for none."""
    parts = folder.split("/")
    if NEVER.isdisjoint(parts) and (tracked or _BUILT.isdisjoint(parts)):
        return ""
    first = next(i for i, part in enumerate(parts) if part in NEVER or (part in _BUILT and not tracked))
    return "/".join(parts[: first + 1])


def checkout_of(folder: Path, known: dict[Path, Path | None] | None = None) -> Path | None:
    """The checkout a folder lies in, None for none."""
    known = {} if known is None else known
    if folder not in known:
        if (folder / ".git").exists():
            known[folder] = folder
        else:
            known[folder] = None if folder.parent == folder else checkout_of(folder.parent, known)
    return known[folder]


def _git_lists(folder: Path, only: Collection[str] | None) -> dict[str, bool | None] | None:
    """Whether git tracks it, by path below the folder, of all that is in it; None where git fails.

    What is ignored says None, and folders of which everything is stand for it. Where only some paths are looked for,
    they are told of, with what closes a folder above them, but nothing that is ignored.
    """
    tracked = ("ls-files", "-t", "-z", "--cached", "--others", "--exclude-standard")
    if only is None:
        ignored = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
        with ThreadPoolExecutor(2) as pool:  # each goes through the folder
            answers = list(pool.map(lambda arguments: _git(folder, *arguments), (ignored, tracked)))
    else:
        base = os.path.join(folder, "")
        inside = [name[len(base) :] for name in only if name.startswith(base)]
        folders = [name for name in inside if os.path.isdir(base + name)]
        nested = [name for name in folders if os.path.exists(f"{base}{name}/.git")]
        beneath = tuple(f"{name}/" for name in nested)  # git tells of a checkout where nothing in it is asked for
        marks = [f"{name}/{mark}" for name in folders for mark in _MARKS]
        files = set(inside).difference(folders)
        specs = [name for name in (*files, *marks, *nested) if not name.startswith(beneath)] + list(_MARKS)
        groups = (specs[at : at + _AT_ONCE] for at in range(0, len(specs), _AT_ONCE))
        literal = ("--literal-pathspecs", *tracked, "--")
        answers = [b"", *(_git(folder, *literal, *group) for group in groups)]
    left: dict[str, bool | None] = {}
    for out in answers:
        if out is None:
            return None
        names = os.fsdecode(out).split("\0")[:-1]
        left |= dict.fromkeys(names) if out is answers[0] else {name[2:]: name[0] != "?" for name in names}
    return left


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints, None where it fails or is not installed."""
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


def _walk(
    folder: str, rules: IgnoreFiles | None, only: Collection[str] | None, *, top: bool = False
) -> Iterator[Entry]:
    """`look_through` of a folder that git does not list; no rules: all of it."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=_NAME)
    except OSError:
        yield os.path.join(folder, ""), Left.UNREADABLE, None
        return
    names = {entry.name for entry in entries}
    left = None if top else _closes(folder, names)
    if left is Left.STORE or (left and rules is not None):
        yield os.path.join(folder, ""), left, None
        return
    hidden = {name.lower() for name in names if name[0] == "."}  # some systems do not tell cases apart
    if not top and rules is not None and ".git" in hidden and os.path.exists(os.path.join(folder, ".git")):
        yield from look_through(Path(folder), only=only)
        return
    for entry in entries:
        if only is not None and entry.path not in only:
            continue
        if not entry.is_dir(follow_symlinks=False):
            ignored = rules is not None and rules.ignores(entry.path)
            yield entry.path, Left.IGNORED if ignored else None, None
        elif entry.name in _MACHINERY:
            continue
        elif rules is None:
            yield from _walk(entry.path, rules, only)
        elif entry.name in NEVER or entry.name in _BUILT:
            yield os.path.join(entry.path, ""), Left.TOOLS, None
        elif rules.ignores(entry.path, folder=True):
            yield os.path.join(entry.path, ""), Left.IGNORED, None
        else:
            yield from _walk(entry.path, rules, only)


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

    def ignores(self, path: str, *, folder: bool = False) -> bool:
        """Whether a rule leaves out a path, or a folder it lies in."""
        above = path.rpartition(os.sep)[0]
        verdict = False
        for base, spec in self._rules_above(above):
            inside = path[len(base) :].lstrip("/") + ("/" if folder else "")
            if (result := spec.check_file(inside)).include is not None:
                verdict = bool(result.include)
        return verdict or self._ignores_folder(above)

    def _ignores_folder(self, folder: str) -> bool:
        if folder not in self._left_out:
            self._left_out[folder] = folder != self._top and self.ignores(folder, folder=True)
        return self._left_out[folder]

    def _rules_above(self, folder: str) -> list[tuple[str, GitIgnoreSpec]]:
        """(folder of the rules, rules) from the weakest to the strongest, for what lies in a folder."""
        if folder not in self._rules:
            if folder == self._top:
                above = [] if self._general is None else [(folder, self._general)]
            else:
                above = self._rules_above(os.path.dirname(folder))
            own = _read_rules([os.path.join(folder, name) for name in self._names])
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
