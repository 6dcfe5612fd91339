"""What is installed is whole: a wheel is built and installed, and finds what comes with it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools", minversion="77")  # as pyproject.toml asks, where pip may not fetch it
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    for name in ("retrieve_spec", "datastores"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run(build, check=True, timeout=300)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT) for path in (ROOT / "retrieve_spec").rglob("*") if path.is_file()}
    wanted = {str(path) for path in files if "__pycache__" not in path.parts}
    assert wanted <= inside


def test_an_installation_finds_its_recipes(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [*PIP, "install", "--no-deps", "--ignore-installed", "--prefix", str(tmp_path), str(wheel)],
        check=True,
        timeout=300,
    )
    (package,) = tmp_path.rglob("retrieve_spec/__init__.py")
    code = "import retrieve_spec; from retrieve_spec.datastore.sources import recipe_file, load_recipe as load; "
    code += "print(retrieve_spec.__file__, recipe_file('python-stdlib'), load('python-stdlib').name, sep='\\n')"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(package.parents[1])},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.splitlines()
    assert all(Path(path).resolve().is_relative_to(tmp_path) for path in said[:2])
    assert said[2] == "python-stdlib"
