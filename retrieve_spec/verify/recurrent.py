"""Recurrent state under drafts: each row of a tree continues from its parent's, and a commit advances it over the
accepted rows.

The model's code and modules stay as they are, but for an attribute `forward` of its mixers while a pass runs, which
hands every other thread's call to the mixer itself. By rows (`RowMixer`), a mixer's own forward runs, on a copy of its
function that calls ours for its convolution and recurrence (`types.FunctionType`, with other globals). Which functions
are meant, their arguments show, which are those of the packages that stand in for them where these are installed
(`causal_conv1d`, `mamba_ssm`, `fla`). Other mixers step from depth to depth (`retrieve_spec.verify.mixers`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers.activations import ACT2FN

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.interface import Recurrence
from retrieve_spec.verify.mixers import Mixer, Running, ScratchLayer, SteppedMixer, VerifyingMixer, flushed
from retrieve_spec.verify.row_scans import (
    RowTree,
    convolve,
    convolved,
    scan_delta,
    scan_long,
    scan_ssd,
    unit,
)


class RowLayer(ScratchLayer):
    """A cache layer that returns the states before a pass and keeps nothing."""

    def update_conv_state(self, conv_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Return the rows alone: `convolve` has the states."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Do nothing: the states after rows are computed when the rows are accepted."""
        return recurrent_states


