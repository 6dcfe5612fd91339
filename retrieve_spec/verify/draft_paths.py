"""Draft paths: the root-to-leaf paths of a tree as rows of a batch, and a cache layer whose states follow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import LinearAttentionLayer

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
    rows
        Rows of the pass: root tokens, then nodes.
    depth
        (rows,) offset of a row from the first.
    parent
        (rows,) row in front of it, -1 for the first.
    index
        (paths · longest,) the row at each place; paths that end early repeat their last row.
    first
        (rows,) a place at which each row stands.
    ends
        The paths of full length, by their last row.
    levels
        By depth: the rows, and where their parents stand in the level above.
    """

    rows: int
    depth: NDArray[np.int64]
    parent: NDArray[np.int64]
    paths: int
    longest: int
    index: torch.Tensor | None
    first: torch.Tensor | None
    ends: dict[int, int]
    levels: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, roots: int, tree: DraftTree, device: torch.device) -> Paths:
        """Paths of a pass over `roots` root tokens and a tree."""
        rows = roots + len(tree)
        parent = np.arange(-1, rows - 1)
        parent[roots:] = np.where(tree.parent < 0, roots - 1, tree.parent + roots)
        depth = np.arange(rows)
        depth[roots:] = tree.depth + roots - 1
        levels = _levels(depth, parent, device)
        if tree.is_chain:
            return cls(rows, depth, parent, 1, rows, None, None, {rows - 1: 0}, levels)
        leaves = np.setdiff1d(np.arange(rows), parent)
        longest = int(depth.max()) + 1
        places = np.empty((len(leaves), longest), np.int64)
        for path, leaf in enumerate(leaves):
            places[path, depth[leaf] :] = row = leaf
            while row >= 0:
                places[path, depth[row]] = row
                row = parent[row]
        _, first = np.unique(places, return_index=True)
        ends = {int(leaf): path for path, leaf in enumerate(leaves) if depth[leaf] == longest - 1}
        index, at = (torch.from_numpy(rows).to(device) for rows in (places.ravel(), first))
        return cls(rows, depth, parent, len(leaves), longest, index, at, ends, levels)

    def spread(self, states: torch.Tensor) -> torch.Tensor:
        """(1, rows, d) → (paths, longest, d)."""
        if self.index is None:
            return states
        return states[0].index_select(0, self.index).view(self.paths, self.longest, *states.shape[2:])

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """(paths, longest, d) → (1, rows, d)."""
        if self.first is None:
            return states
        return states.reshape(self.paths * self.longest, *states.shape[2:]).index_select(0, self.first)[None]

    def accepted(self, roots: int, path: NDArray[np.int32]) -> NDArray[np.int64]:
        """Rows of the pass that stay."""
        return np.concatenate([np.arange(roots), path.astype(np.int64) + roots])


def _levels(
    depth: NDArray[np.int64], parent: NDArray[np.int64], device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    levels = []
    place = np.zeros(len(depth) + 1, np.int64)  # of a row in its level; the last entry is that of no row
    for level in range(int(depth.max()) + 1):
        rows = np.flatnonzero(depth == level)
        place[rows] = np.arange(len(rows))
        levels.append((torch.from_numpy(rows).to(device), torch.from_numpy(place[parent[rows]]).to(device)))
    return levels
