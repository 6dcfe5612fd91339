"""Verdicts: what a probe found about a model in an earlier process, cached by all that it depends on.

A probe runs the model some forty times. Its result depends on the model's code, configuration, number formats and
attention, on this library, on torch and on the processor, and hardly on the weights, of which a sample is compared. One
file per model holds it until one of these changes. It is used only if the trace of the model's forward is still the one
that was examined.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import platform
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
import transformers
from torch import nn
from torch.nn.modules import module as torch_wide
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from retrieve_spec.config import PASS, SpeculationConfig, cache_dir
from retrieve_spec.datastore.files import write_atomically
from retrieve_spec.drafting.drafter import Layer
from retrieve_spec.errors import in_a_line
from retrieve_spec.recorded.model_state import plain_attributes
from retrieve_spec.verify.interface import attention_of, input_device
from retrieve_spec.verify.tensor_parallel import Ranks

logger = logging.getLogger(__name__)
_SAMPLED = 16
"""Numbers of a tensor that are compared: another checkpoint of a model differs in some of any of its tensors."""
_VARIABLES = ("ATEN_", "CUDA_", "DNNL_", "MKL_", "NUMBA_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_", "TRITON_")
"""Prefixes of environment variables that change what computes, and how."""
_FROM_ELSEWHERE = ("_name_or_path", "_commit_hash", "transformers_version")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a model can be verified in trees.

    Attributes
    ----------
    layout
        The interface that worked (`retrieve_spec.verify.ways.layout_of`).
    takes_padding, takes_pieces, max_positions
        As of that interface.
    exact, largest, rms
        How much rounding changes the model's logits (`retrieve_spec.verify.comparison.Rounding`).
    traced
        Hash of the trace whose recording gave the model's logits; empty: nothing is recorded.
    by_kernels, by_copies
        Whether kernels stand for what it does to rows, and some of its layers for others.
    rows
        Fewest rows of an exact pass, 0 where passes need not be exact.
    has_graphs
        Whether CUDA graphs gave the same.
    has_layers
        Whether layers multiply by programs in passes of the model's own forward.
    """

    layout: str
    takes_padding: bool
    takes_pieces: bool
    max_positions: int
    exact: bool
    largest: float
    rms: float
    traced: str = ""
    by_kernels: bool = False
    by_copies: bool = False
    rows: int = 0
    has_graphs: bool = False
    has_layers: bool = False


class KeptFindings:
    """What is kept of one model between processes, in one small file; nothing where the model has no key.

    Parameters
    ----------
    model
        As it is now.
    config, layer
        How it is accelerated.
    """

    def __init__(self, model: Any, config: SpeculationConfig, layer: Layer) -> None:
        key = key_of(model, config, layer)
        self._path = None if key is None else cache_dir() / "verdicts" / f"{key}.json"
        self._found = {} if self._path is None else _read(self._path)

    @property
    def verdict(self) -> Verdict | None:
        """Return what a probe found in an earlier process, or None."""
        found = self._found.get("verdict")
        return None if found is None else Verdict(**found)

    @property
    def seconds(self) -> dict[int, float]:
        """Return the seconds of passes by number of nodes in that process; empty where nothing is known."""
        return {int(nodes): took for nodes, took in self._found.get("seconds", {}).items()}

    def keep(self, verdict: Verdict) -> None:
        """Keep what a probe found."""
        self._put("verdict", asdict(verdict))

    def keep_seconds(self, seconds: Mapping[int, float]) -> None:
        """Keep the seconds of passes, for a model whose verdict is kept."""
        if "verdict" in self._found:
            self._put("seconds", {str(nodes): took for nodes, took in seconds.items()})

    def _put(self, name: str, value: Any) -> None:
        if self._path is None:
            return
        self._found[name] = value
        content = json.dumps({"found": self._found, "sum": _sum(self._found)}).encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, lambda file: file.write(content))
        except OSError as error:
            logger.debug("verdicts are not kept: %s", error)