def _activated(x: torch.Tensor, activation: Any) -> torch.Tensor:
    """Apply an activation by its name."""
    if activation is None:
        return x
    made: torch.Tensor = (ACT2FN[activation] if isinstance(activation, str) else activation)(x)
    return made


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, positive: bool) -> torch.Tensor:
    """(…, heads) time steps from what a projection made of them, rounded as single steps round them."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (functional.softplus(dt) if positive else dt).float()


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
    is_ours = isinstance(getattr(own, "__self__", None), VerifyingMixer)  # of another pass
    if (own is not None and not is_ours) or any(hasattr(child, "_hf_hook") for child in module.modules()):
        return None
    raw = inspect.unwrap(type(module).forward)
    return raw if isinstance(raw, types.FunctionType) else None


def _role(function: types.FunctionType) -> str:
    if inspect.getclosurevars(function).nonlocals.get("is_new_implementation"):
        return ""  # the package's kernel is faster than matrix products
    taken = inspect.signature(function).parameters.keys()
    return next((role for role, needed in _ARGUMENTS.items() if needed <= taken), "")


class RowMixer(VerifyingMixer):
    """One mixer in passes by row scans; all of its functions are `replaceable`.

    Attributes
    ----------
    layer
        The cache layer that the mixer gets in place of the cache's.
    """

    def __init__(self, mixer: Mixer, running: Running) -> None:
        super().__init__(mixer, running)
        raw, names = _forward_of(self.module), replaceable(self.module)
        self._own_convolve: Callable[..., torch.Tensor] = next(
            raw.__globals__[name] for name, role in names.items() if role == "convolve"
        )
        ours = {name: getattr(self, role) for name, role in names.items()}
        self._bound = types.FunctionType(
            raw.__code__, {**raw.__globals__, **ours}, raw.__name__, raw.__defaults__, raw.__closure__
        )
        self._bound.__kwdefaults__ = raw.__kwdefaults__

    def forget(self) -> None:
        """Release what the last pass computed."""
        self.layer: Any = None
        self._conv: Any = None  # convolution inputs of the last pass over a draft: `ConvRows`
        self._rows: Any = None  # recurrence inputs of that pass: `SsdRows` or `DeltaRows`

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the mixer's forward on a copy of its function."""
        if self._running.tree is not None:
            layers = [cache.layers[self.mixer.layer_idx] for cache in self._running.caches]
            self.layer = RowLayer.of_texts(layers, range(len(layers))) if len(layers) > 1 else RowLayer(layers[0])
            args, kwargs = self.call_over(self.layer, args, kwargs)
        return self._bound(self.module, *args, **kwargs)

    def states_after(self, tree: RowTree, text: int, rows: torch.Tensor, last: int) -> tuple[ScratchLayer, int]:
        """Return the states after the rows, computed now."""
        layer = ScratchLayer(self.layer)
        layer.conv_states[0] = self._conv.state_after(tree, text, last)
        state = layer.recurrent_states.get(0)
        if state is not None:
            only = slice(text, text + 1)
            layer.recurrent_states[0] = self._rows.state_after(state[only], only, rows)
        return layer, 0

    def convolve(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Convolve (texts, channels, rows)."""
        if self._running.tree is None:
            return self._own_convolve(hidden_states, weight, bias, activation=activation, **kwargs)
        out, self._conv = convolve(self._running.tree, hidden_states, self.layer.conv_states[0], weight, bias)
        return _activated(out, activation).to(hidden_states.dtype)

    def convolve_step(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: Any = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Convolve one row (texts, channels, 1), and keep it."""
        if self._running.tree is not None:
            return self.convolve(hidden_states, weight, bias, activation)
        seen = torch.cat([conv_state[..., 1:], hidden_states.to(conv_state.dtype)], -1)
        conv_state.copy_(seen)
        out = convolved(seen[..., -weight.shape[-1] :], weight, bias, -1)
        return _activated(out, activation).to(hidden_states.dtype).unsqueeze(-1)

    def scan_ssd(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int = 0,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **_kwargs: Any,
    ) -> Any:
        """Mamba-2 over (texts, rows, heads, p)."""
        x, steps = hidden_states.float(), _time_steps(dt, dt_bias, dt_softplus)
        A, B, C, state = A.float(), B.float(), C.float(), initial_states
        if (tree := self._running.tree) is not None:  # single steps do not clamp
            out, self._rows = scan_ssd(tree, x, steps, B, C, self.layer.recurrent_states[0], A)
        else:
            if state is None:
                state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1])
            parts = x, steps.clamp(*dt_limit), B, C
            out, state = scan_long(functools.partial(scan_ssd, decay=A), parts, state)
        out = (out if D is None else torch.addcmul(out, x, D.float().unsqueeze(-1))).contiguous()  # some view it
        return (out, state) if return_final_states else out

    def step_ssd(
        self,
        state: torch.Tensor,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Mamba-2 over one row (texts, heads, p), in the state itself."""
        texts, heads, p = hidden_states.shape
        x, decay, skip = hidden_states.float(), A[:, 0, 0].float(), None if D is None else D[:, 0].float()
        steps = _time_steps(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus)
        B, C = B.float(), C.float()
        if (tree := self._running.tree) is not None:
            before = self.layer.recurrent_states[0]
            said, self._rows = scan_ssd(tree, x[:, None], steps[:, None], B[:, None], C[:, None], before, decay)
            out = said[:, 0]
        else:
            flat = state.view(texts * B.shape[1], -1, B.shape[-1])
            state.mul_((steps * decay).exp_()[..., None, None])
            flat.baddbmm_((x * steps.unsqueeze(-1)).view(len(flat), -1, 1), B.reshape(len(flat), 1, -1))
            out = torch.bmm(flat, C.reshape(len(flat), -1, 1)).view(texts, heads, p)
        out = out if skip is None else torch.addcmul(out, x, skip.unsqueeze(-1))
        return (out if z is None else out * functional.silu(z.float())).to(hidden_states.dtype)

    def scan_delta(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_kwargs: Any,
    ) -> Any:
        """The gated delta rule over (texts, rows, heads, d)."""
        if g.ndim != 3:
            raise NotImplementedError("a decay for every channel")
        q, k, v, state = query.float(), key.float(), value.float(), initial_state
        if use_qk_l2norm_in_kernel:
            q, k = unit(q), unit(k)
        q = q * q.shape[-1] ** -0.5
        if (times := v.shape[2] // k.shape[2]) > 1:
            q, k = q.repeat_interleave(times, 2), k.repeat_interleave(times, 2)
        parts = q, k, v, g.float(), beta.float()
        if (tree := self._running.tree) is not None:
            out, self._rows = scan_delta(tree, *parts, self.layer.recurrent_states[0])
        else:
            if state is None:
                state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
            out, state = scan_long(scan_delta, parts, state)
        return out.to(query.dtype), state if output_final_state else None

    step_delta = scan_delta


class RecurrentState:
    """The recurrent layers of caches under drafts.

    Parameters
    ----------
    recurrence
        The modules that keep state, and how they verify drafts.
    """

    def __init__(self, recurrence: Recurrence) -> None:
        self._running = Running()
        self._by_rows = recurrence.way == "rows"
        kind = RowMixer if self._by_rows else SteppedMixer
        self._mixers = [kind(mixer, self._running) for mixer in recurrence.mixers]
        self._tree: RowTree | None = None  # of the last pass, until it is committed
        self._roots: Sequence[int] = ()  # by text

    def apart(self) -> RecurrentState:
        """Return the same modules for another text whose passes may only alternate with those of this one."""
        return copy.copy(self)

    def forget(self) -> None:
        """Release what the last pass computed."""
        if self._tree is not None:
            self._tree = None
            for mixer in self._mixers:
                mixer.forget()

    @contextlib.contextmanager
    def verifying(
        self, given: Any, caches: Sequence[Any], roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device
    ) -> Iterator[None]:
        """Let the pass inside verify drafts, empty ones too; states stay as they are until they are committed.

        A lone text without a draft updates the model's own cache in place.

        Parameters
        ----------
        given
            The cache that the model is given.
        caches, roots, trees
            By text of the pass, the cache that holds its states, its root tokens, and its draft.
        """
        self.forget()
        running = self._running
        if given is not caches[0] or len(trees[0]):
            self._tree, self._roots = RowTree.of(roots, trees, device), roots
        elif not self._by_rows:
            yield
            return
        running.tree, running.given, running.caches, running.thread = self._tree, given, caches, get_ident()
        for mixer in self._mixers:
            mixer.put_in_place()
        try:
            with flushed() if device.type == "cpu" else contextlib.nullcontext():
                yield
        finally:
            running.tree, running.given, running.caches, running.thread = None, None, (), 0
            for mixer in self._mixers:
                mixer.take_out()

    def commit(self, cache: Any, path: NDArray[np.int32], text: int = 0) -> None:
        """Advance a text's states over its root tokens and the accepted nodes of the last pass."""
        tree = self._tree
        if tree is None:
            return
        roots = self._roots[text]
        taken = np.concatenate([np.arange(roots), path.astype(np.int64) + roots])
        rows, last = torch.from_numpy(taken).to(tree.above.device), int(taken[-1])
        with torch.no_grad():
            for mixer in self._mixers:
                layer, row = mixer.states_after(tree, text, rows, last)
                layer.write_to(cache.layers[mixer.mixer.layer_idx], row)
        if tree.texts == 1:
            self.forget()
