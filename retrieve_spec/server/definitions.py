"""Definitions of names that a text imports, from the files of a workspace.

Imports are found in the text around a cursor, which need not be whole nor say what it is called: those of Python and of
JavaScript and TypeScript, by the look of the line. Python files are read by Python's own parser, the others line by
line. All that is imported by name is shown, used yet or not: what stands before the file must not change while somebody
types, or everything behind it is read again.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from threading import Lock

from retrieve_spec.server.prompts import Chunk, FimParts
from retrieve_spec.server.workspace import Workspace

_PYTHON = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(?:\(([^()]*)\)|([^\n(]+))", re.MULTILINE)
_SCRIPT = re.compile(
    r"""^[ \t]*(?:import|export) (?:type )?(?:[\w$]+[ \t]*,\s*)?(\{[^{}]{1,2000}\})\s*from[ \t]*["']([^"'\n]+)["']""",
    re.MULTILINE,
)
_REQUIRED = re.compile(r"""^[ \t]*(?:const|let|var)\s+(\{[^{}]*\})\s*=\s*require\(["']([^"'\n]+)["']\)""", re.MULTILINE)
_NEWLINE = re.compile(r"\r\n?|\n")
"""What ends a line for Python's parser; `str.splitlines` knows more."""
_EXPORTED = (
    r"^(?:export\s+)?(?:default\s+)?(?:declare\s+)?(?:abstract\s+)?(?:async\s+)?"
    r"(?:function(?:\s*\*)?|class|interface|type|enum|const|let|var)\s+{name}\b"
)
_SUFFIXES = (".ts", ".tsx", ".js", ".jsx", ".mjs", ".cjs", ".mts", ".cts")
_TOP = 20_000
"""Characters of a file in which imports are looked for."""
_MOST_NAMES, _MOST_LINES, _MOST_FILES = 64, 16, 256
_DEPTH = 3
"""Files that a name is followed through: packages pass on what their modules define."""


@dataclass(frozen=True, slots=True)
class Import:
    """A name, and the module it comes from as the importing file writes it."""

    module: str
    name: str
    is_python: bool


def imports(text: str) -> list[Import]:
    """Names that a text imports one by one, in the order of their lines."""
    found: list[tuple[int, Import]] = []
    for match in _PYTHON.finditer(text):
        listed = re.sub(r"#[^\n]*", "", match[2] if match[3] is None else match[3].partition("#")[0])
        for name in re.findall(r"(?:^|,)\s*(\w+)", listed):
            found.append((match.start(), Import(match[1], name, True)))
    for pattern in (_SCRIPT, _REQUIRED):
        for match in pattern.finditer(text):
            for name in re.findall(r"[{,]\s*(?:type\s+)?([\w$]+)", match[1]):
                found.append((match.start(), Import(match[2], name, False)))
    found.sort(key=lambda entry: entry[0])
    return list(dict.fromkeys(entry for _, entry in found))[:_MOST_NAMES]


