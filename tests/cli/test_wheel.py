"""What is installed is whole, and what `tools/deploy/` says of it is true."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import click
import pytest
from waiting import HANG_S

from retrieve_spec import cli, cli_common
from retrieve_spec.config import ServeConfig

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
    subprocess.run(build, check=True, timeout=HANG_S)
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
        timeout=HANG_S,
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
        timeout=HANG_S,
    ).stdout.splitlines()
    assert all(Path(path).resolve().is_relative_to(tmp_path) for path in said[:2])
    assert said[2] == "python-stdlib"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def container() -> list[tuple[str, str]]:
    """Instructions of the container file: name and words, lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "tools" / "deploy" / "Containerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in lines if line.strip()]


def words(instruction: str) -> list[str]:
    """Words of the last instruction of that name, which is written as a list."""
    return json.loads([given for name, given in container() if name == instruction][-1].removeprefix("CMD "))


def test_the_container_serves_where_it_listens_and_says_how_it_is(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    program, verb, *arguments = words("ENTRYPOINT") + words("CMD")
    assert program in PROJECT["scripts"] and verb == "serve"
    command = cli.cli.get_command(click.Context(cli.cli), "serve")
    given = command.make_context("serve", [str(keys) if word == "/keys" else word for word in arguments]).params
    assert given["host"] == "0.0.0.0" and given["key_file"] == keys
    port = str(ServeConfig().port)
    assert dict(container())["EXPOSE"] == port
    from retrieve_spec.server.guard import OPEN_PATHS, check_binding, read_keys

    check_binding(given["host"], read_keys(keys))
    (url,) = re.findall(r"'http://127.0.0.1:(\d+)(/[a-z]+)'", dict(container())["HEALTHCHECK"])
    assert url[0] == port and url[1] in OPEN_PATHS


def test_a_missing_package_of_an_extra_is_noticed():
    """What commands look for before they say which extra to install is what the extra brings, by its import name."""
    named = {"prometheus-client": "prometheus_client"}
    for extra, modules in cli_common.EXTRAS.items():
        wanted = {
            re.match(r"[a-z0-9-]+", word)[0] for word in PROJECT["optional-dependencies"][extra] if ";" not in word
        }
        assert {named.get(word, word) for word in wanted} == set(modules), extra
