"""A user without a home, of an installation that cannot be written, as containers have them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import retrieve_spec
from retrieve_spec.config import temporary_dir

PACKAGE = Path(retrieve_spec.__file__).parent
USER = 12345


@pytest.fixture
def stranger(tmp_path: Path) -> list[str]:
    """A command that runs Python as a user without a name, who reads everything and writes to one folder alone."""
    setpriv = shutil.which("setpriv")
    if os.getuid() or setpriv is None:
        pytest.skip("only root may become another user")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    os.chmod(temporary, 0o777)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(folder, 0o755)
    shutil.copytree(PACKAGE, tmp_path / "installed" / "retrieve_spec", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_text("def add(a, b):\n    return a + b\n" * 20)
    packages = [str(tmp_path / "installed"), *(place for place in sys.path if place and place != str(PACKAGE.parent))]
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    variables = [f"TMPDIR={temporary}", f"PYTHONPATH={os.pathsep.join(packages)}", "PATH=/usr/bin:/bin"]
    environment = ["env", "-i", *variables, "OMP_NUM_THREADS=1", "NUMBA_OPT=0", "PYTHONDONTWRITEBYTECODE=1"]
    me = [setpriv, "--reuid", str(USER), "--clear-groups", *reads, *environment, sys.executable]
    if subprocess.run([*me, "-c", "import numpy"], capture_output=True, cwd=temporary).returncode:
        pytest.skip("capabilities are not handed on here")
    return me


COMMANDS = """
import json, os, sys
os.environ["NUMBA_DISABLE_JIT"] = sys.argv[1]
import torch
from retrieve_spec import cli
from retrieve_spec.drafting.mixture import MixtureDrafter
from retrieve_spec.sampling.acceptance import read_logits
MixtureDrafter.prepare = lambda self: read_logits(torch.zeros(1, 2), 1)  # compiles one kernel instead of all
for words in json.loads(sys.argv[2]):
    assert cli.run(words) == 0, words
"""


def test_commands_run_in_a_temporary_folder(stranger: list[str], tmp_path: Path) -> None:
    """Commands that call many kernels run without the compiler; `doctor` shows where compiled code is kept."""
    temporary = tmp_path / "tmp"
    many_kernels = [
        ["build", "store", "../text", "--tokenizer", "reference"],
        ["search", "store", "def add("],
        ["sync", "store", "../text"],
        ["generate", "--model", "reference", "--prompt", "def add(", "--max-new-tokens", "2", "--draft", "off"],
    ]
    doctor = ["doctor", "--model", "none"]
    own = temporary / f"retrieve-spec-{USER}"
    sentence = (
        f"Code of compiled kernels is kept in {own}: set NUMBA_CACHE_DIR to a folder that can be written and stays"
    )
    kept = []
    for commands, disable_jit in ((many_kernels, True), ([doctor], False), ([doctor, ["forget"]], False)):
        command = [*stranger, "-c", COMMANDS, str(int(disable_jit)), json.dumps(commands)]
        done = subprocess.run(command, cwd=temporary, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert disable_jit or done.stderr.count(sentence) == 1, done.stderr
        kept.append(sorted((own / "kernels").rglob("*.nb[ci]")))
    assert not (temporary / "~").exists()
    assert own.stat().st_mode & 0o777 == 0o700 and kept[1] == kept[2] != [], "found by the next process"


def test_a_folder_for_code_that_cannot_be_written_is_not_used(stranger: list[str], tmp_path: Path) -> None:
    """Numba would make a folder named `~` where the command runs."""
    temporary = tmp_path / "tmp"
    program = (
        f"import os; os.environ['NUMBA_CACHE_DIR'] = '{tmp_path}/text'\n"
        "from retrieve_spec.kernels import step\n"
        "print(step.propose.stats.cache_path)"
    )
    done = subprocess.run([*stranger, "-c", program], cwd=temporary, capture_output=True, text=True)
    assert done.stdout.startswith(str(temporary / f"retrieve-spec-{USER}")), done.stdout + done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR") == 1 and not (temporary / "~").exists()


def test_numba_is_given_a_folder_where_it_finds_none(tmp_path: Path) -> None:
    program = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]\n"
        "from retrieve_spec.kernels import step\n"
        "print(step.propose.stats.cache_path)"
    )
    hidden = ("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES", "NUMBA_DISABLE_JIT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    own = tmp_path / f"retrieve-spec-{os.getuid()}"
    assert Path(done.stdout.strip()).is_relative_to(own / "kernels"), done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR") == 1


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    named = tmp_path / f"retrieve-spec-{os.getuid()}"
    for place in ("folder", "link"):
        temporary_dir.cache_clear()
        (tmp_path / "theirs").mkdir(exist_ok=True)
        named.symlink_to("theirs") if place == "link" else named.mkdir()
        named.chmod(0o777)
        other = temporary_dir("Something", "A_VARIABLE")
        assert other != named and other.parent == tmp_path and other.stat().st_mode & 0o777 == 0o700
        named.unlink() if place == "link" else named.rmdir()
    temporary_dir.cache_clear()
