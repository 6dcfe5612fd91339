"""Mixer site: one mixer while drafts are verified: its hooks, its twin, and what the last pass computed of each row.

Inside a mixer the paths of a tree, or of the trees of several texts, become rows of a batch that start from the
committed states, which nothing writes to. Rows that were accepted before, and which these states do not hold yet, go in
front of every path; what the projections made of them is known.
Where a mixer's forward ignores the state when it gets several tokens, every depth of the tree is one step of the
mixer's own one-token path, from its parents' states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache

from retrieve_spec.verify.draft_paths import Paths, ScratchLayer
from retrieve_spec.verify.interface import Way
from retrieve_spec.verify.mixers import Mixer, takes_anything

_CHUNK = 64
"""Rows of a chunk of a scan while it verifies, where paths are so long: no shorter one is padded."""


def _shape(part: Any) -> tuple[int, ...]:
    """Rows and places of a tensor, nothing of anything else."""
    return tuple(part.shape[:2]) if isinstance(part, torch.Tensor) else ()


@dataclass(frozen=True, slots=True)
class _Call:
    """What a mixer was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: Any
    layer_idx: int

    def over(self, states: torch.Tensor, scratch: ScratchLayer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with other hidden states and another cache."""
        layers: list[Any] = [None] * self.layer_idx + [scratch]
        own = Cache(layers=layers)
        args = [own if value is self.cache else value for value in self.args]
        kwargs = {name: own if value is self.cache else value for name, value in self.kwargs.items()}
        if args:
            args[0] = states
        else:
            kwargs["hidden_states"] = states
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # nothing is padded behind the prompt
        return tuple(args), kwargs


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Rows of a pass at one mixer, from which the states behind them can be computed.

    Attributes
    ----------
    hidden
        (1, rows, d) what the mixer was given.
    projected
        (1, rows, d') by projection, what it made of them.
    call
        How the mixer was called.
    """

    hidden: torch.Tensor
    projected: dict[str, torch.Tensor]
    call: _Call


class MixerSite:
    """One mixer under drafts: its hooks, its twin, and what the last pass computed.

    Parameters
    ----------
    mixer, way
        The mixer, and how it verifies.
    """

    def __init__(self, mixer: Mixer, way: Way) -> None:
        self.mixer, self.way = mixer, way
        replaced = mixer.projections if way == "scan" else (*mixer.inputs, *mixer.projections[-1:])
        self.twin, self.given = mixer.twin(replaced)
        self.tensors = mixer.tensors
        self.projections = {name: mixer.module.get_submodule(name) for name in mixer.projections}
        self.known: dict[str, torch.Tensor] = {}
        self.paths: Paths | None = None  # of the pass that runs, None in between
        self.thread = 0
        module = mixer.module
        self._clamps, self._chunks = hasattr(module, "time_step_limit"), hasattr(module, "chunk_size")
        self._takes_chunk = not self._chunks and takes_anything(module)

    def hooks(self) -> Iterator[Any]:
        """Register on the mixer and its projections; they do nothing outside of passes over drafts."""
        module, last = self.mixer.module, self.mixer.projections[-1:]
        scans = self.way == "scan"
        yield module.register_forward_pre_hook(self._before_scan if scans else self._before_steps, with_kwargs=True)
        yield module.register_forward_hook(self._after_scan if scans else self._after_steps, always_call=True)
        for name, child in self.projections.items():
            if scans:
                hooks: Any = self._before_projection, self._after_projection(name)
            elif name in last:
                hooks = self._before_output, self._after_output
            elif name in self.mixer.inputs:
                hooks = self._before_input, self._after_input(name)
            else:
                continue
            yield child.register_forward_pre_hook(hooks[0])
            yield child.register_forward_hook(hooks[1])

    @property
    def running(self) -> Paths | None:
        """The paths of the pass that this thread runs."""
        return self.paths if self.thread == get_ident() else None

    def begin(self, paths: Paths, given: Any, caches: Sequence[Any], carried: KnownRows | None) -> None:
        """Verify a pass that is `given` a cache, from the states in those of its texts, until `paths` is None again.

        `carried` are the rows in front of the pass that the states do not hold yet.
        """
        self.paths, self.cache, self.carried, self.thread = paths, given, carried, get_ident()
        layers = [cache.layers[self.mixer.layer_idx] for cache in caches]
        if len(layers) > 1:
            self.scratch = ScratchLayer.beside(layers, paths.text.tolist())
        else:
            self.scratch = ScratchLayer(layers[0])
        self.known.clear()

    def _settings(self, rows: int) -> dict[str, Any]:
        """Attributes of a mixer that scans so many rows: single steps do not clamp, and a chunk is not padded."""
        settings: dict[str, Any] = {"time_step_limit": (0.0, float("inf"))} if self._clamps else {}
        return {**settings, "chunk_size": min(rows, _CHUNK)} if self._chunks else settings

    def _keywords(self, rows: int) -> dict[str, Any]:
        """Keyword arguments of a call over so many rows."""
        return {"chunk_size": min(rows, _CHUNK)} if self._takes_chunk and rows > 1 else {}

    def _note_call(self, args: Any, kwargs: Any) -> None:
        """Take down what the mixer is called with."""
        self.hidden = args[0] if args else kwargs["hidden_states"]
        self.call = _Call(args, kwargs, self.cache, self.mixer.layer_idx)

    # -- one scan over all paths --------------------------------------------------------------------------------------

    def _before_scan(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        paths = self.running
        if paths is None:
            return None
        self._note_call(args, kwargs)
        if self.carried is not None:
            self.hidden = torch.cat([self.carried.hidden, self.hidden], 1)
        if paths.texts == 1 < paths.paths:
            self.scratch.rows(lambda state: state.expand(paths.paths, *state.shape[1:]))
        args, kwargs = self.call.over(paths.spread(self.hidden), self.scratch)
        settings = self._settings(paths.longest)
        self._settings_before = {name: getattr(module, name) for name in settings}
        for name, value in settings.items():
            setattr(module, name, value)
        return args, {**kwargs, **self._keywords(paths.longest)}

    def _after_scan(self, module: nn.Module, _args: Any, out: Any) -> Any:
        paths = self.running
        if paths is None:
            return None
        for name, value in self._settings_before.items():
            setattr(module, name, value)
        if out is None:  # the pass raised
            return None
        if not isinstance(out, tuple):
            return paths.fed(out)
        spread = (paths.paths, paths.longest)
        return tuple(paths.fed(part) if _shape(part) == spread else part for part in out)

    def _before_projection(self, _module: nn.Module, args: Any) -> Any:
        paths = self.running
        if paths is None or (paths.index is None and not paths.carried):
            return None
        if args[0].shape[:2] != (paths.paths, paths.longest):
            return None
        return (paths.fed(args[0]), *args[1:])

    def _after_projection(self, name: str) -> Any:
        def after(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor | None:
            paths = self.running
            if paths is None or out.shape[:2] != (paths.texts, paths.width - paths.carried):
                return None
            if self.carried is not None:
                out = torch.cat([self.carried.projected[name], out], 1)
            self.known[name] = out
            return paths.spread(out)

        return after

    def rows(self, index: torch.Tensor | slice) -> KnownRows:
        """Some rows of the last pass, by their numbers, of all texts one behind the other."""
        for name in self.projections:
            if name not in self.known:
                raise RuntimeError(f"projection {name!r} was not seen")
        projected = {name: out.flatten(0, 1)[index][None] for name, out in self.known.items()}
        return KnownRows(self.hidden.flatten(0, 1)[index][None], projected, self.call)

    def replayed(self, base: Any, rows: KnownRows) -> tuple[ScratchLayer, int]:
        """Run the twin over rows from the states of a real layer: the states behind them, and their row."""
        count = rows.hidden.shape[1]
        for name, stand_in in self.given.items():
            stand_in.value = rows.projected[name]
        layer = ScratchLayer(base)
        layer.rows(torch.clone)
        for name, value in self._settings(count).items():
            setattr(self.twin, name, value)
        args, kwargs = rows.call.over(rows.hidden, layer)
        self.twin(*args, **kwargs, **self._keywords(count))
        return layer, 0

    # -- one step of the mixer's own one-token path per depth ---------------------------------------------------------

    def _before_steps(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.running is None:
            return None
        self._note_call(args, kwargs)
        self.scratch.rows(torch.clone)
        self.levels = [self.scratch]
        for name, value in self._settings(1).items():
            setattr(self.twin, name, value)
        return self.call.over(self.hidden[:, :1], self.scratch)

    def _after_steps(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        if self.running is None or out is None:
            return None
        return (self.out, *out[1:]) if isinstance(out, tuple) else self.out

    def _before_input(self, _module: nn.Module, args: Any) -> Any:
        return None if self.running is None else (self.hidden, *args[1:])

    def _after_input(self, name: str) -> Any:
        def after(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor | None:
            if self.running is None:
                return None
            self.known[name] = out
            return out[:, :1]

        return after

    def _before_output(self, _module: nn.Module, args: Any) -> Any:
        paths = self.running
        if paths is None:
            return None
        states = args[0].new_empty((1, paths.width, args[0].shape[-1]))
        states[:, :1] = args[0]
        for rows, above in paths.levels(states.device)[1:]:
            layer = ScratchLayer(self.levels[-1])
            layer.rows(lambda state, above=above: state.index_select(0, above))
            for name in self.mixer.inputs:
                self.given[name].value = self.known[name][0].index_select(0, rows)[:, None]
            hidden = self.hidden[0].index_select(0, rows)[:, None]
            own, keywords = self.call.over(hidden, layer)
            out = self.twin(*own, **keywords)
            states[0].index_copy_(0, rows, (out[0] if isinstance(out, tuple) else out)[:, 0])
            self.levels.append(layer)
        return (states, *args[1:])

    def _after_output(self, _module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor | None:
        if self.running is None:
            return None
        self.out = out
        return out[:, :1]

    def states_behind(self, paths: Paths, last: int) -> tuple[ScratchLayer, int]:
        """The states behind an accepted row that the pass left, and their row."""
        if self.way == "scan":
            return self.scratch, paths.ends[last]
        depth = int(paths.depth[last])
        return self.levels[depth], int((np.flatnonzero(paths.depth == depth) == last).argmax())

    def end(self) -> None:
        """Let go of what the last pass computed."""
        self.paths = self.carried = None
        self.call = self.hidden = self.scratch = self.cache = self.out = None  # type: ignore[assignment]
        self.levels = []
        self.known.clear()
        for stand_in in self.given.values():
            stand_in.value = None
