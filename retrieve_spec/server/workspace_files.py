"""Decides which files of opened folders may be remembered, and reads them.

Files that git would ignore, secrets, binaries and very large files are left out.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

from retrieve_spec.config import ServeConfig

SKIPPED_FOLDERS = frozenset(
    [
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".tox",
        ".nox",
        ".idea",
        ".vscode",
        "dist",
        "build",
        "target",
        "site-packages",
        ".eggs",
        ".gradle",
        ".terraform",
        ".cache",
        ".ssh",
        ".gnupg",
        ".aws",
        ".kube",
        ".docker",
    ]
)
SECRET_NAMES = [
    ".env",
    ".env.*",
    "*.env",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.asc",
    "*.gpg",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    ".netrc",
    "_netrc",
    ".npmrc",
    ".pypirc",
    ".htpasswd",
    ".pgpass",
    ".git-credentials",
    "credentials",
    "credentials.*",
    "secrets.*",
    "*secret*.y*ml",
    "*secret*.json",
    "kubeconfig",
    "*.tfstate",
    "*.tfvars",
    "service-account*.json",
]
_SECRET_TEXT = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36}|\bxox[baprs]-[A-Za-z0-9-]{10,}"
    r"|\bsk-[A-Za-z0-9_-]{32,}|\bAIza[0-9A-Za-z_-]{35}"
)


def looks_secret(path: Path, text: str = "") -> bool:
    """Whether a file is one that must not be remembered, by its name or by a key inside."""
    name = path.name.lower()
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SECRET_NAMES) or bool(_SECRET_TEXT.search(text))


class IgnoreRules:
    """The ``.gitignore`` files of a folder tree, each read once.

    Parameters
    ----------
    root
        Top of the tree.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs: dict[Path, GitIgnoreSpec | None] = {}

    def ignores(self, path: Path, *, folder: bool) -> bool:
        """Whether a rule of any folder above excludes a path."""
        verdict = False
        relative = path.relative_to(self._root)
        at = self._root
        for part in relative.parts:
            spec = self._spec(at)
            if spec is not None:
                inside = str(path.relative_to(at)) + ("/" if folder else "")
                result = spec.check_file(inside)
                if result.include is not None:
                    verdict = bool(result.include)
            at = at / part
        return verdict

    def _spec(self, folder: Path) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            lines: list[str] = []
            for name in (".gitignore", ".ignore"):
                try:
                    lines += (folder / name).read_text("utf-8", "replace").splitlines()
                except OSError:
                    continue
            self._specs[folder] = GitIgnoreSpec.from_lines(lines) if lines else None
        return self._specs[folder]


class WorkspaceFiles:
    """The files of some folders that count.

    Parameters
    ----------
    roots
        Folders.
    config
        Bounds.
    """

    def __init__(self, roots: Sequence[Path], config: ServeConfig) -> None:
        self._roots, self._config = roots, config
        self._rules: dict[Path, IgnoreRules] = {}

    def walk(self) -> Iterator[Path]:
        """Files that count, the ones changed last first; ignore files are read anew."""
        self._rules = {root: IgnoreRules(root) for root in self._roots}
        found: list[tuple[float, Path]] = []
        for root in self._roots:
            for folder, names, files in os.walk(root, followlinks=False):
                here = Path(folder)
                names[:] = [
                    name
                    for name in sorted(names)
                    if name not in SKIPPED_FOLDERS and not self._rules[root].ignores(here / name, folder=True)
                ]
                for name in files:
                    path = here / name
                    if not looks_secret(path) and not self._rules[root].ignores(path, folder=False):
                        found.append((_mtime(path), path))
                if len(found) > self._config.workspace_files:
                    break
        found.sort(key=lambda item: (-item[0], str(item[1])))
        return iter([path for _, path in found[: self._config.workspace_files]])

    def counts(self, path: Path, *, exists: bool = True) -> bool:
        """Whether a path lies in the workspace and no rule leaves it out."""
        for root in self._roots:
            if not path.is_relative_to(root):
                continue
            if any(part in SKIPPED_FOLDERS for part in path.relative_to(root).parts[:-1]) or looks_secret(path):
                return False
            rules = self._rules.setdefault(root, IgnoreRules(root))
            folders = list(path.relative_to(root).parents)[:-1]
            if any(rules.ignores(root / folder, folder=True) for folder in folders):
                return False
            return not rules.ignores(path, folder=False) and (not exists or path.exists())
        return False

    def read(self, path: Path) -> str:
        """Text of a file, "" for one that must not or cannot be remembered."""
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_size > self._config.workspace_file_bytes:
                return ""
            data = path.read_bytes()
        except OSError:
            return ""
        if b"\0" in data[:8192]:
            return ""
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return ""
        return "" if looks_secret(path, text) else text


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
