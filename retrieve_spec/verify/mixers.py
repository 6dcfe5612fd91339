"""Mixers: the modules of a hybrid model that keep recurrent state, and drafts that they verify step by step.

Where several tokens at once would ignore the cached state, every depth of a tree is one step of a mixer's one-token
path, from its parents' states (`SteppedState`). Other mixers: `retrieve_spec.verify.recurrent`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from retrieve_spec.attention import row_depths
from retrieve_spec.drafting.tree import DraftTree


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


_LEAST, _HALF = 2.3e-308, 0.5
"""The product of both is denormal."""


def are_flushed() -> bool:
    """Whether this thread takes denormal numbers for zero."""
    return _LEAST * _HALF == 0.0


@contextmanager
def flushed() -> Iterator[None]:
    """Take denormal numbers for zero on this thread inside of the block; torch's other threads go on as they were."""
    before = are_flushed()
    try:
        if not before:
            torch.set_flush_denormal(True)
        yield
    finally:
        if not before:
            torch.set_flush_denormal(False)


class SteppedState:
    """The recurrent layers of a text's cache under drafts, step by step; passes without a draft are the model's own.

    Parameters
    ----------
    mixers
        The modules that keep state.
    """

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self._adapters = [MixerAdapter(mixer) for mixer in mixers]
        self._rows: NDArray[np.int64] | None = None  # of the last pass over a draft, where each stands in its depth
        self._depths: NDArray[np.int64] = np.zeros(0, np.int64)
        self._roots = 0

    def apart(self) -> SteppedState:
        """The same modules for another text, between whose passes and those of this one there is no third."""
        return copy.copy(self)

    def forget(self) -> None:
        """Forget the last pass."""
        self._rows = None
        for adapter in self._adapters:
            adapter.forget()

    @contextmanager
    def verifying(
        self, given: Any, caches: Sequence[Any], roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device
    ) -> Iterator[None]:
        """Let the pass inside verify the draft of a lone text (`RowState.verifying`)."""
        self.forget()
        (tree,), (self._roots,) = trees, roots
        if not len(tree):
            yield
            return
        above = np.where(tree.parent < 0, self._roots - 1, tree.parent + self._roots)
        above = np.concatenate([np.arange(-1, self._roots - 1), above])
        self._depths = row_depths(self._roots, tree)
        self._rows = np.zeros(len(above), np.int64)
        levels = []
        for depth in range(int(self._depths.max()) + 1):
            rows = np.flatnonzero(self._depths == depth)
            self._rows[rows] = np.arange(len(rows))
            levels.append(tuple(torch.from_numpy(part).to(device) for part in (rows, self._rows[above[rows]])))
        with contextlib.ExitStack() as hooks, flushed() if device.type == "cpu" else contextlib.nullcontext():
            for adapter in self._adapters:
                adapter.begin(levels, given)
                for hook in adapter.hooks():
                    hooks.enter_context(hook)
            yield

    def commit(self, cache: Any, path: NDArray[np.int32], text: int = 0) -> None:
        """Advance the states over the root tokens and the accepted nodes of the last pass."""
        if self._rows is not None:
            last = int(path[-1]) + self._roots if len(path) else self._roots - 1
            for adapter in self._adapters:
                layer = adapter.levels[int(self._depths[last])]
                layer.write_to(cache.layers[adapter.mixer.layer_idx], int(self._rows[last]))
            self.forget()


class MixerAdapter:
    """One mixer while a draft is verified step by step: its hooks, its twin, and the states at every depth.

    Its projections are called once, with all rows of the pass.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self.twin, self._given = mixer.twin((*mixer.inputs, *mixer.projections[-1:]))
        self._levels: Sequence[tuple[torch.Tensor, ...]] = ()
        self._cache: Any = None
        self.forget()

    def begin(self, levels: Sequence[tuple[torch.Tensor, ...]], cache: Any) -> None:
        """Verify a pass of this thread that is given a cache; by depth, its rows and where their parents stand."""
        self._levels, self._cache, self._thread = levels, cache, get_ident()

    def forget(self) -> None:
        """Let go of what the last pass computed."""
        self.levels: list[ScratchLayer] = []
        self._levels = ()
        self._cache = None
        self._hidden = self._out = torch.empty(0)
        self._known: dict[str, torch.Tensor] = {}
        self._thread = 0
        for stand_in in self._given.values():
            stand_in.value = None

    def hooks(self) -> Iterator[Any]:
        """Register on the mixer and its projections; hooks do nothing in other threads."""
        module, last = self.mixer.module, self.mixer.projections[-1:]
        yield module.register_forward_pre_hook(self._here(self._before), with_kwargs=True)
        yield module.register_forward_hook(self._here(self._after))
        for name in {*self.mixer.inputs, *last}:
            child = module.get_submodule(name)
            if name in last:
                yield child.register_forward_pre_hook(self._here(self._before_output))
                yield child.register_forward_hook(self._here(self._after_output))
            else:
                yield child.register_forward_pre_hook(self._here(lambda _module, args: (self._hidden, *args[1:])))
                yield child.register_forward_hook(self._here(self._after_input(name)))

    def _here(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that acts in the thread that runs the pass."""
        return lambda *given: hook(*given) if self._thread == get_ident() else None

    def _call(self, states: torch.Tensor, layer: ScratchLayer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The mixer's call with other hidden states and another cache."""
        own = Cache(layers=[None] * self.mixer.layer_idx + [layer])
        args = [own if value is self._cache else value for value in self._args]
        kwargs = {name: own if value is self._cache else value for name, value in self._kwargs.items()}
        if args:
            args[0] = states
        else:
            kwargs["hidden_states"] = states
        return tuple(args), kwargs

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._args, self._kwargs = args, kwargs
        self._hidden = args[0] if args else kwargs["hidden_states"]
        layer = ScratchLayer(self._cache.layers[self.mixer.layer_idx])
        layer.rows(torch.clone)
        self.levels = [layer]
        return self._call(self._hidden[:, :1], layer)

    def _after(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        return (self._out, *out[1:]) if isinstance(out, tuple) else self._out

    def _after_input(self, name: str) -> Callable[..., torch.Tensor]:
        def after(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
            self._known[name] = out
            return out[:, :1]

        return after

    def _before_output(self, _module: nn.Module, args: Any) -> Any:
        hidden = self._hidden
        states = args[0].new_empty((1, hidden.shape[1], args[0].shape[-1]))
        states[:, :1] = args[0]
        for rows, above in self._levels[1:]:
            layer = ScratchLayer(self.levels[-1])
            layer.rows(lambda state, above=above: state.index_select(0, above))
            for name in self.mixer.inputs:
                self._given[name].value = self._known[name][0].index_select(0, rows)[:, None]
            own, keywords = self._call(hidden[0].index_select(0, rows)[:, None], layer)
            out = self.twin(*own, **keywords)
            states[0].index_copy_(0, rows, (out[0] if isinstance(out, tuple) else out)[:, 0])
            self.levels.append(layer)
        return (states, *args[1:])

    def _after_output(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor:
        self._out = out
        return out[:, :1]
