"""Mixers: the modules of a hybrid model that keep recurrent state, twins that repeat them, scratch states."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer


class ScratchLayer(LinearAttentionLayer):  # type: ignore[misc]
    """A cache layer that reads the states of another and keeps what is written to itself."""

    def __init__(self, base: Any) -> None:
        super().__init__(base.number_of_states)
        for name in ("conv_states", "recurrent_states", "is_conv_states_initialized", "conv_kernel_size",
                     "is_recurrent_states_initialized", "has_previous_state"):  # fmt: skip
            setattr(self, name, dict(getattr(base, name)))

    def rows(self, take: Any) -> None:
        """Let `take` make the rows of every state from those there are."""
        for states in (self.conv_states, self.recurrent_states):
            for i, state in states.items():
                if state is not None:
                    states[i] = take(state)

    @classmethod
    def beside(cls, bases: Sequence[Any], rows: Sequence[int]) -> ScratchLayer:
        """One whose rows are copies of the states of several layers, by their numbers."""
        layer = cls(bases[0])
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name)
            for i in [i for i, state in states.items() if state is not None]:
                states[i] = torch.cat([getattr(bases[row], name)[i] for row in rows])
        return layer

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_kwargs: Any
    ) -> torch.Tensor:
        """See the states before; keep the newest."""
        before = self.conv_states[state_idx]
        assert before is not None
        full = torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = full[..., -before.shape[-1] :]
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **_kwargs: Any
    ) -> torch.Tensor:
        """Keep the state."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def write_to(self, base: Any, row: int) -> None:
        """Make the states of one row those of a real layer."""
        for name in ("conv_states", "recurrent_states"):
            for i, state in getattr(self, name).items():
                if state is not None:
                    getattr(base, name)[i].copy_(state[row : row + 1])


class Given(nn.Module):
    """Stands in for a projection whose output is known; without one it hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None

    def forward(self, states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Return what was given, or the input."""
        return states if self.value is None else self.value


@dataclass(slots=True)
class Mixer:
    """One module that reads and writes the recurrent or convolution state of one cache layer.

    Attributes
    ----------
    module
        The innermost module that runs when the state is updated.
    layer_idx
        Its cache layer.
    projections
        Names of the linear children it calls once per pass, in order of their calls.
    inputs
        Those of them that read the mixer's own input, unchanged.
    """

    module: nn.Module
    layer_idx: int
    projections: tuple[str, ...]
    inputs: tuple[str, ...]

    def twin(self, replaced: tuple[str, ...]) -> tuple[nn.Module, dict[str, Given]]:
        """A copy of the module that shares its weights, with stand-ins for some of its projections."""
        stand_ins = {name: Given() for name in replaced}
        memo: dict[int, Any] = {}
        for name, child in self.module.named_children():
            memo[id(child)] = stand_ins.get(name, child)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            memo[id(tensor)] = tensor
        for value in vars(self.module).values():
            if not isinstance(value, (dict, nn.Module)):
                memo[id(value)] = value  # configs and functions are shared, not copied
        return copy.deepcopy(self.module, memo), stand_ins

    @property
    def tensors(self) -> tuple[int, ...]:
        """What a twin shares: changes when a weight is replaced or a child is exchanged."""
        children = [id(child) for child in self.module.children()]
        return (*children, *(id(tensor) for tensor in self.module.parameters(recurse=False)))


def find_mixers(model: Any, cache_name: str, ids: torch.Tensor) -> list[Mixer] | str:
    """Run a few tokens and see which modules update recurrent state; why they cannot be repeated, where they cannot.

    Parameters
    ----------
    ids
        (1, L) long, L at least 2.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    linear = [i for i, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not linear:
        return "no layer of its cache keeps recurrent state"
    updated: dict[int, list[nn.Module]] = {i: [] for i in linear}
    kept: dict[int, list[nn.Module]] = {i: [] for i in linear}
    with _watched(model) as (stack, called), torch.no_grad():
        for i in linear:
            layer = cache.layers[i]
            for name, seen in (("update_conv_state", updated), ("update_recurrent_state", updated), ("update", kept)):
                if hasattr(layer, name):
                    setattr(layer, name, _noting(getattr(layer, name), stack, seen[i]))
        model(input_ids=ids, use_cache=True, **{cache_name: cache})
    mixers = []
    for i in linear:
        modules = {id(module): module for module in updated[i]}
        if not modules:
            continue  # a layer whose state this model does not use
        if len(modules) > 1:
            return f"several modules share the state of layer {i}"
        module = updated[i][0]
        if any(module is other for other in kept[i]):
            return f"a {type(module).__name__} keeps recurrent state and keys together"
        mixers.append(_described(module, i, called))
    return mixers or "its recurrent state is not in its cache"


def _noting(update: Any, stack: list[nn.Module], seen: list[nn.Module]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(stack[-1])
        return update(*args, **kwargs)

    return noted


_Call = tuple[nn.Module, Any]


@contextmanager
def _watched(model: nn.Module) -> Iterator[tuple[list[nn.Module], list[_Call]]]:
    """The modules that are running, innermost last, and all calls so far with their inputs, while the block lasts."""
    stack: list[nn.Module] = []
    calls: list[_Call] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(module)
        calls.append((module, args[0] if args else kwargs.get("hidden_states")))

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(lambda *_: stack.pop() and None))
        yield stack, calls


def _described(module: nn.Module, layer_idx: int, called: list[_Call]) -> Mixer:
    own = {id(child): name for name, child in module.named_children() if _is_projection(child)}
    counts: dict[str, list[Any]] = {}
    hidden = next((states for other, states in called if other is module), None)
    for other, states in called:
        if id(other) in own:
            counts.setdefault(own[id(other)], []).append(states)
    once = [name for name, inputs in counts.items() if len(inputs) == 1 and inputs[0].ndim == 3]
    reading = [name for name in once if hidden is not None and counts[name][0].shape == hidden.shape
               and torch.equal(counts[name][0], hidden)]  # fmt: skip
    return Mixer(module, layer_idx, tuple(once), tuple(reading))


def _is_projection(child: nn.Module) -> bool:
    """Whether a module treats every row alike and alone."""
    if isinstance(child, nn.Sequential):
        return all(isinstance(part, nn.Linear) for part in child)
    return isinstance(child, nn.Linear)