class Definitions:
    """Looks definitions up in a workspace."""

    def __init__(self, workspace: Workspace, max_chars: int) -> None:
        self._workspace, self._max_chars = workspace, max_chars
        self._lock = Lock()
        self._version = -1
        self._by_name: dict[str, list[Path]] = {}
        # By the text of files, so that only those which change are read again.
        self._imports = lru_cache(_MOST_FILES)(imports)
        self._python_definitions = lru_cache(_MOST_FILES)(_python_definitions)
        self._script_definition = lru_cache(_MOST_FILES * 16)(_script_definition)

    def shown_with(self, parts: FimParts) -> FimParts:
        """What an editor knows at a cursor, and before what it sent definitions: they go first if room is short."""
        found = self.of(parts.prefix[:_TOP])
        return replace(parts, extra=(*found, *parts.extra)) if found else parts

    def of(self, text: str) -> list[Chunk]:
        """Definitions of what a text imports, file by file, in the order of the imports."""
        found: dict[Path, list[str]] = {}
        left = self._max_chars
        with self._lock:
            self._follow()
            places = [self._find(wanted, None, _DEPTH, set()) for wanted in imports(text)] if self._max_chars else []
        for place in places:
            if place is None:
                continue
            path, definition = place
            if definition in found.get(path, ()) or definition in text or len(definition) > left:
                continue  # the file itself is in the workspace, too
            found.setdefault(path, []).append(definition)
            left -= len(definition)
        return [Chunk("\n".join(parts) + "\n", self._name(path)) for path, parts in found.items()]

    def _name(self, path: Path) -> str:
        root = next((root for root in self._workspace.roots if path.is_relative_to(root)), path.parent)
        return path.relative_to(root).as_posix()

    def forget(self) -> None:
        """Drop what is remembered of texts and of what they import."""
        for cached in (self._imports, self._python_definitions, self._script_definition):
            cached.cache_clear()

    def _find(
        self, wanted: Import, importer: Path | None, depth: int, tried: set[tuple[Path, str]]
    ) -> tuple[Path, str] | None:
        """Where a name is defined, and how; followed through files that import it themselves, each ``tried`` once."""
        for path in self._files(wanted, importer):
            text = self._workspace.texts.get(path)
            if text is None or (path, wanted.name) in tried:
                continue
            if len(tried) >= _MOST_FILES:
                return None
            tried.add((path, wanted.name))
            if path.suffix == ".py":
                definition = self._python_definitions(text).get(wanted.name, "")
            else:
                definition = self._script_definition(text, wanted.name)
            if definition:
                return path, definition
            if depth > 1:
                for passed in self._imports(text):
                    if passed.name == wanted.name and (place := self._find(passed, path, depth - 1, tried)):
                        return place
        return None

    def _files(self, wanted: Import, importer: Path | None) -> Iterator[Path]:
        """Files that a module may be, the nearest first where it is known who imports it."""
        if wanted.is_python:
            parts = [part for part in wanted.module.split(".") if part]
            ends = [(*parts[:-1], parts[-1] + ".py"), (*parts, "__init__.py")] if parts else [("__init__.py",)]
            if not parts and importer is None:
                return
        else:
            if not wanted.module.startswith("."):
                return
            parts = [part for part in PurePosixPath(wanted.module).parts if part not in (".", "..")]
            if not parts:
                return
            stem = re.sub(r"\.[cm]?[jt]sx?$", "", parts[-1])
            ends = [(*parts[:-1], stem + suffix) for suffix in _SUFFIXES]
            ends += [(*parts, "index" + suffix) for suffix in _SUFFIXES]
        for end in ends:
            files = [
                path for path in self._by_name.get(end[-1], ()) if path.parts[-len(end) :] == end and path != importer
            ]
            yield from sorted(files, key=lambda path: (-_shared(path, importer), len(path.parts), path))

    def _follow(self) -> None:
        """Look at the files anew when some have changed."""
        version = self._workspace.version
        if version != self._version:
            by_name: dict[str, list[Path]] = {}
            for path in list(self._workspace.texts):
                by_name.setdefault(path.name, []).append(path)
            self._version, self._by_name = version, by_name


def _shared(path: Path, other: Path | None) -> int:
    """Folders that two files have in common."""
    return len(Path(os.path.commonpath([path, other])).parts) if other else 0


def _python_definitions(text: str) -> dict[str, str]:
    """What the top level of a file defines: signatures with the first line of their docstring, values, classes."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    lines = _NEWLINE.split(text)
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = "\n".join(_head(node, lines)[:_MOST_LINES])
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.end_lineno is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = "\n".join(lines[node.lineno - 1 : min(node.end_lineno, node.lineno + 3)])
    return found


def _head(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> list[str]:
    """A definition without the bodies of its functions."""
    first = node.body[0]
    doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    begins = min([first.lineno, *(one.lineno for one in getattr(first, "decorator_list", ()))])
    shown = lines[node.lineno - 1 : max(begins - 1, node.lineno)]
    if doc and first.lineno > node.lineno:
        shown.append(lines[first.lineno - 1])
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                ends = max(inner.body[0].lineno - 1, inner.lineno)
                shown += lines[inner.lineno - 1 : ends]
            elif isinstance(inner, ast.AnnAssign):
                shown.append(lines[inner.lineno - 1])
    return shown


def _script_definition(text: str, name: str) -> str:
    """A definition at the left margin: to the end of a signature, or of a type, some lines at most."""
    match = re.search(_EXPORTED.format(name=re.escape(name)), text, re.MULTILINE)
    if match is None:
        return ""
    lines = text[match.start() : match.start() + 4096].split("\n")[:_MOST_LINES]
    is_type = re.search(r"\b(?:class|interface|type|enum)\s+[\w$]+\Z", match.group()) is not None
    shown: list[str] = []
    for line in lines:
        shown.append(line)
        if not is_type and (line.rstrip().endswith(("{", "=>", ";")) or "=>" in line):
            break
        if line.rstrip() in ("}", "};", ")") or (len(shown) == 1 and line.rstrip().endswith((";", "}"))):
            break
    return "\n".join(shown).rstrip()
