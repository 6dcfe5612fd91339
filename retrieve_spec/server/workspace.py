"""Keeps the text of opened folders at hand: which files count, what they hold, and what changed since.

Files that git would ignore, secrets, binaries and very large files are left out; nothing is written into a workspace
and nothing leaves the machine.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from retrieve_spec.config import ServeConfig
from retrieve_spec.errors import ServeError
from retrieve_spec.paths import cache_dir
from retrieve_spec.server.continuations import Continuation, TextIndex, key_starts

log = logging.getLogger("retrieve_spec.server")

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
_SEGMENT_CHARS = 500_000


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


@dataclass(frozen=True, slots=True)
class _Segment:
    paths: frozenset[Path]
    index: TextIndex


class Workspace:
    """The text of one or more folders, indexed in the background and kept current.

    Parameters
    ----------
    roots
        Folders.
    config
        Bounds.
    on_change
        Called after the text changed, from the indexing thread (a store follows, say); when it answers False it is
        called again a little later.

    Raises
    ------
    ServeError
        A root is not a folder.
    """

    def __init__(
        self, roots: Iterable[Path], config: ServeConfig, on_change: Callable[[Workspace], bool] | None = None
    ) -> None:
        self.roots = [root.expanduser().resolve() for root in roots]
        for root in self.roots:
            if not root.is_dir():
                raise ServeError("a folder as workspace", f"{root}", "Give an existing folder.")
        self.config = config
        self.texts: dict[Path, str] = {}
        self.indexed = threading.Event()
        self.progress: Callable[[int, int], None] | None = None
        self.on_change = on_change
        self._dirty = False
        self._segments: list[_Segment] = []
        self._rules: dict[Path, IgnoreRules] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, *, watch: bool = True) -> None:
        """Index in the background, then follow changes."""
        self._thread = threading.Thread(target=self._run, args=(watch,), name="retrieve-spec-workspace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the background thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    @property
    def chars(self) -> int:
        """Characters remembered."""
        return sum(map(len, self.texts.values()))

    def scan(self) -> None:
        """Read every file that counts and index it."""
        self._rules = {root: IgnoreRules(root) for root in self.roots}
        texts: dict[Path, str] = {}
        total = 0
        for done, path in enumerate(self._files()):
            text = self._read(path)
            if self._stop.is_set() or total + len(text) > self.config.workspace_chars:
                break
            if text:
                texts[path] = text
                total += len(text)
            if self.progress is not None and done % 100 == 0:
                self.progress(done, len(texts))
        with self._lock:
            self.texts = texts
        self._segments = self._index(texts)
        self.indexed.set()
        self._changed()

    def update(self, paths: Iterable[Path]) -> bool:
        """Read files again after they changed, appeared or went; whether anything did change."""
        changed: set[Path] = set()
        for path in map(Path, paths):
            if path.name in (".gitignore", ".ignore"):
                self.scan()
                return True
            text = self._read(path) if self._counts(path) else ""
            if text != self.texts.get(path, ""):
                changed.add(path)
                with self._lock:
                    self.texts.pop(path, None)
                    if text and self.chars + len(text) <= self.config.workspace_chars:
                        self.texts[path] = text
        if changed:
            touched = {path for segment in self._segments if segment.paths & changed for path in segment.paths}
            kept = [segment for segment in self._segments if not segment.paths & changed]
            again = {path: self.texts[path] for path in touched | changed if path in self.texts}
            self._segments = kept + self._index(again)
            self._changed()
        return bool(changed)

    def put(self, path: Path, text: str) -> None:
        """Take the text of a file from an editor (saved or not), if the file counts."""
        if not self._counts(path, exists=False) or looks_secret(path, text):
            return
        with self._lock:
            self.texts.pop(path, None)
            self.texts[path] = text

    def forget(self) -> None:
        """Drop everything remembered."""
        with self._lock:
            self.texts = {}
        self._segments = []
        self._changed()

    def find(self, left: str, limit: int) -> list[Continuation]:
        """What followed the text left of the cursor elsewhere in the workspace, longest match first."""
        starts = key_starts(left)
        found: dict[str, Continuation] = {}
        for segment in self._segments:
            for hit in segment.index.find(left, starts, limit):
                if hit.text not in found or found[hit.text].matched < hit.matched:
                    found[hit.text] = hit
        return sorted(found.values(), key=lambda hit: -hit.matched)[:limit]

    def _index(self, texts: dict[Path, str]) -> list[_Segment]:
        segments: list[_Segment] = []
        group: dict[Path, str] = {}
        size = 0
        for path, text in texts.items():
            group[path] = text
            size += len(text)
            if size >= _SEGMENT_CHARS:
                segments.append(_Segment(frozenset(group), TextIndex(list(group.values()))))
                group, size = {}, 0
        if group:
            segments.append(_Segment(frozenset(group), TextIndex(list(group.values()))))
        return segments

    def _changed(self) -> None:
        if self.on_change is not None and not self._stop.is_set():
            self._dirty = not self.on_change(self)

    def _run(self, watch: bool) -> None:
        try:
            self.scan()
            if watch:
                self._watch()
        except Exception:
            log.exception("the workspace could not be indexed")
            self.indexed.set()

    def _watch(self) -> None:
        from watchfiles import watch

        for changes in watch(*self.roots, stop_event=self._stop, debounce=400, rust_timeout=500, yield_on_timeout=True):
            if self._stop.is_set():
                return
            if not (changes and self.update(Path(path) for _, path in changes)) and self._dirty:
                self._changed()

    def _files(self) -> Iterator[Path]:
        """Files that count, the ones changed last first."""
        found: list[tuple[float, Path]] = []
        for root in self.roots:
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
                if len(found) > self.config.workspace_files:
                    break
        found.sort(key=lambda item: (-item[0], str(item[1])))
        return iter([path for _, path in found[: self.config.workspace_files]])

    def _counts(self, path: Path, *, exists: bool = True) -> bool:
        """Whether a path lies in the workspace and no rule leaves it out."""
        for root in self.roots:
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

    def _read(self, path: Path) -> str:
        """Text of a file, "" for one that must not or cannot be remembered."""
        try:
            if path.is_symlink() or not path.is_file() or path.stat().st_size > self.config.workspace_file_bytes:
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


def memory_folder(roots: Iterable[Path]) -> Path:
    """Where the store of a workspace lives: the user's cache folder, one entry per set of folders."""
    key = hashlib.sha256("\0".join(sorted(str(root.expanduser().resolve()) for root in roots)).encode()).hexdigest()
    return cache_dir() / "workspaces" / key[:24]


def forget_workspace(roots: Iterable[Path]) -> bool:
    """Delete what is stored on disk about a workspace; whether there was anything."""
    folder = memory_folder(roots)
    if not folder.exists():
        return False
    shutil.rmtree(folder)
    return True
