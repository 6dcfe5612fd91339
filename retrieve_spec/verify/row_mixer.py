"""Row mixer: one mixer whose convolution and recurrence go by row scans in passes of ours.

The mixer's own forward runs, on a copy of its function that calls ours for the two (`types.FunctionType`, with other
globals); the model's code and modules stay as they are, but for an attribute `forward` of the mixer while a pass runs,
which hands every other thread's call to the mixer itself. Which functions are meant, their arguments show, which
are those of the packages that stand in for them where these are installed (`causal_conv1d`, `mamba_ssm`, `fla`).
"""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from transformers.cache_utils import Cache

from retrieve_spec.verify.draft_paths import ScratchLayer
from retrieve_spec.verify.mixers import Mixer
from retrieve_spec.verify.row_functions import RowFunctions, RowLayer, Running
from retrieve_spec.verify.row_scans import DeltaRows, SsdRows
from retrieve_spec.verify.row_tree import RowTree

_ARGUMENTS: dict[str, set[str]] = {
    "convolve_step": {"hidden_states", "conv_state", "weight", "bias", "activation"},
    "convolve": {"hidden_states", "weight", "bias", "activation"},
    "scan_ssd": {"hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states", "dt_softplus",
                  "dt_limit", "return_final_states"},
    "step_ssd": {"state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus"},
    "scan_delta": {"query", "key", "value", "g", "beta", "chunk_size", "initial_state", "output_final_state",
                    "use_qk_l2norm_in_kernel"},
    "step_delta": {"query", "key", "value", "g", "beta", "initial_state", "output_final_state",
                    "use_qk_l2norm_in_kernel"},
}  # fmt: skip
"""By the name of what stands in for it, arguments that a function takes; the first that fits is it."""
_TOGETHER = (
    {"convolve", "convolve_step", "scan_ssd", "step_ssd"},
    {"convolve", "convolve_step", "scan_delta", "step_delta"},
    {"convolve", "convolve_step"},
)


def replaceable(module: torch.nn.Module) -> dict[str, str]:
    """By name in its file, which functions a mixer's forward calls that ours stand in for; empty when not all do."""
    raw = _forward_of(module)
    found: dict[str, str] = {}
    for name in raw.__code__.co_names if raw is not None else ():
        function = raw.__globals__.get(name)
        if isinstance(function, types.FunctionType) and (role := _role(function)):
            found[name] = role
    return found if set(found.values()) in _TOGETHER and len(found) == len(set(found.values())) else {}


def _forward_of(module: torch.nn.Module) -> Any:
    """The function that a module's forward is, where nothing of other packages is around it."""
    own = vars(module).get("forward")
    if (own is not None and not is_ours(own)) or any(hasattr(child, "_hf_hook") for child in module.modules()):
        return None
    raw = inspect.unwrap(type(module).forward)
    return raw if isinstance(raw, types.FunctionType) else None


def _role(function: types.FunctionType) -> str:
    if inspect.getclosurevars(function).nonlocals.get("is_new_implementation"):
        return ""  # a kernel of a package is faster than products of matrices
    taken = inspect.signature(function).parameters.keys()
    return next((role for role, needed in _ARGUMENTS.items() if needed <= taken), "")


@dataclass(slots=True)
class StateBehind:
    """A recurrent state, and rows that were accepted behind it: it is brought up to them when it is next read.

    It is replaced, not written to, so that nothing is added twice where this is cut short.
    """

    state: torch.Tensor
    rows: SsdRows | DeltaRows
    accepted: torch.Tensor
    spare: torch.Tensor | None

    def settle(self, layer: Any) -> None:
        """Bring the state in a cache layer up to the accepted rows."""
        if layer.recurrent_states[0] is self.state:
            layer.recurrent_states[0] = self.rows.behind(self.state, rows=self.accepted, out=self.spare)


class RowMixer(RowFunctions):
    """One mixer in passes by row scans.

    Parameters
    ----------
    mixer
        The mixer, all of whose functions are `replaceable`.
    running
        The pass, which all mixers of a model share.
    """

    def __init__(self, mixer: Mixer, running: Running) -> None:
        self.mixer, self.module, self.tensors = mixer, mixer.module, mixer.tensors
        raw, names = _forward_of(self.module), replaceable(self.module)
        if raw is None or not names:
            raise RuntimeError(f"a {type(self.module).__name__} calls other functions than when it was probed")
        own = {role: raw.__globals__[name] for name, role in names.items()}
        super().__init__(running, own["convolve"])
        ours = {name: getattr(self, role) for name, role in names.items()}
        self._bound = types.FunctionType(
            raw.__code__, {**raw.__globals__, **ours}, raw.__name__, raw.__defaults__, raw.__closure__
        )
        self._bound.__kwdefaults__ = raw.__kwdefaults__
        self._behind: StateBehind | None = None

    def take(self, behind: StateBehind | None) -> None:
        """Take the mixer's place until `leave`; `behind`: rows that the state of a lone text does not hold yet."""
        self._behind = behind
        before = vars(self.module).get("forward")
        if before is not None and not is_ours(before):
            raise RuntimeError(f"somebody has set the forward of a {type(self.module).__name__} since it was probed")
        vars(self.module)["forward"] = self.forward

    def leave(self) -> None:
        """Give the mixer its place back."""
        self._behind = None
        if is_ours(vars(self.module).get("forward")):
            del vars(self.module)["forward"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mixer's forward, ours where this thread runs a pass."""
        running = self._running
        if running.thread != get_ident():
            return type(self.module).forward(self.module, *args, **kwargs)
        at = self.mixer.layer_idx
        if self._behind is not None:
            self._behind.settle(running.caches[0].layers[at])
        if running.tree is not None:
            layers = [cache.layers[at] for cache in running.caches]
            self.layer = RowLayer.beside(layers, range(len(layers))) if len(layers) > 1 else RowLayer(layers[0])
            own = Cache(layers=[None] * at + [self.layer])
            args = tuple(own if value is running.given else value for value in args)
            kwargs = {name: own if value is running.given else value for name, value in kwargs.items()}
            if kwargs.get("attention_mask") is not None:
                kwargs["attention_mask"] = None  # nothing is padded behind the prompt
        return self._bound(self.module, *args, **kwargs)

    def states_behind(self, tree: RowTree, text: int, rows: torch.Tensor) -> ScratchLayer:
        """What a cache layer of a text holds behind the last of some rows of it that follow one another."""
        layer = ScratchLayer(self.layer)
        layer.conv_states[0] = self.conv_rows().behind(tree, text, int(rows[-1]))
        state = layer.recurrent_states.get(0)
        if state is not None:
            only = slice(text, text + 1)
            layer.recurrent_states[0] = self.rows().behind(state[only], only, rows)
        return layer

    def commit(self, tree: RowTree, rows: torch.Tensor, cache: Any, spare: torch.Tensor | None) -> StateBehind | None:
        """Write the convolution state of a lone text behind accepted rows, and say what its recurrent state lacks."""
        layer = cache.layers[self.mixer.layer_idx]
        layer.conv_states[0].copy_(self.conv_rows().behind(tree, 0, int(rows[-1])))
        state = layer.recurrent_states.get(0)
        return None if state is None else StateBehind(state, self.rows(), rows, spare)


def is_ours(forward: Any) -> bool:
    """Whether a module's `forward` is a row mixer's."""
    return isinstance(getattr(forward, "__self__", None), RowMixer)
