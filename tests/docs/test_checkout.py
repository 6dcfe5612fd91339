"""Scripts run the package of the checkout they stand in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = {"checkout", "harness", "measuring", "bench_batches"}
"""Modules of scripts/ that set the path, or import one that does, before anything of the package."""


def imported(path: Path) -> list[str]:
    """Top-level modules a file imports, in order."""
    names: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module.partition(".")[0])
    return names


def test_the_checkout_comes_before_the_package() -> None:
    found = 0
    for path in (ROOT / "scripts").glob("*.py"):
        names = imported(path)
        if "__main__" in path.read_text(encoding="utf-8") and "retrieve_spec" in names:
            found += 1
            assert FIRST & set(names[: names.index("retrieve_spec")]), path.name
    assert found > 10, "the scripts are still read"


@pytest.mark.parametrize("script", ["scripts/record_terminal.py", "tools/compare/compare.py"])
def test_another_installed_package_is_not_imported(tmp_path: Path, script: str) -> None:
    other = tmp_path / "retrieve_spec"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the other package')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    check = "import retrieve_spec, subprocess, sys; print(retrieve_spec.__file__, flush=True)"
    if script.startswith("scripts"):
        check += "; subprocess.run([sys.executable, '-c', 'import retrieve_spec; print(retrieve_spec.__file__)'])"
    before = (ROOT / script).read_text(encoding="utf-8").partition('if __name__ == "__main__":')[0]
    copy = ROOT / Path(script).parent / f"_{tmp_path.name}.py"
    copy.write_text(f"{before}\n{check}\n", encoding="utf-8")
    try:
        done = subprocess.run([sys.executable, copy], env=environment, cwd=tmp_path, capture_output=True, text=True)
    finally:
        copy.unlink()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert lines == [str(ROOT / "retrieve_spec" / "__init__.py")] * len(lines), done.stdout
    assert lines
