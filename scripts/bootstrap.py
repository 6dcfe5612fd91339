"""Environment of a fresh clone: `.venv` with the pinned packages; nothing is done when it is current.

Knows only the standard library, because it runs before anything is installed::

    python3 scripts/bootstrap.py            # the package, as `make demo` needs it
    python3 scripts/bootstrap.py serve      # with what the IDE backend needs
    python3 scripts/bootstrap.py test       # the package with every extra that the tests need

The environment is current when the stamp inside it names the same interpreter, extras, constraints and pyproject.
Words after `--` go to pip, for example `-- --no-index --find-links wheels/` without a network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
EXTRAS = {"run": (), "serve": ("serve",), "test": ("dev", "serve", "parquet", "gpu")}

NO_VENV = """\
This Python cannot make virtual environments: its `venv` module is missing.
  Debian, Ubuntu:  apt install python3-venv
  elsewhere:       install Python from python.org, pyenv or conda
  or name another: make PYTHON=/path/to/python3.12 {goal}"""
NO_PIP = """\
Neither `ensurepip` nor a pip of version 22.3 or newer is there, so nothing can be installed.
  Debian, Ubuntu:  apt install python3-venv python3-pip"""
INSTALL_FAILED = """\
Installing the packages failed; pip's own words are above. The usual causes:
  no network      try again later, or point pip at a folder of wheels:
                  make {goal} PIP_ARGS="--no-index --find-links wheels/"
  a proxy/mirror  set PIP_INDEX_URL, PIP_PROXY or PIP_CERT as for any pip
  little space    about 3 GB (4 for the tests) are needed below {root} (and in the folder for temporary files)
  another Python  constraints.txt was made with 3.11; with other releases: make {goal} CONSTRAINTS=mine.txt
The half-made environment stays and the next run goes on from there."""


def fingerprint(extras: tuple[str, ...], constraints: Path) -> str:
    """Say in one line what the environment was made from."""
    digest = hashlib.sha256()
    for path in (constraints, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return f"{sys.version.split()[0]} {sys.platform} [{','.join(extras)}] {digest.hexdigest()[:16]}"


def is_current(venv: Path, python: Path, goal: str, constraints: Path) -> bool:
    """Whether an earlier run already installed this, or a superset of it."""
    if not python.exists():
        return False
    wanted = {fingerprint(extras, constraints) for extras in EXTRAS.values() if set(EXTRAS[goal]) <= set(extras)}
    return any(
        (venv / f".installed-{name}").is_file() and (venv / f".installed-{name}").read_text() in wanted
        for name in EXTRAS
    )


def create(venv: Path, python: Path, goal: str) -> list[str]:
    """Make the environment; return the command that runs a pip which installs into it."""
    if importlib.util.find_spec("venv") is None:
        sys.exit(NO_VENV.format(goal=goal))
    if python.exists() and subprocess.run([python, "-c", "pass"], capture_output=True).returncode != 0:
        shutil.rmtree(venv)  # made by an interpreter that is gone
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    if not python.exists():
        print(f"creating {venv.name} with Python {sys.version.split()[0]}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", *([] if has_ensurepip else ["--without-pip"]), venv], check=True)
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return [str(python), "-m", "pip"]
    # Debian ships Python without ensurepip; a pip outside the environment can install into it.
    outside = [sys.executable, "-m", "pip", "--python", str(python)]
    if subprocess.run([*outside, "--version"], capture_output=True).returncode != 0:
        sys.exit(NO_PIP)
    return outside


def main() -> None:
    """Parse the command line, install what is missing, leave a stamp."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("goal", nargs="?", choices=sorted(EXTRAS), default="run")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    args, pip_args = parser.parse_args(words[:split]), words[split + 1 :]
    make_goal = "demo" if args.goal == "run" else args.goal
    if sys.version_info < OLDEST_PYTHON:
        found = sys.version.split()[0]
        sys.exit(f"Python 3.11 or newer is needed, this is {found}. Try: make PYTHON=python3.12 {make_goal}")
    python = args.venv / "bin" / "python"
    if is_current(args.venv, python, args.goal, args.constraints):
        return
    pip = create(args.venv, python, make_goal)
    extras = EXTRAS[args.goal]
    print(
        "installing" + (f" with extras {', '.join(extras)}" if extras else "") + " (minutes the first time)", flush=True
    )
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    command = [*pip, "install", "--quiet", "-c", str(args.constraints), *pip_args, "-e", target]
    if subprocess.run(command, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}).returncode != 0:
        sys.exit(INSTALL_FAILED.format(goal=make_goal, root=ROOT))
    (args.venv / f".installed-{args.goal}").write_text(fingerprint(extras, args.constraints))


if __name__ == "__main__":
    main()
