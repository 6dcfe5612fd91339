"""Row state: recurrent layers of caches under drafts, by row scans: the state behind an accepted row is made for it.

Passes without a draft go by the same functions: the model's own cache is written by its own forward then.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.drafting.tree import DraftTree
from retrieve_spec.verify.denormals import flushed
from retrieve_spec.verify.draft_paths import ScratchLayer
from retrieve_spec.verify.interface import Recurrence
from retrieve_spec.verify.row_functions import Running
from retrieve_spec.verify.row_mixer import RowMixer, StateBehind
from retrieve_spec.verify.row_tree import RowTree


class RowState:
    """The recurrent layers of caches under drafts (`RecurrentState`), every row of a tree computed once.

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
        self._kept: dict[int, list[ScratchLayer]] = {}  # by text and mixer, what a commit writes
        self._behind: list[StateBehind | None] = []  # by mixer, of a lone text

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
        self._leave()  # what an interruption left
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
        """Let the pass inside verify drafts (`RecurrentState.verifying`); a lone text without one is read in place."""
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
            if text not in self._kept:
                self._kept[text] = [mixer.states_behind(tree, text, rows) for mixer in self._mixers]
        for mixer, layer in zip(self._mixers, self._kept[text], strict=True):
            layer.write_to(cache.layers[mixer.mixer.layer_idx], 0)

    def settle(self, cache: Any) -> None:
        """Bring the states in a cache up to the text; may be done again where it was cut short."""
        with torch.no_grad():
            for mixer, behind in zip(self._mixers, self._behind, strict=False):  # none where none is
                if behind is not None:
                    behind.settle(cache.layers[mixer.mixer.layer_idx])
        self._behind = []

    def forget(self) -> None:
        """Let go of what the last pass computed."""
        if self._tree is None and not self._kept:
            return
        self._tree, self._kept = None, {}
        for mixer in self._mixers:
            mixer.forget()
