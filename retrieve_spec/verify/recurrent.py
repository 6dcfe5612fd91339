"""Recurrent state under drafts: layers of caches that stay as they are until a draft is accepted.

Where all functions that a mixer calls are known, every row of a tree goes on from its parent's row, and the state
behind the accepted ones is made for them (`RowState`). Where several tokens at once would ignore the cached state,
every depth of a tree is one step of the mixer's one-token path, from its parents' states (`SteppedState`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import Cache

from retrieve_spec.attention import row_depths
from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.interface import Recurrence
from retrieve_spec.verify.mixers import Mixer, ScratchLayer
from retrieve_spec.verify.row_mixer import LaggingState, RowMixer, Running
from retrieve_spec.verify.row_scans import RowTree

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


class RowState:
    """The recurrent layers of caches under drafts, every row of a tree computed once.

    Passes without a draft go by the same functions: the model's own cache is written by its own forward then.

    Parameters
    ----------
    recurrence
        The modules that keep state.
    """

    def __init__(self, recurrence: Recurrence) -> None:
        self._running = Running()
        self._mixers = [RowMixer(mixer, self._running) for mixer in recurrence.mixers]
        self._tree: RowTree | None = None  # of the last pass, until it is committed
        self._roots: Sequence[int] = ()  # by text
        self._behind: list[LaggingState | None] = []  # by mixer, of a lone text

    def apart(self) -> RowState:
        """The same modules for another text, between whose passes and those of this one there is no third."""
        other = copy.copy(self)
        other._behind = []
        return other

    def attach(self) -> None:
        """Make ready for a text."""
        self.detach()
        self._mixers = [
            own if own.tensors == own.mixer.tensors else RowMixer(own.mixer, self._running) for own in self._mixers
        ]

    def detach(self) -> None:
        """Forget the last pass, and the text."""
        self.forget()
        self._behind = []

    @contextlib.contextmanager
    def _in_place(
        self, device: torch.device, tree: RowTree | None, given: Any, caches: Sequence[Any]
    ) -> Iterator[None]:
        try:
            self._running.begin(tree, given, caches)
            for mixer, behind in zip_longest(self._mixers, self._behind):
                mixer.take(behind)
            with flushed() if device.type == "cpu" else contextlib.nullcontext():
                yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._running.end()
        for mixer in self._mixers:
            mixer.leave()

    def verifying(
        self, given: Any, caches: Sequence[Any], roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device
    ) -> contextlib.AbstractContextManager[None]:
        """Let the pass inside verify drafts, empty ones too; states stay as they are until they are committed.

        A lone text without a draft is read in place.

        Parameters
        ----------
        given
            The cache that the model is given.
        caches, roots, trees
            By text of the pass, the cache that holds its states, its root tokens, and its draft.
        """
        self.forget()
        if given is caches[0] and not len(trees[0]):
            return self._in_place(device, None, given, caches)
        self._tree = RowTree.of(roots, trees, device)
        self._roots = roots
        return self._in_place(device, self._tree, given, caches)

    def commit(self, cache: Any, path: NDArray[np.int32], text: int = 0) -> None:
        """Advance a text's states over its root tokens and the accepted nodes of the last pass."""
        tree = self._tree
        if tree is None:
            return
        roots = self._roots[text]
        rows = torch.from_numpy(np.concatenate([np.arange(roots), path.astype(np.int64) + roots]))
        rows = rows.to(tree.above.device)
        with torch.no_grad():
            if tree.texts == 1:
                self._behind = [
                    mixer.commit(tree, rows, cache, behind.state if behind is not None else None)
                    for mixer, behind in zip_longest(self._mixers, self._behind)
                ]
                self.forget()
                return
            for mixer in self._mixers:
                mixer.states_behind(tree, text, rows).write_to(cache.layers[mixer.mixer.layer_idx], 0)

    def settle(self, cache: Any) -> None:
        """Bring the states in a cache up to the text."""
        with torch.no_grad():
            for mixer, behind in zip(self._mixers, self._behind, strict=False):  # none where none is
                if behind is not None:
                    behind.settle(cache.layers[mixer.mixer.layer_idx])
        self._behind = []

    def forget(self) -> None:
        """Let go of what the last pass computed."""
        if self._tree is not None:
            self._tree = None
            for mixer in self._mixers:
                mixer.forget()


