"""Recurrent state under drafts: mixers follow every path of a tree over scratch states; accepted rows alone are kept.

Inside a mixer the paths of a tree, or of the trees of several texts, become rows of a batch that start from the
committed states, which nothing writes to.
Afterwards only what depends on the state is computed again, over the accepted rows and over the real cache:
projections are known from the pass. Where a mixer's forward ignores the state when it gets several tokens, every depth
of the tree is one step of the mixer's own one-token path, from its parents' states, and nothing is computed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import Cache

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.draft_paths import Paths, ScratchLayer
from retrieve_spec.verify.interface import Recurrence, Way
from retrieve_spec.verify.mixers import Mixer, takes_anything

_CHUNK = 64
"""Rows of a chunk of a scan while it verifies, where paths are so long: no shorter one is padded."""


def _shape(part: Any) -> tuple[int, ...]:
    """Rows and places of a tensor, nothing of anything else."""
    return tuple(part.shape[:2]) if isinstance(part, torch.Tensor) else ()


class _Site:
    """One mixer under drafts: its hooks, its twin, and what the last pass computed."""

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

    def begin(self, paths: Paths, given: Any, caches: Sequence[Any]) -> None:
        """Verify a pass that is `given` a cache, from the states in those of its texts, until `paths` is None again."""
        self.paths, self.cache, self.thread = paths, given, get_ident()
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

    def _arguments(self, args: Any, kwargs: Any, states: torch.Tensor, scratch: Any) -> tuple[Any, dict[str, Any]]:
        """A call with other hidden states and another cache."""
        layers: list[Any] = [None] * self.mixer.layer_idx + [scratch]
        own = Cache(layers=layers)
        args = [own if value is self.cache else value for value in args]
        kwargs = {name: own if value is self.cache else value for name, value in kwargs.items()}
        if args:
            args[0] = states
        else:
            kwargs["hidden_states"] = states
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # nothing is padded behind the prompt
        return tuple(args), kwargs

    # -- one scan over all paths --------------------------------------------------------------------------------------

    def _before_scan(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        paths = self.running
        if paths is None:
            return None
        self.hidden = args[0] if args else kwargs["hidden_states"]
        self.call = args, kwargs
        if paths.texts == 1 < paths.paths:
            self.scratch.rows(lambda state: state.expand(paths.paths, *state.shape[1:]))
        args, kwargs = self._arguments(args, kwargs, paths.spread(self.hidden), self.scratch)
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
            return paths.gather(out)
        spread = (paths.paths, paths.longest)
        return tuple(paths.gather(part) if _shape(part) == spread else part for part in out)

    def _before_projection(self, _module: nn.Module, args: Any) -> Any:
        paths = self.running
        if paths is None or paths.index is None or args[0].shape[:2] != (paths.paths, paths.longest):
            return None
        return (paths.gather(args[0]), *args[1:])

    def _after_projection(self, name: str) -> Any:
        def after(_module: nn.Module, _args: Any, out: torch.Tensor) -> torch.Tensor | None:
            paths = self.running
            if paths is None or out.shape[:2] != (paths.texts, paths.width):
                return None
            self.known[name] = out
            return None if paths.index is None else paths.spread(out)

        return after

    def replayed(self, base: Any, rows: torch.Tensor) -> tuple[ScratchLayer, int]:
        """Run the twin over accepted rows from the states of a real layer: the states behind them, and their row."""
        for name, stand_in in self.given.items():
            out = self.known.get(name)
            if out is None:
                raise RuntimeError(f"projection {name!r} was not seen")
            stand_in.value = out.flatten(0, 1).index_select(0, rows)[None]
        layer = ScratchLayer(base)
        layer.rows(torch.clone)
        for name, value in self._settings(len(rows)).items():
            setattr(self.twin, name, value)
        args, kwargs = self._arguments(*self.call, self.hidden.flatten(0, 1).index_select(0, rows)[None], layer)
        self.twin(*args, **kwargs, **self._keywords(len(rows)))
        return layer, 0

    # -- one step of the mixer's own one-token path per depth ---------------------------------------------------------

    def _before_steps(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.running is None:
            return None
        self.hidden = args[0] if args else kwargs["hidden_states"]
        self.call = args, kwargs
        self.scratch.rows(torch.clone)
        self.levels = [self.scratch]
        for name, value in self._settings(1).items():
            setattr(self.twin, name, value)
        return self._arguments(args, kwargs, self.hidden[:, :1], self.scratch)

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
            own, keywords = self._arguments(*self.call, hidden, layer)
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
        self.paths = None
        self.call = self.hidden = self.scratch = self.cache = self.out = None  # type: ignore[assignment]
        self.levels = []
        self.known.clear()
        for stand_in in self.given.values():
            stand_in.value = None


class RecurrentState:
    """The recurrent layers of caches under drafts, for the passes of one text, or of several at once.

    Parameters
    ----------
    recurrence
        The modules that keep state, and how they verify.
    """

    def __init__(self, recurrence: Recurrence) -> None:
        self._way = recurrence.way
        self._sites = [_Site(mixer, self._way) for mixer in recurrence.mixers]
        self._paths: Paths | None = None
        self._sizes: list[tuple[int, int]] = []  # by text, root tokens and nodes
        self._kept: dict[int, list[tuple[ScratchLayer, int]]] = {}  # by text and site, what a commit writes
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Put hooks on the mixers; they do nothing but inside `verifying`."""
        self.detach()
        self._sites = [
            site if site.tensors == site.mixer.tensors else _Site(site.mixer, self._way) for site in self._sites
        ]
        for site in self._sites:
            self._handles.extend(site.hooks())  # one by one: an interruption leaves none that `detach` does not know

    def detach(self) -> None:
        """Take the hooks off and forget the last pass."""
        self._unhook()
        self.forget()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Have hooks on the mixers inside of the block alone; the last pass is remembered."""
        self.attach()
        try:
            yield
        finally:
            self._unhook()

    @contextlib.contextmanager
    def verifying(
        self, given: Any, caches: Sequence[Any], roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device
    ) -> Iterator[None]:
        """Let the pass inside verify drafts; states stay as they are.

        Parameters
        ----------
        given
            The cache that the model is given.
        caches, roots, trees
            By text of the pass, the cache that holds its states, its root tokens, and its draft.
        """
        self._paths, self._kept = Paths.of(roots, trees, device), {}
        self._sizes = [(count, len(tree)) for count, tree in zip(roots, trees, strict=True)]
        for site in self._sites:
            site.begin(self._paths, given, caches)
        try:
            yield
        finally:
            for site in self._sites:
                site.paths = None

    def commit(self, cache: Any, path: NDArray[np.int32], text: int = 0) -> None:
        """Advance a text's states over its root tokens and the accepted nodes of the last pass."""
        paths = self._paths
        if paths is None:
            return
        if text not in self._kept:
            self._kept[text] = self._behind(cache, paths, paths.accepted(text, *self._sizes[text], path))
        for site, (states, row) in zip(self._sites, self._kept[text], strict=True):
            states.write_to(cache.layers[site.mixer.layer_idx], row)
        if paths.texts == 1:
            self.forget()

    def _behind(self, cache: Any, paths: Paths, rows: NDArray[np.int64]) -> list[tuple[ScratchLayer, int]]:
        """By site, the states behind accepted rows; the cache's are as they were, so this may be done again."""
        last = int(rows[-1])
        if self._way == "steps" or last in paths.ends:
            return [site.states_behind(paths, last) for site in self._sites]
        with torch.no_grad():
            index = torch.from_numpy(rows)
            bases = [cache.layers[site.mixer.layer_idx] for site in self._sites]
            return [
                site.replayed(base, index.to(site.hidden.device)) for site, base in zip(self._sites, bases, strict=True)
            ]

    def forget(self) -> None:
        """Let go of what the last pass computed."""
        self._paths, self._kept = None, {}
        for site in self._sites:
            site.end()
