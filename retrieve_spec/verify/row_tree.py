"""Row tree: the rows of a pass over draft trees, which of them follow which, and the decays between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from retrieve_spec.attention.tree_mask import visible_rows
from retrieve_spec.drafting.tree import DraftTree


@dataclass(slots=True)
class RowTree:
    """The rows of a pass over one text or several, and which of them follow which.

    Attributes
    ----------
    texts, width
        The pass takes (texts, width) rows; what a text has fewer of stands at the right and is nobody's.
    parent
        (texts, width) row of the same text in front of it, -1 for the state in front of the pass.
    above
        (texts, width, width) float32, 1 where a row (second axis) is reached through one (third axis), or is it.
    shut
        (texts, 1, width, width) 0 there, elsewhere -inf.
    """

    texts: int
    width: int
    parent: NDArray[np.int64]
    above: torch.Tensor
    shut: torch.Tensor
    _windows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, roots: Sequence[int], trees: Sequence[DraftTree], device: torch.device) -> RowTree:
        """Rows of a pass over so many root tokens of each text, and the trees behind them."""
        sizes = [count + len(tree) for count, tree in zip(roots, trees, strict=True)]
        texts, width = len(sizes), max(sizes)
        parent, seen = np.full((texts, width), -1), np.zeros((texts, width, width), np.bool_)
        seen[:, np.arange(width), np.arange(width)] = True
        for text, (count, tree, size) in enumerate(zip(roots, trees, sizes, strict=True)):
            parent[text, 1:count] = np.arange(count - 1)
            parent[text, count:size] = np.where(tree.parent < 0, count - 1, tree.parent + count)
            seen[text, :size, :size] = visible_rows(count, tree)
        return cls._seeing(parent, seen, device)

    @classmethod
    def chain(cls, texts: int, width: int, device: torch.device) -> RowTree:
        """Rows that follow one another."""
        seen = np.broadcast_to(np.tri(width, dtype=np.bool_), (texts, width, width))
        return cls._seeing(np.tile(np.arange(width) - 1, (texts, 1)), seen, device)

    @classmethod
    def _seeing(cls, parent: NDArray[np.int64], seen: NDArray[np.bool_], device: torch.device) -> RowTree:
        shut = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
        above, closed = (torch.from_numpy(part).to(device) for part in (seen.astype(np.float32), shut))
        texts, width = parent.shape
        return cls(texts, width, parent, above, closed)

    def windows(self, held: int, length: int) -> torch.Tensor:
        """(texts · width · length,) rows that a convolution sees, oldest first, among all texts' states and rows.

        A text's `held` columns of state come first, then its rows.
        """
        if (held, length) not in self._windows:
            back = np.empty((self.texts, self.width, length), np.int64)
            base = (np.arange(self.texts) * (held + self.width))[:, None]
            at = np.tile(np.arange(self.width) + held, (self.texts, 1))
            for place in range(length - 1, -1, -1):
                back[:, :, place] = at + base
                above = np.take_along_axis(self.parent, np.maximum(at - held, 0), 1) + held
                at = np.maximum(np.where(at >= held, above, at - 1), 0)
            self._windows[held, length] = torch.from_numpy(back.reshape(-1)).to(self.above.device)
        return self._windows[held, length]

    def decays(self, logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of (texts, width, heads) logarithms of decays at every row, those since the state, and between rows.

        Returns
        -------
        since
            (texts, heads, width) logarithms.
        between
            (texts, heads, width, width) factors; 0 where a row (third axis) is not reached through one (last axis).
        """
        since = torch.matmul(self.above, logs).transpose(1, 2)
        return since, (since.unsqueeze(-1) - since.unsqueeze(-2)).add_(self.shut).exp_()