class SteppedState:
    """The recurrent layers of a text's cache under drafts, step by step; passes without a draft are the model's own.

    Parameters
    ----------
    recurrence
        The modules that keep state.
    """

    def __init__(self, recurrence: Recurrence) -> None:
        self._adapters = [MixerAdapter(mixer) for mixer in recurrence.mixers]
        self._rows: NDArray[np.int64] | None = None  # of the last pass over a draft, where each stands in its depth
        self._depths: NDArray[np.int64] = np.zeros(0, np.int64)
        self._roots = 0

    def apart(self) -> SteppedState:
        """The same modules for another text, between whose passes and those of this one there is no third."""
        return copy.copy(self)

    def attach(self) -> None:
        """Make ready for a text."""
        self.detach()
        self._adapters = [
            own if own.tensors == own.mixer.tensors else MixerAdapter(own.mixer) for own in self._adapters
        ]

    def detach(self) -> None:
        """Forget the last pass."""
        self._rows = None
        for adapter in self._adapters:
            adapter.forget()

    @contextmanager
    def verifying(
        self, given: Any, caches: Sequence[Any], roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device
    ) -> Iterator[None]:
        """Let the pass inside verify the draft of a lone text (`RowState.verifying`)."""
        self.detach()
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
            self.detach()

    def settle(self, cache: Any) -> None:
        """Nothing to bring up to the text."""


class MixerAdapter:
    """One mixer while a draft is verified step by step: its hooks, its twin, and the states at every depth.

    Its projections are called once, with all rows of the pass.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer, self.tensors = mixer, mixer.tensors
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
        yield module.register_forward_pre_hook(self._before, with_kwargs=True)
        yield module.register_forward_hook(self._after)
        for name in {*self.mixer.inputs, *last}:
            child = module.get_submodule(name)
            if name in last:
                yield child.register_forward_pre_hook(self._before_output)
                yield child.register_forward_hook(self._after_output)
            else:
                yield child.register_forward_pre_hook(self._before_input)
                yield child.register_forward_hook(self._after_input(name))

    @property
    def _runs(self) -> bool:
        return self._thread == get_ident()

    def _call(self, states: torch.Tensor, layer: ScratchLayer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The mixer's call with other hidden states and another cache."""
        own = Cache(layers=[None] * self.mixer.layer_idx + [layer])
        args = [own if value is self._cache else value for value in self._args]
        kwargs = {name: own if value is self._cache else value for name, value in self._kwargs.items()}
        if args:
            args[0] = states
        else:
            kwargs["hidden_states"] = states
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # nothing is padded behind the prompt
        return tuple(args), kwargs

    def _before(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._runs:
            return None
        self._args, self._kwargs = args, kwargs
        self._hidden = args[0] if args else kwargs["hidden_states"]
        layer = ScratchLayer(self._cache.layers[self.mixer.layer_idx])
        layer.rows(torch.clone)
        self.levels = [layer]
        return self._call(self._hidden[:, :1], layer)

    def _after(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        if not self._runs:
            return None
        return (self._out, *out[1:]) if isinstance(out, tuple) else self._out

    def _before_input(self, _module: nn.Module, args: Any) -> Any:
        return (self._hidden, *args[1:]) if self._runs else None

    def _after_input(self, name: str) -> Any:
        def after(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor | None:
            if not self._runs:
                return None
            self._known[name] = out
            return out[:, :1]

        return after

    def _before_output(self, _module: nn.Module, args: Any) -> Any:
        if not self._runs:
            return None
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

    def _after_output(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor | None:
        if not self._runs:
            return None
        self._out = out
        return out[:, :1]


def state_of(recurrence: Recurrence | None) -> RowState | SteppedState | None:
    """The recurrent layers of a model under drafts, None where it has none."""
    if recurrence is None:
        return None
    return RowState(recurrence) if recurrence.way == "rows" else SteppedState(recurrence)
