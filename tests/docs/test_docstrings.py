"""Docstrings name the parameters that there are."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import retrieve_spec

PACKAGE = Path(retrieve_spec.__file__).parent


def documented(docstring: str) -> list[str]:
    """Names in the section "Parameters" of a NumPy docstring."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^[A-Z]\w+\n-+$|\Z)", docstring, re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^(\S.*)$", section[1], re.MULTILINE) if section else []
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


def accepted(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Names of the parameters of a function, of a class's `__init__` or of a dataclass."""
    if isinstance(node, ast.ClassDef):
        made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if made is None:
            return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        node = made
    a = node.args
    return {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if arg is not None}


def test_documented_parameters_exist() -> None:
    found, wrong = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = documented(inspect.cleandoc(ast.get_docstring(node) or ""))
                found += len(names)
                wrong += [f"{path.name}: {node.name}({name})" for name in names if name not in accepted(node)]
    assert not wrong
    assert found > 100, "the docstrings are still read"
