"""Recurrent state under drafts: mixers follow every path of a tree over scratch states; accepted rows alone are kept.

Where everything up to the end of a longest path was accepted, the states that the pass left there are the text's. Else
states stay behind: the accepted rows, whose projections are known, go through the mixers once more in front of the next
pass. When these become too many, or the cache goes to somebody else, twins of the mixers bring the states up to them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.denormals import flushed
from retrieve_spec.verify.draft_paths import Paths, ScratchLayer
from retrieve_spec.verify.interface import Recurrence
from retrieve_spec.verify.mixer_site import KnownRows, MixerSite
from retrieve_spec.verify.row_state import RowState

_CARRIED = 32
"""Rows at most by which the states of a text are behind it."""
_RESTS = 4
"""Passes in a row without a draft after which mixers lose their hooks: even idle ones take time in every call."""


@dataclass(slots=True)
class _Behind:
    """Accepted rows that the states in a cache do not hold yet, by site, and the states behind them once computed."""

    count: int
    rows: list[KnownRows]
    states: list[tuple[ScratchLayer, int]] | None = None


class RecurrentState:
    """The recurrent layers of caches under drafts, for the passes of one text, or of several at once.

    Parameters
    ----------
    recurrence
        The modules that keep state, and how they verify.
    """

    def __init__(self, recurrence: Recurrence) -> None:
        self._way = recurrence.way
        self._sites = [MixerSite(mixer, self._way) for mixer in recurrence.mixers]
        self._paths: Paths | None = None
        self._sizes: list[tuple[int, int]] = []  # by text, root tokens and nodes
        self._kept: dict[int, list[tuple[ScratchLayer, int]]] = {}  # by text and site, what a commit writes
        self._handles: list[Any] = []  # one list for all that are `apart`
        self._hooked, self._rested = False, 0
        self._behind: _Behind | None = None

    def apart(self) -> RecurrentState:
        """The same modules for another text, between whose passes and those of this one there is no third."""
        other = copy.copy(self)
        other._behind = None
        return other

    def attach(self) -> None:
        """Make ready for a text; mixers get hooks when a draft is first verified."""
        self.detach()
        self._sites = [
            site if site.tensors == site.mixer.tensors else MixerSite(site.mixer, self._way) for site in self._sites
        ]

    def detach(self) -> None:
        """Take the hooks off and forget the last pass, and the text."""
        self._unhook()
        self.forget()
        self._behind = None

    def _hook(self) -> None:
        """Put hooks on the mixers; they do nothing but inside `verifying`."""
        self._rested = 0
        if not self._hooked:
            self._unhook()  # what an interruption left
            for site in self._sites:
                self._handles.extend(site.hooks())  # one by one: an interruption leaves none that is not known
            self._hooked = True

    def _unhook(self) -> None:
        self._hooked = False
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    @contextlib.contextmanager
    def verifying(
        self, given: Any, caches: Sequence[Any], roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device
    ) -> Iterator[None]:
        """Let the pass inside verify drafts, empty ones too; states stay as they are.

        A pass over a lone text without a draft goes by: the model's own cache is written, unless states are behind it.

        Parameters
        ----------
        given
            The cache that the model is given.
        caches, roots, trees
            By text of the pass, the cache that holds its states, its root tokens, and its draft.
        """
        behind = self._behind
        alone = given is caches[0]
        if alone and behind is None and not len(trees[0]):
            self.forget()
            self._rested += 1
            if self._rested == _RESTS:
                self._unhook()
            yield
            return
        try:
            self._hook()
            self._paths, self._kept = Paths.of(roots, trees, device, behind.count if behind is not None else 0), {}
            self._sizes = [(count, len(tree)) for count, tree in zip(roots, trees, strict=True)]
            for i, site in enumerate(self._sites):
                site.begin(self._paths, given, caches, behind.rows[i] if behind is not None else None)
            with flushed() if device.type == "cpu" else contextlib.nullcontext():
                yield
        finally:
            for site in self._sites:
                site.paths = None
            if not alone:  # texts in company go on alone between any two passes
                self._unhook()

    def commit(self, cache: Any, path: NDArray[np.int32], text: int = 0) -> None:
        """Advance a text's states over its root tokens and the accepted nodes of the last pass."""
        paths = self._paths
        if paths is None:
            return
        if text not in self._kept:
            rows = paths.accepted(text, *self._sizes[text], path)
            if paths.texts == 1 and self._stays_behind(paths, rows):
                return
            self._kept[text] = self._states_behind(cache, paths, rows)
        self._write(self._kept[text], cache)
        if paths.texts == 1:
            self._behind = None
            self.forget()

    def _stays_behind(self, paths: Paths, rows: NDArray[np.int64]) -> bool:
        """Leave the states of a lone text where they are, and remember the rows they lack, if these are few enough."""
        count = paths.carried + len(rows)
        if self._way == "steps" or int(rows[-1]) in paths.ends or count > _CARRIED:
            return False
        last = int(rows[-1])
        if last == count - 1:
            self._behind = _Behind(count, [site.rows(slice(count)) for site in self._sites])
        else:
            index = torch.from_numpy(np.concatenate([np.arange(paths.carried), rows]))
            self._behind = _Behind(count, [site.rows(index.to(site.hidden.device)) for site in self._sites])
        self.forget()
        return True

    def settle(self, cache: Any) -> None:
        """Bring the states in a cache up to the text; may be done again where it was cut short."""
        if (behind := self._behind) is None:
            return
        if behind.states is None:
            bases = [cache.layers[site.mixer.layer_idx] for site in self._sites]
            with torch.no_grad():
                sites = zip(self._sites, bases, behind.rows, strict=True)
                behind.states = [site.replayed(base, rows) for site, base, rows in sites]
        self._write(behind.states, cache)
        self._behind = None

    def _write(self, states: list[tuple[ScratchLayer, int]], cache: Any) -> None:
        for site, (layer, row) in zip(self._sites, states, strict=True):
            layer.write_to(cache.layers[site.mixer.layer_idx], row)

    def _states_behind(self, cache: Any, paths: Paths, rows: NDArray[np.int64]) -> list[tuple[ScratchLayer, int]]:
        """By site, the states behind accepted rows; the cache's are as they were, so this may be done again."""
        last = int(rows[-1])
        if self._way == "steps" or last in paths.ends:
            return [site.states_behind(paths, last) for site in self._sites]
        with torch.no_grad():
            index = torch.from_numpy(np.concatenate([np.arange(paths.carried), rows]))
            bases = [cache.layers[site.mixer.layer_idx] for site in self._sites]
            return [
                site.replayed(base, site.rows(index.to(site.hidden.device)))
                for site, base in zip(self._sites, bases, strict=True)
            ]

    def forget(self) -> None:
        """Let go of what the last pass computed."""
        if self._paths is None and not self._kept:
            return
        self._paths, self._kept = None, {}
        for site in self._sites:
            site.end()


def state_of(recurrence: Recurrence | None) -> RecurrentState | RowState | None:
    """The recurrent layers of a model under drafts, None where it has none."""
    if recurrence is None:
        return None
    return RowState(recurrence) if recurrence.way == "rows" else RecurrentState(recurrence)
