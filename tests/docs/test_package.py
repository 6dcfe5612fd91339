"""The package as a whole: docstrings name parameters that there are, pins are what is declared, scripts run it."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


ROOT = Path(__file__).parents[2]


def declared() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins(file: str) -> Iterator[tuple[str, Version]]:
    for line in (ROOT / file).read_text().splitlines():
        if words := line.partition("#")[0].split():
            name, _, version = words[0].partition("==")
            yield canonicalize_name(name), Version(version)


def lower_bound(requirement: Requirement) -> Version:
    (bound,) = (Version(s.version) for s in requirement.specifier if s.operator == ">=")
    return bound


def test_lowest_constraints_are_the_lower_bounds() -> None:
    assert dict(pins("constraints-lowest.txt")) == {name: lower_bound(r) for name, r in declared().items()}


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_pins_satisfy_what_is_declared(file: str) -> None:
    pinned = dict(pins(file))
    assert len(pinned) == len(list(pins(file))), "a package is pinned twice"
    wrong = {name: str(r) for name, r in declared().items() if name not in pinned or pinned[name] not in r.specifier}
    assert not wrong


def test_another_installed_package_is_not_imported(tmp_path: Path) -> None:
    other = tmp_path / "installed" / "retrieve_spec"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the other package')")
    script = ROOT / "scripts" / f"_{tmp_path.name}.py"
    check = "import retrieve_spec, subprocess, sys; print(retrieve_spec.__file__, flush=True)"
    child = "subprocess.run([sys.executable, '-c', 'import retrieve_spec; print(retrieve_spec.__file__)'])"
    script.write_text(f"import harness\n{check}; {child}\n")
    environment = {**os.environ, "PYTHONPATH": str(other.parent)}
    try:
        done = subprocess.run([sys.executable, script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    finally:
        script.unlink()
    assert done.stdout.split() == [str(ROOT / "retrieve_spec" / "__init__.py")] * 2, done.stderr
