"""Git rules: which files of a folder git would let in, asked of git itself, and read from its files where it cannot be.

Git is started with nothing of the environment that could point it elsewhere, and with nothing of a checkout's own
configuration that would run a program.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

NEVER = frozenset(
    [".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache",
     ".pytest_cache", ".tox", ".nox", "site-packages", ".eggs", ".gradle", ".terraform", ".cache", ".ssh", ".gnupg",
     ".aws", ".azure", ".kube", ".docker", ".password-store"]
)  # fmt: skip
"""Folders that are never looked into."""
_BUILT = frozenset(["dist", "build", "target", ".idea", ".vscode"])
"""Folders that are looked into only as far as git tracks what they hold."""
_KEPT = frozenset(["GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"])
_AT_ONCE = 400
_SECONDS = 120


def list_folder(root: Path) -> Iterator[Path]:
    """Files below a folder that no ignore rule leaves out, symbolic links to files among them.

    A folder that lies in a checkout is listed by git, every other one file by file; checkouts inside of it are listed
    by git on their own.
    """
    found = None if checkout_of(root) is None else _git_lists(root)
    if found is None:
        yield from _walk(root, IgnoreFiles(root, (".gitignore", ".ignore"), above=True))
        return
    own = IgnoreFiles(root, (".ignore",))
    for name, tracked in found:
        folder, _, _ = name.rpartition("/")
        path = root / name
        if name.endswith("/") or os.path.isdir(path):  # a checkout inside of this one
            if os.path.islink(path):
                continue
            if (path / ".git").exists() and not _passed_over(name.rstrip("/"), tracked=False):
                yield from list_folder(path)
        elif not _passed_over(folder, tracked=tracked) and not own.ignores(path):
            yield path


def listed(roots: Sequence[Path], paths: Iterable[Path]) -> set[Path]:
    """Those of some paths below the roots that `list_folder` would list."""
    by_checkout: dict[Path | None, list[Path]] = {}
    known: dict[Path, Path | None] = {}
    for path in paths:
        by_checkout.setdefault(checkout_of(path.parent, known), []).append(path)
    allowed: set[Path] = set()
    rules: dict[Path, IgnoreFiles] = {}
    for checkout, group in by_checkout.items():
        found = None if checkout is None else _git_allows(checkout, group)
        for path in group:
            root = max((root for root in roots if path.is_relative_to(root)), key=lambda r: len(r.parts), default=None)
            if root is None or (found is not None and path not in found):
                continue
            top = checkout if checkout is not None and checkout.is_relative_to(root) else root
            if top not in rules:
                names = (".gitignore", ".ignore") if found is None else (".ignore",)
                rules[top] = IgnoreFiles(top, names, above=found is None)
            tracked = found is not None and found[path]
            below = path.relative_to(root).parent.as_posix()
            if not _passed_over(below, tracked=tracked) and not rules[top].ignores(path):
                allowed.add(path)
    return allowed


def _passed_over(folder: str, *, tracked: bool) -> bool:
    parts = folder.split("/")
    return not NEVER.isdisjoint(parts) or (not tracked and not _BUILT.isdisjoint(parts))


def checkout_of(folder: Path, known: dict[Path, Path | None] | None = None) -> Path | None:
    """The checkout a folder lies in, None for none."""
    known = {} if known is None else known
    if folder not in known:
        if (folder / ".git").exists():
            known[folder] = folder
        else:
            known[folder] = None if folder.parent == folder else checkout_of(folder.parent, known)
    return known[folder]


def _git_lists(folder: Path) -> list[tuple[str, bool]] | None:
    """(path below the folder, whether git tracks it) of all that is tracked or not ignored; None where git fails."""
    out = _git(folder, "ls-files", "-t", "-z", "--cached", "--others", "--exclude-standard")
    return None if out is None else list(dict(_parsed(out)).items())


def _git_allows(checkout: Path, paths: Sequence[Path]) -> dict[Path, bool] | None:
    """Of some paths of a checkout those that are tracked or not ignored, with whether git tracks them."""
    found: dict[Path, bool] = {}
    for at in range(0, len(paths), _AT_ONCE):
        names = [str(path.relative_to(checkout)) for path in paths[at : at + _AT_ONCE]]
        out = _git(
            checkout, "--literal-pathspecs", "ls-files", "-t", "-z", "--cached", "--others", "--exclude-standard",
            "--", *names,
        )  # fmt: skip
        if out is None:
            return None
        found |= {checkout / name: tracked for name, tracked in _parsed(out)}
    return found


def _parsed(out: bytes) -> list[tuple[str, bool]]:
    entries = (os.fsdecode(entry) for entry in out.split(b"\0") if entry)
    return [(entry[2:], entry[0] != "?") for entry in entries]


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


def _walk(folder: Path, rules: IgnoreFiles) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if entry.name in NEVER or entry.name in _BUILT or rules.ignores_entry(path, folder=True):
                continue
            if (path / ".git").exists():
                yield from list_folder(path)
            else:
                yield from _walk(path, rules)
        elif not (entry.is_symlink() and entry.is_dir()) and not rules.ignores_entry(path):
            yield path


class IgnoreFiles:
    """Ignore files of a folder tree, each read once.

    Parameters
    ----------
    root
        Top of the tree.
    names
        How the files are called.
    above
        Folders above the top count too, up to the top of the checkout, with its ``.git/info/exclude`` and the user's
        global file: all that git reads, where git itself cannot be asked.
    """

    def __init__(self, root: Path, names: Sequence[str], *, above: bool = False) -> None:
        self._names = names
        self._top = (checkout_of(root) or root) if above else root
        self._rules: dict[str, list[tuple[str, GitIgnoreSpec]]] = {}
        self._left_out: dict[str, bool] = {}
        self._general = _general_rules(self._top) if above else None

    def ignores(self, path: Path, *, folder: bool = False) -> bool:
        """Whether a rule leaves out a path, or a folder it lies in."""
        return self._ignores_folder(str(path.parent)) or self.ignores_entry(path, folder=folder)

    def ignores_entry(self, path: Path, *, folder: bool = False) -> bool:
        """`ignores` for what lies in a folder that is known not to be left out."""
        name, verdict = str(path), False
        for base, spec in self._rules_above(name.rpartition(os.sep)[0]):
            inside = name[len(base) :].lstrip("/") + ("/" if folder else "")
            if (result := spec.check_file(inside)).include is not None:
                verdict = bool(result.include)
        return verdict

    def _ignores_folder(self, folder: str) -> bool:
        if folder == str(self._top):
            return False
        if folder not in self._left_out:
            above = self._ignores_folder(os.path.dirname(folder))
            self._left_out[folder] = above or self.ignores_entry(Path(folder), folder=True)
        return self._left_out[folder]

    def _rules_above(self, folder: str) -> list[tuple[str, GitIgnoreSpec]]:
        """(folder of the rules, rules) from the weakest to the strongest, for what lies in a folder."""
        if folder not in self._rules:
            if folder == str(self._top):
                above = [] if self._general is None else [(folder, self._general)]
            else:
                above = self._rules_above(os.path.dirname(folder))
            own = _read_rules([Path(folder, name) for name in self._names])
            self._rules[folder] = above if own is None else [*above, (folder, own)]
        return self._rules[folder]


def _general_rules(top: Path) -> GitIgnoreSpec | None:
    """Rules of the user's global file, and of a checkout's own that is not committed."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return _read_rules([config / "git" / "ignore", top / ".git" / "info" / "exclude"])


def _read_rules(files: Iterable[Path]) -> GitIgnoreSpec | None:
    lines: list[str] = []
    for file in files:
        try:
            lines += file.read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
    return GitIgnoreSpec.from_lines(lines) if lines else None
