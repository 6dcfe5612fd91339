"""Row functions: what stands in for a mixer's convolution and recurrence, called as its forward calls its own.

Arguments are those of `causal_conv1d`, `mamba_ssm` and `fla`, and of what transformers has in their place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from retrieve_spec.verify.draft_paths import ScratchLayer
from retrieve_spec.verify.row_scans import (
    ConvRows,
    DeltaRows,
    SsdRows,
    convolve,
    convolved,
    scan_delta,
    scan_long,
    scan_ssd,
    unit,
)
from retrieve_spec.verify.row_tree import RowTree


class RowLayer(ScratchLayer):
    """A cache layer that shows the states in front of a pass and keeps nothing."""

    def update_conv_state(self, conv_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """See the rows alone: `convolve` knows the states."""
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """States behind rows are made when these are accepted."""
        return recurrent_states


@dataclass(slots=True)
class Running:
    """The pass that mixers take part in.

    Attributes
    ----------
    thread
        That runs it; 0 when there is none.
    tree
        The rows of its drafts; None where rows follow one another and are written to the cache itself.
    given, caches
        The cache that the model is given, and by text those that hold states.
    """

    thread: int = 0
    tree: RowTree | None = None
    given: Any = None
    caches: Sequence[Any] = ()

    def begin(self, tree: RowTree | None, given: Any, caches: Sequence[Any]) -> None:
        """Let this thread's calls of mixers be part of a pass."""
        self.tree, self.given, self.caches, self.thread = tree, given, caches, get_ident()

    def end(self) -> None:
        """Let them be the mixers' own again."""
        self.thread = 0
        self.tree, self.given, self.caches = None, None, ()


class RowFunctions:
    """The functions of one mixer, in the pass that runs.

    Parameters
    ----------
    running
        The pass.
    convolve
        The mixer's own convolution, for rows that follow one another.
    """

    def __init__(self, running: Running, convolve: Callable[..., torch.Tensor]) -> None:
        self._running, self._own_convolve = running, convolve
        self.forget()

    def forget(self) -> None:
        """Let go of what the last pass computed."""
        self.layer: Any = None  # what the mixer is shown in place of the cache's
        self._conv: ConvRows | None = None
        self._rows: SsdRows | DeltaRows | None = None

    def conv_rows(self) -> ConvRows:
        """The rows of the last pass over a draft as its convolution saw them."""
        if self._conv is None:
            raise RuntimeError("the pass did not run a mixer")
        return self._conv

    def rows(self) -> SsdRows | DeltaRows:
        """The rows of the last pass over a draft as its recurrence saw them."""
        if self._rows is None:
            raise RuntimeError("the pass did not run a recurrence")
        return self._rows

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


def _activated(x: torch.Tensor, activation: Any) -> torch.Tensor:
    """What an activation, by its name, makes of a tensor."""
    if activation is None:
        return x
    made: torch.Tensor = (ACT2FN[activation] if isinstance(activation, str) else activation)(x)
    return made


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, positive: bool) -> torch.Tensor:
    """(…, heads) time steps from what a projection made of them, rounded as single steps round them."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (functional.softplus(dt) if positive else dt).float()
