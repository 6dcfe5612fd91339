"""Draft paths: the root-to-leaf paths of draft trees as rows of a batch, and a cache layer whose states follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import LinearAttentionLayer

from retrieve_spec.attention.tree_mask import row_depths
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


@dataclass(slots=True)
class Paths:
    """The root-to-leaf paths of one pass as rows of a batch.

    Attributes
    ----------
    texts, width
        The pass takes (texts, width) rows; what a text has fewer of stands at the left and is nobody's.
    depth
        (texts · width,) offset of a row from the first of its text.
    parent
        (texts · width,) row in front of it, -1 for the first of a text.
    paths, longest
        How many, and rows of the longest.
    text
        (paths,) whose path it is.
    index
        (paths · longest,) the row at each place; paths that end early repeat their last row. None where every text is
        one path.
    first
        (texts · width,) a place at which each row stands.
    ends
        The paths of full length, by their last row.
    carried
        Rows of a lone text in front of the pass, counted among `width`, that mixers go through once more.
    """

    texts: int
    width: int
    depth: NDArray[np.int64]
    parent: NDArray[np.int64]
    paths: int
    longest: int
    text: NDArray[np.int64]
    index: torch.Tensor | None
    first: torch.Tensor | None
    ends: dict[int, int]
    carried: int = 0

    @classmethod
    def of(cls, roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device, carried: int = 0) -> Paths:
        """Paths of a pass over so many root tokens of each text, a lone one's `carried` rows in front of them, and the
        trees behind them."""
        roots = [count + carried for count in roots]
        sizes = [count + len(tree) for count, tree in zip(roots, trees, strict=True)]
        texts, width = len(sizes), max(sizes)
        depth, parent = np.zeros(texts * width, np.int64), np.full(texts * width, -1)
        leaves = []
        for text, (count, tree, size) in enumerate(zip(roots, trees, sizes, strict=True)):
            start = (text + 1) * width - size
            depth[start : start + size] = row_depths(count, tree)
            parent[start + 1 : start + size] = np.arange(start, start + size - 1)
            above = np.where(tree.parent < 0, count - 1, tree.parent + count)
            parent[start + count : start + size] = above + start
            leaves.append(start + np.setdiff1d(np.arange(size), parent[start : start + size] - start))
        ends = np.concatenate(leaves)
        text_of = ends // width
        longest = int(depth[ends].max()) + 1
        full = {int(leaf): path for path, leaf in enumerate(ends) if depth[leaf] == longest - 1}
        if len(ends) == texts and longest == width == min(sizes):
            return cls(texts, width, depth, parent, texts, width, text_of, None, None, full, carried)
        places = np.empty((len(ends), longest), np.int64)
        for path, leaf in enumerate(ends):
            places[path, depth[leaf] :] = row = leaf
            while row >= 0:
                places[path, depth[row]] = row
                row = parent[row]
        first = np.zeros(texts * width, np.int64)
        first[places.ravel()[::-1]] = np.arange(places.size)[::-1]
        index, at = (torch.from_numpy(rows).to(device) for rows in (places.ravel(), first))
        return cls(texts, width, depth, parent, len(ends), longest, text_of, index, at, full, carried)

    def spread(self, states: torch.Tensor) -> torch.Tensor:
        """(texts, width, d) → (paths, longest, d)."""
        if self.index is None:
            return states
        return states.flatten(0, 1).index_select(0, self.index).view(self.paths, self.longest, *states.shape[2:])

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """(paths, longest, d) → (texts, width, d)."""
        if self.first is None:
            return states
        rows = states.reshape(self.paths * self.longest, *states.shape[2:]).index_select(0, self.first)
        return rows.view(self.texts, self.width, *states.shape[2:])

    def fed(self, states: torch.Tensor) -> torch.Tensor:
        """(paths, longest, d) → (texts, width, d) without the rows in front of the pass."""
        rows = self.gather(states)
        # Cut as a matrix: with the strides of a longer batch of one, torch multiplies it as a batch, which is slower.
        return rows[0, self.carried :][None] if self.carried else rows

    def accepted(self, text: int, roots: int, nodes: int, path: NDArray[np.int32]) -> NDArray[np.int64]:
        """Rows of the pass that stay of a text."""
        start = (text + 1) * self.width - roots - nodes
        return start + np.concatenate([np.arange(roots), path.astype(np.int64) + roots])

    def levels(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """By depth, the rows of a lone text, and where their parents stand in the level above."""
        levels = []
        place = np.zeros(self.width + 1, np.int64)  # of a row in its level; the last entry is that of no row
        for level in range(int(self.depth.max()) + 1):
            rows = np.flatnonzero(self.depth == level)
            place[rows] = np.arange(len(rows))
            levels.append((torch.from_numpy(rows).to(device), torch.from_numpy(place[self.parent[rows]]).to(device)))
        return levels
