"""Models by name: `reference` (the bundled one), a folder or a hub id, with the tokenizer."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieve_spec.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from retrieve_spec.forks import survive_forks

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

REFERENCE = "reference"
"""The name of the bundled model."""
DTYPES = ("auto", "float32", "bfloat16", "float16")


def reference_path() -> Path:
    """Folder of the bundled model (weights, tokenizer, `CARD.md`)."""
    return Path(str(files("retrieve_spec") / "reference"))


def load_model(
    name: str = REFERENCE, *, dtype: str = "auto", device: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate.

    Parameters
    ----------
    name
        `"reference"` for the bundled model, a folder that `save_pretrained` wrote, or a Hugging Face hub id.
    dtype
        `"auto"` (as stored; the bundled model in float32 on a CPU), `"float32"`, `"bfloat16"` or `"float16"`.
    device
        `"auto"` (the first GPU, else the CPU) or a torch device string.

    Raises
    ------
    ModelNotFoundError
        Nothing by that name, on disk or on the hub.
    UnsupportedModelError
        The checkpoint is not a causal language model.
    ConfigError
        An unknown dtype, or a device that is not there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    survive_forks()
    target = _device(device)
    source, options = _locate(name)
    wanted = _dtype(dtype, name, target)
    config, tokenizer = load_config_and_tokenizer(name)
    with _explained(name):
        model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=wanted, **options)
    with torch.no_grad():
        model.to(target)
    model.eval()
    return model, tokenizer


def load_config_and_tokenizer(name: str) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Load what there is to know of a model before its weights; errors are those of `load_model`."""
    from transformers import AutoConfig, AutoTokenizer

    source, options = _locate(name)
    with _explained(name):
        config = AutoConfig.from_pretrained(source, **options)  # first: a wrong name is found out by one request
        return config, AutoTokenizer.from_pretrained(source, config=config, **options)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what Transformers says of a name into errors of this library."""
    try:
        yield
    except (OSError, KeyError) as error:
        raise _not_found(name, error) from error
    except ValueError as error:
        raise UnsupportedModelError(
            f"to load {name!r} as a causal language model", _first_line(error), "Give another checkpoint."
        ) from error


def _locate(name: str) -> tuple[str, dict[str, Any]]:
    """Where to load from, and with which options of `from_pretrained`."""
    if name == REFERENCE:
        return str(reference_path()), {"local_files_only": True}
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"a model in folder {name!r}", "no config.json", "Give the folder that save_pretrained wrote."
            )
        return str(path), {"local_files_only": True}
    check_hub_id(name, "a model folder")
    return name, {}


def check_hub_id(name: str, wanted: str) -> None:
    """Refuse what can only be a path, and a mistyped `reference`, before the hub is asked.

    Raises
    ------
    ModelNotFoundError
        Saying that it is not what was wanted.
    """
    path = Path(name).expanduser()
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1 or path.exists():
        got = "a file" if path.is_file() else "a folder without one" if path.exists() else "nothing there"
        raise ModelNotFoundError(
            f"{wanted} at {name!r}", got, "Give a folder, a hub id such as 'owner/name', or 'reference'."
        )
    if "/" not in name and difflib.get_close_matches(name.lower(), [REFERENCE], cutoff=0.8):
        raise ModelNotFoundError("the name of a model", repr(name), f"Did you mean {REFERENCE!r}?")


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

    if dtype not in DTYPES:
        raise ConfigError(f"a dtype among {', '.join(DTYPES)}", repr(dtype), "Leave it at 'auto'.")
    if dtype == "auto":
        return torch.float32 if name == REFERENCE and device.type == "cpu" else "auto"
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def _not_found(name: str, error: Exception) -> ModelNotFoundError:
    remedy = "Give 'reference', a folder, or a hub id; a hub id needs the network once, and some need `hf auth login`."
    return ModelNotFoundError(f"to load model and tokenizer {name!r}", _first_line(error), remedy)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