def _read(path: Path) -> dict[str, Any]:
    """Return what the file holds; nothing where it is missing or damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = kept["found"]
        return found if kept["sum"] == _sum(found) else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        logger.debug("no verdict is read: %s", in_a_line(error))
        return {}


def _sum(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def key_of(model: Any, config: SpeculationConfig, layer: Layer) -> str | None:
    """Return a hash of all that findings about a model depend on; None where it is unknown, or would not pay."""
    patched = "generate" in vars(model) or any("forward" in vars(module) for module in model.modules())
    alone = Ranks.of(model) is None  # ranks must run the same passes
    if patched or model.training or not alone or model.num_parameters() < PASS.min_parameters:
        return None
    try:
        device, attention = input_device(model), attention_of(model)
        facts = [
            [config.recorded_pass, config.exact, layer],
            _code_of(Path(__file__).parents[1]),
            _machine(device),
            [_without(part.to_dict()) for part in (model.config, model.generation_config)],
            [
                attention,
                _attention(attention),
                *(_describe_class(cls) for cls in dict.fromkeys(map(type, model.modules()))),
            ],
            [[number, name, _describe(value)] for number, name, value in plain_attributes(model)],
            [[number, _describe_function(hook)] for number, hook in _hooks(model)],
        ]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        for sample in _samples(model):
            digest.update(sample)
    except Exception as error:  # some classes, configs or tensors cannot be described
        logger.debug("no verdict is kept of this model: %s", in_a_line(error))
        return None
    return digest.hexdigest()[:32]


def _without(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _FROM_ELSEWHERE}


@functools.cache
def _code_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return the sizes and times of the sources in a folder."""
    return [_file(str(path)) for path in sorted(folder.rglob("*.py"))]


def _file(path: str) -> tuple[str, int, int]:
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns


def _machine(device: torch.device) -> list[Any]:
    """Return the processor, the packages and their releases."""
    facts = [
        sys.version, platform.machine(), torch.__version__, transformers.__version__, numba.__version__, np.__version__,
        llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.enabled, torch.get_num_threads(), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES)), str(device),
    ]  # fmt: skip
    if device.type == "cuda":
        facts += [torch.version.cuda, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)]
        facts += [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
    return facts


def _describe_class(cls: type[nn.Module]) -> list[Any]:
    """Return where a class of modules is defined, and its functions, which may have been patched.

    Raises
    ------
    LookupError, AttributeError
        It has no file, as when it was typed in.
    """
    file = _file(str(sys.modules[cls.__module__].__file__))
    release = getattr(sys.modules[cls.__module__.partition(".")[0]], "__version__", "")
    return [cls.__qualname__, file, release, _describe_function(cls.forward), _called_by(cls.forward)]


def _called_by(function: Any) -> list[Any]:
    """Return the functions of its module that a function calls by name: one that makes masks may have been patched."""
    function = inspect.unwrap(function)
    named = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
    return [[name, _describe_function(one)] for name, one in named if isinstance(one, types.FunctionType)]


def _attention(name: str) -> Any:
    """Return the registered attention function, which may have been replaced."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return _describe_function(function) if isinstance(function, types.FunctionType) else repr(type(function))


def _describe_function(function: Any) -> list[Any]:
    """Return where a function is defined, and its code.

    Raises
    ------
    AttributeError, OSError
        It is no Python function, or was typed in.
    """
    code = getattr(function, "__wrapped__", function).__code__
    return [function.__module__, function.__qualname__, _file(code.co_filename), code.co_code.hex()]


def _hooks(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the hooks around forwards with the indices of their modules; -1 for hooks of all modules."""
    everywhere = torch_wide._global_forward_hooks, torch_wide._global_forward_pre_hooks
    yield from ((-1, hook) for hooks in everywhere for hook in hooks.values())
    for number, module in enumerate(model.modules()):
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            yield number, hook


def _describe(value: Any) -> Any:
    """Return a description of a plain attribute that is the same in every process."""
    if isinstance(value, types.FunctionType):
        return _describe_function(value)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict):
        return sorted((str(name), _describe(entry)) for name, entry in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        entries = [str(_describe(entry)) for entry in value]
        return entries if isinstance(value, (list, tuple)) else sorted(entries)
    return repr(value)


def _samples(model: nn.Module) -> Iterator[bytes]:
    """Yield the kind of each tensor, and some of its numbers."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name} {type(tensor)} {tensor.dtype} {tensor.device} {tuple(tensor.shape)}".encode()
        if tensor.numel():
            at = torch.linspace(0, tensor.numel() - 1, min(_SAMPLED, tensor.numel()), dtype=torch.float64).long()
            sample = tensor.detach()[torch.unravel_index(at.to(tensor.device), tensor.shape)] if tensor.ndim else tensor
            yield sample.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
