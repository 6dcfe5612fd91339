"""Mixers: the modules of a hybrid model that keep recurrent state, and drafts that they verify step by step.

Where several tokens at once would ignore the cached state, every depth of a tree is one step of a mixer's one-token
path, from its parents' states (`SteppedMixer`). Other mixers: `retrieve_spec.verify.recurrent`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from retrieve_spec.verify.row_scans import RowTree


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
    def of_texts(cls, bases: Sequence[Any], rows: Sequence[int]) -> ScratchLayer:
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
    inputs
        Names of the linear children that it calls once per pass, with its own input.
    output
        Name of the one that it calls last, once per pass, with something else; empty where there is none.
    """

    module: nn.Module
    layer_idx: int
    inputs: tuple[str, ...]
    output: str

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
        made = copy.deepcopy(self.module, memo)
        vars(made).pop("forward", None)  # an instance's own forward belongs to the original
        return made, stand_ins


def find_mixers(model: Any, cache_name: str, ids: torch.Tensor) -> list[Mixer] | str:
    """Run a few tokens and see which modules update recurrent state; why they cannot be repeated, where they cannot.

    Parameters
    ----------
    ids
        (1, L) long, L at least 2.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    linear = [i for i, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]
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
            continue  # this model does not use the layer's state
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
    reading = [name for name in once[:-1] if hidden is not None and torch.equal(counts[name][0], hidden)]
    return Mixer(module, layer_idx, tuple(reading), once[-1] if once else "")


def _is_projection(child: nn.Module) -> bool:
    """Whether a module treats each row alike and independently."""
    if isinstance(child, nn.Sequential):
        return all(isinstance(part, nn.Linear) for part in child)
    return isinstance(child, nn.Linear)


_LEAST, _HALF = 2.3e-308, 0.5
"""The product of both is denormal."""


def are_flushed() -> bool:
    """Whether this thread treats denormal numbers as zero."""
    return _LEAST * _HALF == 0.0


@contextmanager
def flushed() -> Iterator[None]:
    """Treat denormal numbers as zero on this thread inside the block; torch's other threads are unchanged."""
    before = are_flushed()
    try:
        if not before:
            torch.set_flush_denormal(True)
        yield
    finally:
        if not before:
            torch.set_flush_denormal(False)


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


class VerifyingMixer:
    """One mixer whose forward is ours while a pass runs, in the thread that runs it.

    Parameters
    ----------
    mixer
        The mixer.
    running
        The pass, which all mixers of a model share.
    """

    def __init__(self, mixer: Mixer, running: Running) -> None:
        self.mixer, self.module, self._running = mixer, mixer.module, running
        self._own: Any = None  # a forward of the module itself, such as `accelerate` gives it
        self.forget()

    def forget(self) -> None:
        """Release what the last pass computed."""
        raise NotImplementedError

    def states_after(self, tree: RowTree, text: int, rows: torch.Tensor, last: int) -> tuple[ScratchLayer, int]:
        """Return the cache layer with a text's states after consecutive rows up to `last`, and the row they are in."""
        raise NotImplementedError

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the mixer's forward in a pass."""
        raise NotImplementedError

    def put_in_place(self) -> None:
        """Replace the module's forward."""
        self._own = vars(self.module).get("forward")
        vars(self.module)["forward"] = self.forward

    def take_out(self) -> None:
        """Restore the module's forward."""
        vars(self.module).pop("forward", None)
        if self._own is not None:
            vars(self.module)["forward"] = self._own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer's own forward, or ours where this thread runs a pass."""
        if self._running.thread == get_ident():
            return self.run(args, kwargs)
        own = self._own if self._own is not None else type(self.module).forward.__get__(self.module)
        return own(*args, **kwargs)

    def call_over(
        self, layer: ScratchLayer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call over another cache layer; there is no padding after the prompt."""
        own = Cache(layers=[None] * self.mixer.layer_idx + [layer])
        given = [own if value is self._running.given else value for value in args]
        named = {name: own if value is self._running.given else value for name, value in kwargs.items()}
        if named.get("attention_mask") is not None:
            named["attention_mask"] = None
        return given, named


class SteppedMixer(VerifyingMixer):
    """One mixer while the draft of a lone text is verified step by step.

    Its projections are called once, with all rows of the pass; a twin of it steps from depth to depth.
    """

    def __init__(self, mixer: Mixer, running: Running) -> None:
        super().__init__(mixer, running)
        self._twin, self._given = mixer.twin((*mixer.inputs, *filter(None, [mixer.output])))

    def forget(self) -> None:
        """Release what the last pass computed."""
        self._levels: list[ScratchLayer] = []

    def states_after(self, tree: RowTree, text: int, rows: torch.Tensor, last: int) -> tuple[ScratchLayer, int]:
        """Return the cache layer of the last row's depth, and the row's index there."""
        depth = len(rows) - 1
        return self._levels[depth], tree.levels[depth].places[last]

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step from depth to depth."""
        tree = self._running.tree
        assert tree is not None
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        known = {name: self.module.get_submodule(name)(hidden)[0] for name in self.mixer.inputs}
        layer, parts = ScratchLayer(self._running.caches[0].layers[self.mixer.layer_idx]), []
        for level in tree.levels:
            layer = ScratchLayer(layer)
            layer.rows(lambda state, above=level.above: state.index_select(0, above))
            self._levels.append(layer)
            for name, projected in known.items():
                self._given[name].value = projected.index_select(0, level.rows)[:, None]
            states = hidden[0].index_select(0, level.rows)[:, None]
            given, named = self.call_over(layer, (states, *others), kwargs)
            told = self._twin(*given, **named)
            parts.append((told[0] if isinstance(told, tuple) else told)[:, 0])
        for stand_in in self._given.values():
            stand_in.value = None
        out = parts[0].new_empty((1, tree.width, parts[0].shape[-1]))
        for level, part in zip(tree.levels, parts, strict=True):
            out[0].index_copy_(0, level.rows, part)
        if self.mixer.output:
            out = self.module.get_submodule(self.mixer.output)(out)
        return (out, *told[1:]) if isinstance(told, tuple) else out
